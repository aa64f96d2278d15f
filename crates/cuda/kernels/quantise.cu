// architectures: 90a 100a
// Roundings between steps: float to bf16, and float through bf16 to e4m3 in groups of 128 with a power-of-two scale
// (model.md 3.1). Every value or group stands alone.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/fp8.cuh"
#include "common/overlap.cuh"

// x float [groups, 128]; codes [groups, 128], scales [groups]. A warp per group.
extern "C" __global__ void __launch_bounds__(256)
quantise(const float4* __restrict__ x, uint32_t* __restrict__ codes, float* __restrict__ scales, unsigned long long groups) {
    longwave::overlap();
    const unsigned long long group = blockIdx.x * 8ull + threadIdx.x / 32;
    const unsigned lane = threadIdx.x % 32;
    if (group >= groups) {
        return;
    }
    const float4 v = x[group * 32 + lane];
    const float a = longwave::round_bf16(v.x), b = longwave::round_bf16(v.y);
    const float c = longwave::round_bf16(v.z), d = longwave::round_bf16(v.w);
    codes[group * 32 + lane] = longwave::quantise_group(a, b, c, d, scales + group);
}

// n is a multiple of four.
extern "C" __global__ void __launch_bounds__(256)
round_to_bf16(const float4* __restrict__ x, uint2* __restrict__ out, unsigned long long quads) {
    longwave::overlap();
    const unsigned long long i = blockIdx.x * 256ull + threadIdx.x;
    if (i < quads) {
        const float4 v = x[i];
        out[i] = make_uint2(longwave::narrow(v.x, v.y), longwave::narrow(v.z, v.w));
    }
}
