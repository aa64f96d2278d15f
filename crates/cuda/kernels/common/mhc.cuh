// Arithmetic of hyper-connections (model.md 5), the same bits for kernels that cut it differently: products of columns come from
// units of 128 columns, squares of a sublayer's input from groups of 128.
#pragma once
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/fp8.cuh"
#include "common/reduce.cuh"

namespace longwave::hyper {

constexpr int ROWS = 24;
// Values of a partial sum: 24 products and the squares, padded.
constexpr int PARTIAL = 32;
// Columns of each stream in a partial sum.
constexpr int COLUMNS = 128;

// Two columns of a sublayer's output, whichever form it has.
__device__ __forceinline__ float2 output_of(const uint32_t* y, const float2* wide_y, size_t at) {
    if (wide_y) {
        const float2 v = wide_y[at];
        return make_float2(round_bf16(v.x), round_bf16(v.y));
    }
    return widen(y[at]);
}

// A stream's two columns after a sublayer with output y: post, then comb with the source stream first.
__device__ __forceinline__ float2 updated(const float* mix, unsigned stream, float2 y, const float2 (&old)[4]) {
    const float p = mix[stream];
    float2 sum = make_float2(__fmul_rn(p, y.x), __fmul_rn(p, y.y));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float c = mix[4 + 4 * i + stream];
        sum = make_float2(fmaf(c, old[i].x, sum.x), fmaf(c, old[i].y, sum.y));
    }
    return sum;
}

// Sums over a warp of the products of two columns per lane with their weights, and of their squares: lane l has row l.
__device__ __forceinline__ float products_of(const float2 (&f)[ROWS], float2 x) {
    float v[PARTIAL];
#pragma unroll
    for (int r = 0; r < PARTIAL; r++) {
        v[r] = r < ROWS    ? fmaf(f[r].x, x.x, __fmul_rn(f[r].y, x.y))
               : r == ROWS ? fmaf(x.x, x.x, __fmul_rn(x.y, x.y))
                           : 0.f;
    }
    return warp_sums(v);
}

__device__ __forceinline__ float sigmoid(float v) {
    return 1.f / (1.f + __expf(-v));
}

// What products are multiplied with, of all streams' squares.
__device__ __forceinline__ float norm_of(const float* dots, unsigned width, float eps) {
    return rsqrtf(dots[ROWS] / float(4 * width) + eps);
}

// A stream's weight in the sublayer's input.
__device__ __forceinline__ float weight_of(float dot, float r, float factor, float base, float eps) {
    return sigmoid(fmaf(__fmul_rn(dot, r), factor, base)) + eps;
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

// The mix that is needed after the sublayer, post and comb with the source stream first: a warp, in which every lane has the whole
// 4 x 4 matrix; the first one writes.
__device__ __forceinline__ void make_mix(const float* dots, float r, const float* factors, const float* bases, float eps,
                                         unsigned iters, float* mix) {
    float c[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        c[i] = fmaf(__fmul_rn(dots[8 + i], r), factors[2], bases[8 + i]);
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
        c[i] += eps;
    }
    normalise<4>(c, eps);
    for (unsigned n = 1; n < iters; n++) {
        normalise<1>(c, eps);
        normalise<4>(c, eps);
    }
    if (threadIdx.x % 32 == 0) {
        float4* to = reinterpret_cast<float4*>(mix);
        float post[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            post[i] = 2.f * sigmoid(fmaf(__fmul_rn(dots[4 + i], r), factors[1], bases[4 + i]));
        }
        to[0] = make_float4(post[0], post[1], post[2], post[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[1 + i] = make_float4(c[4 * i], c[4 * i + 1], c[4 * i + 2], c[4 * i + 3]);
        }
    }
}

// Four columns of the sublayer's input, from those of all streams.
__device__ __forceinline__ float4 collapsed(const uint2 (&x)[4], const float (&w)[4]) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const float2 a = widen(x[s].x), b = widen(x[s].y);
        sum = make_float4(fmaf(w[s], a.x, sum.x), fmaf(w[s], a.y, sum.y), fmaf(w[s], b.x, sum.z), fmaf(w[s], b.y, sum.w));
    }
    return make_float4(round_bf16(sum.x), round_bf16(sum.y), round_bf16(sum.z), round_bf16(sum.w));
}

__device__ __forceinline__ float squares_of(float4 h) {
    return fmaf(h.x, h.x, __fmul_rn(h.y, h.y)) + fmaf(h.z, h.z, __fmul_rn(h.w, h.w));
}

// Four normed columns per lane of a warp, which has a group of 128: as bf16 and as codes at `at`, a fourth of the column, and the
// group's scale.
__device__ __forceinline__ void write_input(float4 h, float factor, float4 gains, uint32_t* normed, uint32_t* codes, size_t at,
                                            float* scale) {
    const float y0 = round_bf16(h.x * factor * gains.x), y1 = round_bf16(h.y * factor * gains.y);
    const float y2 = round_bf16(h.z * factor * gains.z), y3 = round_bf16(h.w * factor * gains.w);
    reinterpret_cast<uint2*>(normed)[at] = make_uint2(narrow(y0, y1), narrow(y2, y3));
    codes[at] = quantise_group(y0, y1, y2, y3, scale);
}

}  // namespace longwave::hyper
