// architectures: 90a 100a
// y = W x: W e4m3 [rows, cols] with a float scale per 128 x 128 block, x e4m3 [tokens, cols] with a float scale per 128
// columns, y float [tokens, rows]. linear_fp8.md has floor, design and measured steps. With groups (gridDim.y, for few
// tokens, gridDim.z for many) there are as many matrices one behind the other, and a token's inputs and results lie side by
// side: x [tokens, groups, cols], y [tokens, groups, rows]; rows are then a multiple of 128.
//
// SPLIT warps share sixteen rows; warp w of them takes the column blocks w, w + SPLIT, ... A block of eight warps has
// 8 / SPLIT groups of sixteen rows. The order of every sum depends on the shape alone (SPLIT is chosen by it), so a
// token's result has the same bits in any batch; `many` below walks through the parts in the same order, with the same
// products. Needs rows % 16 == 0, cols % 128 == 0.
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/copy.cuh"
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
    const unsigned blocks = cols / BLOCK, part_of_row = warp % SPLIT, groups = gridDim.y;
    w += size_t(blockIdx.y) * rows * cols;
    w_scales += size_t(blockIdx.y) * (rows / BLOCK) * blocks;
    x += size_t(blockIdx.y) * cols;
    x_scales += size_t(blockIdx.y) * blocks;
    y += size_t(blockIdx.y) * rows;
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
                    tokens_x[n] = __ldg(reinterpret_cast<const uint4*>(x + size_t(token) * groups * cols + b * BLOCK + 64 * half + 16 * c));
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
                    const float s = ws * __ldg(x_scales + size_t(token) * groups * blocks + b);
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
            y[size_t(token) * groups * rows + to + row] = sum;
        }
    }
}

// Many tokens: a block has 128 rows and 64 tokens, a warp 32 and 32. Column blocks come into shared memory three stages
// ahead. Row r of a stage is 128 bytes in eight pieces, piece p at p ^ (r % 2) * 4, so that eight threads that read two
// rows meet no bank twice.
constexpr int TILE = 128, TOKENS = 64, STAGES = 4, STAGE_BYTES = (TILE + TOKENS) * BLOCK + TOKENS * 4;

template <int SPLIT>
__device__ __forceinline__ void many(const uint8_t* __restrict__ w, const float* __restrict__ w_scales,
                                     const uint8_t* __restrict__ x, const float* __restrict__ x_scales,
                                     float* __restrict__ y, unsigned rows, unsigned cols, unsigned tokens) {
    extern __shared__ __align__(128) uint8_t staged[];
    const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    const unsigned blocks = cols / BLOCK, groups = gridDim.z;
    const unsigned first_row = blockIdx.x * TILE, first_token = blockIdx.y * TOKENS;
    w += size_t(blockIdx.z) * rows * cols;
    x += size_t(blockIdx.z) * cols;
    x_scales += size_t(blockIdx.z) * blocks;
    y += size_t(blockIdx.z) * rows;
    const float* scales = w_scales + (size_t(blockIdx.z) * (rows / BLOCK) + first_row / BLOCK) * blocks;

    // Step i of the walk is column block i of part 0, then of part 1, ...
    const auto block_of = [&](unsigned i) {
        unsigned part = 0;
        for (; part + 1 < SPLIT; part++) {
            const unsigned own = (blocks - part + SPLIT - 1) / SPLIT;
            if (i < own) {
                break;
            }
            i -= own;
        }
        return part + i * SPLIT;
    };
    const auto load = [&](unsigned i) {
        if (i < blocks) {
            const unsigned b = block_of(i);
            const uint32_t to = longwave::shared_address(staged + (i % STAGES) * STAGE_BYTES);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const unsigned r = n * 32 + thread / 8, piece = thread % 8, at = r * BLOCK + ((piece ^ (r % 2 * 4)) * 16);
                longwave::copy16(to + at, w + size_t(min(first_row + r, rows - 1)) * cols + b * BLOCK + piece * 16);
                if (n < 2) {
                    longwave::copy16(to + TILE * BLOCK + at,
                                     x + size_t(min(first_token + r, tokens - 1)) * groups * cols + b * BLOCK + piece * 16);
                }
            }
            if (thread < TOKENS) {
                longwave::copy4(to + (TILE + TOKENS) * BLOCK + thread * 4,
                                x_scales + size_t(min(first_token + thread, tokens - 1)) * groups * blocks + b);
            }
        }
        longwave::copy_commit();
    };

    const unsigned row0 = warp / 2 * 32, token0 = warp % 2 * 32;
    float sum[2][4][4] = {}, total[2][4][4] = {};
    for (int i = 0; i < STAGES - 1; i++) {
        load(i);
    }
    unsigned left = (blocks + SPLIT - 1) / SPLIT, part = 0;
    for (unsigned i = 0; i < blocks; i++) {
        longwave::copy_wait<STAGES - 2>();
        __syncthreads();
        load(i + STAGES - 1);
        const uint8_t* const ws = staged + (i % STAGES) * STAGE_BYTES;
        const uint8_t* const xs = ws + TILE * BLOCK;
        const float* const token_scales = reinterpret_cast<const float*>(xs + TOKENS * BLOCK);
        const float row_scale = __ldg(scales + block_of(i));
        float own[2][4][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 a[2][2], v[4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const unsigned r = row0 + m * 16 + h * 8 + g;
                    a[m][h] = *reinterpret_cast<const uint4*>(ws + r * BLOCK + (((half * 4 + c) ^ (r % 2 * 4)) * 16));
                }
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const unsigned r = token0 + n * 8 + g;
                v[n] = *reinterpret_cast<const uint4*>(xs + r * BLOCK + (((half * 4 + c) ^ (r % 2 * 4)) * 16));
            }
#pragma unroll
            for (int s = 0; s < 4; s++) {
                uint32_t f[2][4];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    widen(reinterpret_cast<const uint32_t*>(&a[m][0])[s], f[m][0], f[m][2]);
                    widen(reinterpret_cast<const uint32_t*>(&a[m][1])[s], f[m][1], f[m][3]);
                }
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    uint32_t b0, b1;
                    widen(reinterpret_cast<const uint32_t*>(&v[n])[s], b0, b1);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        longwave::mma_f16(own[m][n], f[m][0], f[m][1], f[m][2], f[m][3], b0, b1);
                    }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float s = row_scale * token_scales[token0 + n * 8 + 2 * c + j];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    total[m][n][j] += own[m][n][j] * s;
                    total[m][n][2 + j] += own[m][n][2 + j] * s;
                }
            }
        }
        left--;
        // A part ends. Parts without a column block add nothing, as zeros do in `linear`.
        if (left == 0) {
            part++;
            left = part < SPLIT && part < blocks ? (blocks - part + SPLIT - 1) / SPLIT : 0;
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        sum[m][n][k] += total[m][n][k];
                        total[m][n][k] = 0.f;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const unsigned row = first_row + row0 + m * 16 + g + k / 2 * 8;
                const unsigned token = first_token + token0 + n * 8 + 2 * c + k % 2;
                if (row < rows && token < tokens) {
                    y[size_t(token) * groups * rows + row] = sum[m][n][k];
                }
            }
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

#define MANY(split)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) linear_fp8_many_##split(                                 \
        const uint8_t* w, const float* w_scales, const uint8_t* x, const float* x_scales, float* y, unsigned rows,       \
        unsigned cols, unsigned tokens) {                                                                                \
        many<split>(w, w_scales, x, x_scales, y, rows, cols, tokens);                                                    \
    }

MANY(8)
MANY(2)
