// architectures: 90a 100a
// Router (model.md 7.1): experts and weights of each token, then tokens in groups of one expert.
//   router_choose  the k experts of a token and their weights, in the order of choice
//   router_few     both for at most eight tokens
//   router_group   groups of a few (token, slot) pairs of one expert, in the order of experts and tokens
// router_cluster.cu has product and choice of a few tokens in one launch, where it can.
// A padded token (UNMAPPED) has no expert. At most 512 experts and 32 choices. Nothing depends on other tokens but the
// places of pairs.
#include <stdint.h>

#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/router.cuh"

namespace {

constexpr int MOST = 512;
// Tokens that one block routes.
constexpr int FEW = 8;

// The k experts of the largest keys, lane `slot` gets that of slot `slot`; among equals the lower expert. keys[i] is expert
// 32 i + lane; bit i of `taken` says that it is not there.
__device__ __forceinline__ unsigned best_experts(const float (&keys)[MOST / 32], unsigned taken, unsigned k, unsigned lane) {
    unsigned own = longwave::UNMAPPED;
    for (unsigned slot = 0; slot < k; slot++) {
        // The best of the lane, then of the warp.
        unsigned best = longwave::UNMAPPED;
        float best_key = 0.f;
#pragma unroll
        for (int i = 0; i < MOST / 32; i++) {
            if (!(taken >> i & 1) && (best == longwave::UNMAPPED || keys[i] > best_key)) {
                best = i * 32 + lane;
                best_key = keys[i];
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            const unsigned other = __shfl_xor_sync(0xffffffffu, best, step);
            const float key = __shfl_xor_sync(0xffffffffu, best_key, step);
            const bool better = other != longwave::UNMAPPED &&
                                (best == longwave::UNMAPPED || key > best_key || (key == best_key && other < best));
            best = better ? other : best;
            best_key = better ? key : best_key;
        }
        if (best % 32 == lane) {
            taken |= 1u << best / 32;
        }
        own = lane == slot ? best : own;
    }
    return own;
}

}  // namespace

// logits float [tokens, experts]; bias float [experts], or table u32 [vocab, k] that names the experts by token id; ids u32
// [tokens]. chosen u32 and weights float [tokens, k]. A warp per token.
extern "C" __global__ void __launch_bounds__(256)
router_choose(const float* __restrict__ logits, const float* __restrict__ bias, const unsigned* __restrict__ table,
              const unsigned* __restrict__ ids, unsigned* __restrict__ chosen, float* __restrict__ weights, unsigned tokens,
              unsigned experts, unsigned k, float scale) {
    longwave::overlap();
    const unsigned token = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) {
        return;
    }
    const unsigned id = ids[token];
    const float* row = logits + size_t(token) * experts;
    unsigned own = longwave::UNMAPPED;
    float own_score = 0.f;
    if (id != longwave::UNMAPPED) {
        if (table) {
            if (lane < k) {
                own = table[size_t(id) * k + lane];
                own_score = longwave::router_score(row[own]);
            }
        } else {
            float keys[MOST / 32];
            unsigned taken = 0;
#pragma unroll
            for (int i = 0; i < MOST / 32; i++) {
                const unsigned e = i * 32 + lane;
                keys[i] = 0.f;
                taken |= 1u << i;
                if (e < experts) {
                    keys[i] = longwave::router_key(longwave::router_score(row[e]), bias[e]);
                    taken &= ~(1u << i);
                }
            }
            own = best_experts(keys, taken, k, lane);
            own_score = lane < k ? longwave::router_score(row[own]) : 0.f;
        }
    }
    const float weight = longwave::router_weight(own, own_score, k, scale);
    if (lane < k) {
        chosen[size_t(token) * k + lane] = own;
        weights[size_t(token) * k + lane] = weight;
    }
}

// The same for at most eight tokens, and their groups (see below), in one block of 1024 threads: every thread has a score, then
// a warp a token, then a thread an expert that is here. `here` of them, the first has the id `offset`.
extern "C" __global__ void __launch_bounds__(1024)
router_few(const float* __restrict__ logits, const float* __restrict__ bias, const unsigned* __restrict__ table,
           const unsigned* __restrict__ ids, unsigned* __restrict__ chosen, float* __restrict__ weights,
           int* __restrict__ groups, unsigned* __restrict__ inputs, unsigned* __restrict__ sources,
           unsigned* __restrict__ places, unsigned tokens, unsigned experts, unsigned k, float scale, unsigned size,
           unsigned most, unsigned offset, unsigned here) {
    longwave::wait_before();
    __shared__ float scores[FEW * MOST];
    __shared__ unsigned picked[FEW * 32];
    // Pairs in the lower half, groups in the upper one: of a warp's experts, then of all before it.
    __shared__ unsigned sums[MOST / 32];
    const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32, pairs = tokens * k;
    if (!table) {
        for (unsigned i = thread; i < tokens * experts; i += 1024) {
            scores[i] = longwave::router_score(logits[i]);
        }
        __syncthreads();
    }
    if (warp < tokens) {
        const unsigned id = ids[warp];
        const float* row = scores + warp * experts;
        unsigned own = longwave::UNMAPPED;
        float own_score = 0.f;
        if (id != longwave::UNMAPPED && table) {
            own = lane < k ? table[size_t(id) * k + lane] : own;
            own_score = lane < k ? longwave::router_score(logits[size_t(warp) * experts + own]) : 0.f;
        } else if (id != longwave::UNMAPPED) {
            float keys[MOST / 32];
            unsigned taken = 0;
#pragma unroll
            for (int i = 0; i < MOST / 32; i++) {
                const unsigned e = i * 32 + lane;
                keys[i] = e < experts ? longwave::router_key(row[e], bias[e]) : 0.f;
                taken |= e < experts ? 0 : 1u << i;
            }
            own = best_experts(keys, taken, k, lane);
            own_score = lane < k ? row[own] : 0.f;
        }
        const float weight = longwave::router_weight(own, own_score, k, scale);
        if (lane < k) {
            chosen[warp * k + lane] = picked[warp * k + lane] = own;
            weights[warp * k + lane] = weight;
        }
    }
    __syncthreads();
    // Not earlier: the blocks of the experts' product would hold all registers while they wait, and the shared expert, which runs
    // beside this, would get none.
    longwave::start_next();
    unsigned own = 0;
    if (thread < here) {
        for (unsigned p = 0; p < pairs; p++) {
            own += picked[p] - offset == thread;
        }
    }
    const unsigned own_groups = (own + size - 1) / size;
    unsigned before = own | own_groups << 16;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned v = __shfl_up_sync(0xffffffffu, before, step);
        before += lane >= step ? v : 0;
    }
    if (lane == 31 && warp < MOST / 32) {
        sums[warp] = before;
    }
    __syncthreads();
    unsigned all = 0, earlier = 0;
#pragma unroll
    for (unsigned w = 0; w < MOST / 32; w++) {
        earlier += w < warp ? sums[w] : 0;
        all += sums[w];
    }
    if (thread < MOST) {
        const unsigned at = before + earlier - (own | own_groups << 16), first = at & 0xffff, first_group = at >> 16;
        for (unsigned j = 0; j < own_groups; j++) {
            int* group = groups + 3 * (first_group + j);
            group[0] = static_cast<int>(thread);
            group[1] = static_cast<int>(first + size * j);
            group[2] = static_cast<int>(min(own - size * j, size));
        }
        unsigned place = first;
        for (unsigned p = 0; own > 0 && p < pairs; p++) {
            if (picked[p] - offset == thread) {
                inputs[place] = p / k;
                sources[place] = p;
                places[p] = place++;
            }
        }
    } else {
        const unsigned other = thread - MOST;
        for (unsigned p = other; p < pairs; p += 1024 - MOST) {
            if (picked[p] - offset >= here) {
                places[p] = longwave::UNMAPPED;
            }
        }
        for (unsigned j = (all >> 16) + other; j < most; j += 1024 - MOST) {
            groups[3 * j] = groups[3 * j + 1] = groups[3 * j + 2] = 0;
        }
        for (unsigned p = (all & 0xffff) + other; p < pairs; p += 1024 - MOST) {
            inputs[p] = 0;
            sources[p] = longwave::UNMAPPED;
        }
    }
}

// Grid experts that are here, 256 threads: each block finds the pairs of one of them; the first has the id `offset`. chosen
// u32 [pairs], pair i is slot i % k of token i / k. groups int [most, 3]: expert, first place, up to `size` pairs; unused
// groups have none. By place: inputs u32 (token) and sources u32 (pair; UNMAPPED behind the last place). By pair: places u32,
// UNMAPPED for padded tokens and experts elsewhere.
extern "C" __global__ void __launch_bounds__(256)
router_group(const unsigned* __restrict__ chosen, int* __restrict__ groups, unsigned* __restrict__ inputs,
             unsigned* __restrict__ sources, unsigned* __restrict__ places, unsigned pairs, unsigned k,
             unsigned size, unsigned most, unsigned offset) {
    longwave::wait_before();
    __shared__ unsigned counts[MOST];
    __shared__ unsigned before[2];
    __shared__ unsigned found[2][8];
    const unsigned expert = blockIdx.x, experts = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (unsigned e = threadIdx.x; e < experts; e += 256) {
        counts[e] = 0;
    }
    if (threadIdx.x < 2) {
        before[threadIdx.x] = 0;
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < pairs; i += 256) {
        const unsigned e = chosen[i] - offset;
        if (e < experts) {
            atomicAdd(counts + e, 1u);
        } else if (expert == 0) {
            places[i] = longwave::UNMAPPED;
        }
    }
    __syncthreads();
    unsigned pairs_before = 0, groups_before = 0;
    for (unsigned e = threadIdx.x; e < expert; e += 256) {
        pairs_before += counts[e];
        groups_before += (counts[e] + size - 1) / size;
    }
    pairs_before = __reduce_add_sync(0xffffffffu, pairs_before);
    groups_before = __reduce_add_sync(0xffffffffu, groups_before);
    if (lane == 0) {
        atomicAdd(before, pairs_before);
        atomicAdd(before + 1, groups_before);
    }
    __syncthreads();
    const unsigned first = before[0], first_group = before[1], own = counts[expert], own_groups = (own + size - 1) / size;
    for (unsigned j = threadIdx.x; j < own_groups; j += 256) {
        int* group = groups + 3 * size_t(first_group + j);
        group[0] = static_cast<int>(expert);
        group[1] = static_cast<int>(first + size * j);
        group[2] = static_cast<int>(min(own - size * j, size));
    }
    if (expert == experts - 1) {
        for (unsigned j = first_group + own_groups + threadIdx.x; j < most; j += 256) {
            groups[3 * size_t(j)] = groups[3 * size_t(j) + 1] = groups[3 * size_t(j) + 2] = 0;
        }
        for (unsigned p = first + own + threadIdx.x; p < pairs; p += 256) {
            inputs[p] = 0;
            sources[p] = longwave::UNMAPPED;
        }
    }
    if (own == 0) {
        return;
    }
    // Not earlier, as above.
    longwave::start_next();
    unsigned done = first, turn = 0;
    for (unsigned base = 0; base < pairs; base += 256, turn ^= 1) {
        const unsigned i = base + threadIdx.x;
        const bool mine = i < pairs && chosen[i] - offset == expert;
        const unsigned votes = __ballot_sync(0xffffffffu, mine);
        if (lane == 0) {
            found[turn][warp] = __popc(votes);
        }
        __syncthreads();
        unsigned at = done + __popc(votes & ((1u << lane) - 1));
#pragma unroll
        for (unsigned w = 0; w < 8; w++) {
            at += w < warp ? found[turn][w] : 0;
            done += found[turn][w];
        }
        if (mine) {
            inputs[at] = i / k;
            sources[at] = i;
            places[i] = at;
        }
    }
}
