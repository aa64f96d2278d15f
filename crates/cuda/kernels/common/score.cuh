// Scores of a row of the indexer with keys of its sequence (model.md 6.5): a warp takes 32 keys, straight from their page into
// registers, with all heads. At most 64 heads of 128 channels, pages of at least 32 keys.
//
// Lane 4 g + c has channels 32 c .. 32 c + 31 of keys 8 i + g: any order of channels is one order of the sum as long as queries
// lie in it too.
#pragma once
#include <stdint.h>

#include "mma.cuh"
#include "pages.cuh"
#include "widen.cuh"

namespace longwave {

enum class Format { Fp8, Fp4, Bf16 };

constexpr unsigned SCORE_TILES = 8;

// A row's heads, in the order in which lanes take them: tile of eight heads, quarter of 32 channels, lane. In shared memory.
struct ScoreQueries {
    uint4 fragments[SCORE_TILES * 4 * 32];
    float gates[SCORE_TILES * 8];

    // q bf16 [heads, 128] and weights [heads] of the row; a barrier has to follow.
    __device__ __forceinline__ void fill(const uint16_t* q, const float* weights, unsigned heads) {
        const unsigned tiles = (heads + 7) / 8;
        for (unsigned i = threadIdx.x; i < tiles * 128; i += blockDim.x) {
            const unsigned head = i / 128 * 8 + i % 32 / 4;
            const uint4* of_head = reinterpret_cast<const uint4*>(q + size_t(head) * 128);
            fragments[i] = head < heads ? __ldg(of_head + i % 4 * 4 + i / 32 % 4) : make_uint4(0, 0, 0, 0);
        }
        if (threadIdx.x < tiles * 8) {
            gates[threadIdx.x] = threadIdx.x < heads ? __ldg(weights + threadIdx.x) : 0.f;
        }
    }
};

// A lane's 32 channels of a key as they are stored, and their scale: a float (fp8), a byte of ue8m0 (fp4).
template <Format FORMAT>
struct KeyCodes {
    uint4 words[FORMAT == Format::Bf16 ? 4 : FORMAT == Format::Fp8 ? 2 : 1];
    uint32_t scale;
};

template <Format FORMAT>
__device__ __forceinline__ void load_codes(KeyCodes<FORMAT>& codes, const uint8_t* page, unsigned slot, unsigned rows, unsigned c) {
    constexpr unsigned BYTES = FORMAT == Format::Bf16 ? 64 : FORMAT == Format::Fp8 ? 32 : 16;
    const uint4* from = reinterpret_cast<const uint4*>(page + size_t(slot) * (4 * BYTES) + c * BYTES);
#pragma unroll
    for (unsigned i = 0; i < BYTES / 16; i++) {
        codes.words[i] = __ldg(from + i);
    }
    if constexpr (FORMAT == Format::Fp8) {
        codes.scale = __ldg(reinterpret_cast<const uint32_t*>(page + size_t(rows) * 128) + slot);
    } else if constexpr (FORMAT == Format::Fp4) {
        codes.scale = __ldg(page + size_t(rows) * 64 + size_t(slot) * 4 + c);
    }
}

// Words w of the channels (32 c + 2 w, + 1) as bf16, and what the score is to be times.
template <Format FORMAT>
__device__ __forceinline__ float widen_codes(uint32_t (&words)[16], const KeyCodes<FORMAT>& codes) {
#pragma unroll
    for (int i = 0; i < int(sizeof(codes.words) / 16); i++) {
        const uint4 v = codes.words[i];
        const uint32_t of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (FORMAT == Format::Bf16) {
                words[4 * i + j] = of[j];
            } else if constexpr (FORMAT == Format::Fp8) {
                const uint32_t up = 0x7b807b80u;  // 2^120
                words[8 * i + 2 * j] = times_bf16(spread_e4m3(of[j], 0x1404), up);
                words[8 * i + 2 * j + 1] = times_bf16(spread_e4m3(of[j], 0x3424), up);
            } else {
                const uint32_t s = codes.scale << 7 | codes.scale << 23, up = 0x7e807e80u;  // 2^126
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    words[4 * j + k] = times_bf16(times_bf16(spread_e2m1(of[j] >> (8 * k)), up), s);
                }
            }
        }
    }
    return FORMAT == Format::Fp8 ? __uint_as_float(codes.scale) : 1.f;
}

// What a lane has of 32 keys: key 8 i + g of the tile is row g or g + 8 of product i / 2.
template <Format FORMAT>
struct KeyTile {
    KeyCodes<FORMAT> codes[4];

    // Keys first .. first + 31, a multiple of 32; those from `end` on count as zeros, as those without a page.
    __device__ __forceinline__ void load(const Pages& keys, unsigned seat, unsigned first, unsigned end) {
        const unsigned lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        const uint8_t* page = keys.page(seat, first);
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            const unsigned entry = first + 8 * i + g;
            codes[i] = {};
            if (page && entry < end) {
                load_codes(codes[i], page, keys.slot(entry), 1u << keys.shift, c);
            }
        }
    }
};

// The score of key 8 c + g.
template <Format FORMAT>
__device__ __forceinline__ float score_of_tile(const ScoreQueries& queries, unsigned heads, const KeyTile<FORMAT>& tile) {
    const unsigned lane = threadIdx.x % 32, c = lane % 4, tiles = (heads + 7) / 8;
    uint32_t words[4][16];
    float scale[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        scale[i] = widen_codes(words[i], tile.codes[i]);
    }
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
    for (unsigned n = 0; n < tiles; n++) {
        float d[2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 b = queries.fragments[(n * 4 + i) * 32 + lane];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint32_t low[4] = {words[2 * m][4 * i], words[2 * m + 1][4 * i], words[2 * m][4 * i + 1],
                                         words[2 * m + 1][4 * i + 1]};
                const uint32_t high[4] = {words[2 * m][4 * i + 2], words[2 * m + 1][4 * i + 2], words[2 * m][4 * i + 3],
                                          words[2 * m + 1][4 * i + 3]};
                mma_bf16(d[m], low, b.x, b.y);
                mma_bf16(d[m], high, b.z, b.w);
            }
        }
        const float2 gate = *reinterpret_cast<const float2*>(queries.gates + n * 8 + 2 * c);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[i] = fmaf(fmaxf(d[i / 2][i % 2 * 2], 0.f), gate.x, sums[i]);
            sums[i] = fmaf(fmaxf(d[i / 2][i % 2 * 2 + 1], 0.f), gate.y, sums[i]);
        }
    }
    float own = 0.f;
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
        float sum = sums[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        own = c == i ? sum * scale[i] : own;
    }
    return own;
}

// Both.
template <Format FORMAT>
__device__ __forceinline__ float score_of_32(const ScoreQueries& queries, unsigned heads, const Pages& keys, unsigned seat,
                                             unsigned first, unsigned end) {
    KeyTile<FORMAT> tile;
    tile.load(keys, seat, first, end);
    return score_of_tile(queries, heads, tile);
}

// Integers in the order of scores, never 0. NaN counts as minus infinity.
__device__ __forceinline__ uint32_t ordered_score(float score) {
    const uint32_t bits = __float_as_uint(isnan(score) ? -INFINITY : score + 0.f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

}  // namespace longwave
