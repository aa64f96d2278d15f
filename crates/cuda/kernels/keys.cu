// architectures: 90a 100a
// What follows the fused projection [wq_a; wkv] and wq_b (model.md 6.1, 6.2):
//   keys_*          norm of the query latent, as e4m3 with a scale per 128; norm, rotation and storing of the window row
//   gather_window   copies the window rows before a step to the pages of the step
//   queries         norm and rotation of query heads, as bf16
// Bits are those of the CPU: sums in sixteen lanes and its tree. Rows without a seat write nothing. Query latents of
// q_width % 128 == 0 and at most 2048 channels; window pages of 64 rows; angles [tokens, 64]: 32 cosines, 32 sines.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/keys.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"

namespace {

using longwave::BatchRow;
using longwave::KEY;
using longwave::Pages;
using longwave::round_bf16;

constexpr unsigned WINDOW = 128;

}  // namespace

// Grid (tokens, 2), 256 threads. projected [tokens, q_width + 512]; codes [tokens, q_width], scales [tokens, q_width / 128].
// A local table of null is none.
#define KEYS(name, fp8)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                                     \
        name(const float* projected, const BatchRow* rows, const float* angles, const float* q_norm, const float* kv_norm, \
             uint8_t* codes, float* scales, uint8_t* window_pool, const unsigned* window_table,                           \
             unsigned long long window_bytes, unsigned window_len, unsigned window_shift, uint8_t* local_pool,            \
             const unsigned* local_table, unsigned long long local_bytes, unsigned local_len, unsigned local_shift,       \
             unsigned q_width, float eps) {                                                                               \
        longwave::overlap();                                                                                             \
        const Pages window = {window_pool, window_table, window_bytes, window_len, window_shift};                         \
        const Pages local = {local_pool, local_table, local_bytes, local_len, local_shift};                               \
        longwave::project_keys<fp8>(blockIdx.y == 0, blockIdx.x, projected, rows, angles, q_norm, kv_norm, codes, scales, window, local, q_width, eps);                  \
    }

KEYS(keys_fp8, true)
KEYS(keys_bf16, false)

// Grid (sequences, 16), 256 threads: a warp copies a row. sequences [n, 2]: seat, first position of the step. Rows whose
// page is not there, on either side, are left out.
extern "C" __global__ void __launch_bounds__(256, 4)
gather_window(const uint2* __restrict__ sequences, const uint8_t* window_pool, const unsigned* window_table,
              unsigned long long window_bytes, unsigned window_len, unsigned window_shift, uint8_t* local_pool,
              const unsigned* local_table, unsigned long long local_bytes, unsigned local_len, unsigned local_shift,
              unsigned row_bytes) {
    longwave::overlap();
    const uint2 sequence = sequences[blockIdx.x];
    const unsigned back = blockIdx.y * 8 + threadIdx.x / 32 + 1, lane = threadIdx.x % 32;
    if (sequence.x == longwave::UNMAPPED || back > sequence.y || back >= WINDOW) {
        return;
    }
    const unsigned position = sequence.y - back;
    const Pages window = {const_cast<uint8_t*>(window_pool), window_table, window_bytes, window_len, window_shift};
    const Pages local = {local_pool, local_table, local_bytes, local_len, local_shift};
    const uint8_t* from = window.page(sequence.x, position);
    uint8_t* to = local.page(sequence.x, position);
    if (!from || !to) {
        return;
    }
    // 584 bytes are 576 of data and 8 of scales behind the data of all rows.
    const unsigned data = row_bytes & ~15u, slot = window.slot(position), there = local.slot(position);
    for (unsigned i = lane; i < data / 16; i += 32) {
        reinterpret_cast<uint4*>(to + size_t(there) * data)[i] = reinterpret_cast<const uint4*>(from + size_t(slot) * data)[i];
    }
    if (row_bytes != data && lane == 0) {
        reinterpret_cast<uint2*>(to + (size_t(data) << local.shift))[there] =
            reinterpret_cast<const uint2*>(from + (size_t(data) << window.shift))[slot];
    }
}

// Grid (heads / 16 rounded up, tokens), 256 threads: sixteen lanes have a head, lane l its channels l, l + 16, ...
// x [tokens, heads, 512], out the same as bf16.
extern "C" __global__ void __launch_bounds__(256)
queries(const float* __restrict__ x, const BatchRow* __restrict__ rows, const float* __restrict__ angles,
        uint32_t* __restrict__ out, unsigned heads, float eps) {
    longwave::overlap();
    const unsigned token = blockIdx.y, head = blockIdx.x * 16 + threadIdx.x / 16, lane = threadIdx.x % 16;
    if (rows[token].seat == longwave::UNMAPPED) {
        return;
    }
    // Lanes without a head compute along with the last one.
    const size_t at = (size_t(token) * heads + min(head, heads - 1)) * KEY;
    float v[32], squares = 0.f;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        v[i] = round_bf16(__ldg(x + at + i * 16 + lane));
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        squares = fmaf(v[i], v[i], squares);
    }
    const float r = longwave::inverse_rms(longwave::sixteen_sum(squares), KEY, eps);
    const float* of_token = angles + size_t(token) * 64;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        v[i] *= r;
        if (i >= 28) {
            const float other = __shfl_xor_sync(0xffffffffu, v[i], 1);
            const unsigned pair = (i - 28) * 8 + lane / 2;
            const float c = __ldg(of_token + pair), s = __ldg(of_token + 32 + pair);
            const float2 turned = lane % 2 ? longwave::turn(other, v[i], c, s) : longwave::turn(v[i], other, c, s);
            v[i] = lane % 2 ? turned.y : turned.x;
        }
    }
    // Even lanes store pairs of even i, odd lanes of odd i.
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const float other = __shfl_xor_sync(0xffffffffu, lane % 2 ? v[i] : v[i + 1], 1);
        const uint32_t pair = lane % 2 ? longwave::narrow(other, v[i + 1]) : longwave::narrow(v[i], other);
        if (head < heads) {
            out[at / 2 + (i + lane % 2) * 8 + lane / 2] = pair;
        }
    }
}
