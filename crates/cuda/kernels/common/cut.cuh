// The k best of a row of the indexer, of many scores that lie in memory: a block filters them by a bar into a list in shared memory,
// and counts those of the list by digits until it has the score that k of them reach. Entries come in ascending order,
// so of equal scores the earlier ones stay.
#pragma once
#include <stdint.h>

#include "best.cuh"

namespace longwave {

// Threads of a block and their logarithm, scores of the block at once, pieces of four that a thread has of them, and room of the list:
// for the k best and a piece of each thread.
constexpr unsigned CUT_BITS = 8, CUTTERS = 1 << CUT_BITS, CUT_SCORES = 8192, CUT_PIECES = CUT_SCORES / 4 / CUTTERS, CUT_ROOM = 2048;

struct CutRoom {
    alignas(16) uint32_t scores[CUT_ROOM];
    unsigned entries[CUT_ROOM];
    unsigned partial[2][CUTTERS / 32], bins[CUTTERS], cursor, digit, above, found;
};

// At most CUT_SCORES scores of a row, and a thread's of them: four neighbours of each piece, 0 where nothing is.
struct CutScores {
    const uint32_t* from;
    uint32_t own[4 * CUT_PIECES];

    __device__ __forceinline__ static unsigned place(unsigned i) {
        return (i / 4 * CUTTERS + threadIdx.x) * 4 + i % 4;
    }

    __device__ __forceinline__ CutScores(const uint32_t* scores, unsigned n) : from(scores) {
#pragma unroll
        for (unsigned i = 0; i < CUT_PIECES; i++) {
            const unsigned at = place(4 * i);
            const uint4 v = at < n ? __ldg(reinterpret_cast<const uint4*>(from + at)) : make_uint4(0, 0, 0, 0);
            own[4 * i] = v.x;
            own[4 * i + 1] = v.y;
            own[4 * i + 2] = v.z;
            own[4 * i + 3] = v.w;
        }
        if (n < CUT_SCORES) {
#pragma unroll
            for (unsigned i = 0; i < 4 * CUT_PIECES; i++) {
                own[i] = place(i) < n ? own[i] : 0;
            }
        }
    }

    // A bit for each that is above.
    __device__ __forceinline__ uint32_t above(unsigned bar) const {
        uint32_t bits = 0;
#pragma unroll
        for (unsigned i = 0; i < 4 * CUT_PIECES; i++) {
            bits |= own[i] > bar ? 1u << i : 0;
        }
        return bits;
    }
};

struct Cut {
    CutRoom& room;
    unsigned count, k, turn;
    // Of entries to come, scores above it may be among the k best.
    unsigned bar;

    __device__ __forceinline__ Cut(CutRoom& shared, unsigned most) : room(shared), count(0), k(most), turn(0), bar(0) {}

    __device__ __forceinline__ unsigned total(unsigned own) {
        return total_of<CUTTERS / 32>(own, room.partial, turn++);
    }

    // With the candidates of earlier entries.
    __device__ __forceinline__ void begin(const Ranked* found, unsigned n, unsigned bar_of_these) {
        for (unsigned i = threadIdx.x; i < n; i += CUTTERS) {
            const Ranked candidate = found[i];
            room.scores[i] = static_cast<unsigned>(candidate >> 32);
            room.entries[i] = ~static_cast<unsigned>(candidate);
        }
        if (threadIdx.x == 0) {
            room.cursor = n;
        }
        count = n;
        bar = bar_of_these;
        __syncthreads();
    }

    // Adds scores of the entries from `first` on and keeps the k best.
    __device__ __forceinline__ void add(const CutScores& some, unsigned first) {
        uint32_t bits = some.above(bar);
        bool fits = count + total(__popc(bits)) <= CUT_ROOM;
        // Bit by bit the largest score that k of them reach, until no more do than fit.
        unsigned score = 0;
        for (int bit = 31; bit >= 0 && !fits; bit--) {
            const unsigned next = score | 1u << bit;
            bits = some.above(next - 1);
            const unsigned reach = total(__popc(bits));
            if (reach >= k) {
                score = next;
                fits = count + reach <= CUT_ROOM;
            }
        }
        bar = score > 0 ? max(bar, score - 1) : bar;
        if (!fits) {
            bits = some.above(bar);
        }
        // Where too many are equal, piece by piece.
        for (unsigned piece = 0; piece < (fits ? 1 : CUT_PIECES); piece++) {
            list(some.from, fits ? bits : bits & 15u << (4 * piece), first);
            if (count > k) {
                // The list has all that reach the bar, or has not yet.
                keep_best(fits ? bar : 0);
            }
        }
    }

    // Lists the scores of this thread's bits.
    __device__ __forceinline__ void list(const uint32_t* scores, uint32_t bits, unsigned first) {
        const unsigned lane = threadIdx.x % 32, own = __popc(bits), through = through_lanes(own);
        unsigned at = 0;
        if (lane == 31 && through > 0) {
            at = atomicAdd(&room.cursor, through);
        }
        at = __shfl_sync(0xffffffffu, at, 31) + through - own;
        for (; bits; bits &= bits - 1, at++) {
            const unsigned place = CutScores::place(__ffs(static_cast<int>(bits)) - 1);
            room.scores[at] = __ldg(scores + place);
            room.entries[at] = first + place;
        }
        count += total(own);
    }

    // The sum of the lanes up to this one.
    __device__ __forceinline__ static unsigned through_lanes(unsigned v) {
#pragma unroll
        for (unsigned step = 1; step < 32; step *= 2) {
            const unsigned other = __shfl_up_sync(0xffffffffu, v, step);
            v += threadIdx.x % 32 >= step ? other : 0;
        }
        return v;
    }

    // The sum of the threads up to this one.
    __device__ __forceinline__ unsigned through_threads(unsigned v) {
        const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, through = through_lanes(v);
        unsigned(&of_warps)[CUTTERS / 32] = room.partial[turn++ & 1];
        if (lane == 31) {
            of_warps[warp] = through;
        }
        __syncthreads();
        return through + __reduce_add_sync(0xffffffffu, lane < warp ? of_warps[lane] : 0);
    }

    // Keeps the k best of more than k; the k-th best score is at least `least`.
    __device__ __forceinline__ void keep_best(unsigned least) {
        constexpr unsigned EACH = CUT_ROOM / CUTTERS;
        uint32_t scores[EACH], entries[EACH];
        unsigned most = 0;
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            const unsigned at = i * CUTTERS + threadIdx.x;
            scores[i] = at < count ? room.scores[at] : 0;
            entries[i] = at < count ? room.entries[at] : 0;
            most = max(most, scores[i]);
        }
        if (threadIdx.x == 0) {
            room.cursor = 0;
        }
        most = largest_of<CUTTERS / 32>(most, room.partial, turn++);
        // The k-th best score has the bits that the least and the largest share: it is one of score .. score + 2^known - 1.
        const unsigned differ = most ^ least;
        unsigned known = differ ? 32 - __clz(differ) : 0, score = known < 32 ? most >> known << known : 0, needed = k;
        bool all = false;
        while (known > 0 && !all) {
            const unsigned shift = known > CUT_BITS ? known - CUT_BITS : 0, range = known < 32 ? (1u << known) - 1 : ~0u;
            room.bins[threadIdx.x] = 0;
            __syncthreads();
            // Bins from the best on.
#pragma unroll
            for (unsigned i = 0; i < EACH; i++) {
                if (i * CUTTERS < count && scores[i] - score <= range) {
                    atomicAdd(room.bins + (CUTTERS - 1 - ((scores[i] - score) >> shift)), 1);
                }
            }
            __syncthreads();
            const unsigned here = room.bins[threadIdx.x], through = through_threads(here);
            if (through >= needed && through - here < needed) {
                room.digit = CUTTERS - 1 - threadIdx.x;
                room.above = through - here;
                room.found = here;
            }
            __syncthreads();
            score += room.digit << shift;
            needed -= room.above;
            all = room.found == needed;
            known = shift;
        }
        // Of those with this score the earliest: the smallest entry up to which enough are.
        unsigned last = ~0u;
        if (!all) {
            last = 0;
            for (int bit = 30; bit >= 0; bit--) {
                const unsigned next = last | 1u << bit;
                unsigned before = 0;
#pragma unroll
                for (unsigned i = 0; i < EACH; i++) {
                    before += scores[i] == score && entries[i] < next;
                }
                last = total(before) < needed ? next : last;
            }
        }
        const unsigned lane = threadIdx.x % 32;
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            if (i * CUTTERS < count) {
                const bool takes = scores[i] > score || (scores[i] == score && entries[i] <= last);
                const unsigned takers = __ballot_sync(0xffffffffu, takes);
                unsigned at = 0;
                if (lane == 0 && takers) {
                    at = atomicAdd(&room.cursor, __popc(takers));
                }
                at = __shfl_sync(0xffffffffu, at, 0) + __popc(takers & ((1u << lane) - 1));
                if (takes) {
                    room.scores[at] = scores[i];
                    room.entries[at] = entries[i];
                }
            }
        }
        count = k;
        bar = max(bar, all ? score - 1 : score);
        __syncthreads();
    }

    // The entries of the list, all of them below `visible`, in ascending order: a bit for each, in the place of the scores.
    __device__ __forceinline__ void sort(unsigned* picks, unsigned visible) {
        constexpr unsigned EACH = 1024 / CUTTERS, WORDS = CUT_ROOM / CUTTERS, WINDOW = 32 * CUT_ROOM;
        unsigned entries[EACH];
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            const unsigned at = i * CUTTERS + threadIdx.x;
            entries[i] = at < count ? room.entries[at] : ~0u;
        }
        uint4* const own = reinterpret_cast<uint4*>(room.scores + threadIdx.x * WORDS);
        for (unsigned from = 0, done = 0; from < visible; from += WINDOW) {
#pragma unroll
            for (unsigned i = 0; i < WORDS / 4; i++) {
                own[i] = make_uint4(0, 0, 0, 0);
            }
            __syncthreads();
#pragma unroll
            for (unsigned i = 0; i < EACH; i++) {
                if (entries[i] != ~0u && entries[i] / WINDOW == from / WINDOW) {
                    atomicOr(room.scores + entries[i] % WINDOW / 32, 1u << entries[i] % 32);
                }
            }
            __syncthreads();
            uint32_t words[WORDS];
            unsigned mine = 0;
#pragma unroll
            for (unsigned i = 0; i < WORDS / 4; i++) {
                const uint4 v = own[i];
                words[4 * i] = v.x;
                words[4 * i + 1] = v.y;
                words[4 * i + 2] = v.z;
                words[4 * i + 3] = v.w;
                mine += __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w);
            }
            const unsigned through = through_threads(mine);
            unsigned at = done + through - mine;
#pragma unroll
            for (unsigned i = 0; i < WORDS; i++) {
                for (uint32_t bits = words[i]; bits; bits &= bits - 1) {
                    picks[at++] = from + (threadIdx.x * WORDS + i) * 32 + __ffs(static_cast<int>(bits)) - 1;
                }
            }
            done += total(mine);
        }
    }
};

}  // namespace longwave
