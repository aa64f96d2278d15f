// The k best candidates of a row of the indexer that a block keeps in shared memory. A candidate is the score's bits, in their
// order, above the inverted entry: no two are equal, larger is better, the lower entry wins a tie. 0 is none.
#pragma once
#include <stdint.h>

#include "score.cuh"

namespace longwave {

typedef unsigned long long Ranked;

__device__ __forceinline__ Ranked ranked_bits(uint32_t ordered, unsigned entry) {
    return static_cast<Ranked>(ordered) << 32 | static_cast<unsigned>(~entry);
}

__device__ __forceinline__ Ranked ranked(float score, unsigned entry) {
    return ranked_bits(ordered_score(score), entry);
}

// What `of_warp` makes of the values of all threads, for every thread; 0 changes nothing. Calls alternate between the two rows of
// `partial`.
template <unsigned WARPS, class OfWarp>
__device__ __forceinline__ unsigned of_block(unsigned own, unsigned (&partial)[2][WARPS], unsigned turn, const OfWarp& of_warp) {
    own = of_warp(own);
    if (threadIdx.x % 32 == 0) {
        partial[turn & 1][threadIdx.x / 32] = own;
    }
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    return of_warp(lane < WARPS ? partial[turn & 1][lane] : 0);
}

// The sum and the largest of the values.
template <unsigned WARPS>
__device__ __forceinline__ unsigned total_of(unsigned own, unsigned (&partial)[2][WARPS], unsigned turn) {
    return of_block(own, partial, turn, [](unsigned v) { return __reduce_add_sync(0xffffffffu, v); });
}

template <unsigned WARPS>
__device__ __forceinline__ unsigned largest_of(unsigned own, unsigned (&partial)[2][WARPS], unsigned turn) {
    return of_block(own, partial, turn, [](unsigned v) { return __reduce_max_sync(0xffffffffu, v); });
}

// What a block of THREADS shares: a list of ROOM candidates.
template <unsigned THREADS, unsigned ROOM>
struct BestRoom {
    Ranked list[ROOM];
    unsigned partial[2][THREADS / 32];
    unsigned cursor;
};

template <unsigned THREADS, unsigned ROOM>
struct Best {
    BestRoom<THREADS, ROOM>& room;
    unsigned count, k;
    // The turn of the next sum over threads.
    unsigned turn;
    // Candidates above it may still be among the k best; at most the k-th best of the list, if there are so many.
    Ranked bar;

    __device__ __forceinline__ Best(BestRoom<THREADS, ROOM>& shared, unsigned most) : room(shared), count(0), k(most), turn(0), bar(0) {
        if (threadIdx.x == 0) {
            room.cursor = 0;
        }
        __syncthreads();
    }

    __device__ __forceinline__ unsigned total(unsigned own) {
        return total_of<THREADS / 32>(own, room.partial, turn++);
    }

    __device__ __forceinline__ void append(Ranked candidate, bool takes) {
        const unsigned lane = threadIdx.x % 32, takers = __ballot_sync(0xffffffffu, takes);
        unsigned at = 0;
        if (lane == 0 && takers) {
            at = atomicAdd(&room.cursor, __popc(takers));
        }
        at = __shfl_sync(0xffffffffu, at, 0) + __popc(takers & ((1u << lane) - 1));
        if (takes) {
            room.list[at] = candidate;
        }
    }

    // One candidate per thread, or 0. All threads call it.
    __device__ __forceinline__ void offer(Ranked candidate) {
        const bool takes = candidate > bar;
        append(candidate, takes);
        count += __syncthreads_count(takes);
        if (count > ROOM - THREADS) {
            cut();
        }
    }

    // Keeps the k best of more than k, behind a barrier: the largest bound that k candidates reach, bit by bit, first of their
    // scores, from the highest bit on that bar and largest score do not share.
    __device__ __forceinline__ void cut() {
        Ranked own[ROOM / THREADS];
        unsigned most = 0;
#pragma unroll
        for (unsigned i = 0; i < ROOM / THREADS; i++) {
            const unsigned at = i * THREADS + threadIdx.x;
            own[i] = at < count ? room.list[at] : 0;
            most = max(most, static_cast<unsigned>(own[i] >> 32));
        }
        if (threadIdx.x == 0) {
            room.cursor = 0;
        }
        most = largest_of<THREADS / 32>(most, room.partial, turn++);
        const unsigned least = static_cast<unsigned>(bar >> 32), differ = most ^ least;
        const int high = differ ? 31 - __clz(differ) : -1;
        unsigned score = high < 31 ? most >> (high + 1) << (high + 1) : 0, reach = 0;
        for (int bit = high; bit >= 0; bit--) {
            const unsigned next = score | 1u << bit;
            reach = 0;
#pragma unroll
            for (unsigned i = 0; i < ROOM / THREADS; i++) {
                if (i * THREADS < count) {
                    reach += static_cast<unsigned>(own[i] >> 32) >= next;
                }
            }
            reach = total(reach);
            if (reach >= k) {
                score = next;
            }
            if (reach == k) {
                break;
            }
        }
        Ranked bound = static_cast<Ranked>(score) << 32;
        // More than k reach it: their entries tell them apart.
        for (int bit = 31; bit >= 0 && reach != k; bit--) {
            const Ranked next = bound | 1u << bit;
            reach = 0;
#pragma unroll
            for (unsigned i = 0; i < ROOM / THREADS; i++) {
                reach += own[i] >= next;
            }
            reach = total(reach);
            if (reach >= k) {
                bound = next;
            }
        }
#pragma unroll
        for (unsigned i = 0; i < ROOM / THREADS; i++) {
            if (i * THREADS < count) {
                append(own[i], own[i] >= bound);
            }
        }
        count = k;
        bar = bound - 1;
        __syncthreads();
    }
};

}  // namespace longwave
