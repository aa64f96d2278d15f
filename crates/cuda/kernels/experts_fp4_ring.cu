// architectures: 90a
// The products of experts_fp4_wide.cu for groups of up to 64 pairs and of up to 128; a pair has the same bits from any of these files.
// Weights come through shared memory too, several column blocks ahead, and are widened once for all pairs of a group while the tensor
// cores multiply the column block before. experts_fp4.md has floor and design, and says what has been measured.
//
// Blocks stay and take tiles of 192 weight rows of one group in turn. A ring of stages has what a column block needs: the rows' codes
// and scales as they are, by the copy engine, and the pairs' codes and scales, gathered by the threads of a fourth warpgroup. Each of
// three warpgroups has 64 rows; more than 64 pairs are multiplied in two halves, one after the other, so that the running product and
// the widened codes of two column blocks fit into registers beside the sums. Needs rows % 16 == 0, cols % 128 == 0.
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

constexpr unsigned BLOCK = longwave::EXPERT_BLOCK, TILE = 192, PIECES = TILE / longwave::EXPERT_TILE, CONSUMERS = 2 * TILE, PRODUCERS = 128;
constexpr unsigned CODES = longwave::EXPERT_CODES, SCALES = longwave::EXPERT_SCALES;
// Tiles of sixteen rows of a stage that a filling warp copies.
constexpr unsigned SHARE = PIECES / (PRODUCERS / 32);
// Stages of pairs that may still be on their way when the one behind them is shown to readers: less than STAGES - 1, since a reader
// waits for the next stage before it gives back the one that it reads.
constexpr unsigned LATE = 1;

using Operands = longwave::ExpertOperands;
using Tile = longwave::ExpertRows<TILE>;

// Shared memory for groups of up to MOST pairs. Codes of pairs lie at multiples of 1,024 bytes.
template <unsigned MOST>
struct Ring {
    static constexpr unsigned STAGES = 512 / MOST, PAIRS = MOST * BLOCK;
    static constexpr unsigned ROWS = STAGES * PAIRS, ROW_SCALES = ROWS + STAGES * PIECES * CODES;
    static constexpr unsigned PAIR_SCALES = ROW_SCALES + STAGES * PIECES * SCALES;
    // A float of each product for the sum of the first part, the inputs of which each filling thread copies codes, the table of
    // powers, barriers.
    static constexpr unsigned SUMS = PAIR_SCALES + STAGES * MOST * 4, OWN = MOST / 16, INPUTS = SUMS + TILE * MOST * 4;
    static constexpr unsigned POWERS = INPUTS + PRODUCERS * OWN * 4;
    static constexpr unsigned BARRIERS = POWERS + 8 * longwave::EXPERT_POWERS, BYTES = BARRIERS + 16 * STAGES;
    static_assert((STAGES & (STAGES - 1)) == 0 && LATE + 2 <= STAGES && BYTES <= 227 * 1024);

    uint32_t base;

    __device__ __forceinline__ uint32_t full(unsigned count) const {
        return base + BARRIERS + 8 * (count % STAGES);
    }

    __device__ __forceinline__ uint32_t empty(unsigned count) const {
        return full(count) + 8 * STAGES;
    }

    __device__ __forceinline__ uint32_t at(unsigned count, unsigned begin, unsigned bytes) const {
        return base + begin + count % STAGES * bytes;
    }

    // The stage of column block `count`, counted from the kernel's beginning, has been filled.
    __device__ __forceinline__ void wait_full(unsigned count) const {
        longwave::wait(full(count), count / STAGES & 1);
    }

    // All readers are done with what the stage had before.
    __device__ __forceinline__ void wait_empty(unsigned count) const {
        longwave::wait(empty(count), count / STAGES & 1 ^ 1);
    }
};

// The column block behind `block`: even ones are the first part, odd ones the second.
__device__ __forceinline__ unsigned next_block(unsigned block, unsigned blocks) {
    return block + 2 < blocks ? block + 2 : 1;
}

// Fills the stages. Eight threads copy a pair's codes, sixteen of them each, for every sixteenth pair; a thread copies the scale of one.
// Of the rows each warp has three tiles of sixteen: a thread asks the copy engine for the codes of one, four copy its scales.
template <unsigned MOST>
__device__ __forceinline__ void produce(const Operands& o, Ring<MOST> ring) {
    const unsigned blocks = o.cols / BLOCK, thread = threadIdx.x - CONSUMERS, first = thread / 8, piece = thread % 8;
    const unsigned lane = thread % 32, share = thread / 32 * SHARE + lane / 4;
    const uint32_t inputs = ring.base + ring.INPUTS + thread * 16;
    unsigned issued = 0, shown = 0;
    const auto show = [&]() {
        longwave::fence_shared();
        longwave::arrive(ring.full(shown));
        shown++;
    };
    Tile tile;
    for (unsigned t = blockIdx.x; tile.find(o, t); t += gridDim.x) {
        // Behind the last pair comes the last one again, up to a multiple of sixteen; behind the last rows the last ones, of which
        // nothing is stored.
        const unsigned sixteens = (tile.pairs + 15) / 16, tiles = o.rows / longwave::EXPERT_TILE;
        const unsigned of_tile = (tile.expert * tiles + min(tile.row / longwave::EXPERT_TILE + share, tiles - 1)) * blocks;
        for (unsigned i = 0; i < ring.OWN; i++) {
            longwave::write_4(inputs + i / 4 * PRODUCERS * 16 + i % 4 * 4, o.input_of(tile.pair + min(first + 16 * i, tile.pairs - 1)));
        }
        const unsigned scaled = o.input_of(tile.pair + min(thread, tile.pairs - 1));
        unsigned block = 0;
        for (unsigned step = 0; step < blocks; step++) {
            ring.wait_empty(issued);
            if (lane == 0) {
                longwave::arrive_expecting(ring.full(issued), SHARE * CODES);
            }
            __syncwarp();
            if (lane < 4 * SHARE) {
                const unsigned at = of_tile + block;
                if (lane % 4 == 0) {
                    longwave::copy_run(ring.at(issued, ring.ROWS, PIECES * CODES) + share * CODES, o.w + size_t(at) * CODES, CODES,
                                       ring.full(issued));
                }
                longwave::copy_16(ring.at(issued, ring.ROW_SCALES, PIECES * SCALES) + share * SCALES + lane % 4 * 16,
                                  o.w_scales + size_t(at) * SCALES + lane % 4 * 16);
            }
            const uint32_t to = ring.at(issued, 0, ring.PAIRS) + first * 128 + ((piece ^ first % 8) << 4);
            const uint8_t* codes = o.x + block * BLOCK + 16 * piece;
#pragma unroll
            for (unsigned i = 0; i < ring.OWN; i += 4) {
                const uint4 four = longwave::read_16(inputs + i / 4 * PRODUCERS * 16);
                const unsigned own[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (unsigned k = 0; k < 4; k++) {
                    if (i + k < sixteens) {
                        longwave::copy_16(to + (i + k) * 16 * 128, codes + size_t(own[k]) * o.cols);
                    }
                }
            }
            if (thread < 16 * sixteens) {
                longwave::copy_4(ring.at(issued, ring.PAIR_SCALES, MOST * 4) + thread * 4, o.x_scales + size_t(scaled) * blocks + block);
            }
            longwave::commit_copies();
            issued++;
            if (issued - shown > LATE) {
                longwave::wait_copies<LATE>();
                show();
            }
            block = next_block(block, blocks);
        }
    }
    longwave::wait_copies<0>();
    while (shown < issued) {
        show();
    }
}

// Widens a warp's weights of a column block whose stage has been filled.
template <unsigned MOST>
__device__ __forceinline__ void widen(Ring<MOST> ring, unsigned count, const uint8_t* powers, uint32_t (&a)[4][4]) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t codes = ring.at(count, ring.ROWS, PIECES * CODES) + warp * CODES + lane * 16;
    const uint32_t scales = ring.at(count, ring.ROW_SCALES, PIECES * SCALES) + warp * SCALES + lane / 4 * 4;
    const longwave::ExpertWeights weights = {longwave::read_16(codes), longwave::read_16(codes + CODES / 2),
                                             longwave::read_4(scales), longwave::read_4(scales + SCALES / 2)};
    longwave::widen_block(weights, powers, a);
    longwave::wgmma_ready(a);
}

// Ends the sums of N pairs and adds them, times the scales of pairs at `scales`, to those of the column blocks before.
template <int N>
__device__ __forceinline__ void add(float* total, float (&product)[N / 2], uint32_t scales) {
    longwave::wgmma_wait<0>();
    longwave::wgmma_done(product);
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const uint2 s = longwave::read_8(scales + 32 * n);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            total[4 * n + k] = fmaf(product[4 * n + k], __uint_as_float(k % 2 ? s.y : s.x), total[4 * n + k]);
        }
    }
}

// The products of a tile whose group has up to N pairs, or twice as many in two halves.
template <int N, int HALVES, unsigned MOST>
__device__ __forceinline__ void consume(const Operands& o, const Tile& tile, Ring<MOST> ring, const uint8_t* powers, float* own,
                                        unsigned& count) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, blocks = o.cols / BLOCK;
    const unsigned end = count + blocks;
    float total[HALVES * N / 2] = {}, product[N / 2] = {};
    uint32_t a[2][4][4];
    const auto step = [&](uint32_t (&now)[4][4], uint32_t (&next)[4][4]) {
        const uint32_t pairs = ring.at(count, 0, ring.PAIRS), scales = ring.at(count, ring.PAIR_SCALES, MOST * 4) + 8 * c;
        longwave::begin_block(product, now, pairs);
        if constexpr (HALVES == 2) {
            add<N>(total, product, scales);
            longwave::begin_block(product, now, pairs + N * 128);
        }
        // The tensor cores are at work; the next column block becomes e4m3.
        if (count + 1 < end) {
            ring.wait_full(count + 1);
            widen(ring, count + 1, powers, next);
        }
        add<N>(total + (HALVES - 1) * N / 2, product, scales + (HALVES - 1) * N * 4);
        longwave::arrive_of_warp(ring.empty(count));
        count++;
    };
    ring.wait_full(count);
    widen(ring, count, powers, a[0]);
    for (unsigned left = (blocks + 1) / 2;;) {
        for (; left >= 2; left -= 2) {
            step(a[0], a[1]);
            step(a[1], a[0]);
        }
        if (left > 0) {
            step(a[0], a[1]);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                a[0][i / 4][i % 4] = a[1][i / 4][i % 4];
            }
        }
        if (count == end) {
            break;
        }
        // The end of the first part.
#pragma unroll
        for (int k = 0; k < HALVES * N / 2; k++) {
            own[k * CONSUMERS] = total[k];
            total[k] = 0.f;
        }
        left = end - count;
    }
    // Addresses that are known before the sums begin would be computed there, and kept in registers that the sums need.
    unsigned rows = o.rows;
    asm volatile("" : "+r"(rows));
    const unsigned row = tile.row + warp * 16 + g;
    if (row < rows) {
        const float* factors = o.w_factors + size_t(tile.expert) * rows + row;
        const float factor[2] = {__ldg(factors), __ldg(factors + 8)};
        float* y = o.y + size_t(tile.pair + 2 * c) * rows + row;
#pragma unroll
        for (int n = 0; n < HALVES * N / 8; n++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int i = 4 * n + k;
                const float sum = blocks > 1 ? own[i * CONSUMERS] + total[i] : total[i];
                if (8 * n + 2 * c + k % 2 < tile.pairs) {
                    y[k % 2 * rows + k / 2 * 8] = sum * factor[k / 2];
                }
            }
            y += 8 * size_t(rows);
        }
    }
}

template <unsigned MOST>
__device__ __forceinline__ void experts(const Operands& o) {
    extern __shared__ __align__(1024) uint8_t memory[];
    using Shared = Ring<MOST>;
    const Shared ring = {longwave::shared_address(memory)};
    longwave::fill_powers(memory + Shared::POWERS);
    longwave::init_ring<Shared::STAGES>(ring.full(0), ring.empty(0), PRODUCERS + PRODUCERS / 32, CONSUMERS / 32 * longwave::WARP_ARRIVALS);
    if (threadIdx.x >= CONSUMERS) {
        longwave::fewer_registers<32>();
        produce(o, ring);
        return;
    }
    longwave::more_registers<160>();
    const uint8_t* powers = memory + Shared::POWERS;
    float* own = reinterpret_cast<float*>(memory + Shared::SUMS) + threadIdx.x;
    unsigned count = 0;
    Tile tile;
    for (unsigned t = blockIdx.x; tile.find(o, t); t += gridDim.x) {
        const unsigned sixteens = (tile.pairs + 15) / 16;
        if (sixteens == 1) {
            consume<16, 1>(o, tile, ring, powers, own, count);
        } else if (sixteens == 2) {
            consume<32, 1>(o, tile, ring, powers, own, count);
        } else if (sixteens == 3) {
            consume<48, 1>(o, tile, ring, powers, own, count);
        } else if (sixteens == 4) {
            consume<64, 1>(o, tile, ring, powers, own, count);
        } else if constexpr (MOST > 64) {
            if (sixteens == 5) {
                consume<40, 2>(o, tile, ring, powers, own, count);
            } else if (sixteens == 6) {
                consume<48, 2>(o, tile, ring, powers, own, count);
            } else if (sixteens == 7) {
                consume<56, 2>(o, tile, ring, powers, own, count);
            } else {
                consume<64, 2>(o, tile, ring, powers, own, count);
            }
        }
    }
}

}  // namespace

// Grid: as many blocks as multiprocessors, 512 threads. Dynamic shared memory: Ring's BYTES, 223,616 for 64 pairs and 222,528 for 128.
#define ENTRY(most)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) experts_fp4_ring_##most(                      \
        const uint8_t* w, const uint8_t* w_scales, const float* w_factors, const uint8_t* x, const float* x_scales,      \
        const int* groups, const unsigned* inputs, float* y, unsigned rows, unsigned cols, unsigned group_count) {       \
        longwave::overlap();                                                                                             \
        static_assert(Ring<most>::BYTES == (most == 64 ? 223616 : 222528));                                              \
        experts<most>({w, w_scales, w_factors, x, x_scales, groups, inputs, y, rows, cols, group_count});                \
    }

ENTRY(64)
ENTRY(128)
