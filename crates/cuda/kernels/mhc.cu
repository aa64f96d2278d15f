// architectures: 90a 100a
// Hyper-connections around a sublayer (model.md 5): four residual streams of bf16 [tokens, 4, width], float inside.
//   mhc_dots        partial products of the 24 rows of fn with a token's streams, and of their squares
//   mhc_post_dots   the same of the streams as the sublayer before this leaves them, which are stored
//   mhc_pre         the mix (Sinkhorn), the sublayer's input, its RMS norm, and that as e4m3 with a scale per 128
//   mhc_post        the streams after the last sublayer, in place
// A few tokens take mhc_few.cu, which does the second and the third in one launch.
// Sums have one order whatever the number of tokens. width % 256 == 0 and width <= 8192.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/fp8.cuh"
#include "common/mhc.cuh"
#include "common/overlap.cuh"
#include "common/reduce.cuh"

namespace {

using longwave::hyper::COLUMNS;
using longwave::hyper::output_of;
using longwave::hyper::PARTIAL;
using longwave::hyper::products_of;
using longwave::hyper::ROWS;
using longwave::hyper::updated;

constexpr int MOST_WIDTH = 8192;
// Rounds of four columns per thread over the widest model.
constexpr int ROUNDS = MOST_WIDTH / 1024;

// A block has its columns of all four streams: 64 threads with two each per stream.
template <bool AFTER>
__device__ __forceinline__ void dots(uint32_t* streams, const uint32_t* y, const float2* wide_y, const float* mix,
                                     const float2* fn, float* partial, unsigned width, unsigned tokens) {
    const unsigned half = width / 2, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned stream = threadIdx.x / (COLUMNS / 2), column = blockIdx.x * (COLUMNS / 2) + threadIdx.x % (COLUMNS / 2);
    const unsigned at = stream * half + column;
    float2 f[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        f[r] = __ldg(fn + size_t(r) * (4 * half) + at);
    }
    longwave::wait_before();
    __shared__ float sums[2][8][PARTIAL];
    unsigned turn = 0;
    for (unsigned token = blockIdx.y; token < tokens; token += gridDim.y, turn ^= 1) {
        uint32_t* row = streams + size_t(token) * (4 * half);
        float2 x;
        if constexpr (AFTER) {
            float2 old[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                old[i] = longwave::widen(row[i * half + column]);
            }
            const float2 out = output_of(y, wide_y, size_t(token) * half + column);
            const float2 sum = updated(mix + size_t(token) * 20, stream, out, old);
            const uint32_t rounded = longwave::narrow(sum.x, sum.y);
            // The other streams' threads have read what this replaces.
            __syncthreads();
            row[at] = rounded;
            x = longwave::widen(rounded);
        } else {
            x = longwave::widen(row[at]);
        }
        sums[turn][warp][lane] = products_of(f, x);
        __syncthreads();
        if (threadIdx.x < PARTIAL) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < 8; w++) {
                sum += sums[turn][w][threadIdx.x];
            }
            partial[(size_t(token) * gridDim.x + blockIdx.x) * PARTIAL + threadIdx.x] = sum;
        }
    }
}

}  // namespace

// Grid (width / COLUMNS, at most tokens), 256 threads; partial [tokens, blocks, PARTIAL].
extern "C" __global__ void __launch_bounds__(256)
mhc_dots(uint32_t* streams, const float2* fn, float* partial, unsigned width, unsigned tokens) {
    longwave::start_next();
    dots<false>(streams, nullptr, nullptr, nullptr, fn, partial, width, tokens);
}

// The same grid. The output of the sublayer before, [tokens, width]: bf16 in y, or float that is still to be rounded in wide_y;
// mix as mhc_pre left it for that sublayer.
extern "C" __global__ void __launch_bounds__(256)
mhc_post_dots(uint32_t* streams, const uint32_t* y, const float2* wide_y, const float* mix, const float2* fn, float* partial,
              unsigned width, unsigned tokens) {
    longwave::start_next();
    dots<true>(streams, y, wide_y, mix, fn, partial, width, tokens);
}

// Grid tokens, 288 threads: eight warps for the sublayer's input, one for the mix that is needed after it. base [24],
// scale [3] (pre, post, comb); mix [tokens, 20]: post, then comb with the source stream first. codes [tokens, width],
// scales [tokens, width / 128]; normed bf16 [tokens, width].
extern "C" __global__ void __launch_bounds__(288, 2)
mhc_pre(const uint32_t* __restrict__ streams, const float* __restrict__ partial, const float* __restrict__ base,
        const float* __restrict__ scale, const float* __restrict__ weight, float* __restrict__ mix,
        uint32_t* __restrict__ normed, uint32_t* __restrict__ codes, float* __restrict__ scales, unsigned width,
        float norm_eps, float hc_eps, unsigned iters) {
    longwave::start_next();
    __shared__ float dots[PARTIAL];
    __shared__ float squares_of[MOST_WIDTH / COLUMNS];
    __shared__ float bases[ROWS], factors[3];
    __shared__ __align__(16) float gains[MOST_WIDTH];
    const unsigned token = blockIdx.x, blocks = width / COLUMNS, quads = width / 4;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool mixes = warp == 8;
    // Weights, before the kernel before this one has ended. A thread reads the gains that it copied.
    if (mixes) {
        if (lane < ROWS) {
            bases[lane] = __ldg(base + lane);
        }
        if (lane < 3) {
            factors[lane] = __ldg(scale + lane);
        }
    } else {
        for (unsigned at = threadIdx.x; at < quads; at += 256) {
            longwave::copy_16(longwave::shared_address(gains + 4 * at), weight + 4 * at);
        }
        longwave::commit_copies();
    }
    longwave::wait_before();
    // Warp q adds up rows 4 q .. 4 q + 3 of all blocks, a block per lane; the streams are on their way meanwhile.
    float4 part = make_float4(0.f, 0.f, 0.f, 0.f);
    uint2 x[ROUNDS][4];
    if (!mixes) {
        const float4* parts = reinterpret_cast<const float4*>(partial + size_t(token) * blocks * PARTIAL) + warp;
        if (lane < blocks) {
            part = parts[lane * (PARTIAL / 4)];
        }
        if (lane + 32 < blocks) {
            const float4 more = parts[(lane + 32) * (PARTIAL / 4)];
            part = make_float4(part.x + more.x, part.y + more.y, part.z + more.z, part.w + more.w);
        }
        const uint2* rows = reinterpret_cast<const uint2*>(streams + size_t(token) * 2 * width);
#pragma unroll
        for (unsigned q = 0; q < ROUNDS; q++) {
            if (q * 256 + threadIdx.x < quads) {
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    x[q][s] = rows[s * quads + q * 256 + threadIdx.x];
                }
            }
        }
        part = make_float4(longwave::warp_sum(part.x), longwave::warp_sum(part.y), longwave::warp_sum(part.z),
                           longwave::warp_sum(part.w));
        if (lane == 0) {
            reinterpret_cast<float4*>(dots)[warp] = part;
        }
    }
    __syncthreads();
    const float r = longwave::hyper::norm_of(dots, width, norm_eps);
    if (mixes) {
        longwave::hyper::make_mix(dots, r, factors, bases, hc_eps, iters, mix + size_t(token) * 20);
        return;
    }
    // The sublayer's input, four columns per thread and round.
    float w[4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        w[s] = longwave::hyper::weight_of(dots[s], r, factors[0], bases[s], hc_eps);
    }
    float4 h[ROUNDS];
    // In the last round of a width that 1024 does not divide only some of the warps have columns. A warp has 128 neighbouring
    // columns in a round, a group of its own, and groups are added up in one tree.
#pragma unroll
    for (unsigned q = 0; q < ROUNDS; q++) {
        if (q * 256 + threadIdx.x < quads) {
            h[q] = longwave::hyper::collapsed(x[q], w);
            const float squares = longwave::warp_sum(longwave::hyper::squares_of(h[q]));
            if (lane == 0) {
                squares_of[q * 8 + warp] = squares;
            }
        }
    }
    longwave::wait_copies<0>();
    // The eight warps alone.
    asm volatile("bar.sync 1, 256;" ::: "memory");
    float squares = lane < blocks ? squares_of[lane] : 0.f;
    squares += lane + 32 < blocks ? squares_of[lane + 32] : 0.f;
    squares = longwave::warp_sum(squares);
    const float factor = rsqrtf(squares / float(width) + norm_eps);
#pragma unroll
    for (unsigned q = 0; q < ROUNDS; q++) {
        const unsigned at = q * 256 + threadIdx.x;
        if (at < quads) {
            const float4 g = reinterpret_cast<const float4*>(gains)[at];
            // A warp has 128 neighbouring columns: one group.
            const size_t place = size_t(token) * quads + at;
            longwave::hyper::write_input(h[q], factor, g, normed, codes, place, scales + size_t(token) * (width / 128) + at / 32);
        }
    }
}

// Grid (width / 512 rounded up, tokens), 256 threads. y bf16 [tokens, width], the sublayer's output.
extern "C" __global__ void __launch_bounds__(256)
mhc_post(uint32_t* streams, const uint32_t* y, const float* mix, unsigned width) {
    longwave::overlap();
    const unsigned token = blockIdx.y, column = blockIdx.x * 256 + threadIdx.x, half = width / 2;
    if (column >= half) {
        return;
    }
    uint32_t* row = streams + size_t(token) * (4 * half);
    float2 old[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        old[i] = longwave::widen(row[i * half + column]);
    }
    const float2 out = longwave::widen(y[size_t(token) * half + column]);
#pragma unroll
    for (unsigned j = 0; j < 4; j++) {
        const float2 sum = updated(mix + size_t(token) * 20, j, out, old);
        row[j * half + column] = longwave::narrow(sum.x, sum.y);
    }
}
