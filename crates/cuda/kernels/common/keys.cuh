// What follows the fused projection [wq_a; wkv] of a row (model.md 6.1, 6.2): norm of the query latent, as e4m3 with a scale per 128, or
// norm, rotation and storing of the window row. Bits are those of the CPU.
#pragma once
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/fp8.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"

namespace longwave {

constexpr unsigned MOST_LATENT = 2048, KEY = 512;

// y = bf16(x * r * w) of four channels.
__device__ __forceinline__ float4 scaled(const float* row, const float* weight, unsigned at, float r) {
    const float4 x = *reinterpret_cast<const float4*>(row + at);
    const float4 w = __ldg(reinterpret_cast<const float4*>(weight + at));
    return round_bf16(make_float4(x.x * r * w.x, x.y * r * w.y, x.z * r * w.z, x.w * r * w.w));
}

// A block of 256 threads has a part of a row. A local table of null is none.
template <bool FP8>
__device__ __forceinline__ void project_keys(bool of_query, unsigned token, const float* __restrict__ projected,
                                             const BatchRow* __restrict__ rows, const float* __restrict__ angles,
                                             const float* __restrict__ q_norm, const float* __restrict__ kv_norm,
                                             uint8_t* __restrict__ codes, float* __restrict__ scales, const Pages& window,
                                             const Pages& local, unsigned q_width, float eps) {
    __shared__ __align__(16) float row[MOST_LATENT];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const BatchRow at = rows[token];
    if (at.seat == UNMAPPED) {
        return;
    }
    const unsigned width = of_query ? q_width : KEY;
    const float* from = projected + size_t(token) * (q_width + KEY) + (of_query ? 0 : q_width);
    for (unsigned i = threadIdx.x; i < width; i += 256) {
        row[i] = round_bf16(__ldg(from + i));
    }
    __syncthreads();
    const float r = inverse_rms_of(row, width, eps);
    if (of_query) {
        for (unsigned group = warp; group < q_width / 128; group += 8) {
            const float4 y = scaled(row, q_norm, group * 128 + lane * 4, r);
            float amax = most_of(y);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
            }
            const uint32_t byte = scale_byte(amax);
            const float inverse = inverse_of(byte);
            *reinterpret_cast<uint32_t*>(codes + size_t(token) * q_width + group * 128 + lane * 4) =
                codes_of(y.x * inverse, y.y * inverse, y.z * inverse, y.w * inverse);
            if (lane == 0) {
                scales[size_t(token) * (q_width / 128) + group] = scale_of(byte);
            }
        }
    } else if (threadIdx.x < 128) {
        const unsigned i = threadIdx.x;
        float4 y = scaled(row, kv_norm, i * 4, r);
        if (i >= 112) {
            y = round_bf16(turn(y, angles + size_t(token) * 64, (i - 112) * 2));
        }
        uint8_t* const kept = window.page(at.seat, at.position);
        if (kept) {
            store_main<FP8>(kept, window.slot(at.position), 1u << window.shift, i, y);
        }
        uint8_t* const near = local.table ? local.page(at.seat, at.position) : nullptr;
        if (near) {
            store_main<FP8>(near, local.slot(at.position), 1u << local.shift, i, y);
        }
    }
}

}  // namespace longwave
