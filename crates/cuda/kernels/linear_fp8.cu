// architectures: 90a 100a
// y = W x: W e4m3 [rows, cols] with a float scale per 128 x 128 block, x e4m3 [tokens, cols] with a float scale per 128
// columns, y float [tokens, rows]. Hopper has others (linear_fp8_wide.cu). linear_fp8.md has floor, design and measured steps. With G groups, W is
// [G, rows, cols], x [tokens, G, cols], y [tokens, G, rows]; then rows % 128 == 0.
//
// A row's column blocks are summed in SPLIT parts: part p has the blocks p, p + SPLIT, ..., each multiplied on the tensor
// cores, scaled, and added in this order; then the parts are added. For few tokens SPLIT warps share sixteen rows and have
// a part each; the kernel for many tokens visits one part after the other. The order of every sum depends on the shape
// alone (SPLIT is chosen by it), so a token's result has the same bits in any batch and from either kernel. Needs
// rows % 16 == 0, cols % 128 == 0.
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/halves.cuh"
#include "common/linear_fp8.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int ROWS = 16;
constexpr int BLOCK = 128;

// How often the loop over the halves of a column block is unrolled for many tokens: what registers allow without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int HALVES = 2;
#else
constexpr int HALVES = 1;
#endif

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

using Operands = longwave::Fp8Operands;

// TILES tiles of eight tokens. Blocks stay and have a share of all tiles of WARPS / SPLIT times sixteen rows, which are
// neighbours; weights of the next tile are on their way while a tile ends: AHEAD column blocks of a thread, 64 bytes each. WHOLE:
// every warp's column blocks are a multiple of AHEAD.
template <int TILES, int SPLIT, int AHEAD, bool WHOLE>
__device__ __forceinline__ void linear(const Operands& o, float (&sums)[2][WARPS][TILES * 8][ROWS + 1]) {
    constexpr unsigned TEAMS = WARPS / SPLIT;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned blocks = o.cols / BLOCK, part = warp % SPLIT, team = warp / SPLIT;
    const unsigned of_group = (o.rows / ROWS + TEAMS - 1) / TEAMS, tiles = of_group * o.groups;
    const unsigned share = tiles / gridDim.x, rest = tiles % gridDim.x;
    const unsigned begin = blockIdx.x * share + min(blockIdx.x, rest), end = begin + share + (blockIdx.x < rest);
    // Behind the last rows of a group a team computes the last ones again and stores nothing.
    const auto row_of = [&](unsigned t) { return min((t % of_group * TEAMS + team) * ROWS, o.rows - ROWS); };

    // The weights that are loaded next: AHEAD column blocks of this warp's part from `coming_block` on.
    const uint8_t* from = nullptr;
    unsigned coming = begin, coming_block = part;
    const auto find = [&]() {
        from = o.w + (size_t(coming / of_group) * o.rows + row_of(coming) + g) * o.cols + size_t(part) * BLOCK + 16 * c;
    };
    Tile ahead[AHEAD];
    const auto load = [&](int a) {
        if ((WHOLE ? coming_block : coming_block + a * SPLIT) < blocks) {
            ahead[a].load(from + a * SPLIT * BLOCK, from + a * SPLIT * BLOCK + size_t(8) * o.cols);
        }
    };
    const auto advance = [&]() {
        coming_block += AHEAD * SPLIT;
        from += AHEAD * SPLIT * BLOCK;
        if (coming_block >= blocks) {
            coming_block = blocks;
            if (++coming < end) {
                coming_block = part;
                find();
            }
        }
    };
    if (begin < end) {
        find();
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            load(a);
        }
    }
    // Weights are on their way while the kernel before this one ends.
    longwave::wait_before();
    const size_t y_stride = size_t(o.groups) * o.rows;
    const unsigned x_stride = o.groups * o.cols, x_blocks = o.groups * blocks;
    for (unsigned t = begin; t < end; t++) {
        const unsigned group = t / of_group;
        const uint8_t* x = o.x + size_t(group) * o.cols + 16 * c;
        const float* x_scales = o.x_scales + group * blocks;
        const float* w_scales = o.w_scales + (size_t(group) * (o.rows / BLOCK) + row_of(t) / BLOCK) * blocks;
        float total[TILES][4] = {};
        for (unsigned start = part; start < blocks; start += AHEAD * SPLIT) {
            advance();
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const unsigned b = start + a * SPLIT;
                if (WHOLE || b < blocks) {
                    float products[TILES][4] = {};
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        uint32_t w[4][4];
#pragma unroll
                        for (int s = 0; s < 4; s++) {
                            longwave::widen_e4m3(longwave::word(ahead[a].v[0][half], s), w[s][0], w[s][2]);
                            longwave::widen_e4m3(longwave::word(ahead[a].v[1][half], s), w[s][1], w[s][3]);
                        }
#pragma unroll
                        for (int n = 0; n < TILES; n++) {
                            const unsigned token = min(n * 8 + g, o.tokens - 1);
                            const uint4 v = __ldg(reinterpret_cast<const uint4*>(x + (token * x_stride + b * BLOCK + 64 * half)));
#pragma unroll
                            for (int s = 0; s < 4; s++) {
                                uint32_t b0, b1;
                                longwave::widen_e4m3(longwave::word(v, s), b0, b1);
                                longwave::mma_f16(products[n], w[s][0], w[s][1], w[s][2], w[s][3], b0, b1);
                            }
                        }
                    }
                    const float ws = __ldg(w_scales + b);
#pragma unroll
                    for (int n = 0; n < TILES; n++) {
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            const unsigned token = min(n * 8 + 2 * c + j, o.tokens - 1);
                            const float s = ws * __ldg(x_scales + (token * x_blocks + b));
                            total[n][j] = fmaf(products[n][j], s, total[n][j]);
                            total[n][2 + j] = fmaf(products[n][2 + j], s, total[n][2 + j]);
                        }
                    }
                }
                load(a);
            }
        }
        // The parts, added in order.
        float(&of_tile)[WARPS][TILES * 8][ROWS + 1] = sums[t % 2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                of_tile[warp][n * 8 + 2 * c + j][g] = total[n][j];
                of_tile[warp][n * 8 + 2 * c + j][g + 8] = total[n][2 + j];
            }
        }
        __syncthreads();
        for (unsigned i = threadIdx.x; i < TEAMS * o.tokens * ROWS; i += WARPS * 32) {
            const unsigned row = i % ROWS, of = i / ROWS % TEAMS, token = i / ROWS / TEAMS;
            const unsigned to = (t % of_group * TEAMS + of) * ROWS;
            if (to < o.rows) {
                float sum = 0.f;
#pragma unroll
                for (int v = 0; v < SPLIT; v++) {
                    sum += of_tile[of * SPLIT + v][token][row];
                }
                o.y[token * y_stride + size_t(group) * o.rows + to + row] = sum;
            }
        }
    }
}

// Grid (token tiles, row tiles, groups). A warp has M x N products, a block BM x BN; STAGES tiles are on their way. Dynamic
// shared memory: the tiles, then one float per product for the sum of the parts.
template <int BM, int BN, int M, int N, int STAGES>
__device__ __forceinline__ void many(const uint8_t* __restrict__ w, const float* __restrict__ w_scales,
                                     const uint8_t* __restrict__ x, const float* __restrict__ x_scales,
                                     float* __restrict__ y, unsigned rows, unsigned cols, unsigned tokens, unsigned split) {
    constexpr int THREADS = BM / M * (BN / N) * 32, TILES = longwave::tile_bytes(BM) + longwave::tile_bytes(BN);
    constexpr int STAGE = TILES + 4 * BN;
    extern __shared__ uint4 tiles[];
    const uint32_t base = longwave::shared_address(tiles);
    float* own_sum = reinterpret_cast<float*>(tiles) + STAGES * (STAGE / 4) + threadIdx.x;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned row0 = warp % (BM / M) * M, token0 = warp / (BM / M) * N;
    const unsigned first_row = blockIdx.y * BM, first_token = blockIdx.x * BN;
    const unsigned blocks = cols / BLOCK, groups = gridDim.z;
    w += size_t(blockIdx.z) * rows * cols;
    w_scales += size_t(blockIdx.z) * (rows / BLOCK) * blocks + size_t(first_row / BLOCK) * blocks;
    x += size_t(blockIdx.z) * cols;
    x_scales += blockIdx.z * blocks;
    y += size_t(blockIdx.z) * rows;
    const size_t x_stride = size_t(groups) * cols, x_blocks = size_t(groups) * blocks, y_stride = size_t(groups) * rows;

    // The column block that is copied next; blocks of a part, then the next part.
    unsigned coming = 0, coming_part = 0, slot = 0;
    const auto copy = [&]() {
        if (coming < blocks && coming_part < split) {
            const uint32_t to = base + slot * STAGE;
            longwave::copy_tile<BM, THREADS>(to, w + size_t(coming) * BLOCK, cols, first_row, rows);
            longwave::copy_tile<BN, THREADS>(to + longwave::tile_bytes(BM), x + size_t(coming) * BLOCK, x_stride, first_token, tokens);
            if (threadIdx.x < BN) {
                const unsigned token = min(first_token + threadIdx.x, tokens - 1);
                longwave::copy_4(to + TILES + 4 * threadIdx.x, x_scales + token * x_blocks + coming);
            }
            coming += split;
            if (coming >= blocks) {
                coming = ++coming_part;
            }
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        longwave::commit_copies();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        copy();
    }
#pragma unroll
    for (int i = 0; i < M * N / 32; i++) {
        own_sum[i * THREADS] = 0.f;
    }
    float total[M / 16][N / 8][4] = {};
    unsigned b = 0, b_part = 0;
    for (unsigned step = 0; step < blocks; step++) {
        const float ws = __ldg(w_scales + b);
        longwave::wait_copies<STAGES - 2>();
        __syncthreads();
        copy();
        const uint32_t from = base + step % STAGES * STAGE, from_w = from + (row0 + g) * 64 + 16 * c;
        const uint32_t from_x = from + longwave::tile_bytes(BM) + (token0 + g) * 64 + 16 * c;
        float part[M / 16][N / 8][4] = {};
#pragma unroll HALVES
        for (int half = 0; half < 2; half++) {
            uint4 xs[N / 8];
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                xs[n] = longwave::read_16(from_x + half * longwave::plane_bytes(BN) + 512 * n);
            }
            uint4 low[M / 16], high[M / 16];
#pragma unroll
            for (int m = 0; m < M / 16; m++) {
                const uint32_t at = from_w + half * longwave::plane_bytes(BM) + 1024 * m;
                low[m] = longwave::read_16(at);
                high[m] = longwave::read_16(at + 8 * 64);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t b0[N / 8], b1[N / 8];
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    longwave::widen_e4m3(longwave::word(xs[n], k), b0[n], b1[n]);
                }
#pragma unroll
                for (int m = 0; m < M / 16; m++) {
                    uint32_t a0, a1, a2, a3;
                    longwave::widen_e4m3(longwave::word(low[m], k), a0, a2);
                    longwave::widen_e4m3(longwave::word(high[m], k), a1, a3);
#pragma unroll
                    for (int n = 0; n < N / 8; n++) {
                        longwave::mma_f16(part[m][n], a0, a1, a2, a3, b0[n], b1[n]);
                    }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            const uint2 scales = longwave::read_8(from + TILES + (token0 + 8 * n + 2 * c) * 4);
            const float s[2] = {ws * __uint_as_float(scales.x), ws * __uint_as_float(scales.y)};
#pragma unroll
            for (int m = 0; m < M / 16; m++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    total[m][n][j] = fmaf(part[m][n][j], s[j % 2], total[m][n][j]);
                }
            }
        }
        b += split;
        if (b >= blocks) {
            b = ++b_part;
#pragma unroll
            for (int i = 0; i < M * N / 32; i++) {
                float& v = total[i / (N / 2)][i / 4 % (N / 8)][i % 4];
                own_sum[i * THREADS] += v;
                v = 0.f;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < M * N / 32; i++) {
        const int m = i / (N / 2), n = i / 4 % (N / 8), j = i % 4;
        const unsigned token = first_token + token0 + 8 * n + 2 * c + j % 2;
        const unsigned row = first_row + row0 + 16 * m + g + j / 2 * 8;
        if (token < tokens && row < rows) {
            y[token * y_stride + row] = own_sum[i * THREADS];
        }
    }
}

}  // namespace

#define ENTRY(tiles, split, ahead, resident)                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, resident) linear_fp8_##tiles##_##split(                     \
        const uint8_t* w, const float* w_scales, const uint8_t* x, const float* x_scales, float* y, unsigned rows,       \
        unsigned cols, unsigned tokens, unsigned groups) {                                                               \
        longwave::start_next();                                                                                          \
        __shared__ float sums[2][WARPS][tiles * 8][ROWS + 1];                                                            \
        const Operands o = {w, w_scales, x, x_scales, y, rows, cols, tokens, groups};                                    \
        ahead == 1 || cols % (BLOCK * split * ahead) == 0 ? linear<tiles, split, ahead, true>(o, sums)                   \
                                                          : linear<tiles, split, ahead, false>(o, sums);                 \
    }

// Grid: at most as many blocks as fit the multiprocessors at once, 256 threads. At most 8, 16 and 32 tokens; from 2048 columns
// on, and fewer.
ENTRY(1, 8, 2, 2)
ENTRY(1, 2, 2, 2)
ENTRY(2, 8, 2, 2)
ENTRY(2, 2, 2, 2)
ENTRY(4, 8, 1, 2)
ENTRY(4, 2, 1, 2)

// 128 x 128 products per block: just under 162.25 KiB of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256, 1)
linear_fp8_large(const uint8_t* w, const float* w_scales, const uint8_t* x, const float* x_scales, float* y, unsigned rows,
                 unsigned cols, unsigned tokens, unsigned split) {
    longwave::overlap();
    many<128, 128, 64, 32, 3>(w, w_scales, x, x_scales, y, rows, cols, tokens, split);
}

// 64 x 64 products per block: 65.5 KiB.
extern "C" __global__ void __launch_bounds__(128, 3)
linear_fp8_small(const uint8_t* w, const float* w_scales, const uint8_t* x, const float* x_scales, float* y, unsigned rows,
                 unsigned cols, unsigned tokens, unsigned split) {
    longwave::overlap();
    many<64, 64, 32, 32, 3>(w, w_scales, x, x_scales, y, rows, cols, tokens, split);
}
