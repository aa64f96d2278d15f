// architectures: 90a 100a
// y = W x for few tokens (decode): W e4m3 [rows, cols] with a float scale per 128 x 128 block, x e4m3 [tokens, cols] with
// a float scale per 128 columns, y float [tokens, rows]. linear_fp8.md has floor, design and measured steps.
//
// SPLIT warps share sixteen rows; warp w of them takes the column blocks w, w + SPLIT, ... A block of eight warps has
// 8 / SPLIT groups of sixteen rows. The order of every sum depends on the shape alone (SPLIT is chosen by it), so a
// token's result has the same bits in any batch. Needs rows % 16 == 0, cols % 128 == 0.
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include "common/mma.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int ROWS = 16;
constexpr int BLOCK = 128;
// Column blocks of a warp whose weights are on their way at once: 64 bytes per thread each.
constexpr int AHEAD = 2;

// Four e4m3 codes as two pairs of halves; exact.
__device__ __forceinline__ void widen(uint32_t codes, uint32_t& low, uint32_t& high) {
    const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffff), __NV_E4M3);
    const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16), __NV_E4M3);
    low = static_cast<uint32_t>(a.x) | static_cast<uint32_t>(a.y) << 16;
    high = static_cast<uint32_t>(b.x) | static_cast<uint32_t>(b.y) << 16;
}

// Weights of one thread in one column block: rows g and g + 8, columns 16 c .. and 64 + 16 c .. of the block.
struct Tile {
    uint4 v[2][2];

    __device__ __forceinline__ void load(const uint8_t* low, const uint8_t* high) {
        v[0][0] = __ldcs(reinterpret_cast<const uint4*>(low));
        v[0][1] = __ldcs(reinterpret_cast<const uint4*>(low + 64));
        v[1][0] = __ldcs(reinterpret_cast<const uint4*>(high));
        v[1][1] = __ldcs(reinterpret_cast<const uint4*>(high + 64));
    }
};

// TILES tiles of eight tokens.
template <int TILES, int SPLIT>
__device__ __forceinline__ void linear(const uint8_t* __restrict__ w, const float* __restrict__ w_scales,
                                       const uint8_t* __restrict__ x, const float* __restrict__ x_scales,
                                       float* __restrict__ y, unsigned rows, unsigned cols, unsigned tokens) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned blocks = cols / BLOCK, part_of_row = warp % SPLIT;
    // Behind the last rows a group computes the last ones again and stores nothing.
    const unsigned wanted = (blockIdx.x * (WARPS / SPLIT) + warp / SPLIT) * ROWS;
    const unsigned first = min(wanted, rows - ROWS);
    const uint8_t* low = w + size_t(first + g) * cols + 16 * c;
    const uint8_t* high = low + size_t(8) * cols;
    const float* scales = w_scales + size_t(first / BLOCK) * blocks;

    float total[TILES][4] = {};
    Tile ahead[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        const unsigned b = part_of_row + a * SPLIT;
        if (b < blocks) {
            ahead[a].load(low + size_t(b) * BLOCK, high + size_t(b) * BLOCK);
        }
    }
    for (unsigned start = part_of_row; start < blocks; start += AHEAD * SPLIT) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const unsigned b = start + a * SPLIT;
            if (b >= blocks) {
                break;
            }
            const Tile tile = ahead[a];
            const unsigned next = b + AHEAD * SPLIT;
            if (next < blocks) {
                ahead[a].load(low + size_t(next) * BLOCK, high + size_t(next) * BLOCK);
            }
            float part[TILES][4] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t* wl = reinterpret_cast<const uint32_t*>(&tile.v[0][half]);
                const uint32_t* wh = reinterpret_cast<const uint32_t*>(&tile.v[1][half]);
                uint4 tokens_x[TILES];
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const unsigned token = min(n * 8 + g, tokens - 1);
                    tokens_x[n] = __ldg(reinterpret_cast<const uint4*>(x + size_t(token) * cols + b * BLOCK + 64 * half + 16 * c));
                }
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    uint32_t a0, a1, a2, a3;
                    widen(wl[s], a0, a2);
                    widen(wh[s], a1, a3);
#pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        uint32_t b0, b1;
                        widen(reinterpret_cast<const uint32_t*>(&tokens_x[n])[s], b0, b1);
                        longwave::mma_f16(part[n], a0, a1, a2, a3, b0, b1);
                    }
                }
            }
            const float ws = __ldg(scales + b);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const unsigned token = min(n * 8 + 2 * c + j, tokens - 1);
                    const float s = ws * __ldg(x_scales + size_t(token) * blocks + b);
                    total[n][j] += part[n][j] * s;
                    total[n][2 + j] += part[n][2 + j] * s;
                }
            }
        }
    }

    // The warps' sums, added in the order of the warps.
    __shared__ float sums[WARPS][TILES * 8][ROWS + 1];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sums[warp][n * 8 + 2 * c + j][g] = total[n][j];
            sums[warp][n * 8 + 2 * c + j][g + 8] = total[n][2 + j];
        }
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < WARPS / SPLIT * TILES * 8 * ROWS; i += WARPS * 32) {
        const unsigned row = i % ROWS, group = i / ROWS % (WARPS / SPLIT), token = i / ROWS / (WARPS / SPLIT);
        const unsigned to = (blockIdx.x * (WARPS / SPLIT) + group) * ROWS;
        if (token < tokens && to < rows) {
            float sum = 0.f;
#pragma unroll
            for (int v = 0; v < SPLIT; v++) {
                sum += sums[group * SPLIT + v][token][row];
            }
            y[size_t(token) * rows + to + row] = sum;
        }
    }
}

}  // namespace

#define ENTRY(tiles, split, blocks)                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, blocks) linear_fp8_##tiles##_##split(                       \
        const uint8_t* w, const float* w_scales, const uint8_t* x, const float* x_scales, float* y, unsigned rows,       \
        unsigned cols, unsigned tokens) {                                                                                \
        linear<tiles, split>(w, w_scales, x, x_scales, y, rows, cols, tokens);                                           \
    }

// At most 8, 16 and 32 tokens; from 2048 columns on, and fewer.
ENTRY(1, 8, 2)
ENTRY(1, 2, 2)
ENTRY(2, 8, 2)
ENTRY(2, 2, 2)
ENTRY(4, 8, 1)
ENTRY(4, 2, 1)
