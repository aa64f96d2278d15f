// The k largest of up to 16,384 integers in the order of scores, in a block of 512 threads: counted in bins that are equal in the
// logarithm of the distance from a bound below the k-th, so that outliers on either side leave the others enough of them; what is in
// the bin of the k-th is ranked one by one. Among equals the lower index wins. Where bins do not do (equal or infinite scores, many
// in one bin) the largest bound that k values reach is found two bits at a time.
//
// Thread t has values 4 t .. 4 t + 3 of every 2,048. 0 is none; there are at least k others.
#pragma once
#include <stdint.h>

namespace longwave {

// Threads and warps of a block that chooses, values of all threads at once and most rounds of them.
constexpr unsigned CHOOSERS = 512, CHOOSER_WARPS = CHOOSERS / 32, CHOSEN_AT_ONCE = 4 * CHOOSERS, CHOICE_ROUNDS = 8;
// Bins, 64 to a power of two, so sixteen powers of two below the largest distance; values of one bin that are ranked at most.
// Values that are in no bin are counted at the first of two places before all bins.
constexpr unsigned CHOICE_BINS = 1024, BIN_SHIFT = 17, RANKED_OF_BIN = 64, NO_BINS = 2;
// Most values that one choice gives where it may give more than k.
constexpr unsigned MOST_CHOSEN = 1024;

// The values, or those of sixteen at a time whose numbers are in `groups`.
struct ChoiceSource {
    const uint32_t* values;
    const unsigned* groups;
    unsigned count;

    // The index of value c of a thread in a round.
    __device__ __forceinline__ unsigned index(unsigned round, unsigned c) const {
        const unsigned four = round * CHOOSERS + threadIdx.x;
        return (groups ? groups[four / 4] * 16 + four % 4 * 4 : four * 4) + c;
    }

    // Of four values those that are there.
    __device__ __forceinline__ void keep(uint32_t* own, uint4 v, unsigned round) const {
        const unsigned first = (round * CHOOSERS + threadIdx.x) * 4;
        own[0] = first < count ? v.x : 0;
        own[1] = first + 1 < count ? v.y : 0;
        own[2] = first + 2 < count ? v.z : 0;
        own[3] = first + 3 < count ? v.w : 0;
    }

    // The values of a round.
    __device__ __forceinline__ void load(uint32_t* own, unsigned round) const {
        uint4 v = make_uint4(0, 0, 0, 0);
        if ((round * CHOOSERS + threadIdx.x) * 4 < count) {
            v = *reinterpret_cast<const uint4*>(values + index(round, 0));
        }
        keep(own, v, round);
    }

    __device__ __forceinline__ unsigned rounds() const {
        return (count + CHOSEN_AT_ONCE - 1) / CHOSEN_AT_ONCE;
    }
};

// Bins of all choices of a row. `bottom` is an ordered integer that the k-th reaches, `low` its score; values in places below `least`
// are known not to be among the best.
struct ChoiceBins {
    uint32_t bottom;
    float low;
    int base;
    unsigned least;
    bool good;

    __device__ __forceinline__ static float score_of(uint32_t v) {
        return __uint_as_float(v ^ (v >> 31 ? 0x80000000u : 0xffffffffu));
    }

    // Where a value is counted: its bin behind NO_BINS, or 0 where it is not among the best. Bins keep the order, since a difference
    // rounds in the order of scores.
    __device__ __forceinline__ unsigned place_of(uint32_t v) const {
        const int bin = static_cast<int>(__float_as_uint(score_of(v) - low) >> BIN_SHIFT) - base;
        const unsigned place = max(bin, 0) + NO_BINS;
        return v >= bottom && place >= least ? place : 0;
    }
};

// What a block shares. Of two places those of the first choice and of the second.
struct ChoiceRoom {
    uint32_t bins[2][NO_BINS + CHOICE_BINS];
    unsigned cursor[2];
    uint2 range[CHOOSER_WARPS];
    uint32_t scan[CHOOSER_WARPS];
    // The place of the k-th's bin, how many of it are needed, and how many are in it.
    uint4 found;
    uint2 ranked[RANKED_OF_BIN];
    // Sums alternate between two places: a barrier is between those who read one and those who write it again.
    uint32_t totals[2][CHOICE_ROUNDS * CHOOSER_WARPS];
    uint2 counts[2][CHOOSER_WARPS];

    // A barrier has to follow.
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (unsigned i = threadIdx.x; i < NO_BINS + CHOICE_BINS; i += CHOOSERS) {
            bins[0][i] = bins[1][i] = 0;
        }
        if (threadIdx.x < 2) {
            cursor[threadIdx.x] = 0;
        }
    }
};

// Calls `work(round, c, place)` for every set bit (bit 4 r + c for value c of round r), with how many set bits of the block come
// before it in the order of indices. Returns how many there are.
template <class Work>
__device__ __forceinline__ unsigned each_in_order(uint32_t set, unsigned rounds, uint32_t* totals, const Work& work) {
    constexpr unsigned LOADS = CHOICE_ROUNDS * CHOOSER_WARPS / 32;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;
#pragma unroll 1
    for (unsigned r = 0; r < rounds; r++) {
        const unsigned in_warp = __reduce_add_sync(0xffffffffu, __popc(set >> 4 * r & 15));
        if (lane == 0) {
            totals[r * CHOOSER_WARPS + warp] = in_warp;
        }
    }
    __syncthreads();
    uint32_t of[LOADS], all = 0;
#pragma unroll
    for (unsigned i = 0; i < LOADS; i++) {
        of[i] = 32 * i + lane < rounds * CHOOSER_WARPS ? totals[32 * i + lane] : 0;
        all += of[i];
    }
#pragma unroll 1
    for (unsigned r = 0; r < rounds; r++) {
        uint32_t place = 0;
#pragma unroll
        for (unsigned i = 0; i < LOADS; i++) {
            place += 32 * i + lane < r * CHOOSER_WARPS + warp ? of[i] : 0;
        }
        place = __reduce_add_sync(0xffffffffu, place);
#pragma unroll
        for (unsigned c = 0; c < 4; c++) {
            place += __popc(__ballot_sync(0xffffffffu, set >> (4 * r + c) & 1) & below);
        }
#pragma unroll
        for (unsigned c = 0; c < 4; c++) {
            if (set >> (4 * r + c) & 1) {
                work(r, c, place++);
            }
        }
    }
    return __reduce_add_sync(0xffffffffu, all);
}

// Exactly the k largest, whatever they are: the slow way, values are read again and again. Totals of the second place are used.
__device__ __forceinline__ uint32_t choose_by_bits(const ChoiceSource& source, unsigned k, ChoiceRoom& room) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, rounds = source.rounds();
    uint32_t bound = 0;
    unsigned turn = 0;
    for (int bit = 30; bit >= 0; bit -= 2, turn ^= 1) {
        uint32_t low = 0, high = 0;
#pragma unroll 1
        for (unsigned r = 0; r < rounds; r++) {
            uint32_t own[4];
            source.load(own, r);
#pragma unroll
            for (unsigned c = 0; c < 4; c++) {
                low += (own[c] >= (bound | 1u << bit)) + ((own[c] >= (bound | 2u << bit)) << 16);
                high += own[c] >= (bound | 3u << bit);
            }
        }
        low = __reduce_add_sync(0xffffffffu, low);
        high = __reduce_add_sync(0xffffffffu, high);
        if (lane == 0) {
            room.counts[turn][warp] = make_uint2(low, high);
        }
        __syncthreads();
        const uint2 part = lane < CHOOSER_WARPS ? room.counts[turn][lane] : make_uint2(0, 0);
        low = __reduce_add_sync(0xffffffffu, part.x);
        high = __reduce_add_sync(0xffffffffu, part.y);
        const unsigned digit = high >= k ? 3 : low >> 16 >= k ? 2 : (low & 0xffff) >= k ? 1 : 0;
        bound |= digit << bit;
        if (digit > 0 && (digit == 3 ? high : digit == 2 ? low >> 16 : low & 0xffff) == k) {
            break;
        }
    }
    uint32_t above = 0, equal = 0;
#pragma unroll 1
    for (unsigned r = 0; r < rounds; r++) {
        uint32_t own[4];
        source.load(own, r);
#pragma unroll
        for (unsigned c = 0; c < 4; c++) {
            above |= (own[c] > bound) << (4 * r + c);
            equal |= (own[c] == bound) << (4 * r + c);
        }
    }
    // Nobody reads the range any more: a barrier has been between.
    const uint32_t in_warp = __reduce_add_sync(0xffffffffu, __popc(above));
    if (lane == 0) {
        room.range[warp].x = in_warp;
    }
    // The others that are needed are the first of those that equal the bound.
    uint32_t early = 0;
    unsigned needed = 0, asked = 0;
    each_in_order(equal, rounds, room.totals[1], [&](unsigned r, unsigned c, unsigned place) {
        if (!asked) {
            for (unsigned w = 0; w < CHOOSER_WARPS; w++) {
                needed += room.range[w].x;
            }
            needed = k - needed;
            asked = 1;
        }
        early |= (place < needed) << (4 * r + c);
    });
    return above | early;
}

// Of `own`, the values of `source`, the k largest, a bit for each; or, with `most` above k and no more than so many, all in the bin
// of the k-th and above it, so that ranks in it need not be known. Choice 0 finds bins, choice 1 goes on in them. False: bins do not
// do.
template <unsigned ROUNDS>
__device__ __forceinline__ bool choose(const ChoiceSource& source, const uint32_t (&own)[4 * ROUNDS], unsigned k, unsigned most,
                                       unsigned choice, ChoiceBins& bins, ChoiceRoom& room, uint32_t& taken) {
    const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32, rounds = source.rounds();
    if (choice == 0) {
        // Of at least k sets of values, none of them empty, each has one at or above the least of their largest: so has the k-th. A
        // thread's values are one set, or two; where there are too few of these, each value is one. None is above all.
        uint32_t first = 0, second = 0, least = 0xffffffffu;
#pragma unroll
        for (unsigned i = 0; i < 4 * ROUNDS; i++) {
            uint32_t& of = i % 4 < 2 ? first : second;
            of = max(of, own[i]);
            least = min(least, own[i] - 1);
        }
        const unsigned whole = min(CHOOSERS, (source.count + 3) / 4), halves = whole + min(CHOOSERS, (source.count + 1) / 4);
        const uint32_t largest = max(first, second);
        least = whole >= k ? largest - 1 : halves >= k ? min(first - 1, second - 1) : least;
        least = __reduce_min_sync(0xffffffffu, least);
        const uint32_t of_warp = __reduce_max_sync(0xffffffffu, largest);
        if (lane == 0) {
            room.range[warp] = make_uint2(least, of_warp);
        }
        __syncthreads();
        const uint2 range = room.range[lane % CHOOSER_WARPS];
        bins.bottom = __reduce_min_sync(0xffffffffu, range.x) + 1;
        bins.low = ChoiceBins::score_of(bins.bottom);
        const float width = ChoiceBins::score_of(__reduce_max_sync(0xffffffffu, range.y)) - bins.low;
        bins.base = static_cast<int>(__float_as_uint(width) >> BIN_SHIFT) - static_cast<int>(CHOICE_BINS - 1);
        bins.least = 0;
        // Else all equal, or some infinite.
        bins.good = width > 0.f && width < INFINITY;
    }
    if (!bins.good) {
        return false;
    }
    uint32_t* const counted = room.bins[choice];
    uint32_t in[4 * ROUNDS];
#pragma unroll
    for (unsigned r = 0; r < ROUNDS; r++) {
        if (r < rounds) {
#pragma unroll
            for (unsigned i = 4 * r; i < 4 * r + 4; i++) {
                in[i] = bins.place_of(own[i]);
                atomicAdd(counted + in[i], 1u);
            }
        }
    }
    __syncthreads();
    // Two bins a thread, from the largest scores on.
    const unsigned upper = NO_BINS + CHOICE_BINS - 1 - 2 * thread;
    const uint2 both = *reinterpret_cast<const uint2*>(counted + upper - 1);
    const unsigned in_both = both.x + both.y;
    uint32_t through = in_both;
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, through, step);
        through += lane >= step ? other : 0;
    }
    if (lane == 31) {
        room.scan[warp] = through;
    }
    __syncthreads();
    const unsigned before = __reduce_add_sync(0xffffffffu, lane < warp ? room.scan[lane] : 0) + through - in_both;
    if (before < k && before + in_both >= k) {
        const bool in_upper = before + both.y >= k;
        room.found = make_uint4(in_upper ? upper : upper - 1, k - before - (in_upper ? 0 : both.y), in_upper ? both.y : both.x, 0);
    }
    __syncthreads();
    const unsigned bin = room.found.x, needed = room.found.y, members = room.found.z;
    bins.least = bin;
    const bool all = k - needed + members <= most;
    if (!all && members > RANKED_OF_BIN) {
        return false;
    }
    const unsigned from = all ? bin : bin + 1;
    uint32_t equal = 0;
    taken = 0;
#pragma unroll
    for (unsigned r = 0; r < ROUNDS; r++) {
        if (r < rounds) {
#pragma unroll
            for (unsigned i = 4 * r; i < 4 * r + 4; i++) {
                taken |= (in[i] >= from) << i;
                equal |= (in[i] == bin) << i;
            }
        }
    }
    if (all) {
        return true;
    }
    // Few threads have some of these: they read them again.
    for (uint32_t left = equal; left; left &= left - 1) {
        const unsigned i = __ffs(left) - 1, index = source.index(i / 4, i % 4);
        room.ranked[atomicAdd(room.cursor + choice, 1u)] = make_uint2(source.values[index], index);
    }
    __syncthreads();
    for (uint32_t left = equal; left; left &= left - 1) {
        const unsigned i = __ffs(left) - 1, index = source.index(i / 4, i % 4);
        const uint32_t v = source.values[index];
        unsigned first = 0;
#pragma unroll 4
        for (unsigned m = 0; m < members; m++) {
            const uint2 other = room.ranked[m];
            first += other.x > v || (other.x == v && other.y < index);
        }
        taken |= (first < needed) << i;
    }
    return true;
}

}  // namespace longwave
