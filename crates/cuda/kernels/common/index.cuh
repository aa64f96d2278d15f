// Parts of the indexer's rows of 128 channels (model.md 3.1, 3.4): a warp with four neighbouring channels per lane.
#pragma once
#include <stdint.h>

namespace longwave {

// Code of the nearest e2m1 value, midpoints to the even code.
__device__ __forceinline__ uint32_t e2m1(float x) {
    const float a = fabsf(x);
    const uint32_t code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.f);
    return code | (x < 0.f ? 8 : 0);
}

// H x / sqrt(128), a warp with four neighbouring channels per lane.
__device__ __forceinline__ float4 hadamard(float4 v) {
    v = make_float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
    v = make_float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
        const float4 o = make_float4(__shfl_xor_sync(0xffffffffu, v.x, step), __shfl_xor_sync(0xffffffffu, v.y, step),
                                     __shfl_xor_sync(0xffffffffu, v.z, step), __shfl_xor_sync(0xffffffffu, v.w, step));
        v = threadIdx.x & step ? make_float4(o.x - v.x, o.y - v.y, o.z - v.z, o.w - v.w)
                               : make_float4(v.x + o.x, v.y + o.y, v.z + o.z, v.w + o.w);
    }
    const float norm = 0.08838835f;
    return make_float4(v.x * norm, v.y * norm, v.z * norm, v.w * norm);
}

template <int LANES>
__device__ __forceinline__ float most_among(float most) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    }
    return most;
}

// Exponent byte of the smallest power of two s with amax / 6 <= s.
__device__ __forceinline__ uint32_t scale_byte_fp4(float amax) {
    const uint32_t bits = __float_as_uint(fmaxf(amax, 6.f * __int_as_float(1 << 23)) * (1.f / 6.f));
    return (bits >> 23) + ((bits & 0x7fffffu) != 0);
}

// Value of an e2m1 code.
__device__ __forceinline__ float e2m1_value(uint32_t code) {
    // Its three bits are exponent and mantissa of a float once the exponent is moved by 2^126.
    return __uint_as_float((code & 7) << 22 | (code & 8) << 28) * __uint_as_float(253u << 23);
}

}  // namespace longwave
