// architectures: 90a
// The products of experts_fp4_stream.cu for groups of up to 64 pairs; a pair has the same bits from either file. experts_fp4.md has
// floor, design and measured steps.
//
// Blocks stay and take tiles of 192 weight rows of one group in turn. Three warpgroups have 64 rows each: their codes come straight
// to registers, two column blocks ahead and across tiles, and become e4m3 there. A fourth one copies the pairs' codes to shared
// memory, where the tensor cores read them as they are.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"

#include "common/experts_fp8.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_fp8.cuh"

namespace {

constexpr unsigned BLOCK = 128, GROUPS = 3, TILE = GROUPS * 64, CONSUMERS = GROUPS * 128, PARTS = 2, MOST = 64;
// Column blocks of a thread's weights on their way; stages of the pairs' codes, of which LATE are still on their way.
constexpr int AHEAD = 2;
constexpr unsigned STAGES = 6, LATE = 3;
// A stage: codes of 128 columns of every pair; scales of all stages lie behind them. Then a float of each product for the sum of its
// parts, the table of powers, barriers.
constexpr unsigned STAGE = MOST * BLOCK, SCALES = STAGES * STAGE, SUMS = SCALES + STAGES * MOST * 4;
constexpr unsigned POWERS = SUMS + CONSUMERS * MOST / 2 * 4, BARRIERS = POWERS + 8 * longwave::EXPERT_POWERS;

using Operands = longwave::ExpertOperands;
using Tile = longwave::ExpertRows<TILE>;

// The column block after `block`: the next one of its part, or the first of the next part.
__device__ __forceinline__ void advance(unsigned& block, unsigned& part, unsigned blocks) {
    block += PARTS;
    block = block < blocks ? block : ++part;
}

__device__ __forceinline__ unsigned columns_of(unsigned pairs) {
    return pairs <= 8 ? 8 : (pairs + 15) / 16 * 16;
}

// Fills the stages: 128 threads. Two of them have a pair: four pieces of sixteen codes each, one its scale.
__device__ __forceinline__ void produce(const Operands& o, uint32_t base, uint32_t full, uint32_t empty) {
    const unsigned blocks = o.cols / BLOCK, thread = threadIdx.x - CONSUMERS, n = thread / 2, half = thread % 2;
    unsigned stage = 0, phase = 1, issued = 0, shown = 0;
    const auto show = [&]() {
        longwave::fence_shared();
        longwave::arrive(full + 8 * (shown % STAGES));
        shown++;
    };
    Tile tile;
    for (unsigned t = blockIdx.x; tile.find(o, t); t += gridDim.x) {
        const unsigned input = o.input_of(tile.pair + min(n, tile.pairs - 1));
        const uint8_t* codes = o.x + size_t(input) * o.cols + 64 * half;
        const float* scales = o.x_scales + size_t(input) * blocks;
        const bool has = n < columns_of(tile.pairs);
        unsigned block = 0, part = 0;
        for (unsigned step = 0; step < blocks; step++) {
            longwave::wait(empty + 8 * stage, phase);
            if (has) {
                const uint32_t to = base + stage * STAGE + n * 128;
#pragma unroll
                for (unsigned i = 0; i < 4; i++) {
                    longwave::copy_16(to + ((4 * half + i ^ n % 8) << 4), codes + block * BLOCK + 16 * i);
                }
                if (half == 0) {
                    longwave::copy_4(base + SCALES + (stage * MOST + n) * 4, scales + block);
                }
            }
            longwave::commit_copies();
            issued++;
            if (issued - shown > LATE) {
                longwave::wait_copies<LATE>();
                show();
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
            advance(block, part, blocks);
        }
    }
    longwave::wait_copies<0>();
    while (shown < issued) {
        show();
    }
}

// The weights that are loaded next, of this tile or the one after it.
struct Stream {
    longwave::ExpertTile from;
    unsigned t, step, block, part;
    bool more;

    __device__ __forceinline__ void begin(const Operands& o, unsigned tile_index) {
        t = tile_index;
        step = block = part = 0;
        Tile tile;
        more = tile.find(o, t);
        if (more) {
            // Behind the last rows a warp computes the last ones again and stores nothing.
            const unsigned first = min(tile.row + threadIdx.x / 32 * 16, o.rows - 16);
            from.find(o.w, o.w_scales, size_t(tile.expert) * o.rows + first, o.cols);
        }
    }

    // A tile has a multiple of AHEAD loads; behind its last block nothing is loaded.
    __device__ __forceinline__ void load(const Operands& o, longwave::ExpertWeights& to) {
        const unsigned blocks = o.cols / BLOCK;
        if (more) {
            if (step < blocks) {
                to = from.load(block);
                advance(block, part, blocks);
            }
            if (++step == (blocks + AHEAD - 1) / AHEAD * AHEAD) {
                begin(o, t + gridDim.x);
            }
        }
    }
};

// The products of a tile whose group has up to N pairs.
template <int N>
__device__ __forceinline__ void consume(const Operands& o, const Tile& tile, longwave::ExpertWeights (&ahead)[AHEAD], Stream& stream,
                                        uint32_t base, uint32_t full, uint32_t empty, const uint8_t* powers, float* own,
                                        unsigned& stage, unsigned& phase) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, blocks = o.cols / BLOCK;
    const unsigned row = tile.row + warp * 16 + g;
    const float* factors = o.w_factors + size_t(tile.expert) * o.rows + min(row, o.rows - 9);
    const float factor[2] = {__ldg(factors), __ldg(factors + 8)};
    float total[N / 2], product[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        total[i] = product[i] = 0.f;
    }
    unsigned block = 0, part = 0;
    for (unsigned start = 0; start < blocks; start += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint32_t a[4][4];
            longwave::widen_block(ahead[i], powers, a);
            stream.load(o, ahead[i]);
            if (start + i >= blocks) {
                continue;
            }
            longwave::wait(full + 8 * stage, phase);
            longwave::sum_block(product, a, base + stage * STAGE);
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                const uint2 s = longwave::read_8(base + SCALES + (stage * MOST + 8 * n + 2 * c) * 4);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    total[4 * n + k] = fmaf(product[4 * n + k], __uint_as_float(k % 2 ? s.y : s.x), total[4 * n + k]);
                }
            }
            longwave::arrive_of_warp(empty + 8 * stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
            if (block + PARTS >= blocks) {
                // The end of a part. The last one's sums stay in registers.
                const bool begins = part == 0, more = start + i + 1 < blocks;
#pragma unroll
                for (int k = 0; k < N / 2; k++) {
                    const float sum = begins ? total[k] : own[k * CONSUMERS] + total[k];
                    if (more) {
                        own[k * CONSUMERS] = sum;
                    }
                    total[k] = more ? 0.f : sum;
                }
            }
            advance(block, part, blocks);
        }
    }
    if (row < o.rows) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const unsigned p = i / 4 * 8 + 2 * c + i % 2;
            if (p < tile.pairs) {
                o.y[size_t(tile.pair + p) * o.rows + row + i % 4 / 2 * 8] = total[i] * factor[i % 4 / 2];
            }
        }
    }
}

}  // namespace

// Grid: as many blocks as multiprocessors, 512 threads. Dynamic shared memory: BARRIERS + 16 STAGES.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
experts_fp4_wide(const uint8_t* w, const uint8_t* w_scales, const float* w_factors, const uint8_t* x, const float* x_scales,
                 const int* groups, const unsigned* inputs, float* y, unsigned rows, unsigned cols, unsigned group_count) {
    longwave::overlap();
    extern __shared__ __align__(1024) uint8_t memory[];
    const Operands o = {w, w_scales, w_factors, x, x_scales, groups, inputs, y, rows, cols, group_count};
    const uint32_t base = longwave::shared_address(memory), full = base + BARRIERS, empty = full + 8 * STAGES;
    longwave::fill_powers(memory + POWERS);
    longwave::init_ring<STAGES>(full, empty, 128, CONSUMERS / 32 * longwave::WARP_ARRIVALS);
    if (threadIdx.x >= CONSUMERS) {
        longwave::fewer_registers<56>();
        produce(o, base, full, empty);
        return;
    }
    longwave::more_registers<152>();
    float* own = reinterpret_cast<float*>(memory + SUMS) + threadIdx.x;
    Stream stream;
    stream.begin(o, blockIdx.x);
    longwave::ExpertWeights ahead[AHEAD] = {};
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        stream.load(o, ahead[i]);
    }
    unsigned stage = 0, phase = 0;
    Tile tile;
    for (unsigned t = blockIdx.x; tile.find(o, t); t += gridDim.x) {
        const unsigned columns = columns_of(tile.pairs);
        if (columns == 8) {
            consume<8>(o, tile, ahead, stream, base, full, empty, memory + POWERS, own, stage, phase);
        } else if (columns == 16) {
            consume<16>(o, tile, ahead, stream, base, full, empty, memory + POWERS, own, stage, phase);
        } else if (columns == 32) {
            consume<32>(o, tile, ahead, stream, base, full, empty, memory + POWERS, own, stage, phase);
        } else if (columns == 48) {
            consume<48>(o, tile, ahead, stream, base, full, empty, memory + POWERS, own, stage, phase);
        } else {
            consume<64>(o, tile, ahead, stream, base, full, empty, memory + POWERS, own, stage, phase);
        }
    }
}
