// architectures: 90a 100a
// Both ends of the layers: the embedding into four streams, and the head's mix of the streams with its norm (model.md 5.4).
//   embed      four copies of a token's row; zeros for a padded token
//   head_mix   chosen rows of the streams, mixed and normed
// A row stands alone; sums have one order. width % 256 == 0 and width <= 8192.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/reduce.cuh"

// Grid tokens, 256 threads. ids u32 [tokens]; table bf16 [vocab, width]; streams bf16 [tokens, 4, width].
extern "C" __global__ void __launch_bounds__(256)
embed(const unsigned* __restrict__ ids, const uint4* __restrict__ table, uint4* __restrict__ streams, unsigned width) {
    longwave::overlap();
    const unsigned id = ids[blockIdx.x], pieces = width / 8;
    uint4* to = streams + size_t(blockIdx.x) * 4 * pieces;
    for (unsigned i = threadIdx.x; i < pieces; i += 256) {
        const uint4 v = id == longwave::UNMAPPED ? make_uint4(0, 0, 0, 0) : table[size_t(id) * pieces + i];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            to[s * pieces + i] = v;
        }
    }
}

// Grid n, 256 threads. rows u32 [n], rows of the streams; UNMAPPED gives zeros. function float [4, 4 * width], base [4],
// scale [1], weight [width]; out bf16 [n, width].
extern "C" __global__ void __launch_bounds__(256)
head_mix(const uint2* __restrict__ streams, const unsigned* __restrict__ rows, const float4* __restrict__ function,
         const float* __restrict__ base, const float* __restrict__ scale, const float4* __restrict__ weight,
         uint2* __restrict__ out, unsigned width, float norm_eps, float hc_eps) {
    longwave::overlap();
    const unsigned row = rows[blockIdx.x], quads = width / 4;
    uint2* to = out + size_t(blockIdx.x) * quads;
    if (row == longwave::UNMAPPED) {
        for (unsigned i = threadIdx.x; i < quads; i += 256) {
            to[i] = make_uint2(0, 0);
        }
        return;
    }
    const uint2* from = streams + size_t(row) * 4 * quads;
    float dots[4] = {}, squares = 0.f;
    for (unsigned i = threadIdx.x; i < 4 * quads; i += 256) {
        const uint2 v = from[i];
        const float2 a = longwave::widen(v.x), b = longwave::widen(v.y);
        squares += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float4 f = __ldg(function + size_t(r) * 4 * quads + i);
            dots[r] += f.x * a.x + f.y * a.y + f.z * b.x + f.w * b.y;
        }
    }
    const float inverse = 1.f / __fsqrt_rn(longwave::block_sum(squares) / float(4 * width) + norm_eps);
    float w[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float at = longwave::block_sum(dots[r]) * inverse * scale[0] + base[r];
        w[r] = 1.f / (1.f + expf(-at)) + hc_eps;
    }
    float4 h[8];
    float norm = 0.f;
#pragma unroll
    for (int q = 0; q < 8; q++) {
        const unsigned at = q * 256 + threadIdx.x;
        h[q] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (at < quads) {
            float4 sum = h[q];
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const uint2 v = from[s * quads + at];
                const float2 a = longwave::widen(v.x), b = longwave::widen(v.y);
                sum = make_float4(fmaf(w[s], a.x, sum.x), fmaf(w[s], a.y, sum.y), fmaf(w[s], b.x, sum.z), fmaf(w[s], b.y, sum.w));
            }
            h[q] = make_float4(longwave::round_bf16(sum.x), longwave::round_bf16(sum.y), longwave::round_bf16(sum.z),
                               longwave::round_bf16(sum.w));
        }
        norm += h[q].x * h[q].x + h[q].y * h[q].y + h[q].z * h[q].z + h[q].w * h[q].w;
    }
    const float factor = 1.f / __fsqrt_rn(longwave::block_sum(norm) / float(width) + norm_eps);
#pragma unroll
    for (int q = 0; q < 8; q++) {
        const unsigned at = q * 256 + threadIdx.x;
        if (at < quads) {
            const float4 g = __ldg(weight + at);
            to[at] = make_uint2(longwave::narrow(h[q].x * factor * g.x, h[q].y * factor * g.y),
                                longwave::narrow(h[q].z * factor * g.z, h[q].w * factor * g.w));
        }
    }
}
