// architectures: 90a 100a
// The router (model.md 7.1), and pairs of a token and an expert in groups of one expert.
//   route   experts [tokens, k] and weights: the largest score + bias, among equals the lower expert, or the token's row of
//           a table; weights are scores over their sum, scaled
//   group   groups {expert, first pair, pairs <= 8}, pairs in the order of experts and of tokens in them
#include <stdint.h>

namespace {

constexpr unsigned NONE = 0xffffffffu;
// Experts of a lane.
constexpr unsigned HELD = 12;
constexpr unsigned MOST_EXPERTS = 32 * HELD;

// sqrt(log(1 + e^v)), with the identity above 20.
__device__ __forceinline__ float score(float v) {
    return __fsqrt_rn(v > 20.f ? v : static_cast<float>(log1p(exp(static_cast<double>(v)))));
}

}  // namespace

// Grid (tokens / 8 rounded up), 256 threads: a warp has a token. bias [experts], or null with table [vocab, k]. Tokens of
// 0xffffffff are padded rows: their experts are 0xffffffff. k <= 16, experts <= 384.
extern "C" __global__ void __launch_bounds__(256)
route(const float* __restrict__ logits, const float* __restrict__ bias, const unsigned* __restrict__ table,
      const unsigned* __restrict__ tokens, unsigned* __restrict__ chosen, float* __restrict__ weights, unsigned count,
      unsigned experts, unsigned k, float scale) {
    const unsigned row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= count) {
        return;
    }
    const unsigned token = tokens[row];
    const float* own = logits + size_t(row) * experts;
    unsigned expert = NONE;
    if (token != NONE && table) {
        expert = lane < k ? __ldg(table + size_t(token) * k + lane) : NONE;
    } else if (token != NONE) {
        float key[HELD];
#pragma unroll
        for (unsigned i = 0; i < HELD; i++) {
            const unsigned e = i * 32 + lane;
            const float b = e < experts ? score(own[e]) + __ldg(bias + e) : -INFINITY;
            key[i] = isnan(b) ? -1e30f : b;
        }
        for (unsigned s = 0; s < k; s++) {
            float best = -INFINITY;
            unsigned of = NONE;
#pragma unroll
            for (unsigned i = 0; i < HELD; i++) {
                if (key[i] > best) {
                    best = key[i];
                    of = i * 32 + lane;
                }
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                const float other = __shfl_xor_sync(0xffffffffu, best, step);
                const unsigned other_of = __shfl_xor_sync(0xffffffffu, of, step);
                if (other > best || (other == best && other_of < of)) {
                    best = other;
                    of = other_of;
                }
            }
#pragma unroll
            for (unsigned i = 0; i < HELD; i++) {
                if (of == i * 32 + lane) {
                    key[i] = -INFINITY;
                }
            }
            expert = lane == s ? of : expert;
        }
    }
    const float s = lane < k && expert < experts ? score(own[expert]) : 0.f;
    float sum = 0.f;
    for (unsigned i = 0; i < k; i++) {
        sum += __shfl_sync(0xffffffffu, s, i);
    }
    if (lane < k) {
        chosen[size_t(row) * k + lane] = expert;
        weights[size_t(row) * k + lane] = __fmul_rn(__fdiv_rn(s, sum), scale);
    }
}

// One block of 1024 threads. groups [most, 3] (unused ones have no pairs); of each pair its token (inputs), its weight, and
// of each choice its pair (places, 0xffffffff for padded rows).
extern "C" __global__ void __launch_bounds__(1024)
group(const unsigned* __restrict__ chosen, const float* __restrict__ weights, int* __restrict__ groups,
      unsigned* __restrict__ inputs, float* __restrict__ pair_weights, unsigned* __restrict__ places, unsigned choices,
      unsigned k, unsigned experts, unsigned most) {
    __shared__ unsigned counts[MOST_EXPERTS], first_pair[MOST_EXPERTS + 1], first_group[MOST_EXPERTS + 1];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (unsigned e = threadIdx.x; e < experts; e += 1024) {
        counts[e] = 0;
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < choices; i += 1024) {
        const unsigned e = chosen[i];
        if (e < experts) {
            atomicAdd(&counts[e], 1u);
        } else {
            places[i] = NONE;
        }
    }
    __syncthreads();
    if (warp == 0) {
        unsigned pairs = 0, slots = 0;
        for (unsigned start = 0; start < experts; start += 32) {
            const unsigned e = start + lane, c = e < experts ? counts[e] : 0, g = (c + 7) / 8;
            unsigned before = c, groups_before = g;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const unsigned a = __shfl_up_sync(0xffffffffu, before, step);
                const unsigned b = __shfl_up_sync(0xffffffffu, groups_before, step);
                if (lane >= unsigned(step)) {
                    before += a;
                    groups_before += b;
                }
            }
            if (e < experts) {
                first_pair[e] = pairs + before - c;
                first_group[e] = slots + groups_before - g;
            }
            pairs += __shfl_sync(0xffffffffu, before, 31);
            slots += __shfl_sync(0xffffffffu, groups_before, 31);
        }
        if (lane == 0) {
            first_group[experts] = slots;
        }
    }
    __syncthreads();
    for (unsigned i = first_group[experts] + threadIdx.x; i < most; i += 1024) {
        groups[3 * i + 2] = 0;
    }
    for (unsigned e = warp; e < experts; e += 32) {
        const unsigned count = counts[e];
        if (count == 0) {
            continue;
        }
        for (unsigned g = lane; g < (count + 7) / 8; g += 32) {
            int* const to = groups + 3 * (first_group[e] + g);
            to[0] = e;
            to[1] = first_pair[e] + 8 * g;
            to[2] = min(8u, count - 8 * g);
        }
        unsigned next = first_pair[e], left = count;
        for (unsigned start = 0; left > 0; start += 32) {
            const unsigned i = start + lane;
            const bool own = i < choices && chosen[i] == e;
            const unsigned owners = __ballot_sync(0xffffffffu, own);
            if (own) {
                const unsigned pair = next + __popc(owners & ((1u << lane) - 1));
                inputs[pair] = i / k;
                pair_weights[pair] = weights[i];
                places[i] = pair;
            }
            next += __popc(owners);
            left -= __popc(owners);
        }
    }
}
