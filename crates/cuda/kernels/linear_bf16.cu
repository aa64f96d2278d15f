// architectures: 90a 100a
// y = W x: W bf16 [rows, cols], x bf16 [tokens, cols], y float [tokens, rows]. linear_bf16.md has floor and design.
//
// The columns are cut into SPLIT parts of equal length (by the shape alone). A part is summed on the tensor cores, 16
// columns at a time from left to right, and the parts are added in order; both kernels here do so, with the same columns
// in the same places of each step. A token has the same bits in any batch and from either kernel. Needs
// cols % (64 * SPLIT) == 0; any number of rows.
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/tiles.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int ROWS = 16;
// Columns of a step: 128 bytes of each row.
constexpr int STEP = 64;
// Steps of a warp whose weights are on their way at once: 64 bytes per thread each.
constexpr int AHEAD = 2;

// Rows g and g + 8, bytes 16 c .. and 64 + 16 c .. of a step.
struct Weights {
    uint4 v[2][2];

    __device__ __forceinline__ void load(const uint8_t* low, const uint8_t* high) {
        v[0][0] = __ldcs(reinterpret_cast<const uint4*>(low));
        v[0][1] = __ldcs(reinterpret_cast<const uint4*>(low + 64));
        v[1][0] = __ldcs(reinterpret_cast<const uint4*>(high));
        v[1][1] = __ldcs(reinterpret_cast<const uint4*>(high + 64));
    }
};

// Two tensor core steps: words x and y of all threads, then z and w.
template <int TILES>
__device__ __forceinline__ void first_step(float (&sum)[TILES][4], const uint4& low, const uint4& high, const uint4 (&x)[TILES]) {
    const uint32_t a[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        longwave::mma_bf16(sum[n], a, x[n].x, x[n].y);
    }
}

template <int TILES>
__device__ __forceinline__ void second_step(float (&sum)[TILES][4], const uint4& low, const uint4& high, const uint4 (&x)[TILES]) {
    const uint32_t a[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        longwave::mma_bf16(sum[n], a, x[n].z, x[n].w);
    }
}

// TILES tiles of eight tokens; SPLIT warps share sixteen rows, each has one part of the columns.
template <int TILES, int SPLIT>
__device__ __forceinline__ void few(const uint8_t* __restrict__ w, const uint8_t* __restrict__ x, float* __restrict__ y,
                                    unsigned rows, unsigned cols, unsigned tokens) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned steps = cols / STEP / SPLIT, from = warp % SPLIT * steps;
    // Behind the last row a thread reads the last one again; nothing of it is stored.
    const unsigned first = (blockIdx.x * (WARPS / SPLIT) + warp / SPLIT) * ROWS;
    const size_t stride = size_t(2) * cols, offset = size_t(from) * 128 + 16 * c;
    const uint8_t* low = w + min(first + g, rows - 1) * stride + offset;
    const uint8_t* high = w + min(first + g + 8, rows - 1) * stride + offset;

    float total[TILES][4] = {};
    Weights ahead[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        if (a < steps) {
            ahead[a].load(low + a * 128, high + a * 128);
        }
    }
    for (unsigned start = 0; start < steps; start += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const unsigned s = start + a;
            if (s >= steps) {
                break;
            }
            const Weights now = ahead[a];
            if (s + AHEAD < steps) {
                ahead[a].load(low + size_t(s + AHEAD) * 128, high + size_t(s + AHEAD) * 128);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 tokens_x[TILES];
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const unsigned token = min(n * 8 + g, tokens - 1);
                    tokens_x[n] = __ldg(reinterpret_cast<const uint4*>(x + token * stride + offset + size_t(s) * 128 + 64 * half));
                }
                first_step<TILES>(total, now.v[0][half], now.v[1][half], tokens_x);
                second_step<TILES>(total, now.v[0][half], now.v[1][half], tokens_x);
            }
        }
    }

    // The parts, added in their order.
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
        const unsigned to = (blockIdx.x * (WARPS / SPLIT) + group) * ROWS + row;
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

// Grid (token tiles, row tiles). A warp has M x N products, a block BM x BN; STAGES tiles are on their way.
template <int BM, int BN, int M, int N, int STAGES>
__device__ __forceinline__ void many(const uint8_t* __restrict__ w, const uint8_t* __restrict__ x, float* __restrict__ y,
                                     unsigned rows, unsigned cols, unsigned tokens, unsigned split) {
    constexpr int THREADS = BM / M * (BN / N) * 32, STAGE = (BM + BN) * longwave::TILE_BYTES;
    extern __shared__ uint4 tiles[];
    const uint32_t base = longwave::shared_address(tiles);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned row0 = warp % (BM / M) * M, token0 = warp / (BM / M) * N;
    const unsigned first_row = blockIdx.y * BM, first_token = blockIdx.x * BN;
    const unsigned steps = cols / STEP, part_steps = steps / split;
    const size_t stride = size_t(2) * cols;
    const auto copy = [&](unsigned step) {
        if (step < steps) {
            const uint32_t to = base + step % STAGES * STAGE;
            longwave::copy_tile<BM, THREADS>(to, w + size_t(step) * 128, stride, first_row, rows);
            longwave::copy_tile<BN, THREADS>(to + BM * 128, x + size_t(step) * 128, stride, first_token, tokens);
        }
        longwave::commit_copies();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        copy(s);
    }
    float total[M / 16][N / 8][4] = {}, part[M / 16][N / 8][4] = {};
    unsigned left = part_steps;
    for (unsigned step = 0; step < steps; step++) {
        longwave::wait_copies<STAGES - 2>();
        __syncthreads();
        copy(step + STAGES - 1);
        const uint32_t from = base + step % STAGES * STAGE;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 xs[N / 8];
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                xs[n] = longwave::read_16(from + (BM + half * (BN / 2)) * 128 + (token0 + 8 * n + g) * 64 + 16 * c);
            }
            uint4 low[M / 16], high[M / 16];
#pragma unroll
            for (int m = 0; m < M / 16; m++) {
                const uint32_t at = from + half * (BM * 64) + (row0 + 16 * m + g) * 64 + 16 * c;
                low[m] = longwave::read_16(at);
                high[m] = longwave::read_16(at + 8 * 64);
            }
            // All products of a step before the next step of any.
#pragma unroll
            for (int m = 0; m < M / 16; m++) {
                first_step<N / 8>(part[m], low[m], high[m], xs);
            }
#pragma unroll
            for (int m = 0; m < M / 16; m++) {
                second_step<N / 8>(part[m], low[m], high[m], xs);
            }
        }
        if (--left == 0) {
            left = part_steps;
#pragma unroll
            for (int m = 0; m < M / 16; m++) {
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        total[m][n][j] += part[m][n][j];
                        part[m][n][j] = 0.f;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M / 16; m++) {
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const unsigned token = first_token + token0 + 8 * n + 2 * c + j % 2;
                const unsigned row = first_row + row0 + 16 * m + g + j / 2 * 8;
                if (token < tokens && row < rows) {
                    y[size_t(token) * rows + row] = total[m][n][j];
                }
            }
        }
    }
}

}  // namespace

// Blocks of a multiprocessor: as many as registers allow without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define RESIDENT 2
#else
#define RESIDENT 3
#endif

#define FEW(tiles, split, blocks)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, blocks) linear_bf16_##tiles##_##split(                      \
        const uint8_t* w, const uint8_t* x, float* y, unsigned rows, unsigned cols, unsigned tokens) {                   \
        few<tiles, split>(w, x, y, rows, cols, tokens);                                                                  \
    }

// At most 8, 16 and 32 tokens.
FEW(1, 8, RESIDENT)
FEW(1, 4, RESIDENT)
FEW(1, 1, RESIDENT)
FEW(2, 8, 2)
FEW(2, 4, 2)
FEW(2, 1, 2)
FEW(4, 8, 1)
FEW(4, 4, 1)
FEW(4, 1, 1)

// 128 x 128 products per block: 128 KiB of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(512, 1)
linear_bf16_large(const uint8_t* w, const uint8_t* x, float* y, unsigned rows, unsigned cols, unsigned tokens, unsigned split) {
    many<128, 128, 32, 32, 4>(w, x, y, rows, cols, tokens, split);
}

// 64 x 64 products per block: 64 KiB.
extern "C" __global__ void __launch_bounds__(128, 3)
linear_bf16_small(const uint8_t* w, const uint8_t* x, float* y, unsigned rows, unsigned cols, unsigned tokens, unsigned split) {
    many<64, 64, 32, 32, 4>(w, x, y, rows, cols, tokens, split);
}
