// architectures: 90a 100a
// y = W x: W bf16 [rows, cols], x bf16 [tokens, cols], y float [tokens, rows]; compressor projections, router, index weights
// and the head. linear_bf16.md has floor and design.
//
// The columns of a row are cut into SPLIT parts (chosen by the shape): part p has the blocks of 128 columns p, p + SPLIT, ...
// Within a part one tensor core sum runs through all of them, and parts are added in order. `few` gives a part to each of
// SPLIT warps, `many` walks through them one after the other with the same products: a token has the same bits in both and
// in any batch. Columns are permuted alike in both operands, so that a thread loads sixteen bytes. Needs cols % 128 == 0.
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"

namespace {

constexpr int WARPS = 8, ROWS = 16, BLOCK = 128;

// TILES tiles of eight tokens, of which blockIdx.y says which; a thread has AHEAD column blocks of weights on their way. `block`
// says which rows.
template <int TILES, int SPLIT, int AHEAD>
__device__ __forceinline__ void few(const uint16_t* __restrict__ w, const uint16_t* __restrict__ x, float* __restrict__ y,
                                    unsigned rows, unsigned cols, unsigned tokens, unsigned block) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned blocks = cols / BLOCK, part = warp % SPLIT;
    const unsigned first = (block * (WARPS / SPLIT) + warp / SPLIT) * ROWS;
    const uint16_t* low = w + size_t(min(first + g, rows - 1)) * cols + 8 * c;
    const uint16_t* high = w + size_t(min(first + g + 8, rows - 1)) * cols + 8 * c;
    const unsigned first_token = blockIdx.y * TILES * 8;
    x += size_t(first_token) * cols;
    y += size_t(first_token) * rows;
    tokens = min(tokens - first_token, TILES * 8u);

    float total[TILES][4] = {};
    uint4 ahead[AHEAD][4][2];
    const auto load = [&](uint4 (&to)[4][2], unsigned b) {
        if (b < blocks) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                to[j][0] = __ldcs(reinterpret_cast<const uint4*>(low + size_t(b) * BLOCK + j * 32));
                to[j][1] = __ldcs(reinterpret_cast<const uint4*>(high + size_t(b) * BLOCK + j * 32));
            }
        }
    };
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        load(ahead[a], part + a * SPLIT);
    }
    // Weights are on their way while the kernel before this one ends.
    longwave::wait_before();
    for (unsigned start = part; start < blocks; start += AHEAD * SPLIT) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const unsigned b = start + a * SPLIT;
            if (b < blocks) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        const unsigned token = min(n * 8 + g, tokens - 1);
                        const uint4 v = __ldg(reinterpret_cast<const uint4*>(x + size_t(token) * cols + b * BLOCK + j * 32 + 8 * c));
                        longwave::mma_bf16_32(total[n], ahead[a][j][0], ahead[a][j][1], v);
                    }
                }
                load(ahead[a], b + AHEAD * SPLIT);
            }
        }
    }

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
        const unsigned to = (block * (WARPS / SPLIT) + group) * ROWS + row;
        if (token < tokens && to < rows) {
            float sum = 0.f;
#pragma unroll
            for (int v = 0; v < SPLIT; v++) {
                sum += sums[group * SPLIT + v][token][row];
            }
            y[size_t(token) * rows + to] = sum;
        }
    }
}

// A block has 128 rows and 64 tokens, a warp 32 and 32. Half column blocks (64 columns, 128 bytes) come into shared memory
// three stages ahead, arranged as in linear_fp8.cu.
constexpr int TILE = 128, TOKENS = 64, STAGES = 4, STAGE_BYTES = (TILE + TOKENS) * 128;

template <int SPLIT>
__device__ __forceinline__ void many(const uint16_t* __restrict__ w, const uint16_t* __restrict__ x, float* __restrict__ y,
                                     unsigned rows, unsigned cols, unsigned tokens) {
    extern __shared__ __align__(128) uint8_t staged[];
    const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    const unsigned blocks = cols / BLOCK, steps = 2 * blocks;
    const unsigned first_row = blockIdx.x * TILE, first_token = blockIdx.y * TOKENS;
    const auto load = [&](unsigned i) {
        if (i < steps) {
            unsigned at = i / 2, part = 0;
            for (; part + 1 < SPLIT; part++) {
                const unsigned own = (blocks - part + SPLIT - 1) / SPLIT;
                if (at < own) {
                    break;
                }
                at -= own;
            }
            const unsigned column = (part + at * SPLIT) * BLOCK + i % 2 * 64;
            const uint32_t to = longwave::shared_address(staged + (i % STAGES) * STAGE_BYTES);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const unsigned r = n * 32 + thread / 8, piece = thread % 8, place = r * 128 + ((piece ^ (r % 2 * 4)) * 16);
                longwave::copy_16(to + place, w + size_t(min(first_row + r, rows - 1)) * cols + column + piece * 8);
                if (n < 2) {
                    longwave::copy_16(to + TILE * 128 + place,
                                     x + size_t(min(first_token + r, tokens - 1)) * cols + column + piece * 8);
                }
            }
        }
        longwave::commit_copies();
    };

    const unsigned row0 = warp / 2 * 32, token0 = warp % 2 * 32;
    float sum[2][4][4] = {}, total[2][4][4] = {};
    for (int i = 0; i < STAGES - 1; i++) {
        load(i);
    }
    unsigned left = 2 * ((blocks + SPLIT - 1) / SPLIT), part = 0;
    for (unsigned i = 0; i < steps; i++) {
        longwave::wait_copies<STAGES - 2>();
        __syncthreads();
        load(i + STAGES - 1);
        const uint8_t* const ws = staged + (i % STAGES) * STAGE_BYTES;
        const uint8_t* const xs = ws + TILE * 128;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint4 a[2][2], v[4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const unsigned r = row0 + m * 16 + h * 8 + g;
                    a[m][h] = *reinterpret_cast<const uint4*>(ws + r * 128 + (((j * 4 + c) ^ (r % 2 * 4)) * 16));
                }
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const unsigned r = token0 + n * 8 + g;
                v[n] = *reinterpret_cast<const uint4*>(xs + r * 128 + (((j * 4 + c) ^ (r % 2 * 4)) * 16));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    longwave::mma_bf16_32(total[m][n], a[m][0], a[m][1], v[n]);
                }
            }
        }
        left--;
        if (left == 0) {
            part++;
            left = part < SPLIT && part < blocks ? 2 * ((blocks - part + SPLIT - 1) / SPLIT) : 0;
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
                    y[size_t(token) * rows + row] = sum[m][n][k];
                }
            }
        }
    }
}

}  // namespace

#define PARAMETERS const uint16_t *w, const uint16_t *x, float *y, unsigned rows, unsigned cols, unsigned tokens
#define FEW(name, tiles, split, ahead, resident)                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, resident) linear_bf16_##name(PARAMETERS) {                  \
        longwave::start_next();                                                                                          \
        few<tiles, split, ahead>(w, x, y, rows, cols, tokens, blockIdx.x);                                               \
    }
#define MANY(split)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) linear_bf16_many_##split(PARAMETERS) {                   \
        longwave::overlap();                                                                                             \
        many<split>(w, x, y, rows, cols, tokens);                                                                        \
    }

// Blocks of a multiprocessor with short rows: as many as registers allow without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define SHORT 1
#else
#define SHORT 2
#endif

// Grid (row tiles, token tiles). At most 8, 16 and 32 tokens; from 2048 columns on, and fewer.
FEW(1_8, 1, 8, 2, 2)
FEW(1_2, 1, 2, 1, SHORT)
FEW(2_8, 2, 8, 1, SHORT)
FEW(2_2, 2, 2, 1, SHORT)
FEW(4_8, 4, 8, 1, 1)
FEW(4_2, 4, 2, 1, 1)
// At most 8 tokens, from 2048 columns on, so few rows that each multiprocessor has one block: all weights of 4096 columns are on
// their way before the kernel before this one ends.
FEW(deep, 1, 8, 4, 1)

// Three matrices of the same inputs, at most 8 tokens, from 2048 columns on. Grid: the row tiles of all.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
linear_bf16_three(const uint16_t* w0, const uint16_t* w1, const uint16_t* w2, float* y0, float* y1, float* y2, unsigned rows0,
                  unsigned rows1, unsigned rows2, const uint16_t* x, unsigned cols, unsigned tokens) {
    longwave::start_next();
    const unsigned first = (rows0 + ROWS - 1) / ROWS, second = first + (rows1 + ROWS - 1) / ROWS;
    const unsigned which = (blockIdx.x >= first) + (blockIdx.x >= second);
    const unsigned before = which == 0 ? 0 : which == 1 ? first : second;
    few<1, 8, 2>(which == 0 ? w0 : which == 1 ? w1 : w2, x, which == 0 ? y0 : which == 1 ? y1 : y2,
                 which == 0 ? rows0 : which == 1 ? rows1 : rows2, cols, tokens, blockIdx.x - before);
}

MANY(8)
MANY(2)
