// architectures: 90a 100a
// Hyper-connections around a sublayer (model.md 5): four residual streams of bf16 [tokens, 4, width], float inside.
//   mhc_dots        partial products of the 24 rows of fn with a token's streams, and of their squares
//   mhc_post_dots   the same of the streams as the sublayer before this leaves them, which are stored
//   mhc_pre         the mix (Sinkhorn), the sublayer's input, its RMS norm, and that as e4m3 with a scale per 128
//   mhc_post        the streams after the last sublayer, in place
// Sums have one order whatever the number of tokens. width % 256 == 0 and width <= 8192.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/fp8.cuh"
#include "common/overlap.cuh"
#include "common/reduce.cuh"

namespace {

constexpr int ROWS = 24;
// Values of a partial sum: 24 products and the squares, padded.
constexpr int PARTIAL = 32;
// Columns of each stream that a block of products has.
constexpr int COLUMNS = 128;
constexpr int MOST_WIDTH = 8192;
// Rounds of four columns per thread over the widest model.
constexpr int ROUNDS = MOST_WIDTH / 1024;

// A stream's two columns after a sublayer with output y: post, then comb with the source stream first.
__device__ __forceinline__ float2 updated(const float* mix, unsigned stream, float2 y, const float2 (&old)[4]) {
    const float p = __ldg(mix + stream);
    float2 sum = make_float2(p * y.x, p * y.y);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float c = __ldg(mix + 4 + 4 * i + stream);
        sum = make_float2(fmaf(c, old[i].x, sum.x), fmaf(c, old[i].y, sum.y));
    }
    return sum;
}

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
            float2 out;
            if (wide_y) {
                const float2 v = wide_y[size_t(token) * half + column];
                out = make_float2(longwave::round_bf16(v.x), longwave::round_bf16(v.y));
            } else {
                out = longwave::widen(y[size_t(token) * half + column]);
            }
            const float2 sum = updated(mix + size_t(token) * 20, stream, out, old);
            const uint32_t rounded = longwave::narrow(sum.x, sum.y);
            // The other streams' threads have read what this replaces.
            __syncthreads();
            row[at] = rounded;
            x = longwave::widen(rounded);
        } else {
            x = longwave::widen(row[at]);
        }
        float v[PARTIAL];
#pragma unroll
        for (int r = 0; r < PARTIAL; r++) {
            v[r] = r < ROWS ? f[r].x * x.x + f[r].y * x.y : r == ROWS ? x.x * x.x + x.y * x.y : 0.f;
        }
        sums[turn][warp][lane] = longwave::warp_sums(v);
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

__device__ __forceinline__ float sigmoid(float v) {
    return 1.f / (1.f + __expf(-v));
}

__device__ __forceinline__ float sum_of(const float (&c)[16], int first, int step) {
    return (c[first] + c[first + step]) + (c[first + 2 * step] + c[first + 3 * step]);
}

// Every row (STEP 1) or column (STEP 4) over its sum.
template <int STEP>
__device__ __forceinline__ void normalise(float (&c)[16], float eps) {
#pragma unroll
    for (int line = 0; line < 4; line++) {
        const int first = line * (STEP == 1 ? 4 : 1);
        const float factor = __fdividef(1.f, sum_of(c, first, STEP) + eps);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            c[first + k * STEP] *= factor;
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
    __shared__ float squares_of[8];
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
    const float r = rsqrtf(dots[ROWS] / float(4 * width) + norm_eps);
    if (mixes) {
        // Every lane has the whole 4 x 4 matrix.
        float c[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            c[i] = dots[8 + i] * r * factors[2] + bases[8 + i];
        }
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const float most = fmaxf(fmaxf(c[i], c[i + 1]), fmaxf(c[i + 2], c[i + 3]));
#pragma unroll
            for (int j = i; j < i + 4; j++) {
                c[j] = __expf(c[j] - most);
            }
        }
        normalise<1>(c, 0.f);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            c[i] += hc_eps;
        }
        normalise<4>(c, hc_eps);
        for (unsigned n = 1; n < iters; n++) {
            normalise<1>(c, hc_eps);
            normalise<4>(c, hc_eps);
        }
        if (lane == 0) {
            float4* to = reinterpret_cast<float4*>(mix + size_t(token) * 20);
            float post[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                post[i] = 2.f * sigmoid(dots[4 + i] * r * factors[1] + bases[4 + i]);
            }
            to[0] = make_float4(post[0], post[1], post[2], post[3]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                to[1 + i] = make_float4(c[4 * i], c[4 * i + 1], c[4 * i + 2], c[4 * i + 3]);
            }
        }
        return;
    }
    // The sublayer's input, four columns per thread and round.
    float w[4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        w[s] = sigmoid(dots[s] * r * factors[0] + bases[s]) + hc_eps;
    }
    float4 h[ROUNDS];
    float squares = 0.f;
    // In the last round of a width that 1024 does not divide only some of the warps have columns.
#pragma unroll
    for (unsigned q = 0; q < ROUNDS; q++) {
        if (q * 256 + threadIdx.x < quads) {
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const float2 a = longwave::widen(x[q][s].x), b = longwave::widen(x[q][s].y);
                sum = make_float4(fmaf(w[s], a.x, sum.x), fmaf(w[s], a.y, sum.y), fmaf(w[s], b.x, sum.z), fmaf(w[s], b.y, sum.w));
            }
            h[q] = make_float4(longwave::round_bf16(sum.x), longwave::round_bf16(sum.y), longwave::round_bf16(sum.z),
                               longwave::round_bf16(sum.w));
            squares += h[q].x * h[q].x + h[q].y * h[q].y + h[q].z * h[q].z + h[q].w * h[q].w;
        }
    }
    squares = longwave::warp_sum(squares);
    if (lane == 0) {
        squares_of[warp] = squares;
    }
    longwave::wait_copies<0>();
    // The eight warps alone.
    asm volatile("bar.sync 1, 256;" ::: "memory");
    squares = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        squares += squares_of[i];
    }
    const float factor = rsqrtf(squares / float(width) + norm_eps);
#pragma unroll
    for (unsigned q = 0; q < ROUNDS; q++) {
        const unsigned at = q * 256 + threadIdx.x;
        if (at < quads) {
            const float4 g = reinterpret_cast<const float4*>(gains)[at];
            const float y0 = longwave::round_bf16(h[q].x * factor * g.x), y1 = longwave::round_bf16(h[q].y * factor * g.y);
            const float y2 = longwave::round_bf16(h[q].z * factor * g.z), y3 = longwave::round_bf16(h[q].w * factor * g.w);
            reinterpret_cast<uint2*>(normed)[size_t(token) * quads + at] =
                make_uint2(longwave::narrow(y0, y1), longwave::narrow(y2, y3));
            // A warp has 128 neighbouring columns: one group.
            codes[size_t(token) * quads + at] =
                longwave::quantise_group(y0, y1, y2, y3, scales + size_t(token) * (width / 128) + at / 32);
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
