// architectures: 90a 100a
// The two ends of the model (model.md 4): token embeddings into the four streams, and streams into the input of the head.
// Sums have one order whatever the number of rows. width % 128 == 0.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/reduce.cuh"

// Grid tokens, 256 threads: all four streams are the embedding, bf16 [vocab, width]. Token 0xffffffff is a padded row.
extern "C" __global__ void __launch_bounds__(256)
embed(const uint4* __restrict__ table, const unsigned* __restrict__ tokens, uint4* __restrict__ streams, unsigned width) {
    const unsigned token = tokens[blockIdx.x], pieces = width / 8;
    uint4* to = streams + size_t(blockIdx.x) * 4 * pieces;
    for (unsigned i = threadIdx.x; i < pieces; i += 256) {
        const uint4 v = token == 0xffffffffu ? make_uint4(0, 0, 0, 0) : __ldg(table + size_t(token) * pieces + i);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            to[s * pieces + i] = v;
        }
    }
}

// Grid rows, 256 threads: row rows[i] of the streams, mixed by fn [4, 4 width], base [4], scale [1], and normed; out bf16
// [rows, width].
extern "C" __global__ void __launch_bounds__(256)
collapse(const uint32_t* __restrict__ streams, const unsigned* __restrict__ rows, const float2* __restrict__ fn,
         const float* __restrict__ base, const float* __restrict__ scale, const float2* __restrict__ weight,
         uint32_t* __restrict__ out, unsigned width, float norm_eps, float hc_eps) {
    const uint32_t* x = streams + size_t(rows[blockIdx.x]) * 2 * width;
    float dots[4] = {}, squares = 0.f;
    for (unsigned i = threadIdx.x; i < 2 * width; i += 256) {
        const float2 v = longwave::widen(x[i]);
        squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float2 f = __ldg(fn + size_t(r) * 2 * width + i);
            dots[r] = fmaf(f.x, v.x, fmaf(f.y, v.y, dots[r]));
        }
    }
    const float factor = rsqrtf(longwave::block_sum(squares) / float(4 * width) + norm_eps);
    float w[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float m = longwave::block_sum(dots[r]) * factor * scale[0] + base[r];
        w[r] = 1.f / (1.f + __expf(-m)) + hc_eps;
    }
    const auto mixed = [&](unsigned i) {
        float2 sum = make_float2(0.f, 0.f);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const float2 v = longwave::widen(x[s * (width / 2) + i]);
            sum = make_float2(fmaf(w[s], v.x, sum.x), fmaf(w[s], v.y, sum.y));
        }
        return make_float2(longwave::round_bf16(sum.x), longwave::round_bf16(sum.y));
    };
    float own = 0.f;
    for (unsigned i = threadIdx.x; i < width / 2; i += 256) {
        const float2 h = mixed(i);
        own = fmaf(h.x, h.x, fmaf(h.y, h.y, own));
    }
    const float norm = rsqrtf(longwave::block_sum(own) / float(width) + norm_eps);
    for (unsigned i = threadIdx.x; i < width / 2; i += 256) {
        const float2 h = mixed(i), g = __ldg(weight + i);
        out[size_t(blockIdx.x) * (width / 2) + i] = longwave::narrow(h.x * norm * g.x, h.y * norm * g.y);
    }
}
