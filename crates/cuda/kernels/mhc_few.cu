// architectures: 90a 100a
// A boundary of hyper-connections (model.md 5) of a few tokens in one launch: what mhc_post_dots and mhc_pre of mhc.cu do, the
// same bits. A cluster of up to sixteen blocks has a token, a block 256 columns of its four streams: two units of products, two
// groups of squares. Sums go to all blocks of the cluster by stores that arrive at a barrier there, so nobody waits for more than
// what is sent. width is 256 times the cluster's blocks.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/bf16.cuh"
#include "common/cluster.cuh"
#include "common/mhc.cuh"
#include "common/overlap.cuh"
#include "common/reduce.cuh"

namespace {

using namespace longwave::hyper;

constexpr unsigned THREADS = 512, MOST_BLOCKS = 16;
// Columns of a block, and pairs of them.
constexpr unsigned OWN = 256, PAIRS = OWN / 2;
// Products of a block in every block: two units beside each other in PARTIAL rows, and two floats against bank conflicts.
constexpr unsigned SENT = 2 * PARTIAL + 2;

// Row `row` of the products of all units: a unit a lane.
__device__ __forceinline__ float product_at(const float* products, unsigned row, unsigned units) {
    const unsigned lane = threadIdx.x % 32;
    return lane < units ? products[lane / 2 * SENT + 2 * row + lane % 2] : 0.f;
}

}  // namespace

// Grid (width / 256, tokens) in clusters of width / 256 blocks, 512 threads. streams in place; y or wide_y and mix of the sublayer
// before, fn, base, scale and weight of the site behind; the other arguments as in mhc.cu.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mhc_few(uint32_t* streams, const uint32_t* y, const float2* wide_y, float* mix, const float2* fn, const float* base,
        const float* scale, const float4* weight, uint32_t* normed, uint32_t* codes, float* scales, float norm_eps, float hc_eps,
        unsigned iters) {
    longwave::start_next();
    __shared__ __align__(8) uint64_t barriers[2];
    __shared__ __align__(16) float products[MOST_BLOCKS * SENT];
    __shared__ float squares[2 * MOST_BLOCKS], sums[THREADS / 32][PARTIAL], dots[PARTIAL], bases[ROWS], factors[3];
    __shared__ __align__(8) uint32_t now[4][PAIRS];
    const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned blocks = gridDim.x, rank = blockIdx.x, token = blockIdx.y, width = OWN * blocks, half = width / 2;
    const unsigned unit = thread / 256, stream = thread / 64 % 4, pair = unit * 64 + thread % 64;
    const unsigned column = rank * PAIRS + pair, at = stream * half + column;
    const uint32_t products_here = longwave::shared_address(barriers), squares_here = products_here + 8;
    if (thread == 0) {
        longwave::init_barrier(products_here, 1);
        longwave::init_barrier(squares_here, 1);
        longwave::show_barriers();
        longwave::arrive_expecting(products_here, blocks * PARTIAL * 8);
        longwave::arrive_expecting(squares_here, blocks * 8);
    }
    // Weights, before the kernel before this one has ended.
    float2 f[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        f[r] = __ldg(fn + size_t(r) * (4 * half) + at);
    }
    const bool mixes = rank == 0 && warp == 2;
    float4 gains = make_float4(0.f, 0.f, 0.f, 0.f);
    if (warp < 2) {
        gains = __ldg(weight + rank * (OWN / 4) + thread);
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
    // Every warp sends both units' sums, a row a lane, to one block.
    if (warp < blocks) {
        float units[2] = {};
#pragma unroll
        for (int u = 0; u < 2; u++) {
#pragma unroll
            for (int w = 0; w < 8; w++) {
                units[u] += sums[8 * u + w][lane];
            }
        }
        const uint32_t to = longwave::shared_address(products + rank * SENT + 2 * lane);
        longwave::send_8(longwave::address_in(to, warp), __float_as_uint(units[0]), __float_as_uint(units[1]),
                         longwave::address_in(products_here, warp));
    }
    if (warp > 2 || (warp == 2 && rank > 0)) {
        return;
    }
    longwave::wait(products_here, 0);
    if (mixes) {
        float v[PARTIAL];
#pragma unroll
        for (int r = 0; r < PARTIAL; r++) {
            v[r] = r <= ROWS ? product_at(products, r, 2 * blocks) : 0.f;
        }
        dots[lane] = longwave::warp_sums(v);
        __syncwarp();
        const float r = norm_of(dots, width, norm_eps);
        make_mix(dots, r, factors, bases, hc_eps, iters, mix + size_t(token) * 20);
        return;
    }
    // Two warps have a group of the sublayer's input each, four columns per thread.
    float own[ROWS + 1];
#pragma unroll
    for (int r : {0, 1, 2, 3, ROWS}) {
        own[r] = longwave::warp_sum(product_at(products, r, 2 * blocks));
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
        const uint32_t to = longwave::shared_address(squares + 2 * rank + warp);
        longwave::send_4(longwave::address_in(to, lane), __float_as_uint(of_group), longwave::address_in(squares_here, lane));
    }
    longwave::wait(squares_here, 0);
    const float all = longwave::warp_sum(lane < 2 * blocks ? squares[lane] : 0.f);
    const float factor = rsqrtf(all / float(width) + norm_eps);
    const size_t place = size_t(token) * (width / 4) + rank * (OWN / 4) + thread;
    write_input(h, factor, gains, normed, codes, place, scales + size_t(token) * (width / 128) + 2 * rank + warp);
}
