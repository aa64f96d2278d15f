// What kernels of fp8 products on Hopper's warpgroups share: operands behind maps for the copy engine, and the threads that copy column
// blocks of both into a ring.
//
// Tokens are rows of a warpgroup's product, weights its columns (common/wgmma_fp8.cuh has the layout). Needs rows % 16 == 0 (128 with
// several groups) and cols % 128 == 0.
#pragma once
#include <stdint.h>

#include "barrier.cuh"
#include "overlap.cuh"
#include "tensor_map.cuh"

namespace longwave {

constexpr unsigned FP8_BLOCK = 128;

struct WideOperands {
    const TensorMap& w;
    const TensorMap& x;
    const float* w_scales;
    const float* x_scales;
    float* y;
    unsigned rows, cols, tokens, groups;

    __device__ __forceinline__ unsigned blocks() const {
        return cols / FP8_BLOCK;
    }

    // Scales of the weights' row tile, which lies in one row of scales, and of a token; behind the last token comes the last one.
    __device__ __forceinline__ const float* scales_of_rows(unsigned group, unsigned row) const {
        return w_scales + (size_t(group) * ((rows + FP8_BLOCK - 1) / FP8_BLOCK) + row / FP8_BLOCK) * blocks();
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

// What is copied next: a column block of a tile of `size` rows. Its tiles are every `step`-th from the first one on.
struct WideCursor {
    const WideOperands& o;
    unsigned tile, step, of_group, size, blocks, block, row, col;

    __device__ __forceinline__ WideCursor(unsigned first, unsigned tile_step, unsigned tiles_of_group, unsigned tile_size,
                                          const WideOperands& operands)
        : o(operands), tile(first), step(tile_step), of_group(tiles_of_group), size(tile_size), blocks(operands.blocks()), block(0) {
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
                tile += step;
            }
            begin();
        }
    }

    // The first of the two: its barrier expects both.
    __device__ __forceinline__ void copy_weights(uint32_t to, uint32_t bytes, uint32_t barrier) const {
        arrive_expecting(barrier, bytes);
        copy_box(to, o.w, block * FP8_BLOCK, row, barrier);
    }

    __device__ __forceinline__ void copy_inputs(uint32_t to, uint32_t barrier) const {
        copy_box(to, o.x, col + block * FP8_BLOCK, 0, barrier);
    }
};

// A ring of stages in shared memory, each a column block of N weight rows and behind them of `held` tokens. A stage's barrier `full`
// opens when both are there, its barrier `empty` when they are no longer needed.
struct WideRing {
    uint32_t base, stage_bytes, full, empty;
    unsigned stages;
};

// Brings weights' scales of the tiles first, first + step, ... to the L2: the copy engine does not bring them, and each 32 bytes that come
// from memory make eight column blocks wait. They are weights, so who calls it need not wait for the kernels before this one.
template <unsigned N>
__device__ __forceinline__ void fetch_scales(const WideOperands& o, unsigned first, unsigned step, unsigned thread, unsigned threads) {
    const unsigned of_group = (o.rows + N - 1) / N, tiles = of_group * o.groups, of_tile = (o.blocks() + 7) / 8;
    for (unsigned i = thread; first + i / of_tile * step < tiles; i += threads) {
        const unsigned tile = first + i / of_tile * step;
        const float* from = o.scales_of_rows(tile / of_group, tile % of_group * N) + i % of_tile * 8;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
}

// Copies every PRODUCERS-th column block of the tiles first, first + step, ..., from block `producer` on; one thread calls it. `stages`
// is a multiple of PRODUCERS, so these always have the same slots.
template <unsigned N, unsigned PRODUCERS>
__device__ __forceinline__ void fill_ring(const WideOperands& o, const WideRing& ring, unsigned producer, unsigned first, unsigned step) {
    const unsigned of_group = (o.rows + N - 1) / N, tiles = of_group * o.groups;
    WideCursor weights(first, step, of_group, N, o);
    weights.advance(producer);
    WideCursor inputs = weights;
    // Weights are there before the kernels before this one have ended.
    for (unsigned s = producer; s < ring.stages && weights.tile < tiles; s += PRODUCERS) {
        weights.copy_weights(ring.base + s * ring.stage_bytes, ring.stage_bytes, ring.full + 8 * s);
        weights.advance(PRODUCERS);
    }
    wait_before();
    for (unsigned s = producer; s < ring.stages && inputs.tile < tiles; s += PRODUCERS) {
        inputs.copy_inputs(ring.base + s * ring.stage_bytes + N * FP8_BLOCK, ring.full + 8 * s);
        inputs.advance(PRODUCERS);
    }
    for (unsigned s = producer, phase = 0; inputs.tile < tiles; inputs.advance(PRODUCERS)) {
        wait(ring.empty + 8 * s, phase);
        inputs.copy_weights(ring.base + s * ring.stage_bytes, ring.stage_bytes, ring.full + 8 * s);
        inputs.copy_inputs(ring.base + s * ring.stage_bytes + N * FP8_BLOCK, ring.full + 8 * s);
        s += PRODUCERS;
        if (s >= ring.stages) {
            s = producer;
            phase ^= 1;
        }
    }
}

}  // namespace longwave
