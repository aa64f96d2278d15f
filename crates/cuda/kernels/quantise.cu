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
