// architectures: 90a
// The router of at most eight tokens in one launch (model.md 7.1): product with the gate, choice, groups. A cluster of 16 blocks,
// each of which has a sixteenth of the experts; block 0 has the end. Needs a multiple of 16 experts, at most 512, a multiple of
// 1024 columns, at least 2048, at most 8 choices; router.md has the design.
//
// All bits are those of linear_bf16.cu with eight parts and of router.cu: warp p sums up column blocks p, p + 8, ... in one
// tensor core sum, parts are added in order, and scores, keys and weights are the same functions.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/router.cuh"

namespace {

// Blocks, parts of the product (a warp each), most tokens and choices, columns of a block of them.
constexpr unsigned BLOCKS = 16, PARTS = 8, FEW = 8, CHOICES = 8, BLOCK = 128;

// Integers in the order of keys, above 0; equal keys are equal.
__device__ __forceinline__ uint32_t ordered(float key) {
    const uint32_t bits = __float_as_uint(key + 0.f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// What blocks send to block 0: for scored layers the k best of each block, best first, {ordered key, score, expert, 0} of
// [token][place][block]; for hashed ones scores, float [token][block][row].
struct Shared {
    uint4 sent[FEW * CHOICES * BLOCKS];
    unsigned picked[FEW * CHOICES];
    // Bit i of them: a group begins at place i.
    unsigned begins[2];
    uint64_t arrived;
};

// TILES tiles of 16 rows of the gate are a block's, of which the first experts / 16 rows count; a thread has AHEAD column blocks
// of weights on their way before the kernel before this one ends.
template <int TILES, int AHEAD>
__device__ __forceinline__ void route(const uint16_t* __restrict__ gate, const uint16_t* __restrict__ x,
                                      const float* __restrict__ bias, const unsigned* __restrict__ table,
                                      const unsigned* __restrict__ ids, unsigned* __restrict__ chosen,
                                      float* __restrict__ weights, int* __restrict__ groups, unsigned* __restrict__ inputs,
                                      unsigned* __restrict__ sources, unsigned* __restrict__ places, unsigned cols,
                                      unsigned tokens, unsigned experts, unsigned k, float scale, unsigned size, unsigned most,
                                      unsigned offset, unsigned here) {
    constexpr unsigned WIDTH = 16 * TILES;
    __shared__ float sums[PARTS][FEW][WIDTH + 1];
    __shared__ Shared shared;
    static_assert(AHEAD % 2 == 0 && FEW * BLOCKS * WIDTH * sizeof(float) <= sizeof(shared.sent));
    const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    const unsigned rank = blockIdx.x, own_experts = experts / BLOCKS, steps = cols / (BLOCK * PARTS);

    // Rows behind those of the block are read as well, for no use; none behind the last.
    const uint16_t* rows[2 * TILES];
#pragma unroll
    for (unsigned h = 0; h < 2 * TILES; h++) {
        rows[h] = gate + size_t(min(rank * own_experts + 8 * h + g, experts - 1)) * cols + warp * BLOCK + 8 * c;
    }
    uint4 ahead[AHEAD][4][2 * TILES];
    const auto load = [&](uint4 (&to)[4][2 * TILES], unsigned step) {
        if (step < steps) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int h = 0; h < 2 * TILES; h++) {
                    to[j][h] = __ldcs(reinterpret_cast<const uint4*>(rows[h] + size_t(step) * BLOCK * PARTS + j * 32));
                }
            }
        }
    };
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        load(ahead[a], a);
    }
    // The expert of whose score this thread takes care further on, once for every token.
    const unsigned token = thread / WIDTH, row = thread % WIDTH, expert = rank * own_experts + row;
    const float own_bias = !table && row < own_experts ? __ldg(bias + expert) : 0.f;
    const uint32_t arrived = longwave::shared_address(&shared.arrived);
    if (rank == 0 && thread == 0) {
        shared.begins[0] = shared.begins[1] = 0;
        longwave::init_barrier(arrived, 1);
        longwave::show_barriers();
        longwave::arrive_expecting(arrived, tokens * BLOCKS * (table ? WIDTH * 4 : k * 16));
    }
    __syncwarp();
    longwave::cluster_arrive_relaxed();

    longwave::wait_before();
    // Warps of block 0 have a token each at the end.
    const bool ends = rank == 0 && warp < tokens;
    const unsigned id = ends ? ids[warp] : longwave::UNMAPPED;
    x += size_t(min(g, tokens - 1)) * cols + warp * BLOCK + 8 * c;
    // Inputs of two steps are on their way: one way to the L2 and back takes about as long as the products of a step.
    uint4 v[2][4];
    const auto fetch = [&](uint4 (&to)[4], unsigned step) {
        if (step < steps) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                to[j] = __ldg(reinterpret_cast<const uint4*>(x + size_t(step) * BLOCK * PARTS + j * 32));
            }
        }
    };
    fetch(v[0], 0);
    fetch(v[1], 1);
    unsigned named = longwave::UNMAPPED;
    if (table && id != longwave::UNMAPPED && lane < k) {
        named = table[size_t(id) * k + lane];
    }
    __syncwarp();
    // Block 0 has its barrier: waited for here, while inputs are on their way, and not when there is something to send.
    longwave::cluster_wait();
    float total[TILES][4] = {};
    for (unsigned start = 0; start < steps; start += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (start + a < steps) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        longwave::mma_bf16_32(total[m], ahead[a][j][2 * m], ahead[a][j][2 * m + 1], v[a % 2][j]);
                    }
                }
                load(ahead[a], start + a + AHEAD);
                fetch(v[a % 2], start + a + 2);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sums[warp][2 * c + j][16 * m + g] = total[m][j];
            sums[warp][2 * c + j][16 * m + g + 8] = total[m][2 + j];
        }
    }
    __syncthreads();

    // A thread for each expert of each token; whole warps, some of them with a token that is not there.
    if (warp * 32 < tokens * WIDTH) {
        float logit = 0.f;
#pragma unroll
        for (unsigned part = 0; part < PARTS; part++) {
            logit += sums[part][token][row];
        }
        const float score = longwave::router_score(logit);
        const uint32_t to = longwave::address_in(longwave::shared_address(shared.sent), 0);
        const uint32_t arrived_there = longwave::address_in(arrived, 0);
        if (table) {
            const float second = __shfl_down_sync(0xffffffffu, score, 1), third = __shfl_down_sync(0xffffffffu, score, 2);
            const float fourth = __shfl_down_sync(0xffffffffu, score, 3);
            if (row % 4 == 0 && token < tokens) {
                longwave::send_16(to + ((token * BLOCKS + rank) * WIDTH + row) * 4, score, second, third, fourth, arrived_there);
            }
        } else {
            const uint32_t key = row < own_experts ? ordered(longwave::router_key(score, own_bias)) : 0;
            // Experts of this token and block that come first: larger keys, and equal ones below.
            unsigned place = 0;
#pragma unroll
            for (unsigned o = 1; o < WIDTH; o++) {
                place += __shfl_xor_sync(0xffffffffu, key, o) + ((row ^ o) < row) > key;
            }
            if (place < k && token < tokens) {
                longwave::send_16(to + ((token * CHOICES + place) * BLOCKS + rank) * 16, __uint_as_float(key), score,
                                  __uint_as_float(expert), 0.f, arrived_there);
            }
        }
    }
    __syncwarp();
    // Who has sent stays until it has arrived.
    if (rank > 0) {
        longwave::cluster_arrive_relaxed();
        longwave::cluster_wait();
        return;
    }
    const unsigned named_at = (warp * BLOCKS + named / own_experts) * WIDTH + named % own_experts;
    if (ends) {
        longwave::wait(arrived, 0);
        __syncwarp();
    }
    longwave::cluster_arrive_relaxed();

    if (ends) {
        unsigned own = longwave::UNMAPPED;
        float own_score = 0.f;
        if (id != longwave::UNMAPPED && table) {
            own = named;
            own_score = lane < k ? reinterpret_cast<const float*>(shared.sent)[named_at] : 0.f;
        } else if (id != longwave::UNMAPPED) {
            // Lane l has the list of block l, whose experts are below those of the next: among equal keys the lowest lane wins.
            const uint4* lists = shared.sent + warp * (CHOICES * BLOCKS) + lane % BLOCKS;
            uint32_t keys[CHOICES];
#pragma unroll
            for (unsigned p = 0; p < CHOICES; p++) {
                keys[p] = lane < BLOCKS && p < k ? lists[p * BLOCKS].x : 0;
            }
            unsigned next = lane, at = 0;
#pragma unroll
            for (unsigned slot = 0; slot < CHOICES; slot++) {
                if (slot < k) {
                    const uint32_t best = __reduce_max_sync(0xffffffffu, keys[0]);
                    const unsigned from = __ffs(__ballot_sync(0xffffffffu, keys[0] == best)) - 1;
                    const unsigned found = __shfl_sync(0xffffffffu, next, from);
                    at = lane == slot ? found : at;
                    if (lane == from) {
                        next += BLOCKS;
#pragma unroll
                        for (unsigned p = 0; p + 1 < CHOICES; p++) {
                            keys[p] = keys[p + 1];
                        }
                        keys[CHOICES - 1] = 0;
                    }
                }
            }
            if (lane < k) {
                const uint4 item = shared.sent[warp * (CHOICES * BLOCKS) + at];
                own = item.z;
                own_score = __uint_as_float(item.y);
            }
        }
        const float weight = longwave::router_weight(own, own_score, k, scale);
        if (lane < k) {
            chosen[warp * k + lane] = shared.picked[warp * k + lane] = own;
            weights[warp * k + lane] = weight;
        }
    }
    __syncthreads();
    // Not earlier: the blocks of the experts' product would hold all registers while they wait, and the shared expert, which runs
    // beside this, would get none.
    longwave::start_next();

    // Four threads a pair, each looks at every fourth of all. Bytes of the counts: local pairs before this one in the order of
    // experts and pairs, earlier pairs of its expert, all of its expert, all local ones.
    const unsigned pairs = tokens * k, pair = thread / 4, quarter = thread % 4;
    const unsigned local = pair < pairs ? shared.picked[pair] - offset : longwave::UNMAPPED;
    unsigned counts = 0;
    for (unsigned q = quarter; q < pairs; q += 4) {
        const unsigned other = shared.picked[q] - offset;
        const unsigned same = other == local, earlier = same && q < pair;
        counts += other < here ? unsigned(earlier || other < local) | earlier << 8 | same << 16 | 1u << 24 : 0;
    }
    counts += __shfl_xor_sync(0xffffffffu, counts, 1);
    counts += __shfl_xor_sync(0xffffffffu, counts, 2);
    const unsigned place = counts & 0xff, earlier = counts >> 8 & 0xff, same = counts >> 16 & 0xff, all = counts >> 24;
    // `size` is a power of two.
    const bool begins = local < here && (earlier & (size - 1)) == 0;
    if (begins && quarter == 0) {
        atomicOr(shared.begins + place / 32, 1u << place % 32);
    }
    __syncthreads();
    const unsigned low = shared.begins[0], high = shared.begins[1];
    if (quarter == 0 && pair < pairs) {
        places[pair] = local < here ? place : longwave::UNMAPPED;
        if (local < here) {
            inputs[place] = pair / k;
            sources[place] = pair;
        }
    } else if (quarter == 1 && begins) {
        const unsigned below = (1u << place % 32) - 1;
        int* group = groups + 3 * (place < 32 ? __popc(low & below) : __popc(low) + __popc(high & below));
        group[0] = static_cast<int>(local);
        group[1] = static_cast<int>(place);
        group[2] = static_cast<int>(min(same - earlier, size));
    } else if (quarter == 2 && pair >= all && pair < pairs) {
        inputs[pair] = 0;
        sources[pair] = longwave::UNMAPPED;
    } else if (quarter == 3 && pair >= __popc(low) + __popc(high) && pair < most) {
        groups[3 * pair] = groups[3 * pair + 1] = groups[3 * pair + 2] = 0;
    }
    __syncwarp();
    longwave::cluster_wait();
}

}  // namespace

// gate bf16 [experts, cols], x bf16 [tokens, cols]; bias float [experts], or table u32 [vocab, k] that names the experts by token
// id; the others as in router.cu. Grid: one cluster of 16 blocks, 256 threads.
#define ROUTER(name, tiles, ahead)                                                                                        \
    extern "C" __global__ void __launch_bounds__(PARTS * 32, 1)                                                           \
    router_cluster_##name(const uint16_t* gate, const uint16_t* x, const float* bias, const unsigned* table,              \
                          const unsigned* ids, unsigned* chosen, float* weights, int* groups, unsigned* inputs,           \
                          unsigned* sources, unsigned* places, unsigned cols, unsigned tokens, unsigned experts,          \
                          unsigned k, float scale, unsigned size, unsigned most, unsigned offset, unsigned here) {        \
        route<tiles, ahead>(gate, x, bias, table, ids, chosen, weights, groups, inputs, sources, places, cols, tokens,    \
                            experts, k, scale, size, most, offset, here);                                                 \
    }

// At most 256 experts, with all weights of 4096 columns on their way, and more.
ROUTER(1, 1, 4)
ROUTER(2, 2, 2)
