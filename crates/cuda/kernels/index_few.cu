// architectures: 90a 100a
// The k best entries of a row of the indexer for few rows (model.md 6.5), by the same scores and with the same ties as index.cu:
//   index_row_*   scores of all entries that a row sees, and the largest of every sixteen
//   index_pick    the k best of them, ascending
// Scores lie in scratch whose size the model's longest context gives, not the request's. A row that sees at most k entries takes
// all. Rows without a seat write nothing. k at most 1024, at most 262,144 entries.
#include <stdint.h>

#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"
#include "common/score.cuh"

namespace {

using longwave::BatchRow;
using longwave::Format;
using longwave::Pages;

// Threads of a block that scores, and of one that picks; values of each of the latter.
constexpr unsigned SCORERS = 128, PICKERS = 1024, EACH = 16;
// Entries of a group, of which the largest score is stored.
constexpr unsigned GROUP = 16;

template <Format FORMAT>
__device__ __forceinline__ void score_row(const uint16_t* q, const float* weights, const BatchRow* rows, const Pages& keys,
                                          uint32_t* scores, uint32_t* largest, unsigned stride, unsigned heads, unsigned k) {
    __shared__ __align__(16) longwave::ScoreQueries own;
    const unsigned token = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const BatchRow row = rows[token];
    const unsigned visible = row.visible_c4(), start = blockIdx.x * SCORERS;
    if (visible <= k || start >= visible) {
        return;
    }
    own.fill(q + size_t(token) * heads * 128, weights + size_t(token) * heads, heads);
    __syncthreads();
    scores += size_t(token) * stride;
    largest += size_t(token) * (stride / GROUP);
    for (unsigned first = start + warp * 32; first < visible; first += gridDim.x * SCORERS) {
        const float score = longwave::score_of_32<FORMAT>(own, heads, keys, row.seat, first, visible);
        const unsigned at = 8 * (lane % 4) + lane / 4;
        const uint32_t v = first + at < visible ? longwave::ordered_score(score) : 0;
        scores[first + at] = v;
        // Lanes with the same second bit have sixteen neighbours.
        uint32_t most = v;
#pragma unroll
        for (unsigned step = 16; step > 0; step /= 2) {
            if (step != 2) {
                most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
            }
        }
        if ((lane & ~2u) == 0) {
            largest[first / GROUP + lane / 2] = most;
        }
    }
}

// What a block of PICKERS shares to choose.
struct Shared {
    uint2 counts[2][PICKERS / 32];
    uint32_t scan[PICKERS / 32];
};

// Of the values of all threads (0: none) the k largest, among equals those of lower threads and places; there are at least k.
// `take(place, index)` gets each of this thread's, places 0 .. k - 1 in the order of threads and then of indices. All threads call it;
// a barrier has to follow before what was taken is read, or `shared` is used again.
template <class Take>
__device__ __forceinline__ void choose(const uint32_t (&own)[EACH], unsigned used, unsigned k, Shared& shared, const Take& take) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The largest bound that k values reach, two bits at a time.
    uint32_t bound = 0;
    unsigned turn = 0;
    for (int bit = 30; bit >= 0; bit -= 2, turn ^= 1) {
        uint32_t low = 0, high = 0;
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            if (i < used) {
                low += (own[i] >= (bound | 1u << bit)) + ((own[i] >= (bound | 2u << bit)) << 16);
                high += own[i] >= (bound | 3u << bit);
            }
        }
        low = __reduce_add_sync(0xffffffffu, low);
        high = __reduce_add_sync(0xffffffffu, high);
        if (lane == 0) {
            shared.counts[turn][warp] = make_uint2(low, high);
        }
        __syncthreads();
        const uint2 part = shared.counts[turn][lane];
        low = __reduce_add_sync(0xffffffffu, part.x);
        high = __reduce_add_sync(0xffffffffu, part.y);
        const unsigned digit = high >= k ? 3 : low >> 16 >= k ? 2 : (low & 0xffff) >= k ? 1 : 0;
        bound |= digit << bit;
        if (digit > 0 && (digit == 3 ? high : digit == 2 ? low >> 16 : low & 0xffff) == k) {
            break;
        }
    }
    // How many are above it, and how many are equal, in the threads before this one and in all.
    uint32_t mine = 0;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (i < used) {
            mine += (own[i] > bound) + ((own[i] == bound) << 16);
        }
    }
    uint32_t through = mine;
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, through, step);
        through += lane >= step ? other : 0;
    }
    if (lane == 31) {
        shared.scan[warp] = through;
    }
    __syncthreads();
    const uint32_t of_warp = shared.scan[lane];
    const uint32_t before = __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0) + through - mine;
    const unsigned needed = k - (__reduce_add_sync(0xffffffffu, of_warp) & 0xffff);
    unsigned equal = before >> 16, place = (before & 0xffff) + min(equal, needed);
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (i < used) {
            const bool takes = own[i] > bound || (own[i] == bound && equal < needed);
            equal += own[i] == bound;
            if (takes) {
                take(place++, i);
            }
        }
    }
}

}  // namespace

// Grid (blocks, tokens), SCORERS threads. scores [tokens, stride], largest [tokens, stride / 16]; stride a multiple of 32 that
// holds what any row sees.
#define ROW(name, format)                                                                                                \
    extern "C" __global__ void __launch_bounds__(SCORERS, 4)                                                             \
        name(const uint16_t* q, const float* weights, const BatchRow* rows, uint8_t* key_pool, const unsigned* key_table, \
             unsigned long long key_bytes, unsigned key_len, unsigned key_shift, uint32_t* scores, uint32_t* largest,    \
             unsigned stride, unsigned heads, unsigned k) {                                                              \
        longwave::overlap();                                                                                             \
        const Pages keys = {key_pool, key_table, key_bytes, key_len, key_shift};                                         \
        score_row<format>(q, weights, rows, keys, scores, largest, stride, heads, k);                                    \
    }

ROW(index_row_fp8, Format::Fp8)
ROW(index_row_fp4, Format::Fp4)
ROW(index_row_bf16, Format::Bf16)

// Grid tokens, PICKERS threads. picks [tokens, k], ascending, and how many, picked [tokens].
//
// Where one round of the block does not hold all entries, it first chooses k groups of sixteen by their largest scores, the lower
// group among equals. The k best entries are in these: of an entry elsewhere, each chosen group has one that comes before it.
extern "C" __global__ void __launch_bounds__(PICKERS)
index_pick(const BatchRow* rows, const uint32_t* scores, const uint32_t* largest, unsigned* picks, unsigned* picked,
           unsigned stride, unsigned k) {
    longwave::overlap();
    __shared__ Shared shared;
    __shared__ unsigned groups[PICKERS];
    const unsigned token = blockIdx.x, thread = threadIdx.x;
    const BatchRow row = rows[token];
    if (row.seat == longwave::UNMAPPED) {
        return;
    }
    const unsigned visible = row.visible_c4();
    unsigned* const out = picks + size_t(token) * k;
    if (thread == 0) {
        picked[token] = min(visible, k);
    }
    if (visible <= k) {
        for (unsigned i = thread; i < visible; i += PICKERS) {
            out[i] = i;
        }
        return;
    }
    scores += size_t(token) * stride;
    largest += size_t(token) * (stride / GROUP);
    uint32_t own[EACH];
    if (visible <= PICKERS * EACH) {
        const unsigned used = (visible + PICKERS - 1) / PICKERS;
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            own[i] = i < used && thread * used + i < visible ? scores[thread * used + i] : 0;
        }
        choose(own, used, k, shared, [&](unsigned place, unsigned i) { out[place] = thread * used + i; });
        return;
    }
    const unsigned all = (visible + GROUP - 1) / GROUP, of_groups = (all + PICKERS - 1) / PICKERS;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        own[i] = i < of_groups && thread * of_groups + i < all ? largest[thread * of_groups + i] : 0;
    }
    choose(own, of_groups, k, shared, [&](unsigned place, unsigned i) { groups[place] = thread * of_groups + i; });
    __syncthreads();
    const unsigned used = (k * GROUP + PICKERS - 1) / PICKERS;
    const auto entry = [&](unsigned i) {
        const unsigned at = thread * used + i;
        return groups[at / GROUP] * GROUP + at % GROUP;
    };
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        own[i] = i < used && thread * used + i < k * GROUP ? scores[entry(i)] : 0;
    }
    choose(own, used, k, shared, [&](unsigned place, unsigned i) { out[place] = entry(i); });
}
