// architectures: 90a
// y = W x with e4m3 weights and inputs on Hopper's warpgroups: W [groups, rows, cols] with a float scale per 128 x 128 block, x
// [tokens, groups, cols] with a float scale per 128 columns, y float [tokens, groups, rows]. linear_fp8.md has floor, design and
// measured steps. Other GPUs take linear_fp8.cu.
//
// Tokens are the 64 rows of a warpgroup's product, weights its columns; codes come to shared memory by the copy engine and go to
// the tensor cores as they are. A block of 128 columns is one sum there, scaled by both scales and added to those before it in
// float. So a token has the same bits from any of these kernels and with any other tokens; up to eight tokens have one of their own
// (linear_fp8_eight.cu). Needs rows % 16 == 0 (128 with several groups), cols % 128 == 0.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/linear_fp8_wide.cuh"
#include "common/load.cuh"
#include "common/overlap.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_fp8.cuh"

namespace {

using longwave::TensorMap;

constexpr unsigned BLOCK = longwave::FP8_BLOCK;

using Operands = longwave::WideOperands;

// A thread's scales of a column block: the weights' and those of its two tokens.
struct Scales {
    float w, low, high;
};

__device__ __forceinline__ Scales scales_at(const float* w, const float* low, const float* high, unsigned block) {
    return {longwave::load_now(w + block), longwave::load_now(low + block), longwave::load_now(high + block)};
}

// Waits for a block's sums, with that many blocks begun behind it, and adds them; `end` gives its operands back.
template <int BEHIND, int LENGTH, class End>
__device__ __forceinline__ void add_block(float (&total)[LENGTH], float (&product)[LENGTH], const Scales& scales, const End& end) {
    const float low = scales.w * scales.low, high = scales.w * scales.high;
    longwave::wgmma_wait<BEHIND>();
    longwave::wgmma_done(product);
    end();
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        total[i] = fmaf(product[i], i % 4 < 2 ? low : high, total[i]);
    }
    // Now: the compiler must not leave additions for after the next sums have begun in these registers.
    longwave::wgmma_done(total);
}

// Adds `count` column blocks to `total`: while one is added, the next one's sums are under way. `begin(product)` begins the
// next block and gives its scales, `end()` is called when the operands of one are free.
template <int LENGTH, class Begin, class End>
__device__ __forceinline__ void add_blocks(float (&total)[LENGTH], float (&one)[LENGTH], float (&other)[LENGTH], unsigned count,
                                           const Begin& begin, const End& end) {
    Scales of_one = begin(one), of_other;
    unsigned i = 0;
    for (; i + 2 < count; i += 2) {
        of_other = begin(other);
        add_block<1>(total, one, of_one, end);
        of_one = begin(one);
        add_block<1>(total, other, of_other, end);
    }
    if (i + 1 < count) {
        of_other = begin(other);
        add_block<1>(total, one, of_one, end);
        add_block<0>(total, other, of_other, end);
    } else {
        add_block<0>(total, one, of_one, end);
    }
}

// Threads of a block that copy: one alone takes longer for a column block than its bytes do.
constexpr unsigned PRODUCERS = 4;

// Up to 64 tokens: weights stream past them. A team is a warpgroup that multiplies, threads that copy for it and a ring. A block has
// every gridDim.x-th tile of N weight rows and its teams take turns with them, so that shares of blocks differ by a tile at most: what a
// column block takes is mostly instructions that wait for each other, and between those of one team another's find room. What wgmma reads
// behind the `held` tokens of a stage are other bytes, of a ring or behind it, whose products nobody uses.
template <int N, unsigned TEAMS>
__device__ __forceinline__ void stream(const Operands& o, unsigned held, unsigned stages) {
    constexpr unsigned CONSUMERS = 128 * TEAMS, OF_TEAM = PRODUCERS / TEAMS;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = longwave::shared_address(memory), stage_bytes = (N + held) * BLOCK;
    // Of all teams those of full stages, then those of empty ones.
    const uint32_t full = base + TEAMS * stages * stage_bytes, empty = full + 8 * TEAMS * stages;
    const unsigned blocks = o.blocks(), of_group = (o.rows + N - 1) / N, tiles = of_group * o.groups;
    if (threadIdx.x < TEAMS * stages) {
        longwave::init_barrier(full + 8 * threadIdx.x, 1);
        longwave::init_barrier(empty + 8 * threadIdx.x, 4 * longwave::WARP_ARRIVALS);
        longwave::show_barriers();
    }
    if (threadIdx.x == CONSUMERS) {
        longwave::fetch_map(o.w);
        longwave::fetch_map(o.x);
    }
    __syncthreads();
    const auto ring_of = [&](unsigned team) {
        const unsigned first = team * stages;
        return longwave::WideRing{base + first * stage_bytes, stage_bytes, full + 8 * first, empty + 8 * first, stages};
    };
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x % 32 == 0) {
            const unsigned warp = (threadIdx.x - CONSUMERS) / 32, team = TEAMS == 1 ? 0 : warp / OF_TEAM;
            const unsigned first = blockIdx.x + team * gridDim.x, producer = warp - team * OF_TEAM;
            longwave::fill_ring<N, OF_TEAM>(o, ring_of(team), producer, first, TEAMS * gridDim.x);
        }
        return;
    }
    if constexpr (TEAMS > 1) {
        longwave::fetch_scales<N>(o, blockIdx.x, gridDim.x, threadIdx.x, CONSUMERS);
    }
    longwave::wait_before();
    // The same for all lanes, and known to be.
    const unsigned team = TEAMS == 1 ? 0 : __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const longwave::WideRing ring = ring_of(team);
    const unsigned warp = threadIdx.x / 32 - 4 * team, lane = threadIdx.x % 32, token = warp * 16 + lane / 4, c = lane % 4;
    float total[N / 2], one[N / 2], other[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        one[i] = other[i] = 0.f;
    }
    unsigned stage = 0, phase = 0, free = 0;
    for (unsigned t = blockIdx.x + team * gridDim.x; t < tiles; t += TEAMS * gridDim.x) {
        const unsigned group = t / of_group, row = t % of_group * N;
        const float* low = o.scales_of(group, token);
        const float* high = o.scales_of(group, token + 8);
        const float* w_scales = o.scales_of_rows(group, row);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            total[i] = 0.f;
        }
        // Those of the next block are on their way: they take longer than a block.
        unsigned i = 0;
        Scales coming = scales_at(w_scales, low, high, 0);
        add_blocks(
            total, one, other, blocks,
            [&](float(&product)[N / 2]) {
                const Scales scales = coming;
                coming = scales_at(w_scales, low, high, min(++i, blocks - 1));
                const uint32_t w = ring.base + stage * stage_bytes;
                longwave::wait(ring.full + 8 * stage, phase);
                longwave::begin_block(product, longwave::fp8_rows(w + N * BLOCK), longwave::fp8_rows(w));
                stage = stage + 1 == stages ? 0 : stage + 1;
                phase ^= stage == 0;
                return scales;
            },
            [&]() {
                longwave::arrive_of_warp(ring.empty + 8 * free);
                free = free + 1 == stages ? 0 : free + 1;
            });
        o.store(total, group, row + 2 * c, token, 0);
        o.store(total, group, row + 2 * c, token + 8, 1);
    }
}

// Many tokens: tiles of 128 tokens and N weight rows. The blocks of a cluster have the same tokens, of which each brings its part to all,
// and neighbouring rows. A stage is a column block of the tokens and of a block's rows.
constexpr unsigned CONSUMERS = 256, TOKENS = 128;

template <unsigned N, unsigned CLUSTER, unsigned STAGES>
__device__ __forceinline__ void tiles(const Operands& o) {
    constexpr unsigned INPUTS = TOKENS * BLOCK, STAGE = INPUTS + N * BLOCK;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = longwave::shared_address(memory), full = base + STAGES * STAGE, empty = full + 8 * STAGES;
    const unsigned rank = longwave::cluster_rank(), clusters = gridDim.x / CLUSTER, blocks = o.blocks();
    const unsigned of_tokens = (o.tokens + TOKENS - 1) / TOKENS, of_rows = (o.rows + CLUSTER * N - 1) / (CLUSTER * N);
    const unsigned count = of_tokens * of_rows * o.groups;
    longwave::init_ring<STAGES>(full, empty, 1, CLUSTER * CONSUMERS / 32);
    longwave::cluster_sync();
    if (threadIdx.x >= CONSUMERS) {
        if constexpr (N == 128) {
            longwave::fewer_registers<40>();
        }
        if (threadIdx.x == CONSUMERS) {
            unsigned row = 0, token = 0, col = 0;
            const auto enter = [&](unsigned t) {
                const unsigned rows = t / of_tokens, group = rows / of_rows;
                token = t % of_tokens * TOKENS + rank * TOKENS / CLUSTER;
                row = group * o.rows + (rows % of_rows * CLUSTER + rank) * N;
                col = group * o.cols;
            };
            // Begins a stage with its weights.
            const auto copy_weights = [&](unsigned b, unsigned stage) {
                longwave::arrive_expecting(full + 8 * stage, STAGE);
                longwave::copy_box(base + stage * STAGE + INPUTS, o.w, b * BLOCK, row, full + 8 * stage);
            };
            // Few rows are few bytes on their way: weights of all stages are, before the kernels before this one have ended.
            unsigned early = 0;
            if constexpr (N < 128) {
                for (unsigned t = blockIdx.x / CLUSTER; t < count && early < STAGES; t += clusters) {
                    enter(t);
                    for (unsigned b = 0; b < blocks && early < STAGES; b++) {
                        copy_weights(b, early++);
                    }
                }
                longwave::wait_before();
            }
            unsigned stage = 0, phase = 1;
            for (unsigned t = blockIdx.x / CLUSTER; t < count; t += clusters) {
                enter(t);
                for (unsigned b = 0; b < blocks; b++) {
                    longwave::wait(empty + 8 * stage, phase);
                    if (early > 0) {
                        early--;
                    } else {
                        copy_weights(b, stage);
                    }
                    longwave::copy_box(base + stage * STAGE + rank * INPUTS / CLUSTER, o.x, col + b * BLOCK, token, full + 8 * stage,
                                       uint16_t((1 << CLUSTER) - 1));
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                    phase ^= stage == 0;
                }
            }
        }
    } else {
        if constexpr (N == 128) {
            longwave::more_registers<232>();
        } else {
            longwave::wait_before();
        }
        const unsigned half = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), lane = threadIdx.x % 32, c = lane % 4;
        unsigned stage = 0, phase = 0, free = 0;
        float total[N / 2], one[N / 2], other[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            one[i] = other[i] = 0.f;
        }
        for (unsigned t = blockIdx.x / CLUSTER; t < count; t += clusters) {
            const unsigned rows = t / of_tokens, group = rows / of_rows, row = (rows % of_rows * CLUSTER + rank) * N;
            const unsigned token = t % of_tokens * TOKENS + threadIdx.x / 32 * 16 + lane / 4;
            const float* w_scales = o.scales_of_rows(group, min(row, o.rows - 1));
            const float* low = o.scales_of(group, token);
            const float* high = o.scales_of(group, token + 8);
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                total[i] = 0.f;
            }
            unsigned b = 0;
            Scales coming = scales_at(w_scales, low, high, 0);
            add_blocks(
                total, one, other, blocks,
                [&](float(&product)[N / 2]) {
                    const Scales scales = coming;
                    coming = scales_at(w_scales, low, high, min(++b, blocks - 1));
                    const uint32_t at = base + stage * STAGE;
                    longwave::wait(full + 8 * stage, phase);
                    longwave::begin_block(product, longwave::fp8_rows(at + half * INPUTS / 2), longwave::fp8_rows(at + INPUTS));
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                    phase ^= stage == 0;
                    return scales;
                },
                [&]() {
                    __syncwarp();
                    if (lane < CLUSTER) {
                        longwave::arrive_there(longwave::address_in(empty + 8 * free, lane));
                    }
                    free = free + 1 == STAGES ? 0 : free + 1;
                });
            o.store(total, group, row + 2 * c, token, 0);
            o.store(total, group, row + 2 * c, token + 8, 1);
        }
    }
    // Other blocks may still arrive at barriers here.
    __syncwarp();
    longwave::cluster_sync();
}

}  // namespace

// Grid: at most as many blocks as fit the multiprocessors at once; 256 threads for one team, 384 for two. Dynamic shared memory: for each
// team `stages` (a multiple of its threads that copy, at least four: a block of columns begins before the last one is free) of N + held
// rows of 128 bytes and 16 bytes a stage, and behind the teams 8 KiB. Boxes of N rows of w, of `held` tokens (8, 16, 32 or 64) of x.
#define STREAM(name, n, teams)                                                                                           \
    extern "C" __global__ void __launch_bounds__(128 * teams + 32 * PRODUCERS) linear_fp8_##name##_##n(                  \
        const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const float* w_scales,                 \
        const float* x_scales, float* y, unsigned rows, unsigned cols, unsigned tokens, unsigned groups, unsigned held,  \
        unsigned stages) {                                                                                               \
        longwave::start_next();                                                                                          \
        stream<n, teams>({w, x, w_scales, x_scales, y, rows, cols, tokens, groups}, held, stages);                       \
    }

STREAM(stream, 16, 1)
STREAM(stream, 32, 1)
STREAM(stream, 64, 1)
STREAM(teams, 16, 2)
STREAM(teams, 32, 2)
STREAM(teams, 64, 2)

// Grid: at most as many blocks as multiprocessors, clusters of as many blocks as the entry says, 384 threads. Dynamic shared memory: as many
// stages as it says of N + 128 rows of 128 bytes, and sixteen bytes each. Boxes of N rows of w, of 128 / CLUSTER tokens of x.
#define TILES(name, n, cluster, stages)                                                                                  \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)                                                     \
        linear_fp8_##name(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,                      \
                          const float* w_scales, const float* x_scales, float* y, unsigned rows, unsigned cols,          \
                          unsigned tokens, unsigned groups) {                                                            \
        longwave::start_next();                                                                                          \
        if constexpr (n == 128) {                                                                                        \
            longwave::wait_before();                                                                                     \
        }                                                                                                                \
        tiles<n, cluster, stages>({w, x, w_scales, x_scales, y, rows, cols, tokens, groups});                            \
    }

TILES(tiles, 128, 2, 6)
TILES(tiles_16, 16, 4, 10)
TILES(tiles_32, 32, 4, 10)
TILES(tiles_64, 64, 2, 8)
