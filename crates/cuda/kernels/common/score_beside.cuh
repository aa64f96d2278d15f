// The scores of common/score.cuh, bit for bit, in four chains of products where those are in two: a warp multiplies 32 keys with two
// tiles of eight heads side by side, or 16 keys with four. Each product sums up its channels in the same order, and heads are added
// in the same order. At most 64 heads of 128 channels; tiles of keys lie in one page.
#pragma once
#include <stdint.h>

#include "cluster.cuh"
#include "copy.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "score.cuh"

namespace longwave {

// As ScoreQueries::fill, by copies of a block of THREADS that run beside what follows: the caller waits for them and a barrier has to
// follow. A warp reads two heads at once, 512 bytes in a row, and eight lanes write 128 bytes in a row.
template <unsigned THREADS>
__device__ __forceinline__ void copy_queries(ScoreQueries& to, const uint16_t* q, const float* weights, unsigned heads) {
    const unsigned tiles = (heads + 7) / 8;
#pragma unroll
    for (unsigned i = threadIdx.x; i < SCORE_TILES * 128; i += THREADS) {
        const unsigned head = i / 32 * 2 + i / 4 % 2, c = i % 4, quarter = i / 8 % 4;
        const unsigned place = head / 8 * 128 + quarter * 32 + head % 8 * 4 + c;
        if (i < tiles * 128) {
            copy_16_if(head < heads, shared_address(to.fragments + place),
                       q + size_t(min(head, heads - 1)) * 128 + (c * 4 + quarter) * 8);
        }
    }
    if (threadIdx.x < tiles * 8) {
        copy_4_if(threadIdx.x < heads, shared_address(to.gates + threadIdx.x), weights + min(threadIdx.x, heads - 1));
    }
    commit_copies();
}

// As load_16_if, of four bytes or one: asked for where it stands, since the longest way should begin first.
__device__ __forceinline__ void load_4_if(bool there, uint32_t& v, const void* from) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.u32 %0, [%1];\n}\n" : "+r"(v) : "l"(from), "r"(int(there)));
}

__device__ __forceinline__ void load_1_if(bool there, uint32_t& v, const void* from) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.u8 %0, [%1];\n}\n" : "+r"(v) : "l"(from), "r"(int(there)));
}

// What a lane has of 16 PRODUCTS keys: key 8 i + g of the tile is row g or g + 8 of product i / 2.
template <Format FORMAT, unsigned PRODUCTS>
struct KeysBeside {
    // Of a key that a lane has; four lanes have all.
    static constexpr unsigned BYTES = FORMAT == Format::Bf16 ? 64 : FORMAT == Format::Fp8 ? 32 : 16;
    KeyCodes<FORMAT> codes[2 * PRODUCTS];

    // Keys from `first` on, a multiple of their number, in block `block` of the pool; those from `end` on count as zeros, as those
    // of a block that is not there.
    __device__ __forceinline__ void load(const Pages& keys, unsigned block, unsigned first, unsigned end) {
        const unsigned lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        const uint8_t* page = keys.pool + keys.unit_bytes * block;
#pragma unroll
        for (unsigned i = 0; i < 2 * PRODUCTS; i++) {
            const unsigned entry = first + 8 * i + g;
            codes[i] = {};
            const bool there = block != UNMAPPED && entry < end;
            const uint8_t* from = page + size_t(keys.slot(entry)) * (4 * BYTES) + c * BYTES;
#pragma unroll
            for (unsigned j = 0; j < BYTES / 16; j++) {
                load_16_if(there, codes[i].words[j], from + 16 * j);
            }
            const uint8_t* scales = page + (size_t(4 * BYTES) << keys.shift) + size_t(keys.slot(entry)) * 4;
            if constexpr (FORMAT == Format::Fp8) {
                load_4_if(there, codes[i].scale, scales);
            } else if constexpr (FORMAT == Format::Fp4) {
                load_1_if(there, codes[i].scale, scales + c);
            }
        }
    }
};

// 32 keys of four bits on their way to a warp, in shared memory: what a lane multiplies it has copied itself, scales aside.
struct KeysAhead {
    uint4 codes[4][32];
    uint32_t scales[32];

    // As KeysBeside::load. All lanes have called take() for what lay here before.
    __device__ __forceinline__ void copy(const Pages& keys, unsigned block, unsigned first, unsigned end) {
        const unsigned lane = threadIdx.x % 32;
        const bool mapped = block != UNMAPPED;
        const uint8_t* page = keys.pool + keys.unit_bytes * (mapped ? block : 0);
        const uint8_t* from = page + size_t(keys.slot(first)) * 64 + lane * 16;
        __syncwarp();
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            copy_16_if(mapped && first + 8 * i + lane / 4 < end, shared_address(&codes[i][lane]), from + 512 * i);
        }
        copy_4_if(mapped && first + lane < end, shared_address(scales + lane),
                  page + (size_t(64) << keys.shift) + size_t(keys.slot(first) + lane) * 4);
        commit_copies();
    }

    // Waits for this thread's copies, whatever they are of, and for those of its warp.
    __device__ __forceinline__ void take(KeysBeside<Format::Fp4, 2>& to) const {
        const unsigned lane = threadIdx.x % 32;
        wait_copies<0>();
        __syncwarp();
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            to.codes[i].words[0] = codes[i][lane];
            to.codes[i].scale = reinterpret_cast<const uint8_t*>(scales)[32 * i + lane];
        }
    }
};

// The widen_codes of common/score.cuh; codes of four bits by look-up, four at a time: a code's three lower bits choose the bytes of its
// value as bf16 from two tables of eight, its highest is the sign.
template <Format FORMAT>
__device__ __forceinline__ float widen_beside(uint32_t (&words)[16], const KeyCodes<FORMAT>& codes) {
    if constexpr (FORMAT == Format::Fp4) {
        // 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
        const uint32_t upper[2] = {0x3f3f3f00u, 0x40404040u}, lower[2] = {0xc0800000u, 0xc0804000u};
        const uint32_t of[4] = {codes.words[0].x, codes.words[0].y, codes.words[0].z, codes.words[0].w};
        const uint32_t s = codes.scale << 7 | codes.scale << 23;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t places = of[j] & 0x77777777u, up = of[j] << 4;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t four = places >> (16 * half);
                const uint32_t signs = __byte_perm(of[j], up, half ? 0x3726 : 0x1504) & 0x80808080u;
                const uint32_t high = __byte_perm(upper[0], upper[1], four) | signs, low = __byte_perm(lower[0], lower[1], four);
                words[4 * j + 2 * half] = times_bf16(__byte_perm(low, high, 0x5140), s);
                words[4 * j + 2 * half + 1] = times_bf16(__byte_perm(low, high, 0x7362), s);
            }
        }
        return 1.f;
    } else {
        return widen_codes(words, codes);
    }
}

// The score of key 8 c + g, where there is one. `then` is called when the codes are in other registers.
template <Format FORMAT, unsigned PRODUCTS, class Then>
__device__ __forceinline__ float score_beside(const ScoreQueries& queries, unsigned heads,
                                              const KeysBeside<FORMAT, PRODUCTS>& tile, const Then& then) {
    constexpr unsigned SIDE = 4 / PRODUCTS, OWN = 2 * PRODUCTS;
    const unsigned lane = threadIdx.x % 32, c = lane % 4, tiles = (heads + 7) / 8;
    uint32_t words[OWN][16];
    float scale[OWN], sums[OWN] = {};
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        scale[i] = widen_beside(words[i], tile.codes[i]);
    }
    then();
    for (unsigned n = 0; n < tiles; n += SIDE) {
        float d[SIDE][PRODUCTS][4] = {};
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            uint4 b[SIDE];
#pragma unroll
            for (unsigned s = 0; s < SIDE; s++) {
                // Beside the last tile of an odd number it is once more for nothing.
                b[s] = queries.fragments[(min(n + s, tiles - 1) * 4 + i) * 32 + lane];
            }
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
#pragma unroll
                for (unsigned s = 0; s < SIDE; s++) {
#pragma unroll
                    for (unsigned m = 0; m < PRODUCTS; m++) {
                        const unsigned w = 4 * i + 2 * half;
                        const uint32_t a[4] = {words[2 * m][w], words[2 * m + 1][w], words[2 * m][w + 1], words[2 * m + 1][w + 1]};
                        mma_bf16(d[s][m], a, half ? b[s].z : b[s].x, half ? b[s].w : b[s].y);
                    }
                }
            }
        }
#pragma unroll
        for (unsigned s = 0; s < SIDE; s++) {
            if (n + s < tiles) {
                const float2 gate = *reinterpret_cast<const float2*>(queries.gates + (n + s) * 8 + 2 * c);
#pragma unroll
                for (unsigned i = 0; i < OWN; i++) {
                    sums[i] = fmaf(fmaxf(d[s][i / 2][i % 2 * 2], 0.f), gate.x, sums[i]);
                    sums[i] = fmaf(fmaxf(d[s][i / 2][i % 2 * 2 + 1], 0.f), gate.y, sums[i]);
                }
            }
        }
    }
    float own = 0.f;
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        float sum = sums[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        own = c == i ? sum * scale[i] : own;
    }
    return own;
}

}  // namespace longwave
