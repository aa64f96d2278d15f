// architectures: 90a 100a
// Hyper-connections around a sublayer (model.md 5): four residual streams of bf16 [tokens, 4, width], float inside.
//   mhc_dots   partial products of the 24 rows of fn with a token's streams, and of their squares
//   mhc_pre    the mix (Sinkhorn), the sublayer's input, its RMS norm, and that as e4m3 with a scale per 128
//   mhc_post   the streams after the sublayer, in place
// Sums have one order whatever the number of tokens. width % 256 == 0 and width <= 8192.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/fp8.cuh"
#include "common/overlap.cuh"
#include "common/reduce.cuh"

namespace {

constexpr int ROWS = 24;
// Values of a partial sum: 24 products and the squares, padded.
constexpr int PARTIAL = 32;
// Columns of a block of mhc_dots.
constexpr int COLUMNS = 512;
// Blocks of the widest model.
constexpr int MOST_BLOCKS = 4 * 8192 / COLUMNS;

}  // namespace

// Grid (4 * width / COLUMNS, at most tokens), 256 threads; partial [tokens, blocks, PARTIAL].
extern "C" __global__ void __launch_bounds__(256)
mhc_dots(const uint32_t* __restrict__ streams, const float2* __restrict__ fn, float* __restrict__ partial, unsigned width,
         unsigned tokens) {
    longwave::start_next();
    const unsigned total = 4 * width, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned at = blockIdx.x * (COLUMNS / 2) + threadIdx.x;
    float2 f[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        f[r] = __ldg(fn + size_t(r) * (total / 2) + at);
    }
    longwave::wait_before();
    __shared__ float sums[2][8][PARTIAL];
    unsigned turn = 0;
    for (unsigned token = blockIdx.y; token < tokens; token += gridDim.y, turn ^= 1) {
        const float2 x = longwave::widen(streams[size_t(token) * (total / 2) + at]);
        float v[PARTIAL];
#pragma unroll
        for (int r = 0; r < PARTIAL; r++) {
            v[r] = r < ROWS ? f[r].x * x.x + f[r].y * x.y : r == ROWS ? x.x * x.x + x.y * x.y : 0.f;
        }
        sums[turn][warp][lane] = longwave::warp_sums(v);
        __syncthreads();
        if (threadIdx.x <= ROWS) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < 8; w++) {
                sum += sums[turn][w][threadIdx.x];
            }
            partial[(size_t(token) * gridDim.x + blockIdx.x) * PARTIAL + threadIdx.x] = sum;
        }
    }
}

// Grid tokens, 256 threads. base [24], scale [3] (pre, post, comb); mix [tokens, 20]: post, then comb with the source
// stream first. codes [tokens, width], scales [tokens, width / 128]; normed bf16 [tokens, width].
extern "C" __global__ void __launch_bounds__(256, 3)
mhc_pre(const uint32_t* __restrict__ streams, const float* __restrict__ partial, const float* __restrict__ base,
        const float* __restrict__ scale, const float* __restrict__ weight, float* __restrict__ mix,
        uint32_t* __restrict__ normed, uint32_t* __restrict__ codes, float* __restrict__ scales, unsigned width,
        float norm_eps, float hc_eps, unsigned iters) {
    longwave::overlap();
    __shared__ float dots[PARTIAL];
    __shared__ float parts[MOST_BLOCKS * PARTIAL];
    __shared__ float pre[4];
    const unsigned token = blockIdx.x, blocks = 4 * width / COLUMNS;
    // All of them at once, then in order.
    for (unsigned i = threadIdx.x; i < blocks * PARTIAL; i += 256) {
        parts[i] = partial[size_t(token) * blocks * PARTIAL + i];
    }
    __syncthreads();
    if (threadIdx.x <= ROWS) {
        float sum = 0.f;
        for (unsigned b = 0; b < blocks; b++) {
            sum += parts[b * PARTIAL + threadIdx.x];
        }
        dots[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        // Lane 4 i + j of the first sixteen holds C[i][j]; the others compute along and are ignored.
        const unsigned lane = threadIdx.x, i = lane / 4 % 4, j = lane % 4;
        const float r = rsqrtf(dots[ROWS] / float(4 * width) + norm_eps);
        const auto sigmoid = [](float v) { return 1.f / (1.f + __expf(-v)); };
        const auto of = [&](unsigned row, unsigned s) { return dots[row] * r * scale[s] + base[row]; };
        const auto over_row = [](float v) {
            v += __shfl_xor_sync(0xffffffffu, v, 1);
            return v + __shfl_xor_sync(0xffffffffu, v, 2);
        };
        const auto over_column = [](float v) {
            v += __shfl_xor_sync(0xffffffffu, v, 4);
            return v + __shfl_xor_sync(0xffffffffu, v, 8);
        };
        const float a = of(8 + 4 * i + j, 2);
        float most = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        const float e = __expf(a - most);
        float c = e / over_row(e) + hc_eps;
        c /= over_column(c) + hc_eps;
        for (unsigned n = 1; n < iters; n++) {
            c /= over_row(c) + hc_eps;
            c /= over_column(c) + hc_eps;
        }
        if (lane < 16) {
            mix[size_t(token) * 20 + 4 + lane] = c;
        }
        if (lane < 4) {
            pre[lane] = sigmoid(of(lane, 0)) + hc_eps;
            mix[size_t(token) * 20 + lane] = 2.f * sigmoid(of(4 + lane, 1));
        }
    }
    __syncthreads();
    // The sublayer's input, four columns per thread and round; rounds are kept, there are at most eight.
    float4 h[8];
    const float w[4] = {pre[0], pre[1], pre[2], pre[3]};
    const uint2* rows = reinterpret_cast<const uint2*>(streams + size_t(token) * 2 * width);
    float squares = 0.f;
    // In the last round of a width that 1024 does not divide only some of the warps have columns.
    const unsigned quads = width / 4;
#pragma unroll
    for (unsigned q = 0; q < 8; q++) {
        if (q * 256 + threadIdx.x < quads) {
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const uint2 v = rows[s * (width / 4) + q * 256 + threadIdx.x];
                const float2 a = longwave::widen(v.x), b = longwave::widen(v.y);
                sum = make_float4(fmaf(w[s], a.x, sum.x), fmaf(w[s], a.y, sum.y), fmaf(w[s], b.x, sum.z), fmaf(w[s], b.y, sum.w));
            }
            h[q] = make_float4(longwave::round_bf16(sum.x), longwave::round_bf16(sum.y), longwave::round_bf16(sum.z),
                               longwave::round_bf16(sum.w));
            squares += h[q].x * h[q].x + h[q].y * h[q].y + h[q].z * h[q].z + h[q].w * h[q].w;
        }
    }
    const float factor = rsqrtf(longwave::block_sum(squares) / float(width) + norm_eps);
#pragma unroll
    for (unsigned q = 0; q < 8; q++) {
        const unsigned at = q * 256 + threadIdx.x;
        if (at < quads) {
            const float4 g = __ldg(reinterpret_cast<const float4*>(weight) + at);
            const float y0 = longwave::round_bf16(h[q].x * factor * g.x), y1 = longwave::round_bf16(h[q].y * factor * g.y);
            const float y2 = longwave::round_bf16(h[q].z * factor * g.z), y3 = longwave::round_bf16(h[q].w * factor * g.w);
            reinterpret_cast<uint2*>(normed)[size_t(token) * (width / 4) + at] =
                make_uint2(longwave::narrow(y0, y1), longwave::narrow(y2, y3));
            // A warp has 128 neighbouring columns: one group.
            codes[size_t(token) * (width / 4) + at] =
                longwave::quantise_group(y0, y1, y2, y3, scales + size_t(token) * (width / 128) + at / 32);
        }
    }
}

// Grid (width / 1024 rounded up, tokens), 256 threads. y bf16 [tokens, width], the sublayer's output.
extern "C" __global__ void __launch_bounds__(256)
mhc_post(uint32_t* __restrict__ streams, const uint32_t* __restrict__ y, const float* __restrict__ mix, unsigned width) {
    longwave::overlap();
    const unsigned token = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x;
    if (at >= width / 4) {
        return;
    }
    const float* m = mix + size_t(token) * 20;
    uint2* rows = reinterpret_cast<uint2*>(streams + size_t(token) * 2 * width);
    const uint2 v = reinterpret_cast<const uint2*>(y)[size_t(token) * (width / 4) + at];
    const float2 ya = longwave::widen(v.x), yb = longwave::widen(v.y);
    float4 old[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint2 x = rows[i * (width / 4) + at];
        const float2 a = longwave::widen(x.x), b = longwave::widen(x.y);
        old[i] = make_float4(a.x, a.y, b.x, b.y);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float p = __ldg(m + j);
        float4 sum = make_float4(p * ya.x, p * ya.y, p * yb.x, p * yb.y);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float c = __ldg(m + 4 + 4 * i + j);
            sum = make_float4(fmaf(c, old[i].x, sum.x), fmaf(c, old[i].y, sum.y), fmaf(c, old[i].z, sum.z), fmaf(c, old[i].w, sum.w));
        }
        rows[j * (width / 4) + at] = make_uint2(longwave::narrow(sum.x, sum.y), longwave::narrow(sum.z, sum.w));
    }
}
