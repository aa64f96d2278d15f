// Products of hyper-connections (model.md 5) on the tensor cores. fn's rows are A, tokens are the eight columns of B, so a token has the
// same bits beside any others. A float of fn is its upper eleven bits and the rest, each one value of tf32; of the rest, which has thirteen
// bits at most, the tensor cores take eleven, so that a weight is off by less than its last two bits. Streams are bf16, which tf32 holds.
//
// A warp has sixteen columns of every stream. With g = lane / 4 and c = lane % 4 a lane has columns 4 c .. 4 c + 3 of rows g, g + 8 and
// g + 16; columns are permuted alike in both operands. Sums of eight warps, a unit of 128 columns, are added in the order of the warps.
#pragma once
#include <stdint.h>

#include "common/mhc.cuh"
#include "common/mma.cuh"

namespace longwave::hyper {

// Tokens that are multiplied at once.
constexpr unsigned TOKENS = 8;
// A token's sums of a warp in shared memory: rows of a fragment's lanes are in different banks.
constexpr unsigned PITCH = 36;
// Fours of a token's mix.
constexpr unsigned MIX = 5;

// A lane's columns of fn.
struct Function {
    float4 rows[3][4];

    // `quads` fours of columns a stream; `column` is the lane's.
    __device__ __forceinline__ void load(const float4* fn, unsigned quads, unsigned column) {
        const unsigned g = threadIdx.x % 32 / 4;
#pragma unroll
        for (unsigned o = 0; o < 3; o++) {
#pragma unroll
            for (unsigned s = 0; s < 4; s++) {
                rows[o][s] = __ldg(fn + size_t(8 * o + g) * (4 * quads) + s * quads + column);
            }
        }
    }

    // From here on the compiler does not know what is in them: it would keep both parts of every value across a loop otherwise.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int i = 0; i < 12; i++) {
            float4& v = rows[i / 4][i % 4];
            asm volatile("" : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w));
        }
    }
};

__device__ __forceinline__ float upper_bits(float v) {
    return __uint_as_float(__float_as_uint(v) & 0xffffe000u);
}

// Sums of a warp.
struct Products {
    // Upper bits of rows 0 to 15; of rows 16 to 23, both parts beside each other; the rest of rows 0 to 15.
    float sums[3][4] = {};

    // Adds a stream's four columns of a lane, of token g.
    __device__ __forceinline__ void add(const Function& f, unsigned stream, float4 x) {
        const auto step = [&](float f0, float f1, float f2, float g0, float g1, float g2, float x0, float x1) {
            const float u0 = upper_bits(f0), u1 = upper_bits(f1), u2 = upper_bits(f2);
            const float v0 = upper_bits(g0), v1 = upper_bits(g1), v2 = upper_bits(g2);
            mma_tf32(sums[0], u0, u1, v0, v1, x0, x1);
            mma_tf32(sums[1], u2, f2 - u2, v2, g2 - v2, x0, x1);
            mma_tf32(sums[2], f0 - u0, f1 - u1, g0 - v0, g1 - v1, x0, x1);
        };
        const float4 a = f.rows[0][stream], b = f.rows[1][stream], d = f.rows[2][stream];
        step(a.x, b.x, d.x, a.y, b.y, d.y, x.x, x.y);
        step(a.z, b.z, d.z, a.w, b.w, d.w, x.z, x.w);
    }

    // Row 8 o + g of token 2 c + n.
    __device__ __forceinline__ float of(int o, int n) const {
        return o == 2 ? sums[1][n] + sums[1][2 + n] : sums[0][2 * o + n] + sums[2][2 * o + n];
    }
};

// The squares of a warp's columns, of those of a lane's streams.
__device__ __forceinline__ float over_streams(const float (&squares)[4]) {
    return (squares[0] + squares[1]) + (squares[2] + squares[3]);
}

__device__ __forceinline__ float over_columns(float squares) {
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    return squares + __shfl_xor_sync(0xffffffffu, squares, 2);
}

// A warp's sums of all tokens and the squares of token g, to `to` [TOKENS, PITCH].
__device__ __forceinline__ void write_sums(const Products& products, float squares, float* to) {
    const unsigned g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int o = 0; o < 3; o++) {
            to[(2 * c + n) * PITCH + 8 * o + g] = products.of(o, n);
        }
    }
    if (c == 0) {
        to[g * PITCH + ROWS] = squares;
    }
}

// A row's sum over the eight warps of a unit, whose first one's sums are at `from`.
__device__ __forceinline__ float over_warps(const float* from, unsigned token, unsigned row) {
    float sum = 0.f;
#pragma unroll
    for (unsigned w = 0; w < 8; w++) {
        sum += from[(w * TOKENS + token) * PITCH + row];
    }
    return sum;
}

// A lane's four columns of token g's streams after a sublayer with output y: those of `stream` as bf16. `mix` is the token's.
__device__ __forceinline__ uint2 updated_four(const float* mix, unsigned stream, float4 y, const float4 (&old)[4]) {
    const float p = mix[stream];
    float4 sum = make_float4(__fmul_rn(p, y.x), __fmul_rn(p, y.y), __fmul_rn(p, y.z), __fmul_rn(p, y.w));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float k = mix[4 + 4 * i + stream];
        sum = make_float4(fmaf(k, old[i].x, sum.x), fmaf(k, old[i].y, sum.y), fmaf(k, old[i].z, sum.z), fmaf(k, old[i].w, sum.w));
    }
    return make_uint2(narrow(sum.x, sum.y), narrow(sum.z, sum.w));
}

__device__ __forceinline__ float4 widen_four(uint2 v) {
    const float2 low = widen(v.x), high = widen(v.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

// What was before: no sublayer, or one with its output in bf16, or in float that is still to be rounded.
enum class Before { Nothing, Rounded, Wide };

// What a lane has of a tile of eight tokens, as it comes from memory: four columns of token g's streams and of the output before.
struct Tile {
    uint2 x[4];
    uint4 y;

    template <Before BEFORE>
    __device__ __forceinline__ void load(const uint2* streams, const void* output, unsigned quads, unsigned column, unsigned token,
                                         unsigned tokens) {
        const bool there = token < tokens;
#pragma unroll
        for (unsigned s = 0; s < 4; s++) {
            x[s] = there ? streams[size_t(token) * (4 * quads) + s * quads + column] : make_uint2(0, 0);
        }
        const size_t at = size_t(token) * quads + column;
        y = make_uint4(0, 0, 0, 0);
        if constexpr (BEFORE == Before::Rounded) {
            const uint2 two = there ? static_cast<const uint2*>(output)[at] : make_uint2(0, 0);
            y.x = two.x;
            y.y = two.y;
        } else if constexpr (BEFORE == Before::Wide) {
            y = there ? static_cast<const uint4*>(output)[at] : y;
        }
    }

    template <Before BEFORE>
    __device__ __forceinline__ float4 output() const {
        if constexpr (BEFORE == Before::Wide) {
            return make_float4(round_bf16(__uint_as_float(y.x)), round_bf16(__uint_as_float(y.y)), round_bf16(__uint_as_float(y.z)),
                               round_bf16(__uint_as_float(y.w)));
        } else {
            return widen_four(make_uint2(y.x, y.y));
        }
    }

    // The streams after a sublayer with this output, whose mix is the token's.
    __device__ __forceinline__ void update(const float* mix, float4 output, uint2 (&to)[4]) const {
        float4 old[4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            old[s] = widen_four(x[s]);
        }
#pragma unroll
        for (unsigned s = 0; s < 4; s++) {
            to[s] = updated_four(mix, s, output, old);
        }
    }
};

// Adds token g's four columns of all streams that a lane has; the squares of the warp's columns.
__device__ __forceinline__ float multiply(Products& products, const Function& f, const uint2 (&x)[4]) {
    float squares[4];
#pragma unroll
    for (unsigned s = 0; s < 4; s++) {
        const float4 wide = widen_four(x[s]);
        products.add(f, s, wide);
        squares[s] = squares_of(wide);
    }
    return over_columns(over_streams(squares));
}

}  // namespace longwave::hyper
