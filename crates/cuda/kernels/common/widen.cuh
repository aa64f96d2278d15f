// Codes of 8 and 4 bits as pairs of bf16, exact.
#pragma once
#include <stdint.h>

namespace longwave {

// Two e4m3 codes, which the selector moves to the upper bytes of the halves of a word (0x1404: the lower two, 0x3424: the
// upper two), as 2^-120 of their values.
__device__ __forceinline__ uint32_t spread_e4m3(uint32_t codes, uint32_t selector) {
    const uint32_t t = __byte_perm(codes, 0, selector);
    return (t >> 4 & 0x07f007f0u) | (t & 0x80008000u);
}

// The lowest two of four e2m1 codes in the lower half of a word as 2^-126 of their values.
__device__ __forceinline__ uint32_t spread_e2m1(uint32_t codes) {
    return (codes & 0x7) << 6 | (codes & 0x8) << 12 | (codes & 0x70) << 18 | (codes & 0x80) << 24;
}

__device__ __forceinline__ uint32_t times_bf16(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

}  // namespace longwave
