// architectures: 90a
// y = W x with e4m3 weights and inputs for up to 64 tokens on Hopper's warpgroups, two of which take turns with the column blocks of a
// tile. Operands and bits are those of linear_fp8_wide.cu, which has one warpgroup a tile. linear_fp8.md has floor and design.
//
// A column block costs a warpgroup mostly instructions that wait for each other, and a matrix of few rows has one tile for each
// multiprocessor: so two warpgroups make the products of a tile, one those of even column blocks, the other those of odd ones. Products
// are scaled and added one block after the other whoever makes them, or bits would differ: so each warpgroup adds half of the tile's rows
// and gives the other, through shared memory, its products of that one's rows. Needs rows % 16 == 0 (128 with several groups), cols %
// 256 == 0, and scales at a multiple of eight bytes.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/linear_fp8_wide.cuh"
#include "common/load.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_fp8.cuh"

namespace {

using longwave::TensorMap;
using Operands = longwave::WideOperands;

constexpr unsigned BLOCK = longwave::FP8_BLOCK, TEAM = 128, CONSUMERS = 2 * TEAM, PRODUCERS = 4;

// A thread's scales of two neighbouring column blocks: the weights' and those of its two tokens.
struct Scales {
    float2 w, low, high;
};

// Products on their way from one warpgroup to the other: two slots, which take turns, and a barrier for each, eight bytes apart. A
// thread's four floats lie beside those of its neighbours.
template <int LENGTH>
struct Way {
    static constexpr unsigned SLOT = LENGTH * 4 * TEAM;
    uint32_t slots, barriers;
    // Which slot is next, and the parity of its barrier.
    unsigned next, phase;

    __device__ __forceinline__ void advance() {
        phase ^= next;
        next ^= 1;
    }

    __device__ __forceinline__ void give(const float* v, uint32_t thread) {
        const uint32_t at = slots + next * SLOT + 16 * thread;
#pragma unroll
        for (int i = 0; i < LENGTH; i += 4) {
            longwave::write_16(at + 4 * i * TEAM, make_uint4(__float_as_uint(v[i]), __float_as_uint(v[i + 1]),
                                                             __float_as_uint(v[i + 2]), __float_as_uint(v[i + 3])));
        }
        longwave::arrive_of_warp(barriers + 8 * next);
        advance();
    }

    // Adds what the other one gave.
    __device__ __forceinline__ void take(float (&total)[LENGTH], float low, float high, uint32_t thread) {
        const uint32_t at = slots + next * SLOT + 16 * thread;
        longwave::wait(barriers + 8 * next, phase);
#pragma unroll
        for (int i = 0; i < LENGTH; i += 4) {
            const uint4 v = longwave::read_16(at + 4 * i * TEAM);
            total[i] = fmaf(__uint_as_float(v.x), low, total[i]);
            total[i + 1] = fmaf(__uint_as_float(v.y), low, total[i + 1]);
            total[i + 2] = fmaf(__uint_as_float(v.z), high, total[i + 2]);
            total[i + 3] = fmaf(__uint_as_float(v.w), high, total[i + 3]);
        }
        advance();
    }
};

// How many products are begun behind one.
template <int N>
struct Behind {
    static constexpr int value = N;
};

// What one of the two warpgroups does: MINE is 0 for even column blocks and the lower half of a tile's rows, 1 for odd ones and the
// upper half. `to` and `from` are the ways to the other one and from it.
//
// No slot of a way is written while it may be read: who gives product p + 2 has taken one since that the other gave behind taking
// product p. For this the first one takes the other's last product before it gives its next one, and the second one gives before it takes.
template <int N, unsigned MINE>
__device__ __forceinline__ void multiply(const Operands& o, const longwave::WideRing& ring, Way<N / 4> to, Way<N / 4> from) {
    constexpr int HALF = N / 4;
    const unsigned thread = threadIdx.x % TEAM, lane = thread % 32, token = thread / 32 * 16 + lane / 4, c = lane % 4;
    const unsigned pairs = o.blocks() / 2, of_group = (o.rows + N - 1) / N, tiles = of_group * o.groups;
    float total[HALF], one[N / 2], other[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        one[i] = other[i] = 0.f;
    }
    // A descriptor counts sixteen bytes.
    const uint32_t first = longwave::fp8_rows(ring.base);
    unsigned stage = MINE, phase = 0, free = MINE;
    for (unsigned t = blockIdx.x; t < tiles; t += gridDim.x) {
        const unsigned group = t / of_group, row = t % of_group * N;
        const float* low = o.scales_of(group, token);
        const float* high = o.scales_of(group, token + 8);
        const float* w_scales = o.scales_of_rows(group, row);
        const auto scales_at = [&](unsigned pair) {
            const unsigned block = 2 * min(pair, pairs - 1);
            return Scales{longwave::load_two_now(w_scales + block), longwave::load_two_now(low + block),
                          longwave::load_two_now(high + block)};
        };
        const auto begin = [&](float(&product)[N / 2]) {
            longwave::wait(ring.full + 8 * stage, phase);
            const uint32_t w = first + stage * (ring.stage_bytes / 16);
            longwave::begin_block(product, w + N * BLOCK / 16, w);
            stage = stage + 2 >= ring.stages ? MINE : stage + 2;
            phase ^= stage == MINE;
        };
        // Scales of the odd block of the pair before, which the first one adds when the other has given it.
        float low_before = 0.f, high_before = 0.f;
        // Waits for the product of a pair, with that many begun behind it, and adds the pair's two.
        const auto add = [&](auto behind, float(&product)[N / 2], Scales& scales, unsigned pair) {
            float low[2] = {scales.w.x * scales.low.x, scales.w.y * scales.low.y};
            float high[2] = {scales.w.x * scales.high.x, scales.w.y * scales.high.y};
            // Now: the compiler would load the next ones first, and copy them, and a copy waits for what comes.
            longwave::wgmma_done(low);
            longwave::wgmma_done(high);
            // Those of the pair after the next one are on their way: from memory they take longer than a pair.
            scales = scales_at(pair + 2);
            if (MINE == 0 && pair != 0) {
                from.take(total, low_before, high_before, thread);
            }
            longwave::wgmma_wait<behind.value>();
            longwave::wgmma_done(product);
            longwave::arrive_of_warp(ring.empty + 8 * free);
            free = free + 2 >= ring.stages ? MINE : free + 2;
            to.give(product + (MINE == 0 ? HALF : 0), thread);
            if (MINE == 1) {
                from.take(total, low[0], high[0], thread);
            }
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                total[i] = fmaf(product[MINE * HALF + i], i % 4 < 2 ? low[MINE] : high[MINE], total[i]);
            }
            low_before = low[1], high_before = high[1];
            // Now: the compiler must not leave additions for after the next sums have begun in these registers.
            longwave::wgmma_done(total);
        };
        constexpr Behind<0> last;
        constexpr Behind<1> next;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            total[i] = 0.f;
        }
        Scales of_one = scales_at(0), of_other = scales_at(1);
        begin(one);
        unsigned pair = 0;
        for (; pair + 2 < pairs; pair += 2) {
            begin(other);
            add(next, one, of_one, pair);
            begin(one);
            add(next, other, of_other, pair + 1);
        }
        if (pair + 1 < pairs) {
            begin(other);
            add(next, one, of_one, pair);
            add(last, other, of_other, pair + 1);
        } else {
            add(last, one, of_one, pair);
        }
        if (MINE == 0) {
            from.take(total, low_before, high_before, thread);
        }
        o.store(total, group, row + MINE * N / 2 + 2 * c, token, 0);
        o.store(total, group, row + MINE * N / 2 + 2 * c, token + 8, 1);
    }
}

// A block has every gridDim.x-th tile of N weight rows. Behind the ring lie the ways, of which wgmma reads behind the `held` tokens of the
// last stage; nobody uses those products.
template <int N>
__device__ __forceinline__ void turns(const Operands& o, unsigned held, unsigned stages) {
    using OneWay = Way<N / 4>;
    static_assert(4 * OneWay::SLOT >= 56 * BLOCK);
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = longwave::shared_address(memory), stage_bytes = (N + held) * BLOCK;
    const uint32_t slots = base + stages * stage_bytes, given = slots + 4 * OneWay::SLOT, full = given + 4 * 8;
    const longwave::WideRing ring{base, stage_bytes, full, full + 8 * stages, stages};
    if (threadIdx.x < stages) {
        longwave::init_barrier(ring.full + 8 * threadIdx.x, 1);
        longwave::init_barrier(ring.empty + 8 * threadIdx.x, 4 * longwave::WARP_ARRIVALS);
        if (threadIdx.x < 4) {
            longwave::init_barrier(given + 8 * threadIdx.x, 4 * longwave::WARP_ARRIVALS);
        }
        longwave::show_barriers();
    }
    if (threadIdx.x == CONSUMERS) {
        longwave::fetch_map(o.w);
        longwave::fetch_map(o.x);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x % 32 == 0) {
            longwave::fill_ring<N, PRODUCERS>(o, ring, (threadIdx.x - CONSUMERS) / 32, blockIdx.x, gridDim.x);
        }
        return;
    }
    longwave::fetch_scales<N>(o, blockIdx.x, gridDim.x, threadIdx.x, CONSUMERS);
    longwave::wait_before();
    const OneWay up{slots, given, 0, 0}, down{slots + 2 * OneWay::SLOT, given + 16, 0, 0};
    // The same for all lanes, and known to be.
    if (__shfl_sync(0xffffffffu, threadIdx.x / TEAM, 0) == 0) {
        multiply<N, 0>(o, ring, up, down);
    } else {
        multiply<N, 1>(o, ring, down, up);
    }
}

}  // namespace

// Grid: at most as many blocks as fit the multiprocessors at once, 384 threads. Dynamic shared memory: `stages` (a multiple of PRODUCERS,
// at least two: each warpgroup begins a block before its last one is free) of N + held rows of 128 bytes and 16 bytes a stage, and 512 N
// + 32 bytes. Boxes of N rows of w, of `held` tokens (8, 16, 32 or 64) of x.
#define TURNS(n)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32 * PRODUCERS) linear_fp8_turns_##n(                       \
        const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const float* w_scales,                 \
        const float* x_scales, float* y, unsigned rows, unsigned cols, unsigned tokens, unsigned groups, unsigned held,  \
        unsigned stages) {                                                                                               \
        longwave::start_next();                                                                                          \
        turns<n>({w, x, w_scales, x_scales, y, rows, cols, tokens, groups}, held, stages);                               \
    }

TURNS(16)
TURNS(32)
TURNS(64)
