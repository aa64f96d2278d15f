// One row of logits in a block of threads: reductions in one tree, loops that read ahead, and the token at which a sum over
// the best reaches something. Tokens are ranked by logit (as total_cmp orders them), lower ids first among equals; ids are
// below 2^22. Sums are of integers, so their order does not matter.
#pragma once
#include <stdint.h>

namespace longwave {

// Threads of a block.
constexpr unsigned THREADS = 512;
constexpr unsigned BINS = 2048;
constexpr unsigned NO_BIN = 0xffffffffu;
constexpr unsigned ALL = 0xffffffffu;

// Orders tokens from the best: larger logits first (as total_cmp orders them), lower ids among equals.
__device__ __forceinline__ uint64_t rank_of(float l, unsigned token) {
    const unsigned bits = __float_as_uint(l);
    const unsigned ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(~ascending) << 32 | token;
}

__device__ __forceinline__ float logit_of(uint64_t rank) {
    const unsigned ascending = ~static_cast<unsigned>(rank >> 32);
    return __uint_as_float(ascending & 0x80000000u ? ascending & 0x7fffffffu : ~ascending);
}

// Integers in the order of floats.
__device__ __forceinline__ int ordered(float v) {
    const int bits = __float_as_int(v);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

__device__ __forceinline__ float unordered(int v) {
    return __int_as_float(v < 0 ? v ^ 0x7fffffff : v);
}

// Whether a is kept before b.
__device__ __forceinline__ bool before(float a, unsigned a_token, float b, unsigned b_token) {
    return a > b || (a == b && a_token < b_token);
}

// `merge` over all threads' values, in every thread; one fixed tree.
template <class T, class Merge>
__device__ __forceinline__ T over_block(T v, const Merge& merge) {
    __shared__ T partial[THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        v = merge(v, T::from(v, step));
    }
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = partial[threadIdx.x % (THREADS / 32)];
#pragma unroll
    for (int step = THREADS / 64; step > 0; step /= 2) {
        v = merge(v, T::from(v, step));
    }
    __syncthreads();
    return v;
}

template <class V>
struct Single {
    V v;
    static __device__ __forceinline__ Single from(const Single& own, int step) {
        return {__shfl_xor_sync(ALL, own.v, step)};
    }
};

// A value and the token that has it.
template <class V>
struct Best {
    V v;
    unsigned token;
    static __device__ __forceinline__ Best from(const Best& own, int step) {
        return {__shfl_xor_sync(ALL, own.v, step), __shfl_xor_sync(ALL, own.token, step)};
    }
    static __device__ __forceinline__ Best better(const Best& a, const Best& b) {
        return b.v > a.v || (b.v == a.v && b.token < a.token) ? b : a;
    }
};

// `work(token, logit, is there)` for all tokens, called by whole warps; N logits per thread are read before the first.
template <int N, class Work>
__device__ __forceinline__ void each(const float* l, unsigned vocab, const Work& work) {
    for (unsigned base = threadIdx.x; base < (vocab + THREADS * N - 1) / (THREADS * N) * (THREADS * N); base += THREADS * N) {
        float v[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = base + i * THREADS < vocab ? l[base + i * THREADS] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            work(base + i * THREADS, v[i], base + i * THREADS < vocab);
        }
    }
}

struct Counters {
    unsigned long long bins[BINS];
    unsigned long long warps[THREADS / 32];
    unsigned long long needed;
    unsigned bin;
};

// Finds the bin at which the sum from the first bin on reaches `needed`, and what is needed of that bin. Returns NO_BIN when
// all bins together do not reach it.
__device__ __forceinline__ unsigned reach(Counters& c, unsigned long long& needed) {
    constexpr unsigned OWN = BINS / THREADS;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned long long sum = 0;
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        sum += c.bins[threadIdx.x * OWN + i];
    }
    unsigned long long through = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned long long other = __shfl_up_sync(ALL, through, step);
        through += lane >= static_cast<unsigned>(step) ? other : 0;
    }
    if (lane == 31) {
        c.warps[warp] = through;
    }
    if (threadIdx.x == 0) {
        c.bin = NO_BIN;
    }
    __syncthreads();
    for (unsigned w = 0; w < warp; w++) {
        through += c.warps[w];
    }
    unsigned long long passed = through - sum;
    if (passed < needed && through >= needed) {
        for (unsigned i = 0; i < OWN; i++) {
            const unsigned long long here = c.bins[threadIdx.x * OWN + i];
            if (passed + here >= needed) {
                c.bin = threadIdx.x * OWN + i;
                c.needed = needed - passed;
                break;
            }
            passed += here;
        }
    }
    __syncthreads();
    needed = c.needed;
    const unsigned bin = c.bin;
    __syncthreads();
    return bin;
}

// The rank at which the sum of `weight(l)` over the tokens with `keep(l, rank)`, from the best on, reaches `need(sum over
// all)` (more than 0); all ones when it is never reached. First by distance from `top` in steps of 1 / slope, so that few tokens share
// a counter, then by the digits of the rank.
template <class Need, class Keep, class Weight>
__device__ __forceinline__ uint64_t select(const float* l, unsigned vocab, float top, float slope, Counters& c,
                                           const Need& need, const Keep& keep, const Weight& weight) {
    // The lowest bit of each pass's digit, a byte each from the right: 0 (unused), 53, 42, 32, 11, 0. Digits have 11 bits,
    // the fourth 10; between 32 and 22 there is no bit of a token's id.
    constexpr unsigned long long SHIFTS = 0x000b202a3500ull;
    unsigned first_bin = 0;
    unsigned long long needed = 0;
    uint64_t found = 0;
    for (int pass = 0; pass < 6; pass++) {
        for (unsigned i = threadIdx.x; i < BINS; i += THREADS) {
            c.bins[i] = 0;
        }
        __syncthreads();
        const int shift = static_cast<int>(SHIFTS >> (8 * pass) & 255), bits = pass == 3 ? 10 : 11, known = shift + bits;
        each<4>(l, vocab, [&](unsigned t, float v, bool there) {
            // After the first pass few tokens are left.
            const unsigned distance = static_cast<unsigned>(fminf((top - v) * slope, BINS - 1.f));
            if (pass > 0 && !__any_sync(ALL, there && distance == first_bin)) {
                return;
            }
            unsigned bin = 0;
            unsigned long long w = 0;
            const uint64_t rank = rank_of(v, t);
            if (there && keep(v, rank)) {
                if (pass == 0) {
                    bin = distance;
                    w = weight(v);
                } else if (distance == first_bin && (pass == 1 || rank >> known == found >> known)) {
                    bin = static_cast<unsigned>(rank >> shift) & ((1u << bits) - 1);
                    w = weight(v);
                }
            }
            const unsigned live = __ballot_sync(ALL, w > 0);
            if (live == 0) {
                return;
            }
            // A warp with one bin adds once: else equal logits would wait for each other.
            const unsigned some = __shfl_sync(ALL, bin, __ffs(static_cast<int>(live)) - 1);
            if (__all_sync(ALL, w == 0 || bin == some)) {
#pragma unroll
                for (int step = 16; step > 0; step /= 2) {
                    w += __shfl_xor_sync(ALL, w, step);
                }
                if (threadIdx.x % 32 == 0) {
                    atomicAdd(c.bins + some, w);
                }
            } else if (w > 0) {
                atomicAdd(c.bins + bin, w);
            }
        });
        __syncthreads();
        if (pass == 0) {
            unsigned long long sum = 0;
            for (unsigned i = threadIdx.x; i < BINS; i += THREADS) {
                sum += c.bins[i];
            }
            needed = need(over_block(Single<unsigned long long>{sum},
                                     [](auto a, auto b) { return Single<unsigned long long>{a.v + b.v}; }).v);
        }
        const unsigned bin = reach(c, needed);
        if (bin == NO_BIN) {
            return ~0ull;
        }
        if (pass == 0) {
            first_bin = bin;
        } else {
            found |= static_cast<uint64_t>(bin) << shift;
        }
    }
    return found;
}

}  // namespace longwave
