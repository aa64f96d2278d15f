// Operands of fp4 experts on Hopper: where their weights lie, as `repack_fp8` (experts_fp4_stream.cu) arranges them, and how codes
// become e4m3 for the tensor cores.
//
// Tiles are those of experts.cuh. Of the 64 bytes of a row's column block sixteen belong to lane c of four, a word for each group of
// 32 columns: columns 4 c .. 4 c + 3 and 16 + 4 c .. 16 + 4 c + 3. Scales are relative to the largest of their row: a byte is eight
// times an index into a table of 32 powers of two, with eight e4m3 codes each. What a row has in common is its factor. A group whose
// scale is less than 2^-14 of its row's largest is rounded to multiples of 2^-9 / 384 of the row's largest value; others are exact.
#pragma once
#include <cuda_fp8.h>
#include <stdint.h>

#include "experts.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"
#include "wgmma_fp8.cuh"

namespace longwave {

// Powers of two of the table; the last is 2^6, so that its largest value is 384.
constexpr unsigned EXPERT_POWERS = 32;

// Entry m of power p: the e4m3 code of e2m1's magnitude m times 2^(p - 25).
__device__ __forceinline__ uint8_t expert_entry(unsigned p, unsigned m) {
    const float magnitude = m < 2 ? 0.5f * m : (m % 2 ? 1.5f : 1.f) * static_cast<float>(1 << (m / 2 - 1));
    return __nv_cvt_float_to_fp8(ldexpf(magnitude, static_cast<int>(p) - 25), __NV_SATFINITE, __NV_E4M3);
}

// Fills the table, 256 bytes.
__device__ __forceinline__ void fill_powers(uint8_t* table) {
    for (unsigned i = threadIdx.x; i < 8 * EXPERT_POWERS; i += blockDim.x) {
        table[i] = expert_entry(i / 8, i % 8);
    }
}

// The entries that a selector's lower four nibbles, each below eight, name. __byte_perm would mask the selector once more.
__device__ __forceinline__ uint32_t select(uint2 entries, uint32_t selector) {
    uint32_t four;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(four) : "r"(entries.x), "r"(entries.y), "r"(selector));
    return four;
}

// Eight codes, with a power's eight entries. Bits 4 k to 4 k + 2 are code k's magnitude; bit 8 k + 7 is the sign of code k, bit
// 8 k + 3 that of code 4 + k.
__device__ __forceinline__ void widen_e2m1(uint32_t codes, uint2 entries, uint32_t& low, uint32_t& high) {
    const uint32_t magnitudes = codes & 0x77777777u;
    low = select(entries, magnitudes) | (codes & 0x80808080u);
    high = select(entries, magnitudes >> 16) | (codes << 4 & 0x80808080u);
}

// A thread's e4m3 codes of four groups of 32 columns: rows g and g + 8 as wgmma takes them.
__device__ __forceinline__ void widen_block(const ExpertWeights& weights, const uint8_t* table, uint32_t (&a)[4][4]) {
    const auto entries = [&](uint32_t scales, int j) {
        return *reinterpret_cast<const uint2*>(table + __byte_perm(scales, 0, 0x4440 | j));
    };
    const uint32_t low[4] = {weights.low.x, weights.low.y, weights.low.z, weights.low.w};
    const uint32_t high[4] = {weights.high.x, weights.high.y, weights.high.z, weights.high.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        widen_e2m1(low[j], entries(weights.low_scale, j), a[j][0], a[j][2]);
        widen_e2m1(high[j], entries(weights.high_scale, j), a[j][1], a[j][3]);
    }
}

}  // namespace longwave
