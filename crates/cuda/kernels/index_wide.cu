// architectures: 90a
// The indexer of ratio-4 layers for many rows on Hopper's warpgroups, segment by segment of the entries; scores have the bits of
// common/score.cuh and picks are those of index.cu:
//   index_wide_scores_*   scores of a segment's entries, eight neighbouring rows at a time, as integers in their order
//   index_wide_cut        the k best of those so far and of a segment; of the last one that a row sees, ascending
// index.md has floor, design and measured steps. At most 64 heads, k at most 1024, pages of at least 32 keys. Rows that see at
// most k entries, or have no seat, get no scores and no candidates.
#include <stdint.h>

#include "common/best.cuh"
#include "common/cluster.cuh"
#include "common/cut.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/score.cuh"
#include "common/wgmma.cuh"

namespace {

using longwave::BatchRow;
using longwave::Format;
using longwave::Pages;

// Rows of a block, its warpgroups, keys of a warpgroup at once, and heads that a row has room for.
constexpr unsigned ROWS = 8, WARPGROUPS = 3, KEYS = 64, HEADS = 64;
// Bytes of a row's heads; behind those of all rows, gates, and seat and number of keys of each row. A lane's gates lie together,
// those of the four lanes in other banks.
constexpr unsigned ROW_BYTES = HEADS * 256, GATES = ROWS * ROW_BYTES, OF_LANE = 20, SEEN = GATES + ROWS * 4 * OF_LANE * 4;

// Row r's heads as B: piece 2 s + h of head n has, of step s = 2 i + j, channels 32 c + 8 i + 4 j + 2 h and the next one for
// c = 0 to 3. So step s multiplies what product s of score_of_32 does, in the same places.
__device__ __forceinline__ void fill(uint8_t* memory, const uint16_t* q, const float* weights, unsigned tile, unsigned heads) {
    const uint2* seen = reinterpret_cast<const uint2*>(memory + SEEN);
    for (unsigned at = threadIdx.x; at < ROWS * HEADS * 4; at += WARPGROUPS * 128) {
        const unsigned i = at % 4, n = at / 4 % HEADS, r = at / 4 / HEADS;
        if (seen[r].y == 0) {
            continue;
        }
        const bool there = n < heads;
        const size_t head = size_t(tile + r) * heads + n;
        uint4 v[4];
#pragma unroll
        for (unsigned c = 0; c < 4; c++) {
            v[c] = there ? __ldg(reinterpret_cast<const uint4*>(q + head * 128) + 4 * c + i) : make_uint4(0, 0, 0, 0);
        }
        const auto put = [&](unsigned part, uint4 piece) {
            *reinterpret_cast<uint4*>(memory + r * ROW_BYTES + longwave::operand_piece(HEADS, n, 4 * i + part)) = piece;
        };
        put(0, make_uint4(v[0].x, v[1].x, v[2].x, v[3].x));
        put(1, make_uint4(v[0].y, v[1].y, v[2].y, v[3].y));
        put(2, make_uint4(v[0].z, v[1].z, v[2].z, v[3].z));
        put(3, make_uint4(v[0].w, v[1].w, v[2].w, v[3].w));
        if (i == 0) {
            const unsigned place = (r * 4 + n % 8 / 2) * OF_LANE + n / 8 * 2 + n % 2;
            reinterpret_cast<float*>(memory + GATES)[place] = there ? __ldg(weights + head) : 0.f;
        }
    }
}

// Keys that this lane has of 64: rows g and g + 8 of its warp's sixteen.
template <Format FORMAT>
struct Ahead {
    longwave::KeyCodes<FORMAT> codes[2];

    // Of the sixteen at `first`, which lie in one page, those from `end` on count as zeros.
    __device__ __forceinline__ void load(const Pages& keys, unsigned seat, unsigned first, unsigned end) {
        const unsigned g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        const uint8_t* page = first < end ? keys.page(seat, first) : nullptr;
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            const unsigned entry = first + 8 * i + g;
            codes[i] = {};
            if (page && entry < end) {
                longwave::load_codes(codes[i], page, keys.slot(entry), 1u << keys.shift, c);
            }
        }
    }

    // As A of all steps, and what scores of key g + 8 (c % 2) are to be times.
    __device__ __forceinline__ float widen(uint32_t (&a)[8][4]) const {
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            uint32_t words[16];
            longwave::widen_codes(words, codes[i]);
#pragma unroll
            for (unsigned s = 0; s < 8; s++) {
                a[s][i] = words[2 * s];
                a[s][i + 2] = words[2 * s + 1];
            }
        }
        if constexpr (FORMAT != Format::Fp8) {
            return 1.f;
        }
        // The compiler would choose between them by an address, and put both into memory.
        uint32_t scale[2] = {codes[0].scale, codes[1].scale};
        asm("" : "+r"(scale[0]), "+r"(scale[1]));
        return __uint_as_float(threadIdx.x % 2 ? scale[1] : scale[0]);
    }
};

// Scores of rows begin .. end - 1 of the block (all of them if FULL), of one sequence, with keys from .. to - 1. `out` is that of the
// block's first row and of key `first`.
template <Format FORMAT, bool FULL>
__device__ __forceinline__ void score_run(const uint8_t* memory, uint32_t address, const Pages& keys, unsigned seat, unsigned begin,
                                          unsigned end, unsigned from, unsigned to, uint32_t* out, unsigned first, unsigned stride) {
    const unsigned lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, group = threadIdx.x / 128;
    const unsigned own = group * KEYS + threadIdx.x / 32 % 4 * 16;
    // There are no registers left for keys of bf16 ahead.
    constexpr bool AHEAD = FORMAT != Format::Bf16;
    Ahead<FORMAT> ahead;
    if constexpr (AHEAD) {
        ahead.load(keys, seat, from + own, to);
    }
    // Two rows at a time, so that products of one are under way while those of the other are added up.
    float even[HEADS / 2], odd[HEADS / 2];
#pragma unroll
    for (unsigned i = 0; i < HEADS / 2; i++) {
        even[i] = odd[i] = 0.f;
    }
    for (unsigned at = from; at + group * KEYS < to; at += WARPGROUPS * KEYS) {
        if constexpr (!AHEAD) {
            ahead.load(keys, seat, at + own, to);
        }
        uint32_t a[8][4];
        const float scale = ahead.widen(a);
        uint32_t* const to_row = out + (at - first + own + 8 * (c % 2) + g);
        const auto multiply = [&](float (&d)[HEADS / 2], unsigned r) {
            // Steps differ in their address alone, whose bits carry no further.
            const uint64_t b = longwave::operand(address + r * ROW_BYTES, HEADS, 0);
            const auto of_step = [&](unsigned s) { return b + longwave::operand(0, HEADS, s) - longwave::operand(0, HEADS, 0); };
            longwave::wgmma_fence();
            longwave::wgmma_bf16<false>(d, a[0], b);
#pragma unroll
            for (unsigned s = 1; s < 8; s++) {
                longwave::wgmma_bf16<true>(d, a[s], of_step(s));
            }
            longwave::wgmma_commit();
        };
        // This lane's part of the sum over heads of its two keys; of them, the sum of two lanes of key g + 8 (c % 2).
        const auto add_up = [&](float (&d)[HEADS / 2], unsigned r) {
            longwave::wgmma_done(d);
            const float4* gates = reinterpret_cast<const float4*>(memory + GATES + (r * 4 + c) * (OF_LANE * 4));
            float sum[2] = {0.f, 0.f};
#pragma unroll
            for (unsigned n = 0; n < HEADS / 8; n += 2) {
                const float4 gate = gates[n / 2];
#pragma unroll
                for (unsigned i = 0; i < 2; i++) {
                    sum[i] = fmaf(fmaxf(d[4 * n + 2 * i], 0.f), gate.x, sum[i]);
                    sum[i] = fmaf(fmaxf(d[4 * n + 2 * i + 1], 0.f), gate.y, sum[i]);
                    sum[i] = fmaf(fmaxf(d[4 * n + 2 * i + 4], 0.f), gate.z, sum[i]);
                    sum[i] = fmaf(fmaxf(d[4 * n + 2 * i + 5], 0.f), gate.w, sum[i]);
                }
            }
            return (c % 2 ? sum[1] : sum[0]) + __shfl_xor_sync(0xffffffffu, c % 2 ? sum[0] : sum[1], 1);
        };
        const auto two_rows = [&](unsigned r, unsigned next, unsigned least) {
            multiply(even, r);
            multiply(odd, next);
            // While products are under way, for it waits for the page's address.
            if (AHEAD && r == least) {
                ahead.load(keys, seat, at + WARPGROUPS * KEYS + own, to);
            }
            longwave::wgmma_wait<1>();
            const float sum = add_up(even, r);
            longwave::wgmma_wait<0>();
            const float other = add_up(odd, next);
            // Lanes 0 and 1 of four end with the first row's sums, lanes 2 and 3 with the other's.
            const float score = (c < 2 ? sum : other) + __shfl_xor_sync(0xffffffffu, c < 2 ? other : sum, 2);
            to_row[size_t(c < 2 ? r : next) * stride] = longwave::ordered_score(score * scale);
        };
        if constexpr (FULL) {
#pragma unroll
            for (unsigned r = 0; r < ROWS; r += 2) {
                two_rows(r, r + 1, 0);
            }
        } else {
            for (unsigned r = begin; r < end; r += 2) {
                // The last of an odd number is taken twice.
                two_rows(r, min(r + 1, end - 1), begin);
            }
        }
    }
}

template <Format FORMAT>
__device__ __forceinline__ void scores(const uint16_t* __restrict__ q, const float* __restrict__ weights,
                                       const BatchRow* __restrict__ rows, const Pages& keys, uint32_t* __restrict__ out,
                                       unsigned first, unsigned span, unsigned stride, unsigned tokens, unsigned heads, unsigned k) {
    extern __shared__ __align__(1024) uint8_t memory[];
    uint2* const seen = reinterpret_cast<uint2*>(memory + SEEN);
    const unsigned tile = blockIdx.y * ROWS, length = ((span + KEYS - 1) / KEYS + gridDim.x - 1) / gridDim.x * KEYS;
    const unsigned from = first + blockIdx.x * length, to = min(from + length, first + span);
    bool some = false;
    if (threadIdx.x < ROWS && tile + threadIdx.x < tokens) {
        const BatchRow row = rows[tile + threadIdx.x];
        const unsigned visible = row.visible_c4();
        some = visible > max(k, from) && from < to;
        seen[threadIdx.x] = make_uint2(row.seat, some ? visible : 0);
    } else if (threadIdx.x < ROWS) {
        seen[threadIdx.x] = make_uint2(0, 0);
    }
    if (!__syncthreads_or(some)) {
        return;
    }
    fill(memory, q, weights, tile, heads);
    longwave::fence_shared();
    __syncthreads();
    for (unsigned begin = 0, end; begin < ROWS; begin = end) {
        const uint2 run = seen[begin];
        unsigned most = run.y;
        for (end = begin + 1; end < ROWS && run.y > 0 && seen[end].x == run.x && seen[end].y > 0; end++) {
            most = max(most, seen[end].y);
        }
        const auto score = [&]<bool FULL>() {
            score_run<FORMAT, FULL>(memory, longwave::shared_address(memory), keys, run.x, begin, end, from, min(to, most),
                                    out + size_t(tile) * stride, first, stride);
        };
        if (end - begin == ROWS) {
            score.template operator()<true>();
        } else if (run.y > 0) {
            score.template operator()<false>();
        }
    }
}

}  // namespace

// Grid (parts of the segment, tokens / 8 rounded up), 384 threads, SEEN + 64 bytes of dynamic shared memory. The segment is keys
// first .. first + span - 1, both `first` and `stride` multiples of 64; scores u32 [tokens, stride].
#define SCORES(name, format)                                                                                                \
    extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128, 1)                                                       \
        name(const uint16_t* q, const float* weights, const BatchRow* rows, uint8_t* key_pool, const unsigned* key_table,   \
             unsigned long long key_bytes, unsigned key_len, unsigned key_shift, uint32_t* out, unsigned first, unsigned span, \
             unsigned stride, unsigned tokens, unsigned heads, unsigned k) {                                                \
        longwave::overlap();                                                                                                \
        const Pages keys = {key_pool, key_table, key_bytes, key_len, key_shift};                                            \
        scores<format>(q, weights, rows, keys, out, first, span, stride, tokens, heads, k);                                 \
    }

SCORES(index_wide_scores_fp8, Format::Fp8)
SCORES(index_wide_scores_fp4, Format::Fp4)
SCORES(index_wide_scores_bf16, Format::Bf16)

// Grid tokens, 256 threads. found [tokens, k] candidates and bars [tokens], those of entries before `first` when this begins, and of
// entries before first + span when it ends; of rows that see no more, picks [tokens, k], ascending, and how many, picked [tokens].
// scores as above. Rows that see at most k entries get their picks where `first` is 0.
extern "C" __global__ void __launch_bounds__(longwave::CUTTERS, 4)
index_wide_cut(const BatchRow* __restrict__ rows, const uint32_t* __restrict__ scores, longwave::Ranked* __restrict__ found,
               unsigned* __restrict__ bars, unsigned* __restrict__ picks, unsigned* __restrict__ picked, unsigned first,
               unsigned span, unsigned stride, unsigned k) {
    longwave::overlap();
    __shared__ longwave::CutRoom room;
    const unsigned token = blockIdx.x, thread = threadIdx.x;
    const BatchRow row = rows[token];
    const unsigned visible = row.visible_c4();
    if (row.seat == longwave::UNMAPPED || (first > 0 && visible <= max(k, first))) {
        return;
    }
    scores += size_t(token) * stride;
    found += size_t(token) * k;
    picks += size_t(token) * k;
    if (thread == 0 && first == 0) {
        picked[token] = min(visible, k);
    }
    if (visible <= k) {
        for (unsigned i = thread; i < visible; i += longwave::CUTTERS) {
            picks[i] = i;
        }
        return;
    }
    const unsigned end = min(visible - first, span);
    longwave::Cut cut(room, k);
    for (unsigned base = 0; base < end; base += longwave::CUT_SCORES) {
        const longwave::CutScores some(scores + base, min(end - base, longwave::CUT_SCORES));
        if (base == 0) {
            cut.begin(found, min(first, k), first ? bars[token] : 0);
        }
        cut.add(some, first + base);
    }
    if (visible <= first + span) {
        cut.sort(picks, visible);
        return;
    }
    for (unsigned i = thread; i < cut.count; i += longwave::CUTTERS) {
        found[i] = longwave::ranked_bits(room.scores[i], room.entries[i]);
    }
    if (thread == 0) {
        bars[token] = cut.bar;
    }
}
