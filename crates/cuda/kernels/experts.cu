// architectures: 90a 100a
// Between and after the products of the experts (model.md 7.2), to the bits of the CPU's.
//   swiglu   gate and up to the quantised input of the down product
//   combine  shared expert plus routed experts in the order of choice
//   combine_part  the same of the experts that a rank has, not rounded: other ranks have the rest
// Every value stands alone; padded tokens have no pairs and get zeros.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/fp8.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"

namespace {

__device__ __forceinline__ float activate(float gate, float up, float limit, float weight) {
    float g = longwave::round_bf16(gate), u = longwave::round_bf16(up);
    g = g < limit ? g : limit;
    u = u < limit ? u : limit;
    u = u > -limit ? u : -limit;
    const float e = longwave::exp_of(-(g > -80.f ? g : -80.f));
    return longwave::round_bf16(__fmul_rn(__fmul_rn(__fdiv_rn(g, __fadd_rn(1.f, e)), u), weight));
}

}  // namespace

// y float [rows, 2, inner]: gate, then up. codes [rows, inner], scales [rows, inner / 128]. Row p has the weight
// weights[sources[p]], and nothing is done for UNMAPPED; without sources all weights are 1. A warp per 128 columns.
extern "C" __global__ void __launch_bounds__(256)
swiglu(const float* __restrict__ y, const float* __restrict__ weights, const unsigned* __restrict__ sources,
       uint32_t* __restrict__ codes, float* __restrict__ scales, unsigned rows, unsigned inner, float limit) {
    longwave::overlap();
    const unsigned per_row = inner / 128, lane = threadIdx.x % 32;
    const unsigned long long group = blockIdx.x * 8ull + threadIdx.x / 32;
    const unsigned row = static_cast<unsigned>(group / per_row), at = static_cast<unsigned>(group % per_row) * 128 + 4 * lane;
    if (row >= rows) {
        return;
    }
    float weight = 1.f;
    if (sources) {
        const unsigned source = sources[row];
        if (source == longwave::UNMAPPED) {
            return;
        }
        weight = weights[source];
    }
    const float4 g = *reinterpret_cast<const float4*>(y + size_t(row) * 2 * inner + at);
    const float4 u = *reinterpret_cast<const float4*>(y + size_t(row) * 2 * inner + inner + at);
    const float a = activate(g.x, u.x, limit, weight), b = activate(g.y, u.y, limit, weight);
    const float c = activate(g.z, u.z, limit, weight), d = activate(g.w, u.w, limit, weight);
    codes[group * 32 + lane] = longwave::quantise_group(a, b, c, d, scales + group);
}

namespace {

__device__ __forceinline__ float4 rounded(const float4& v) {
    return make_float4(longwave::round_bf16(v.x), longwave::round_bf16(v.y), longwave::round_bf16(v.z),
                       longwave::round_bf16(v.w));
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

}  // namespace

// Grid (width / 1024 rounded up, tokens), 256 threads. shared float [tokens, width], routed float [places, width], places
// u32 [tokens, k]; out bf16 [tokens, width].
extern "C" __global__ void __launch_bounds__(256)
combine(const float4* __restrict__ shared, const float4* __restrict__ routed, const unsigned* __restrict__ places,
        uint2* __restrict__ out, unsigned width, unsigned k) {
    longwave::overlap();
    const unsigned token = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x, quads = width / 4;
    if (at >= quads) {
        return;
    }
    const unsigned* own = places + size_t(token) * k;
    if (own[0] == longwave::UNMAPPED) {
        out[size_t(token) * quads + at] = make_uint2(0, 0);
        return;
    }
    float4 sum = rounded(routed[size_t(own[0]) * quads + at]);
    for (unsigned slot = 1; slot < k; slot++) {
        sum = add(sum, rounded(routed[size_t(own[slot]) * quads + at]));
    }
    const float4 s = rounded(shared[size_t(token) * quads + at]);
    out[size_t(token) * quads + at] = make_uint2(longwave::narrow(s.x + sum.x, s.y + sum.y), longwave::narrow(s.z + sum.z, s.w + sum.w));
}

// As above; places of experts elsewhere are UNMAPPED. shared is null where other ranks have all of it. choices u32
// [tokens, k] are UNMAPPED for a padded token. out float [tokens, width].
extern "C" __global__ void __launch_bounds__(256)
combine_part(const float4* __restrict__ shared, const float4* __restrict__ routed, const unsigned* __restrict__ places,
             const unsigned* __restrict__ choices, float4* __restrict__ out, unsigned width, unsigned k) {
    longwave::overlap();
    const unsigned token = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x, quads = width / 4;
    if (at >= quads) {
        return;
    }
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (choices[size_t(token) * k] != longwave::UNMAPPED) {
        for (unsigned slot = 0; slot < k; slot++) {
            const unsigned place = places[size_t(token) * k + slot];
            if (place != longwave::UNMAPPED) {
                sum = add(sum, rounded(routed[size_t(place) * quads + at]));
            }
        }
        if (shared) {
            sum = add(sum, shared[size_t(token) * quads + at]);
        }
    }
    out[size_t(token) * quads + at] = sum;
}
