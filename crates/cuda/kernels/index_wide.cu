// architectures: 90a
// The indexer of ratio-4 layers for many rows on Hopper's warpgroups, segment by segment of the entries; scores have the bits of
// common/score.cuh and picks are those of index.cu:
//   index_wide_scores_*   scores of a segment's entries, eight neighbouring rows at a time, as integers in their order
//   index_wide_cut        the k best of those so far and of a segment, which index_merge sorts after the last one
// index.md has floor, design and measured steps. At most 64 heads, k at most 1024, pages of at least 32 keys. Rows that see at
// most k entries, or have no seat, get no scores and no candidates.
#include <stdint.h>

#include "common/best.cuh"
#include "common/cluster.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/score.cuh"
#include "common/wgmma.cuh"

namespace {

using longwave::BatchRow;
using longwave::Format;
using longwave::Pages;
using longwave::Ranked;

// Rows of a block, its warpgroups, keys of a warpgroup at once, and heads that a row has room for.
constexpr unsigned ROWS = 8, WARPGROUPS = 3, KEYS = 64, HEADS = 64;
// Bytes of a row's heads; behind those of all rows, gates, and seat and number of keys of each row.
constexpr unsigned ROW_BYTES = HEADS * 256, GATES = ROWS * ROW_BYTES, SEEN = GATES + ROWS * HEADS * 4;

// Threads of a block that cuts, scores of a thread at once, and candidates in its list.
constexpr unsigned CUTTERS = 256, PIECES = 8, ROOM = 2048;

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
            reinterpret_cast<float*>(memory + GATES)[r * HEADS + n] = there ? __ldg(weights + head) : 0.f;
        }
    }
}

// Keys that this lane has of 64: rows g and g + 8 of its warp's sixteen.
template <Format FORMAT>
struct Ahead {
    longwave::KeyCodes<FORMAT> codes[2];
    bool there[2];

    // Of the sixteen at `first`, those from `end` on count as zeros; they lie in one page.
    __device__ __forceinline__ void load(const Pages& keys, unsigned seat, unsigned first, unsigned end) {
        const unsigned g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        const uint8_t* page = first < end ? keys.page(seat, first) : nullptr;
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            const unsigned entry = first + 8 * i + g;
            there[i] = page && entry < end;
            if (there[i]) {
                longwave::load_codes(codes[i], page, keys.slot(entry), 1u << keys.shift, c);
            }
        }
    }

    // As A of all steps, and what scores are to be times.
    __device__ __forceinline__ void widen(uint32_t (&a)[8][4], float (&scale)[2]) const {
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            uint32_t words[16];
            scale[i] = longwave::widen_codes(words, codes[i]);
            scale[i] = there[i] ? scale[i] : 0.f;
#pragma unroll
            for (unsigned s = 0; s < 8; s++) {
                a[s][i] = there[i] ? words[2 * s] : 0;
                a[s][i + 2] = there[i] ? words[2 * s + 1] : 0;
            }
        }
    }
};

// Scores of rows begin .. end - 1 of the block, all of one sequence, with keys from .. to - 1. `out` is that of the block's
// first row and of key `first`.
template <Format FORMAT>
__device__ __forceinline__ void score_run(const uint8_t* memory, uint32_t address, const Pages& keys, unsigned seat, unsigned begin,
                                          unsigned end, unsigned from, unsigned to, uint32_t* out, unsigned first, unsigned stride) {
    const unsigned lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, own = threadIdx.x / 128 * KEYS + threadIdx.x / 32 % 4 * 16;
    Ahead<FORMAT> ahead;
    ahead.load(keys, seat, from + own, to);
    float d[HEADS / 2];
#pragma unroll
    for (unsigned i = 0; i < HEADS / 2; i++) {
        d[i] = 0.f;
    }
    for (unsigned at = from; at + threadIdx.x / 128 * KEYS < to; at += WARPGROUPS * KEYS) {
        uint32_t a[8][4];
        float scale[2], sum[2];
        ahead.widen(a, scale);
        ahead.load(keys, seat, at + WARPGROUPS * KEYS + own, to);
        uint32_t* const to_row = out + (at - first + own + 8 * (c & 1) + g);
        // Sums of lanes with the same keys, once the next row's products are under way.
        const auto finish = [&](unsigned r) {
            float both[2];
#pragma unroll
            for (unsigned i = 0; i < 2; i++) {
                both[i] = sum[i] + __shfl_xor_sync(0xffffffffu, sum[i], 1);
                both[i] += __shfl_xor_sync(0xffffffffu, both[i], 2);
            }
            const float score = c == 0 ? both[0] * scale[0] : both[1] * scale[1];
            if (c < 2) {
                to_row[size_t(r) * stride] = longwave::ordered_score(score);
            }
        };
        for (unsigned r = begin; r < end; r++) {
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
            if (r > begin) {
                finish(r - 1);
            }
            longwave::wgmma_wait<0>();
            longwave::wgmma_done(d);
            const float2* gates = reinterpret_cast<const float2*>(memory + GATES) + r * (HEADS / 2) + c;
            sum[0] = sum[1] = 0.f;
#pragma unroll
            for (unsigned n = 0; n < HEADS / 8; n++) {
                const float2 gate = gates[4 * n];
#pragma unroll
                for (unsigned i = 0; i < 2; i++) {
                    sum[i] = fmaf(fmaxf(d[4 * n + 2 * i], 0.f), gate.x, sum[i]);
                    sum[i] = fmaf(fmaxf(d[4 * n + 2 * i + 1], 0.f), gate.y, sum[i]);
                }
            }
        }
        finish(end - 1);
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
        if (run.y > 0) {
            score_run<FORMAT>(memory, longwave::shared_address(memory), keys, run.x, begin, end, from, min(to, most),
                              out + size_t(tile) * stride, first, stride);
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

// Grid tokens, 256 threads. found [tokens, k] candidates, counts [tokens]: those of entries before `first`, when this begins, and
// of entries before first + span when it ends. scores as above.
extern "C" __global__ void __launch_bounds__(CUTTERS, 3)
index_wide_cut(const BatchRow* __restrict__ rows, const uint32_t* __restrict__ scores, Ranked* __restrict__ found,
               unsigned* __restrict__ counts, unsigned first, unsigned span, unsigned stride, unsigned k) {
    longwave::overlap();
    __shared__ longwave::BestRoom<CUTTERS, ROOM> room;
    const unsigned token = blockIdx.x, thread = threadIdx.x;
    const unsigned visible = rows[token].visible_c4();
    if (visible <= max(k, first)) {
        return;
    }
    const unsigned end = min(visible - first, span);
    scores += size_t(token) * stride;
    found += size_t(token) * k;
    longwave::Best<CUTTERS, ROOM> best(room, k);
    best.begin(found, min(first, k));
    for (unsigned base = 0; base < end; base += 4 * PIECES * CUTTERS) {
        // Four neighbours of each piece; 0 where nothing is.
        uint32_t own[4 * PIECES];
        const auto read = [&](unsigned i, unsigned piece) {
            const unsigned at = base + (piece * CUTTERS + thread) * 4;
            const uint4 v = at < end ? __ldg(reinterpret_cast<const uint4*>(scores + at)) : make_uint4(0, 0, 0, 0);
            own[4 * i] = v.x;
            own[4 * i + 1] = at + 1 < end ? v.y : 0;
            own[4 * i + 2] = at + 2 < end ? v.z : 0;
            own[4 * i + 3] = at + 3 < end ? v.w : 0;
        };
#pragma unroll
        for (unsigned i = 0; i < PIECES; i++) {
            read(i, i);
        }
        const bool fits = best.raise(own);
        // Where too many are equal, piece by piece.
        for (unsigned piece = 0; piece < (fits ? 1 : PIECES); piece++) {
            if (!fits) {
                read(0, piece);
#pragma unroll
                for (unsigned i = 4; i < 4 * PIECES; i++) {
                    own[i] = 0;
                }
            }
            best.take(own, [&](unsigned i) { return first + base + ((i / 4 + piece) * CUTTERS + thread) * 4 + i % 4; });
            if (best.count > k) {
                best.cut();
            }
            if (fits) {
                break;
            }
        }
    }
    for (unsigned i = thread; i < best.count; i += CUTTERS) {
        found[i] = room.list[i];
    }
    if (thread == 0) {
        counts[token] = best.count;
    }
}
