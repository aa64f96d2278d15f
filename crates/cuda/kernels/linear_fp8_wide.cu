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
#include "common/load.cuh"
#include "common/overlap.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_fp8.cuh"

namespace {

using longwave::TensorMap;

constexpr unsigned BLOCK = 128;

struct Operands {
    const TensorMap& w;
    const TensorMap& x;
    const float* w_scales;
    const float* x_scales;
    float* y;
    unsigned rows, cols, tokens, groups;

    __device__ __forceinline__ unsigned blocks() const {
        return cols / BLOCK;
    }

    // Scales of the weights' row tile, which lies in one row of scales, and of a token; behind the last token comes the last one.
    __device__ __forceinline__ const float* scales_of_rows(unsigned group, unsigned row) const {
        return w_scales + (size_t(group) * ((rows + BLOCK - 1) / BLOCK) + row / BLOCK) * blocks();
    }

    __device__ __forceinline__ const float* scales_of(unsigned group, unsigned token) const {
        return x_scales + (size_t(min(token, tokens - 1)) * groups + group) * blocks();
    }

    // Columns 8 n + 2 c and the next of the tile that begins at `row`, of token `token`.
    template <int LENGTH>
    __device__ __forceinline__ void store(const float (&v)[LENGTH], unsigned group, unsigned row, unsigned token, int half) const {
        if (token < tokens) {
            float* to = y + (size_t(token) * groups + group) * rows + row;
#pragma unroll
            for (int n = 0; n < LENGTH / 4; n++) {
                if (row + 8 * n < rows) {
                    *reinterpret_cast<float2*>(to + 8 * n) = make_float2(v[4 * n + 2 * half], v[4 * n + 2 * half + 1]);
                }
            }
        }
    }
};

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

// Threads that copy: one alone takes longer for a column block than its bytes do.
constexpr unsigned PRODUCERS = 4;

// What is copied next: a column block of a tile of `size` rows.
struct Cursor {
    const Operands& o;
    unsigned tile, of_group, size, blocks, block, row, col;

    __device__ __forceinline__ Cursor(unsigned first, unsigned tiles_of_group, unsigned tile_size, const Operands& operands)
        : o(operands), tile(first), of_group(tiles_of_group), size(tile_size), blocks(operands.blocks()), block(0) {
        begin();
    }

    __device__ __forceinline__ void begin() {
        const unsigned group = tile / of_group;
        row = group * o.rows + (tile - group * of_group) * size;
        col = group * o.cols;
    }

    __device__ __forceinline__ void advance(unsigned by) {
        block += by;
        if (block >= blocks) {
            for (; block >= blocks; block -= blocks) {
                tile += gridDim.x;
            }
            begin();
        }
    }

    // The first of the two: its barrier expects both.
    __device__ __forceinline__ void copy_weights(uint32_t to, uint32_t bytes, uint32_t barrier) const {
        longwave::arrive_expecting(barrier, bytes);
        longwave::copy_box(to, o.w, block * BLOCK, row, barrier);
    }

    __device__ __forceinline__ void copy_inputs(uint32_t to, uint32_t barrier) const {
        longwave::copy_box(to, o.x, col + block * BLOCK, 0, barrier);
    }
};

// Up to 64 tokens: weights stream past them. A block has tiles of N weight rows in turn. A stage of the ring is a column block of the
// weights and of `held` tokens; what wgmma reads behind these are other bytes, of the ring or behind it, whose products nobody uses.
template <int N>
__device__ __forceinline__ void stream(const Operands& o, unsigned held, unsigned stages) {
    constexpr unsigned CONSUMERS = 128;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = longwave::shared_address(memory), stage_bytes = (N + held) * BLOCK;
    const uint32_t full = base + stages * stage_bytes, empty = full + 8 * stages;
    const unsigned blocks = o.blocks(), of_group = (o.rows + N - 1) / N, tiles = of_group * o.groups;
    if (threadIdx.x < stages) {
        longwave::init_barrier(full + 8 * threadIdx.x, 1);
        longwave::init_barrier(empty + 8 * threadIdx.x, 4 * longwave::WARP_ARRIVALS);
        longwave::show_barriers();
    }
    if (threadIdx.x == CONSUMERS) {
        longwave::fetch_map(o.w);
        longwave::fetch_map(o.x);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x % 32 == 0) {
            // Every producer has each PRODUCERS-th column block, and so always the same slots.
            const unsigned producer = (threadIdx.x - CONSUMERS) / 32;
            Cursor weights(blockIdx.x, of_group, N, o);
            weights.advance(producer);
            Cursor inputs = weights;
            // Weights are there before the kernels before this one have ended.
            for (unsigned s = producer; s < stages && weights.tile < tiles; s += PRODUCERS) {
                weights.copy_weights(base + s * stage_bytes, stage_bytes, full + 8 * s);
                weights.advance(PRODUCERS);
            }
            longwave::wait_before();
            for (unsigned s = producer; s < stages && inputs.tile < tiles; s += PRODUCERS) {
                inputs.copy_inputs(base + s * stage_bytes + N * BLOCK, full + 8 * s);
                inputs.advance(PRODUCERS);
            }
            for (unsigned s = producer, phase = 0; inputs.tile < tiles; inputs.advance(PRODUCERS)) {
                longwave::wait(empty + 8 * s, phase);
                inputs.copy_weights(base + s * stage_bytes, stage_bytes, full + 8 * s);
                inputs.copy_inputs(base + s * stage_bytes + N * BLOCK, full + 8 * s);
                s += PRODUCERS;
                if (s >= stages) {
                    s = producer;
                    phase ^= 1;
                }
            }
        }
        return;
    }
    longwave::wait_before();
    const unsigned lane = threadIdx.x % 32, token = threadIdx.x / 32 * 16 + lane / 4, c = lane % 4;
    float total[N / 2], one[N / 2], other[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        one[i] = other[i] = 0.f;
    }
    unsigned stage = 0, phase = 0, free = 0;
    for (unsigned t = blockIdx.x; t < tiles; t += gridDim.x) {
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
                const uint32_t w = base + stage * stage_bytes;
                longwave::wait(full + 8 * stage, phase);
                longwave::begin_block(product, longwave::fp8_rows(w + N * BLOCK), longwave::fp8_rows(w));
                stage = stage + 1 == stages ? 0 : stage + 1;
                phase ^= stage == 0;
                return scales;
            },
            [&]() {
                longwave::arrive_of_warp(empty + 8 * free);
                free = free + 1 == stages ? 0 : free + 1;
            });
        o.store(total, group, row + 2 * c, token, 0);
        o.store(total, group, row + 2 * c, token + 8, 1);
    }
}

// Many tokens: tiles of 128 tokens and 128 weight rows. The two blocks of a cluster have the same tokens, of which each brings half
// to both, and neighbouring rows.
constexpr unsigned STAGES = 6, CONSUMERS = 256, TILE = 128, OPERAND = TILE * BLOCK, STAGE = 2 * OPERAND;

__device__ __forceinline__ void tiles(const Operands& o) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = longwave::shared_address(memory), full = base + STAGES * STAGE, empty = full + 8 * STAGES;
    const unsigned rank = longwave::cluster_rank(), clusters = gridDim.x / 2, blocks = o.blocks();
    const unsigned of_tokens = (o.tokens + TILE - 1) / TILE, of_rows = (o.rows + 2 * TILE - 1) / (2 * TILE);
    const unsigned count = of_tokens * of_rows * o.groups;
    longwave::init_ring<STAGES>(full, empty, 1, 2 * CONSUMERS / 32);
    longwave::cluster_sync();
    if (threadIdx.x >= CONSUMERS) {
        longwave::fewer_registers<40>();
        if (threadIdx.x == CONSUMERS) {
            unsigned stage = 0, phase = 1;
            for (unsigned t = blockIdx.x / 2; t < count; t += clusters) {
                const unsigned token = t % of_tokens * TILE, pair = t / of_tokens, group = pair / of_rows;
                const unsigned row = group * o.rows + (pair % of_rows * 2 + rank) * TILE;
                for (unsigned b = 0; b < blocks; b++) {
                    const uint32_t at = base + stage * STAGE, barrier = full + 8 * stage;
                    longwave::wait(empty + 8 * stage, phase);
                    longwave::arrive_expecting(barrier, STAGE);
                    longwave::copy_box(at + rank * OPERAND / 2, o.x, group * o.cols + b * BLOCK, token + rank * TILE / 2, barrier,
                                       uint16_t(3));
                    longwave::copy_box(at + OPERAND, o.w, b * BLOCK, row, barrier);
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                    phase ^= stage == 0;
                }
            }
        }
    } else {
        longwave::more_registers<232>();
        const unsigned half = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), lane = threadIdx.x % 32, c = lane % 4;
        unsigned stage = 0, phase = 0, free = 0;
        float total[64], one[64], other[64];
#pragma unroll
        for (int i = 0; i < 64; i++) {
            one[i] = other[i] = 0.f;
        }
        for (unsigned t = blockIdx.x / 2; t < count; t += clusters) {
            const unsigned pair = t / of_tokens, group = pair / of_rows, row = (pair % of_rows * 2 + rank) * TILE;
            const unsigned token = t % of_tokens * TILE + threadIdx.x / 32 * 16 + lane / 4;
            const float* w_scales = o.scales_of_rows(group, min(row, o.rows - 1));
            const float* low = o.scales_of(group, token);
            const float* high = o.scales_of(group, token + 8);
#pragma unroll
            for (int i = 0; i < 64; i++) {
                total[i] = 0.f;
            }
            unsigned b = 0;
            Scales coming = scales_at(w_scales, low, high, 0);
            add_blocks(
                total, one, other, blocks,
                [&](float(&product)[64]) {
                    const Scales scales = coming;
                    coming = scales_at(w_scales, low, high, min(++b, blocks - 1));
                    const uint32_t at = base + stage * STAGE;
                    longwave::wait(full + 8 * stage, phase);
                    longwave::begin_block(product, longwave::fp8_rows(at + half * OPERAND / 2), longwave::fp8_rows(at + OPERAND));
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                    phase ^= stage == 0;
                    return scales;
                },
                [&]() {
                    __syncwarp();
                    if (lane < 2) {
                        longwave::arrive_there(longwave::address_in(empty + 8 * free, lane));
                    }
                    free = free + 1 == STAGES ? 0 : free + 1;
                });
            o.store(total, group, row + 2 * c, token, 0);
            o.store(total, group, row + 2 * c, token + 8, 1);
        }
    }
    // The other block may still arrive at barriers here.
    __syncwarp();
    longwave::cluster_sync();
}

}  // namespace

// Grid: at most as many blocks as fit the multiprocessors at once, 256 threads. Dynamic shared memory: `stages` (a multiple of
// PRODUCERS, at least two: a block of columns begins before the last one is free) of N + held rows of 128 bytes, 16 bytes a stage, and 8
// KiB. Boxes of N rows of w, of `held` tokens (8, 16, 32 or 64) of x.
#define STREAM(n)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(128 + 32 * PRODUCERS) linear_fp8_stream_##n(                            \
        const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const float* w_scales,                 \
        const float* x_scales, float* y, unsigned rows, unsigned cols, unsigned tokens, unsigned groups, unsigned held,  \
        unsigned stages) {                                                                                               \
        longwave::start_next();                                                                                          \
        stream<n>({w, x, w_scales, x_scales, y, rows, cols, tokens, groups}, held, stages);                              \
    }

STREAM(16)
STREAM(32)
STREAM(64)

// Grid: at most as many blocks as multiprocessors, an even number, clusters of two, 384 threads. Dynamic shared memory: STAGES *
// (STAGE + 16). Boxes of 128 rows of w, of 64 tokens of x.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
linear_fp8_tiles(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const float* w_scales, const float* x_scales,
                 float* y, unsigned rows, unsigned cols, unsigned tokens, unsigned groups) {
    longwave::overlap();
    tiles({w, x, w_scales, x_scales, y, rows, cols, tokens, groups});
}
