// architectures: 90a 100a
// RMS norm over rows of bf16 or f32 (model.md 3.4), f32 inside, one block per row; the sum has one order whatever the
// number of rows. Rows have a multiple of 8 elements, at most 8 x 1024.
#include <cuda_bf16.h>
#include <stdint.h>

#include "common/reduce.cuh"

// out[row] = x[row] / sqrt(mean(x^2) + eps) * weight; weight may be null.
extern "C" __global__ void __launch_bounds__(256, 4)
rms_norm_f32(const float* __restrict__ x, const float* __restrict__ weight, float* __restrict__ out, unsigned width, float eps) {
    const float4* row = reinterpret_cast<const float4*>(x + size_t(blockIdx.x) * width);
    float4* to = reinterpret_cast<float4*>(out + size_t(blockIdx.x) * width);
    const float4* scale = reinterpret_cast<const float4*>(weight);
    float sum = 0.f;
    for (unsigned i = threadIdx.x; i < width / 4; i += blockDim.x) {
        const float4 v = row[i];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float factor = rsqrtf(longwave::block_sum(sum) / float(width) + eps);
    for (unsigned i = threadIdx.x; i < width / 4; i += blockDim.x) {
        const float4 v = row[i];
        const float4 w = weight ? scale[i] : make_float4(1.f, 1.f, 1.f, 1.f);
        to[i] = make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
    }
}
