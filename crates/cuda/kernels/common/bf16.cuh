// Pairs and eights of bf16 as floats.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

namespace longwave {

__device__ __forceinline__ float2 widen(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Rounds to nearest, ties to even.
__device__ __forceinline__ uint32_t narrow(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
}

__device__ __forceinline__ float round_bf16(float v) {
    return __bfloat162float(__float2bfloat16_rn(v));
}

}  // namespace longwave
