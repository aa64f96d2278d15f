// architectures: 90a 100a
// The indexer of ratio-4 layers (model.md 6.5):
//   index_queries_*   rotation and rounding of query heads to the grid of the keys, as bf16; head weights
//   index_scores_*    scores of a segment of the entries that a row sees, and the k best of them
//   index_merge       the k best of all segments, ascending
// For few rows index_few.cu does the work of the last two, for many rows on Hopper index_wide.cu that of the second.
// A score depends on its row and key alone and the selection is exact (equal scores: the lower entry), so neither batch nor
// segments change a result. Rows that see at most k entries take all. At most 64 heads, k at most 1024, pages of at least
// 32 keys. Rows without a seat write nothing.
#include <stdint.h>

#include "common/best.cuh"
#include "common/bf16.cuh"
#include "common/fp8.cuh"
#include "common/index.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"
#include "common/score.cuh"
#include "common/widen.cuh"

namespace {

using longwave::BatchRow;
using longwave::Format;
using longwave::Pages;
using longwave::Ranked;
using longwave::total_of;

constexpr unsigned THREADS = 256;
// Candidates that a block holds; they are cut to the k best when less than one round of THREADS fits.
constexpr unsigned ROOM = 2048;
// Blocks of index_scores that share a multiprocessor: sm_100 takes more registers for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr unsigned AT_ONCE = 1;
#else
constexpr unsigned AT_ONCE = 2;
#endif
// Threads of a block that merges, candidates of each, and most segments of a row.
constexpr unsigned MERGERS = 1024, EACH = 24, SEGMENTS = 64;

template <Format FORMAT>
__device__ __forceinline__ void queries(const float* __restrict__ products, const float* __restrict__ gates,
                                        const BatchRow* __restrict__ rows, const float* __restrict__ angles,
                                        uint2* __restrict__ out, float* __restrict__ weights, unsigned heads,
                                        float weight_scale) {
    const unsigned token = blockIdx.y, head = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (rows[token].seat == longwave::UNMAPPED || head >= heads) {
        return;
    }
    const size_t row = size_t(token) * heads + head;
    float4 v = longwave::round_bf16(__ldg(reinterpret_cast<const float4*>(products + row * 128) + lane));
    if (lane >= 16) {
        v = longwave::round_bf16(longwave::turn(v, angles + size_t(token) * 64, (lane - 16) * 2));
    }
    if constexpr (FORMAT == Format::Fp4) {
        v = longwave::round_bf16(longwave::hadamard(v));
        const float s = longwave::scale_of(longwave::scale_byte_fp4(longwave::most_among<8>(longwave::most_of(v))));
        const auto round = [&](float x) { return longwave::e2m1_value(longwave::e2m1(x / s)) * s; };
        v = make_float4(round(v.x), round(v.y), round(v.z), round(v.w));
    } else if constexpr (FORMAT == Format::Fp8) {
        const uint32_t byte = longwave::scale_byte(longwave::most_among<32>(longwave::most_of(v)));
        const float inverse = longwave::inverse_of(byte), s = longwave::scale_of(byte);
        const uint32_t codes = longwave::codes_of(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
        // 2^120 brings what spread_e4m3 leaves back.
        const float up = __uint_as_float(247u << 23);
        const float2 low = longwave::widen(longwave::spread_e4m3(codes, 0x1404));
        const float2 high = longwave::widen(longwave::spread_e4m3(codes, 0x3424));
        v = make_float4(low.x * up * s, low.y * up * s, high.x * up * s, high.y * up * s);
    }
    out[row * 32 + lane] = make_uint2(longwave::narrow(v.x, v.y), longwave::narrow(v.z, v.w));
    if (lane == 0) {
        weights[row] = longwave::round_bf16(__ldg(gates + row)) * weight_scale;
    }
}

template <Format FORMAT>
__device__ __forceinline__ void scores(const uint16_t* __restrict__ q, const float* __restrict__ weights,
                                       const BatchRow* __restrict__ rows, const Pages& keys, Ranked* __restrict__ found,
                                       unsigned* __restrict__ counts, unsigned heads, unsigned k) {
    __shared__ __align__(16) longwave::ScoreQueries own;
    __shared__ longwave::BestRoom<THREADS, ROOM> room;
    const unsigned token = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const BatchRow row = rows[token];
    const unsigned visible = row.visible_c4();
    if (visible <= k) {
        return;
    }
    const unsigned length = ((visible + gridDim.x - 1) / gridDim.x + THREADS - 1) / THREADS * THREADS;
    const unsigned from = min(blockIdx.x * length, visible), to = min(from + length, visible);
    own.fill(q + size_t(token) * heads * 128, weights + size_t(token) * heads, heads);
    // Its barrier is the queries' too.
    longwave::Best<THREADS, ROOM> best(room, k);
    for (unsigned base = from; base < to; base += THREADS) {
        const unsigned first = base + warp * 32, entry = first + 8 * (lane % 4) + lane / 4;
        Ranked candidate = 0;
        if (first < to) {
            const float score = longwave::score_of_32<FORMAT>(own, heads, keys, row.seat, first, to);
            candidate = entry < to ? longwave::ranked(score, entry) : 0;
        }
        best.offer(candidate);
    }
    if (best.count > k) {
        best.cut();
    }
    const size_t segment = size_t(token) * gridDim.x + blockIdx.x;
    for (unsigned i = thread; i < best.count; i += THREADS) {
        found[segment * k + i] = room.list[i];
    }
    if (thread == 0) {
        counts[segment] = best.count;
    }
}

}  // namespace

// Grid (heads / 8 rounded up, tokens), 256 threads. products [tokens, heads, 128], gates [tokens, heads]; out bf16
// [tokens, heads, 128], weights [tokens, heads].
#define QUERIES(name, format)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                     \
        name(const float* products, const float* gates, const BatchRow* rows, const float* angles, uint2* out,            \
             float* weights, unsigned heads, float weight_scale) {                                                        \
        longwave::overlap();                                                                                             \
        queries<format>(products, gates, rows, angles, out, weights, heads, weight_scale);                                \
    }

QUERIES(index_queries_fp8, Format::Fp8)
QUERIES(index_queries_fp4, Format::Fp4)
QUERIES(index_queries_bf16, Format::Bf16)

// Grid (segments, tokens), 256 threads. found [tokens, segments, k] ranked entries, counts [tokens, segments].
#define SCORES(name, format)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)                                                        \
        name(const uint16_t* q, const float* weights, const BatchRow* rows, uint8_t* key_pool, const unsigned* key_table, \
             unsigned long long key_bytes, unsigned key_len, unsigned key_shift, Ranked* found, unsigned* counts,         \
             unsigned heads, unsigned k) {                                                                                \
        longwave::overlap();                                                                                             \
        const Pages keys = {key_pool, key_table, key_bytes, key_len, key_shift};                                          \
        scores<format>(q, weights, rows, keys, found, counts, heads, k);                                                  \
    }

SCORES(index_scores_fp8, Format::Fp8)
SCORES(index_scores_fp4, Format::Fp4)
SCORES(index_scores_bf16, Format::Bf16)

// Grid tokens, 1024 threads. picks [tokens, k], ascending, and how many, picked [tokens]. segments * k <= 24576.
extern "C" __global__ void __launch_bounds__(MERGERS)
index_merge(const BatchRow* __restrict__ rows, const Ranked* __restrict__ found, const unsigned* __restrict__ counts,
            unsigned* __restrict__ picks, unsigned* __restrict__ picked, unsigned segments, unsigned k) {
    longwave::overlap();
    __shared__ unsigned count_of[SEGMENTS], partial[2][MERGERS / 32], chosen[2][MERGERS], cursor;
    const unsigned token = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
    const BatchRow row = rows[token];
    if (row.seat == longwave::UNMAPPED) {
        return;
    }
    const unsigned visible = row.visible_c4();
    unsigned* const out = picks + size_t(token) * k;
    if (thread == 0) {
        picked[token] = min(visible, k);
        cursor = 0;
    }
    if (visible <= k) {
        for (unsigned i = thread; i < visible; i += MERGERS) {
            out[i] = i;
        }
        return;
    }
    if (thread < segments) {
        count_of[thread] = __ldg(counts + size_t(token) * segments + thread);
    }
    __syncthreads();
    const Ranked* const own = found + size_t(token) * segments * k + thread;
    // The scores of this thread's candidates; 0 is none. Candidate i is thread + 1024 i of all places.
    const unsigned total = segments * k, skip = MERGERS / k, rest = MERGERS % k;
    unsigned scores[EACH], segment = thread / k, offset = thread % k;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        const unsigned at = i * MERGERS + thread;
        scores[i] = at < total && offset < count_of[segment] ? static_cast<unsigned>(__ldg(own + i * MERGERS) >> 32) : 0;
        segment += skip;
        offset += rest;
        if (offset >= k) {
            offset -= k;
            segment++;
        }
    }
    // The largest bound that k scores reach, bit by bit.
    unsigned bound = 0, reach = 0, at_bound = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const unsigned next = bound | 1u << bit;
        reach = 0;
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            reach += scores[i] >= next;
        }
        reach = total_of<MERGERS / 32>(reach, partial, bit);
        if (reach >= k) {
            bound = next;
            at_bound = reach;
        }
        if (reach == k) {
            break;
        }
    }
    // More reach it: of those whose score it is, the lowest entries (the largest of what is stored, their inverse).
    unsigned low = 0;
    if (at_bound != k) {
        unsigned above = 0;
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            above += scores[i] > bound;
        }
        const unsigned needed = k - total_of<MERGERS / 32>(above, partial, 1);
        for (int bit = 31; bit >= 0; bit--) {
            const unsigned next = low | 1u << bit;
            reach = 0;
#pragma unroll
            for (unsigned i = 0; i < EACH; i++) {
                if (scores[i] == bound) {
                    reach += static_cast<unsigned>(__ldg(own + i * MERGERS)) >= next;
                }
            }
            reach = total_of<MERGERS / 32>(reach, partial, bit + 1);
            if (reach >= needed) {
                low = next;
            }
            if (reach == needed) {
                break;
            }
        }
    }
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        unsigned entry = 0;
        bool takes = scores[i] >= bound;
        if (takes) {
            const unsigned stored = static_cast<unsigned>(__ldg(own + i * MERGERS));
            takes = scores[i] > bound || stored >= low;
            entry = ~stored;
        }
        const unsigned takers = __ballot_sync(0xffffffffu, takes);
        unsigned at = 0;
        if (takers) {
            if (lane == 0) {
                at = atomicAdd(&cursor, __popc(takers));
            }
            at = __shfl_sync(0xffffffffu, at, 0) + __popc(takers & ((1u << lane) - 1));
        }
        if (takes) {
            chosen[0][at] = entry;
        }
    }
    __syncthreads();
    // Sorted with one entry per thread.
    unsigned v = thread < k ? chosen[0][thread] : 0xffffffffu, turn = 1;
    for (unsigned run = 2; run < 2 * k; run *= 2) {
        for (unsigned step = run / 2; step > 0; step /= 2) {
            unsigned other;
            if (step < 32) {
                other = __shfl_xor_sync(0xffffffffu, v, step);
            } else {
                chosen[turn][thread] = v;
                __syncthreads();
                other = chosen[turn][thread ^ step];
                turn ^= 1;
            }
            v = ((thread & run) == 0) == ((thread & step) == 0) ? min(v, other) : max(v, other);
        }
    }
    if (thread < k) {
        out[thread] = v;
    }
}
