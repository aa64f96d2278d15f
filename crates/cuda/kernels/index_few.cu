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
    // The first keys are on their way beside the queries, where registers allow.
    constexpr bool EARLY = FORMAT != Format::Fp8;
    longwave::KeyTile<FORMAT> coming;
    unsigned first = start + warp * 32;
    if (EARLY && first < visible) {
        coming.load(keys, row.seat, first, visible);
    }
    own.fill(q + size_t(token) * heads * 128, weights + size_t(token) * heads, heads);
    __syncthreads();
    for (bool loaded = EARLY; first < visible; first += gridDim.x * SCORERS, loaded = false) {
        if (!loaded) {
            coming.load(keys, row.seat, first, visible);
        }
        const float score = longwave::score_of_tile(own, heads, coming);
        const unsigned at = 8 * (lane % 4) + lane / 4;
        const uint32_t v = first + at < visible ? longwave::ordered_score(score) : 0;
        const size_t place = size_t(blockIdx.y) * stride + first;
        scores[place + at] = v;
        // Lanes with the same second bit have sixteen neighbours.
        uint32_t most = v;
#pragma unroll
        for (unsigned step = 16; step > 0; step /= 2) {
            if (step != 2) {
                most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
            }
        }
        if ((lane & ~2u) == 0) {
            largest[place / GROUP + lane / 2] = most;
        }
    }
}

// Bins of a first cut, and values of one bin that are ranked one by one at most.
constexpr unsigned BINS = 2 * PICKERS, RANKED = 256;

// What a block of PICKERS shares to choose.
struct Shared {
    uint2 counts[2][PICKERS / 32];
    uint32_t scan[PICKERS / 32], places[PICKERS / 32];
    uint2 range[PICKERS / 32];
    uint32_t bins[BINS];
    // Values of the bin in which the k-th lies, with the thread and its index, how many there are and how many are needed; the bin.
    uint2 members[RANKED];
    uint32_t count, needed, bin;
};

// Of the values of all threads (0: none) the k largest, among equals those of lower threads and places; there are at least k. Gives a
// bit for each of this thread's. All threads call it.
__device__ __forceinline__ uint32_t choose_by_bits(const uint32_t (&own)[EACH], unsigned used, unsigned k, Shared& shared) {
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
    unsigned equal = before >> 16;
    uint32_t taken = 0;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (i < used) {
            taken |= (own[i] > bound || (own[i] == bound && equal < needed)) << i;
            equal += own[i] == bound;
        }
    }
    return taken;
}

// The score of an ordered integer.
__device__ __forceinline__ float unordered(uint32_t v) {
    return __uint_as_float(v ^ (v >> 31 ? 0x80000000u : 0xffffffffu));
}

// The same, faster where scores are spread: they are counted in bins of equal width between the least and the largest; what is in the
// bin of the k-th is ranked one by one. Bins keep the order, since each step of a bin's number rounds in the order of scores.
__device__ __forceinline__ uint32_t choose(const uint32_t (&own)[EACH], unsigned used, unsigned k, Shared& shared) {
    const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    uint32_t most = 0, least = 0xffffffffu;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (i < used && own[i]) {
            most = max(most, own[i]);
            least = min(least, own[i]);
        }
    }
    most = __reduce_max_sync(0xffffffffu, most);
    least = __reduce_min_sync(0xffffffffu, least);
    if (lane == 0) {
        shared.range[warp] = make_uint2(least, most);
    }
    shared.bins[thread] = shared.bins[thread + PICKERS] = 0;
    if (thread == 0) {
        shared.count = 0;
    }
    __syncthreads();
    const uint2 range = shared.range[lane];
    const float bottom = unordered(__reduce_min_sync(0xffffffffu, range.x));
    const float width = unordered(__reduce_max_sync(0xffffffffu, range.y)) - bottom, per = (BINS - 1) / width;
    // Equal or infinite scores, or such as lie too close.
    if (!(width > 0.f) || !(per < INFINITY) || !(per > 0.f)) {
        return choose_by_bits(own, used, k, shared);
    }
    const auto bin_of = [&](uint32_t v) { return min(static_cast<unsigned>((unordered(v) - bottom) * per), BINS - 1); };
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (i < used && own[i]) {
            atomicAdd(shared.bins + bin_of(own[i]), 1u);
        }
    }
    __syncthreads();
    // Two bins a thread, from the largest scores on.
    const unsigned upper = BINS - 1 - 2 * thread, in_upper = shared.bins[upper], in_both = in_upper + shared.bins[upper - 1];
    uint32_t through = in_both;
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, through, step);
        through += lane >= step ? other : 0;
    }
    if (lane == 31) {
        shared.scan[warp] = through;
    }
    __syncthreads();
    const unsigned before = __reduce_add_sync(0xffffffffu, lane < warp ? shared.scan[lane] : 0) + through - in_both;
    if (before < k && before + in_both >= k) {
        const bool in_first = before + in_upper >= k;
        shared.bin = in_first ? upper : upper - 1;
        shared.needed = k - before - (in_first ? 0 : in_upper);
    }
    __syncthreads();
    const unsigned bin = shared.bin, needed = shared.needed;
    uint32_t taken = 0, equal = 0;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (i < used && own[i]) {
            const unsigned in = bin_of(own[i]);
            taken |= (in > bin) << i;
            equal |= (in == bin) << i;
        }
    }
    const unsigned members = shared.bins[bin];
    if (members == needed) {
        return taken | equal;
    }
    if (members > RANKED) {
        return choose_by_bits(own, used, k, shared);
    }
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (equal >> i & 1) {
            shared.members[atomicAdd(&shared.count, 1u)] = make_uint2(own[i], thread * EACH + i);
        }
    }
    __syncthreads();
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (equal >> i & 1) {
            unsigned first = 0;
            for (unsigned m = 0; m < members; m++) {
                const uint2 other = shared.members[m];
                first += other.x > own[i] || (other.x == own[i] && other.y < thread * EACH + i);
            }
            taken |= (first < needed) << i;
        }
    }
    return taken;
}

// How many bits the threads before this one have.
__device__ __forceinline__ unsigned places_before(uint32_t taken, Shared& shared) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = __popc(taken);
    unsigned through = mine;
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, through, step);
        through += lane >= step ? other : 0;
    }
    if (lane == 31) {
        shared.places[warp] = through;
    }
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, lane < warp ? shared.places[lane] : 0) + through - mine;
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
    const unsigned all = (visible + GROUP - 1) / GROUP;
    // Groups first where entries are too many; then entries, of these groups or of all.
    const bool grouped = visible > PICKERS * EACH;
    for (bool entries = !grouped;; entries = true) {
        const unsigned count = !entries ? all : grouped ? k * GROUP : visible, used = (count + PICKERS - 1) / PICKERS;
        const auto index_of = [&](unsigned i) {
            const unsigned at = thread * used + i;
            return entries && grouped ? groups[at / GROUP] * GROUP + at % GROUP : at;
        };
        const uint32_t* from = entries ? scores : largest;
        uint32_t own[EACH];
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            own[i] = i < used && thread * used + i < count ? from[index_of(i)] : 0;
        }
        const uint32_t taken = choose(own, used, k, shared);
        unsigned place = places_before(taken, shared);
        unsigned* const to = entries ? out : groups;
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            if (taken >> i & 1) {
                to[place++] = index_of(i);
            }
        }
        if (entries) {
            return;
        }
        __syncthreads();
    }
}
