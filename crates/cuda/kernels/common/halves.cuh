// Codes of 8 and 4 bits as pairs of halves, exact.
#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace longwave {

// Codes of eight columns, as `repack` (experts_fp4.cu) arranges them, as four pairs of halves times 2^-14; exact. A half with
// e2m1's sign in its highest bit and its other three bits in bits 11 to 9 is e2m1's value times 2^-14, zero and 0.5 included.
// Products stand where shifts would: these have another pipe, and masks and shifts are what the experts' kernels wait for.
// What a product adds outside of the mask carries no further than bit 23.
__device__ __forceinline__ void widen_e2m1(uint32_t codes, uint32_t (&out)[4]) {
    constexpr uint32_t HALVES = 0x8e008e00u;
    out[0] = codes & HALVES;
    out[1] = (codes << 3) & HALVES;
    out[2] = ((codes & 0x40384038u) * 66) & HALVES;
    out[3] = ((codes & 0x20072007u) * 516) & HALVES;
}

// Two e4m3 codes as a pair of halves.
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t codes) {
    const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffff), __NV_E4M3);
    return static_cast<uint32_t>(a.x) | static_cast<uint32_t>(a.y) << 16;
}

__device__ __forceinline__ float ue8m0(uint32_t byte) {
    return __uint_as_float(byte << 23);
}

// Four e4m3 codes as two pairs of halves; exact.
__device__ __forceinline__ void widen_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
    const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffff), __NV_E4M3);
    const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16), __NV_E4M3);
    low = static_cast<uint32_t>(a.x) | static_cast<uint32_t>(a.y) << 16;
    high = static_cast<uint32_t>(b.x) | static_cast<uint32_t>(b.y) << 16;
}

__device__ __forceinline__ uint32_t word(const uint4& v, int k) {
    return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w;
}

}  // namespace longwave
