// Rows of 512 and 128 channels with the CPU's roundings, bit for bit: norm, exponential, rotation, storing.
#pragma once
#include <stdint.h>

#include "bf16.cuh"
#include "fp8.cuh"
#include "pages.cuh"

namespace longwave {

// Sum over sixteen neighbouring lanes, in the CPU's tree.
__device__ __forceinline__ float sixteen_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 2);
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    v += __shfl_xor_sync(0xffffffffu, v, 4);
    return v + __shfl_xor_sync(0xffffffffu, v, 8);
}

// 1 / sqrt(mean of squares + eps).
__device__ __forceinline__ float inverse_rms(float squares, unsigned width, float eps) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, float(width)), eps)));
}

// The same of a row in shared memory, computed by every sixteen lanes alike. All threads of a warp call it.
__device__ __forceinline__ float inverse_rms_of(const float* row, unsigned width, float eps) {
    float squares = 0.f;
#pragma unroll 8
    for (unsigned i = threadIdx.x % 16; i < width; i += 16) {
        squares = fmaf(row[i], row[i], squares);
    }
    return inverse_rms(sixteen_sum(squares), width, eps);
}

// e^v for v <= 88; 0 below -87.3.
__device__ __forceinline__ float exp_of(float v) {
    const float x = v > -87.3f ? v : -87.3f;
    const float n = rintf(__fmul_rn(x, 1.44269504f));
    float r = fmaf(n, -0.6933594f, x);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.f / 5040.f;
    p = fmaf(p, r, 1.f / 720.f);
    p = fmaf(p, r, 1.f / 120.f);
    p = fmaf(p, r, 1.f / 24.f);
    p = fmaf(p, r, 1.f / 6.f);
    p = fmaf(p, r, 0.5f);
    p = __fadd_rn(fmaf(p, __fmul_rn(r, r), r), 1.f);
    p = __fmul_rn(p, __int_as_float((__float2int_rn(n) + 127) << 23));
    return v > -87.3f ? p : 0.f;
}

// One pair turned by an angle; back with -sine.
__device__ __forceinline__ float2 turn(float a, float b, float cosine, float sine) {
    return make_float2(__fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine)),
                       __fadd_rn(__fmul_rn(a, sine), __fmul_rn(b, cosine)));
}

// Two neighbouring pairs of a tail of 64 channels, the first of them pair `pair` (even). angles: 32 cosines, 32 sines.
template <bool BACK = false>
__device__ __forceinline__ float4 turn(float4 v, const float* angles, unsigned pair) {
    const float2 c = __ldg(reinterpret_cast<const float2*>(angles + pair));
    float2 s = __ldg(reinterpret_cast<const float2*>(angles + 32 + pair));
    if constexpr (BACK) {
        s = make_float2(-s.x, -s.y);
    }
    const float2 low = turn(v.x, v.y, c.x, s.x), high = turn(v.z, v.w, c.y, s.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ float4 round_bf16(float4 v) {
    return make_float4(round_bf16(v.x), round_bf16(v.y), round_bf16(v.z), round_bf16(v.w));
}

__device__ __forceinline__ float most_of(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Stores a row of 512 channels in slot `slot` of a page of `rows` rows (model.md 11.2): 128 threads, thread i has
// channels 4 i .. 4 i + 3. Whole warps call it, with the same page.
template <bool FP8>
__device__ __forceinline__ void store_main(uint8_t* page, unsigned slot, unsigned rows, unsigned i, float4 v) {
    const uint2 plain = make_uint2(narrow(v.x, v.y), narrow(v.z, v.w));
    if constexpr (!FP8) {
        *reinterpret_cast<uint2*>(page + size_t(slot) * 1024 + i * 8) = plain;
        return;
    }
    float amax = most_of(v);
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    }
    const uint32_t byte = scale_byte(amax);
    const float inverse = inverse_of(byte);
    uint8_t* const data = page + size_t(slot) * 576;
    uint8_t* const scales = page + size_t(rows) * 576 + size_t(slot) * 8;
    if (i < 112) {
        *reinterpret_cast<uint32_t*>(data + i * 4) = codes_of(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    } else {
        *reinterpret_cast<uint2*>(data + 448 + (i - 112) * 8) = plain;
    }
    if (i % 16 == 0) {
        scales[i / 16] = i < 112 ? byte : 0;
    }
}

}  // namespace longwave
