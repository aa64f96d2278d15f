// e4m3 groups of 128 with power-of-two scales that round up (model.md 3.1).
#pragma once
#include <cuda_fp8.h>
#include <stdint.h>

namespace longwave {

// Exponent byte of the smallest power of two s with amax / 448 <= s, amax at least 1e-4.
__device__ __forceinline__ uint32_t scale_byte(float amax) {
    const uint32_t bits = __float_as_uint(fmaxf(amax, 1e-4f) * (1.f / 448.f));
    return (bits >> 23) + ((bits & 0x7fffffu) != 0);
}

__device__ __forceinline__ float scale_of(uint32_t byte) {
    return __uint_as_float(byte << 23);
}

__device__ __forceinline__ float inverse_of(uint32_t byte) {
    return __uint_as_float((254u - byte) << 23);
}

// Four codes of values that were divided by their scale.
__device__ __forceinline__ uint32_t codes_of(float a, float b, float c, float d) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

// A group of 128 in a warp, four neighbouring values per lane: their codes; lane 0 stores the scale.
__device__ __forceinline__ uint32_t quantise_group(float a, float b, float c, float d, float* scale) {
    float amax = fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    }
    const uint32_t byte = scale_byte(amax);
    const float inverse = inverse_of(byte);
    if (threadIdx.x % 32 == 0) {
        *scale = scale_of(byte);
    }
    return codes_of(a * inverse, b * inverse, c * inverse, d * inverse);
}

}  // namespace longwave
