// Entries of compressors (model.md 6.4): norm, rotation and storing of a pooled row, and all of ratio 4. compress.cu says what the
// operands are. Bits are those of the CPU.
#pragma once
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/fp8.cuh"
#include "common/index.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"

namespace longwave {

enum class Entry { MainFp8, MainBf16, IndexFp8, IndexFp4, IndexBf16 };

// Stores a key of 128 channels: one warp, lane l has channels 4 l .. 4 l + 3.
template <Entry FORMAT>
__device__ __forceinline__ void store_index(uint8_t* page, unsigned slot, unsigned rows, unsigned lane, float4 v) {
    if constexpr (FORMAT == Entry::IndexBf16) {
        *reinterpret_cast<uint2*>(page + size_t(slot) * 256 + lane * 8) =
            make_uint2(narrow(v.x, v.y), narrow(v.z, v.w));
    } else if constexpr (FORMAT == Entry::IndexFp8) {
        const uint32_t byte = scale_byte(most_among<32>(most_of(v)));
        const float inverse = inverse_of(byte);
        *reinterpret_cast<uint32_t*>(page + size_t(slot) * 128 + lane * 4) =
            codes_of(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
        if (lane == 0) {
            *reinterpret_cast<float*>(page + size_t(rows) * 128 + size_t(slot) * 4) = scale_of(byte);
        }
    } else {
        v = round_bf16(hadamard(v));
        const uint32_t byte = scale_byte_fp4(most_among<8>(most_of(v)));
        const float s = scale_of(byte);
        const uint32_t pair = e2m1(v.x / s) | e2m1(v.y / s) << 4 | e2m1(v.z / s) << 8 | e2m1(v.w / s) << 12;
        *reinterpret_cast<uint16_t*>(page + size_t(slot) * 64 + lane * 2) = static_cast<uint16_t>(pair);
        if (lane % 8 == 0) {
            page[size_t(rows) * 64 + size_t(slot) * 4 + lane / 8] = static_cast<uint8_t>(byte);
        }
    }
}

// Norm, rotation and storing of a pooled row in shared memory as entry `index`. Threads 0 .. width / 4 - 1 call it, whole
// warps.
template <Entry FORMAT>
__device__ __forceinline__ void store_entry(const float* row, const float* norm, const float* angles, const Pages& entries,
                                            unsigned seat, unsigned index, float eps) {
    constexpr bool MAIN = FORMAT == Entry::MainFp8 || FORMAT == Entry::MainBf16;
    constexpr unsigned WIDTH = MAIN ? 512 : 128;
    const unsigned i = threadIdx.x;
    const float r = inverse_rms_of(row, WIDTH, eps);
    const float4 u = *reinterpret_cast<const float4*>(row + i * 4);
    const float4 w = __ldg(reinterpret_cast<const float4*>(norm) + i);
    float4 v = make_float4(u.x * r * w.x, u.y * r * w.y, u.z * r * w.z, u.w * r * w.w);
    if (i * 4 >= WIDTH - 64) {
        v = turn(v, angles, (i - (WIDTH - 64) / 4) * 2);
    }
    uint8_t* const page = entries.page(seat, index);
    if (!page) {
        return;
    }
    const unsigned slot = entries.slot(index), rows = 1u << entries.shift;
    if constexpr (MAIN) {
        store_main<FORMAT == Entry::MainFp8>(page, slot, rows, i, v);
    } else {
        store_index<FORMAT>(page, slot, rows, i, v);
    }
}

// Ratio 4, one block per row, at least a thread for four channels: stores its state, and the entry of the group that it ends.
template <Entry FORMAT>
__device__ __forceinline__ void compress4(const float* __restrict__ products, const float* __restrict__ ape,
                                          const BatchRow* __restrict__ rows, const float* __restrict__ angles,
                                          const float* __restrict__ norm, const Pages& state, const Pages& entries,
                                          float eps) {
    constexpr bool MAIN = FORMAT == Entry::MainFp8 || FORMAT == Entry::MainBf16;
    constexpr unsigned WIDTH = MAIN ? 512 : 128, N = 2 * WIDTH;
    __shared__ __align__(16) float pooled[WIDTH];
    const BatchRow at = rows[blockIdx.x];
    if (at.seat == UNMAPPED) {
        return;
    }
    uint8_t* const kept = state.page(at.seat, at.position);
    if (kept) {
        const float* from = products + size_t(blockIdx.x) * 2 * N;
        float* to = reinterpret_cast<float*>(kept) + size_t(state.slot(at.position)) * 2 * N;
        for (unsigned i = threadIdx.x; i < N; i += blockDim.x) {
            to[i] = __ldg(from + i);
            to[N + i] = __ldg(from + N + i) + __ldg(ape + at.position % 4 * N + i);
        }
    }
    if (at.position % 4 != 3) {
        return;
    }
    // Rows 0 .. 3 feed their first half, rows 4 .. 7 their second one. The first entry has no rows before its own.
    const unsigned first = at.position < 7 ? 4 : 0;
    const unsigned base = at.position - 7;  // wraps for the first entry, whose rows 0 .. 3 are not read
    bool whole = true;
    for (unsigned channel = threadIdx.x; channel < WIDTH; channel += blockDim.x) {
        float values[8], scores[8];
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            if (i >= first) {
                const unsigned position = base + i, column = channel + (i < 4 ? 0 : WIDTH);
                if (position >= at.start) {
                    const float* row = products + size_t(at.start_row + position - at.start) * 2 * N;
                    values[i] = __ldg(row + column);
                    scores[i] = __ldg(row + N + column) + __ldg(ape + position % 4 * N + column);
                } else {
                    const uint8_t* page = state.page(at.seat, position);
                    whole = whole && page;
                    const float* row = reinterpret_cast<const float*>(page) + size_t(state.slot(position)) * 2 * N;
                    values[i] = page ? row[column] : 0.f;
                    scores[i] = page ? row[N + column] : 0.f;
                }
            }
        }
        float most = first ? scores[4] : scores[0];
#pragma unroll
        for (unsigned i = 1; i < 8; i++) {
            if (i > first) {
                most = most > scores[i] ? most : scores[i];
            }
        }
        float sum = 0.f, weighted = 0.f;
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            if (i >= first) {
                const float p = exp_of(scores[i] - most);
                sum += p;
                weighted = fmaf(p, values[i], weighted);
            }
        }
        pooled[channel] = weighted / sum;
    }
    // An entry whose earlier rows are not there is not written.
    if (!__syncthreads_and(whole)) {
        return;
    }
    if (threadIdx.x < WIDTH / 4) {
        store_entry<FORMAT>(pooled, norm, angles + size_t(blockIdx.x) * 64, entries, at.seat, at.position / 4, eps);
    }
}

}  // namespace longwave
