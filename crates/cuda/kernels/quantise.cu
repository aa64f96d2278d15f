// architectures: 90a 100a
// Products of a matrix on their way into the next one: rounded to bf16, as bf16 or as e4m3 with a power-of-two scale per 128
// (model.md 3.1). width % 128 == 0. A warp has one group of 128.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/fp8.cuh"

namespace {

__device__ __forceinline__ void store_group(float4 v, uint32_t* codes, float* scales, size_t group, unsigned lane) {
    float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    }
    const uint32_t byte = longwave::scale_byte(amax);
    const float inverse = longwave::inverse_of(byte);
    codes[group * 32 + lane] = longwave::codes_of(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    if (lane == 0) {
        scales[group] = longwave::scale_of(byte);
    }
}

// silu of a gate that is clamped from above, times the clamped other half and a weight.
__device__ __forceinline__ float swiglu(float gate, float up, float limit, float weight) {
    gate = fminf(longwave::round_bf16(gate), limit);
    up = fmaxf(fminf(longwave::round_bf16(up), limit), -limit);
    const float silu = gate / (1.f + expf(-fmaxf(gate, -80.f)));
    return longwave::round_bf16(silu * up * weight);
}

}  // namespace

// Grid of eight groups a block, 256 threads.
extern "C" __global__ void __launch_bounds__(256)
quantise(const float4* __restrict__ x, uint32_t* __restrict__ codes, float* __restrict__ scales, unsigned groups) {
    const unsigned group = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (group < groups) {
        const float4 v = x[size_t(group) * 32 + lane];
        store_group(make_float4(longwave::round_bf16(v.x), longwave::round_bf16(v.y), longwave::round_bf16(v.z),
                                longwave::round_bf16(v.w)),
                    codes, scales, group, lane);
    }
}

// The same without the quantisation.
extern "C" __global__ void __launch_bounds__(256)
narrow(const float4* __restrict__ x, uint2* __restrict__ out, unsigned groups) {
    const unsigned group = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (group < groups) {
        const float4 v = x[size_t(group) * 32 + lane];
        out[size_t(group) * 32 + lane] = make_uint2(longwave::narrow(v.x, v.y), longwave::narrow(v.z, v.w));
    }
}

// The activation of experts (model.md 7.2): x [rows, 2 inner], gate then up; weights [rows], or null for 1. Grid (inner /
// 1024 rounded up, rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
activate(const float4* __restrict__ x, const float* __restrict__ weights, uint32_t* __restrict__ codes,
         float* __restrict__ scales, unsigned inner, float limit) {
    const unsigned at = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, lane = threadIdx.x % 32;
    if (at < inner / 4) {
        const float4 g = x[size_t(row) * (inner / 2) + at], u = x[size_t(row) * (inner / 2) + inner / 4 + at];
        const float w = weights ? __ldg(weights + row) : 1.f;
        store_group(make_float4(swiglu(g.x, u.x, limit, w), swiglu(g.y, u.y, limit, w), swiglu(g.z, u.z, limit, w),
                                swiglu(g.w, u.w, limit, w)),
                    codes, scales, size_t(row) * (inner / 128) + at / 32, lane);
    }
}

// The sum of a token's experts (model.md 7.2): shared [tokens, width] plus routed [pairs, width] in the order of choice;
// places [tokens, k] are rows of routed. Products are rounded to bf16 first, and so is the sum. Grid (width / 1024 rounded
// up, tokens), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
combine(const float4* __restrict__ shared_expert, const float4* __restrict__ routed, const unsigned* __restrict__ places,
        uint2* __restrict__ out, unsigned width, unsigned k) {
    const unsigned at = blockIdx.x * 256 + threadIdx.x, token = blockIdx.y, columns = width / 4;
    if (at >= columns) {
        return;
    }
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (unsigned s = 0; s < k; s++) {
        const unsigned place = __ldg(places + size_t(token) * k + s);
        if (place != 0xffffffffu) {
            const float4 v = routed[size_t(place) * columns + at];
            sum.x += longwave::round_bf16(v.x);
            sum.y += longwave::round_bf16(v.y);
            sum.z += longwave::round_bf16(v.z);
            sum.w += longwave::round_bf16(v.w);
        }
    }
    const float4 v = shared_expert[size_t(token) * columns + at];
    out[size_t(token) * columns + at] =
        make_uint2(longwave::narrow(longwave::round_bf16(v.x) + sum.x, longwave::round_bf16(v.y) + sum.y),
                   longwave::narrow(longwave::round_bf16(v.z) + sum.z, longwave::round_bf16(v.w) + sum.w));
}
