// architectures: 90a 100a
// A boundary of hyper-connections (model.md 5) of a few tokens in one launch: what mhc_post_dots and mhc_pre of mhc.cu do, the
// same bits. A cluster of 2 to 16 blocks has a token, a block one or two units of 128 columns of its four streams: as many partial
// products and groups of squares. Sums go to all blocks of the cluster by stores that arrive at a barrier there, so nobody waits for
// more than what is sent.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/bf16.cuh"
#include "common/cluster.cuh"
#include "common/mhc.cuh"
#include "common/overlap.cuh"
#include "common/reduce.cuh"

namespace {

using namespace longwave::hyper;

constexpr unsigned MOST_BLOCKS = 16;

template <unsigned UNITS>
__device__ __forceinline__ void boundary(uint32_t* streams, const uint32_t* y, const float2* wide_y, float* mix, const float2* fn,
                                         const float* base, const float* scale, const float4* weight, uint32_t* normed,
                                         uint32_t* codes, float* scales, float norm_eps, float hc_eps, unsigned iters) {
    // Pairs of columns of a block, and its products in every block: of all units beside each other in PARTIAL rows, and as many
    // floats against bank conflicts.
    constexpr unsigned PAIRS = UNITS * COLUMNS / 2, WARPS = 8 * UNITS, SENT = UNITS * (PARTIAL + 1);
    __shared__ __align__(8) uint64_t barriers[2];
    __shared__ __align__(16) float products[MOST_BLOCKS * SENT];
    __shared__ float squares[UNITS * MOST_BLOCKS], sums[WARPS][PARTIAL], dots[PARTIAL], bases[ROWS], factors[3];
    __shared__ __align__(8) uint32_t now[4][PAIRS];
    const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned blocks = gridDim.x, rank = blockIdx.x, token = blockIdx.y, width = UNITS * COLUMNS * blocks, half = width / 2;
    const unsigned unit = thread / 256, stream = thread / 64 % 4, pair = unit * 64 + thread % 64;
    const unsigned column = rank * PAIRS + pair, at = stream * half + column;
    const uint32_t products_here = longwave::shared_address(barriers), squares_here = products_here + 8;
    if (thread == 0) {
        longwave::init_barrier(products_here, 1);
        longwave::init_barrier(squares_here, 1);
        longwave::show_barriers();
        longwave::arrive_expecting(products_here, blocks * UNITS * PARTIAL * 4);
        longwave::arrive_expecting(squares_here, blocks * UNITS * 4);
    }
    // Weights, before the kernel before this one has ended.
    float2 f[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        f[r] = __ldg(fn + size_t(r) * (4 * half) + at);
    }
    // Of the first warps each has a group of the sublayer's input, of the first block one makes the mix.
    const bool collapses = warp < UNITS, mixes = rank == 0 && warp == UNITS;
    float4 gains = make_float4(0.f, 0.f, 0.f, 0.f);
    if (collapses) {
        gains = __ldg(weight + rank * (PAIRS / 2) + thread);
    }
    if (thread < ROWS) {
        bases[thread] = __ldg(base + thread);
    }
    if (thread < 3) {
        factors[thread] = __ldg(scale + thread);
    }
    longwave::cluster_sync();
    longwave::wait_before();

    uint32_t* row = streams + size_t(token) * (4 * half);
    float2 old[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        old[i] = longwave::widen(row[i * half + column]);
    }
    const float2 out = output_of(y, wide_y, size_t(token) * half + column);
    const float2 sum = updated(mix + size_t(token) * 20, stream, out, old);
    const uint32_t rounded = longwave::narrow(sum.x, sum.y);
    now[stream][pair] = rounded;
    sums[warp][lane] = products_of(f, longwave::widen(rounded));
    __syncthreads();
    // The other streams' threads have read what this replaces.
    row[at] = rounded;
    // Every warp sends the units' sums, a row a lane, to one block or two.
    float units[UNITS] = {};
#pragma unroll
    for (unsigned u = 0; u < UNITS; u++) {
#pragma unroll
        for (unsigned w = 0; w < 8; w++) {
            units[u] += sums[8 * u + w][lane];
        }
    }
    for (unsigned to = warp; to < blocks; to += WARPS) {
        const uint32_t at = longwave::address_in(longwave::shared_address(products + rank * SENT + UNITS * lane), to);
        const uint32_t barrier = longwave::address_in(products_here, to);
        if constexpr (UNITS == 2) {
            longwave::send_8(at, __float_as_uint(units[0]), __float_as_uint(units[1]), barrier);
        } else {
            longwave::send_4(at, __float_as_uint(units[0]), barrier);
        }
    }
    if (!collapses && !mixes) {
        return;
    }
    // Row `row` of the products of all units: a unit a lane.
    const auto product_at = [&](unsigned row) {
        return lane < UNITS * blocks ? products[lane / UNITS * SENT + UNITS * row + lane % UNITS] : 0.f;
    };
    longwave::wait(products_here, 0);
    if (mixes) {
        float v[PARTIAL];
#pragma unroll
        for (int r = 0; r < PARTIAL; r++) {
            v[r] = r <= ROWS ? product_at(r) : 0.f;
        }
        dots[lane] = longwave::warp_sums(v);
        __syncwarp();
        const float r = norm_of(dots, width, norm_eps);
        make_mix(dots, r, factors, bases, hc_eps, iters, mix + size_t(token) * 20);
        return;
    }
    // Four columns per thread.
    float own[ROWS + 1];
#pragma unroll
    for (int r : {0, 1, 2, 3, ROWS}) {
        own[r] = longwave::warp_sum(product_at(r));
    }
    const float r = norm_of(own, width, norm_eps);
    float w[4];
    uint2 x[4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        w[s] = weight_of(own[s], r, factors[0], bases[s], hc_eps);
        x[s] = reinterpret_cast<const uint2*>(now[s])[thread];
    }
    const float4 h = collapsed(x, w);
    const float of_group = longwave::warp_sum(squares_of(h));
    if (lane < blocks) {
        const uint32_t to = longwave::shared_address(squares + UNITS * rank + warp);
        longwave::send_4(longwave::address_in(to, lane), __float_as_uint(of_group), longwave::address_in(squares_here, lane));
    }
    longwave::wait(squares_here, 0);
    const float all = longwave::warp_sum(lane < UNITS * blocks ? squares[lane] : 0.f);
    const float factor = rsqrtf(all / float(width) + norm_eps);
    const size_t place = size_t(token) * (width / 4) + rank * (PAIRS / 2) + thread;
    write_input(h, factor, gains, normed, codes, place, scales + size_t(token) * (width / COLUMNS) + UNITS * rank + warp);
}

}  // namespace

// Grid (blocks, tokens) in clusters of `blocks`, 256 threads a unit; width is 128 times the units of a cluster. streams in place; y or
// wide_y and mix of the sublayer before, fn, base, scale and weight of the site behind; the other arguments as in mhc.cu.
#define ENTRY(units)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256 * units, 1)                                                         \
        mhc_few_##units(uint32_t* streams, const uint32_t* y, const float2* wide_y, float* mix, const float2* fn,        \
                        const float* base, const float* scale, const float4* weight, uint32_t* normed, uint32_t* codes,  \
                        float* scales, float norm_eps, float hc_eps, unsigned iters) {                                   \
        longwave::start_next();                                                                                          \
        boundary<units>(streams, y, wide_y, mix, fn, base, scale, weight, normed, codes, scales, norm_eps, hc_eps,       \
                        iters);                                                                                          \
    }

ENTRY(1)
ENTRY(2)
