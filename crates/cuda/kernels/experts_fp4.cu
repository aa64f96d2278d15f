// architectures: 90a 100a
// y = W_e x for a few rows per expert: W e2m1, packed [experts, rows, cols / 2] in the order of `repack` below,
// with one ue8m0 scale per 32 columns [experts, rows, cols / 32]; x e4m3 [inputs, cols] with a float scale per 128
// columns. A group is up to eight rows (64 for the kernels called many, 32 for each z of the grid) of one expert, or none: {expert, first pair, pairs}; pair p reads input inputs[p]
// (p where inputs is null) and writes y [pairs, rows] float. experts_fp4.md has floor, design and measured steps.
//
// A row's column blocks are summed in SPLIT parts: part p has the blocks p, p + SPLIT, ..., and the parts are added in
// order. For eight rows SPLIT warps share sixteen weight rows and have a part each; for 32 a warp visits all parts. Sums
// have one order, so a pair's result has the same bits whatever else is in its group, and from either kernel. Needs
// rows % 16 == 0, cols % 128 == 0.
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/halves.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int ROWS = 16;
constexpr int BLOCK = 128;
// Column blocks on their way: 32 bytes of codes per thread each.
constexpr int AHEAD = 2;
// For 32 pairs: column blocks of codes and scales on their way, and the bytes of one.
constexpr int STAGES = 4;
constexpr int STAGE = 32 * (BLOCK + 4);

// One thread's weights of a column block: rows g and g + 8.
struct Tile {
    uint4 low, high;
    uint32_t low_scale, high_scale;
};

template <int SPLIT>
__device__ __forceinline__ void experts(const uint8_t* __restrict__ w, const uint8_t* __restrict__ w_scales,
                                        const uint8_t* __restrict__ x, const float* __restrict__ x_scales,
                                        const int* __restrict__ groups, const unsigned* __restrict__ inputs,
                                        float* __restrict__ y, unsigned rows, unsigned cols) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned expert = groups[3 * blockIdx.y], pair = groups[3 * blockIdx.y + 1], pairs = groups[3 * blockIdx.y + 2];
    if (pairs == 0) {
        return;
    }
    const auto input_of = [&](unsigned p) { return inputs ? inputs[p] : p; };
    const unsigned blocks = cols / BLOCK, part_of_row = warp % SPLIT;
    const unsigned wanted = (blockIdx.x * (WARPS / SPLIT) + warp / SPLIT) * ROWS;
    const unsigned first = min(wanted, rows - ROWS);
    const size_t row = size_t(expert) * rows + first + g;
    const uint8_t* low = w + row * (cols / 2) + 16 * c;
    const uint8_t* high = low + size_t(8) * (cols / 2);
    const uint8_t* low_scales = w_scales + row * (cols / 32);
    const uint8_t* high_scales = low_scales + size_t(8) * (cols / 32);
    const float* scales0 = x_scales + size_t(input_of(pair + min(2 * c, pairs - 1))) * blocks;
    const float* scales1 = x_scales + size_t(input_of(pair + min(2 * c + 1, pairs - 1))) * blocks;

    Tile ahead[AHEAD];
    const auto load = [&](Tile& tile, unsigned b) {
        tile.low = __ldcs(reinterpret_cast<const uint4*>(low + size_t(b) * (BLOCK / 2)));
        tile.high = __ldcs(reinterpret_cast<const uint4*>(high + size_t(b) * (BLOCK / 2)));
        tile.low_scale = __ldcs(reinterpret_cast<const uint32_t*>(low_scales + 4 * b));
        tile.high_scale = __ldcs(reinterpret_cast<const uint32_t*>(high_scales + 4 * b));
    };
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        const unsigned b = part_of_row + a * SPLIT;
        if (b < blocks) {
            load(ahead[a], b);
        }
    }
    // The inputs as halves, in the order of the threads: piece (8 columns of a group of 32) 4 i + c of token t is at
    // ((i * pairs) + t) * 4 + c. The weights are on their way meanwhile.
    extern __shared__ uint4 widened[];
    for (unsigned i = threadIdx.x; i < pairs * (cols / 8); i += WARPS * 32) {
        const unsigned t = i / (cols / 8), piece = i % (cols / 8);
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(x + size_t(input_of(pair + t)) * cols + 8 * piece));
        widened[(piece / 4 * pairs + t) * 4 + piece % 4] =
            make_uint4(longwave::widen_e4m3(v.x), longwave::widen_e4m3(v.x >> 16), longwave::widen_e4m3(v.y), longwave::widen_e4m3(v.y >> 16));
    }
    __syncthreads();
    const uint4* own = widened + min(g, pairs - 1) * 4 + c;

    float total[4] = {};
    for (unsigned start = part_of_row; start < blocks; start += AHEAD * SPLIT) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const unsigned b = start + a * SPLIT;
            if (b >= blocks) {
                break;
            }
            const Tile tile = ahead[a];
            if (b + AHEAD * SPLIT < blocks) {
                load(ahead[a], b + AHEAD * SPLIT);
            }
            const uint32_t wl[4] = {tile.low.x, tile.low.y, tile.low.z, tile.low.w};
            const uint32_t wh[4] = {tile.high.x, tile.high.y, tile.high.z, tile.high.w};
            float sum[4] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 xs = own[size_t(b * 4 + j) * pairs * 4];
                uint32_t l[4], h[4];
                longwave::widen_e2m1(wl[j], l);
                longwave::widen_e2m1(wh[j], h);
                float part[4];
                longwave::mma_f16_first(part, l[0], h[0], l[1], h[1], xs.x, xs.y);
                longwave::mma_f16(part, l[2], h[2], l[3], h[3], xs.z, xs.w);
                const float sl = longwave::ue8m0(tile.low_scale >> (8 * j) & 0xff), sh = longwave::ue8m0(tile.high_scale >> (8 * j) & 0xff);
                sum[0] = fmaf(part[0], sl, sum[0]);
                sum[1] = fmaf(part[1], sl, sum[1]);
                sum[2] = fmaf(part[2], sh, sum[2]);
                sum[3] = fmaf(part[3], sh, sum[3]);
            }
            // 2^14 of the widened codes comes back here.
            const float s0 = __ldg(scales0 + b) * 16384.f, s1 = __ldg(scales1 + b) * 16384.f;
            total[0] = fmaf(sum[0], s0, total[0]);
            total[1] = fmaf(sum[1], s1, total[1]);
            total[2] = fmaf(sum[2], s0, total[2]);
            total[3] = fmaf(sum[3], s1, total[3]);
        }
    }

    __shared__ float sums[WARPS][8][ROWS + 1];
    sums[warp][2 * c][g] = total[0];
    sums[warp][2 * c + 1][g] = total[1];
    sums[warp][2 * c][g + 8] = total[2];
    sums[warp][2 * c + 1][g + 8] = total[3];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < WARPS / SPLIT * 8 * ROWS; i += WARPS * 32) {
        const unsigned r = i % ROWS, group = i / ROWS % (WARPS / SPLIT), p = i / ROWS / (WARPS / SPLIT);
        const unsigned to = (blockIdx.x * (WARPS / SPLIT) + group) * ROWS;
        if (p < pairs && to < rows) {
            float sum = 0.f;
#pragma unroll
            for (int v = 0; v < SPLIT; v++) {
                sum += sums[group * SPLIT + v][p][r];
            }
            y[size_t(pair + p) * rows + to + r] = sum;
        }
    }
}

// Eight warps with sixteen weight rows each and TILES tiles of eight pairs, whose codes come through shared memory: of a
// column block, group j of 32 columns of pair t is at 1024 j + 32 t.
template <int TILES, int SPLIT>
__device__ __forceinline__ void many(const uint8_t* __restrict__ w, const uint8_t* __restrict__ w_scales,
                                     const uint8_t* __restrict__ x, const float* __restrict__ x_scales,
                                     const unsigned* __restrict__ inputs, float* __restrict__ y, unsigned rows, unsigned cols,
                                     unsigned expert, unsigned pair, unsigned pairs, uint32_t staged) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const auto input_of = [&](unsigned p) { return inputs ? inputs[p] : p; };
    const unsigned blocks = cols / BLOCK;
    const unsigned wanted = (blockIdx.x * WARPS + warp) * ROWS, first = min(wanted, rows - ROWS);
    const size_t row = size_t(expert) * rows + first + g;
    const uint8_t* low = w + row * (cols / 2) + 16 * c;
    const uint8_t* low_scales = w_scales + row * (cols / 32);
    // Column blocks in the order of the parts.
    const auto advance = [&](unsigned& block, unsigned& part) {
        block += SPLIT;
        block = block < blocks ? block : ++part;
    };
    const unsigned copied = threadIdx.x / 8, piece = threadIdx.x % 8;
    const unsigned input = input_of(pair + min(copied, pairs - 1));
    const uint8_t* source = x + size_t(input) * cols + 16 * piece;
    const float* scale = x_scales + size_t(input) * blocks;
    unsigned coming = 0, coming_part = 0, coming_step = 0;
    const auto copy = [&]() {
        if (coming_step < blocks && copied < 8 * TILES) {
            const uint32_t to = staged + coming_step % STAGES * STAGE + piece / 2 * 1024 + copied * 32 + piece % 2 * 16;
            longwave::copy_16(to, source + size_t(coming) * BLOCK);
            if (piece == 0) {
                longwave::copy_4(staged + coming_step % STAGES * STAGE + 32 * BLOCK + copied * 4, scale + coming);
            }
        }
        coming_step++;
        advance(coming, coming_part);
        longwave::commit_copies();
    };
    const auto load = [&](Tile& tile, unsigned b) {
        tile.low = __ldg(reinterpret_cast<const uint4*>(low + b * (BLOCK / 2)));
        tile.high = __ldg(reinterpret_cast<const uint4*>(low + b * (BLOCK / 2) + 4 * cols));
        tile.low_scale = __ldg(reinterpret_cast<const uint32_t*>(low_scales + 4 * b));
        tile.high_scale = __ldg(reinterpret_cast<const uint32_t*>(low_scales + 4 * b + cols / 4));
    };
    Tile ahead[AHEAD];
    unsigned next = 0, next_part = 0;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        if (a < blocks) {
            load(ahead[a], next);
            advance(next, next_part);
        }
    }
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        copy();
    }
    float parts[TILES][4] = {}, total[TILES][4] = {};
    unsigned b = 0, b_part = 0;
    for (unsigned start = 0; start < blocks; start += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const unsigned step = start + a;
            if (step >= blocks) {
                break;
            }
            const Tile tile = ahead[a];
            if (step + AHEAD < blocks) {
                load(ahead[a], next);
                advance(next, next_part);
            }
            longwave::wait_copies<STAGES - 2>();
            __syncthreads();
            copy();
            const uint32_t from = staged + step % STAGES * STAGE + g * 32 + 8 * c;
            const uint32_t wl[4] = {tile.low.x, tile.low.y, tile.low.z, tile.low.w};
            const uint32_t wh[4] = {tile.high.x, tile.high.y, tile.high.z, tile.high.w};
            float sum[TILES][4] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t l[4], h[4];
                longwave::widen_e2m1(wl[j], l);
                longwave::widen_e2m1(wh[j], h);
                const float sl = longwave::ue8m0(tile.low_scale >> (8 * j) & 0xff), sh = longwave::ue8m0(tile.high_scale >> (8 * j) & 0xff);
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const uint2 v = longwave::read_8(from + 1024 * j + 256 * n);
                    float part[4];
                    longwave::mma_f16_first(part, l[0], h[0], l[1], h[1], longwave::widen_e4m3(v.x), longwave::widen_e4m3(v.x >> 16));
                    longwave::mma_f16(part, l[2], h[2], l[3], h[3], longwave::widen_e4m3(v.y), longwave::widen_e4m3(v.y >> 16));
                    sum[n][0] = fmaf(part[0], sl, sum[n][0]);
                    sum[n][1] = fmaf(part[1], sl, sum[n][1]);
                    sum[n][2] = fmaf(part[2], sh, sum[n][2]);
                    sum[n][3] = fmaf(part[3], sh, sum[n][3]);
                }
            }
            const bool ends = b + SPLIT >= blocks;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                // 2^14 of the widened codes comes back here.
                const uint2 pair_scales = longwave::read_8(staged + step % STAGES * STAGE + 32 * BLOCK + (8 * n + 2 * c) * 4);
                const float s[2] = {__uint_as_float(pair_scales.x) * 16384.f, __uint_as_float(pair_scales.y) * 16384.f};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    total[n][i] = fmaf(sum[n][i], s[i % 2], total[n][i]);
                    if (ends) {
                        parts[n][i] += total[n][i];
                        total[n][i] = 0.f;
                    }
                }
            }
            advance(b, b_part);
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned p = 8 * n + 2 * c + i % 2;
            if (p < pairs && wanted < rows) {
                y[size_t(pair + p) * rows + wanted + g + i / 2 * 8] = parts[n][i];
            }
        }
    }
}

template <int SPLIT>
__device__ __forceinline__ void many_of(const uint8_t* __restrict__ w, const uint8_t* __restrict__ w_scales,
                                        const uint8_t* __restrict__ x, const float* __restrict__ x_scales,
                                        const int* __restrict__ groups, const unsigned* __restrict__ inputs,
                                        float* __restrict__ y, unsigned rows, unsigned cols) {
    __shared__ uint4 staged[STAGES * STAGE / 16];
    const uint32_t at = longwave::shared_address(staged);
    const unsigned expert = groups[3 * blockIdx.y], pair = groups[3 * blockIdx.y + 1] + 32 * blockIdx.z;
    const unsigned left = max(groups[3 * blockIdx.y + 2] - int(32 * blockIdx.z), 0), pairs = min(left, 32u);
    switch ((pairs + 7) / 8) {
        case 0:
            return;
        case 1:
            return many<1, SPLIT>(w, w_scales, x, x_scales, inputs, y, rows, cols, expert, pair, pairs, at);
        case 2:
            return many<2, SPLIT>(w, w_scales, x, x_scales, inputs, y, rows, cols, expert, pair, pairs, at);
        case 3:
            return many<3, SPLIT>(w, w_scales, x, x_scales, inputs, y, rows, cols, expert, pair, pairs, at);
        default:
            return many<4, SPLIT>(w, w_scales, x, x_scales, inputs, y, rows, cols, expert, pair, pairs, at);
    }
}

}  // namespace

// Blocks of a multiprocessor: as many as registers allow without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define RESIDENT 2
#define RESIDENT_MANY 1
#else
#define RESIDENT 3
#define RESIDENT_MANY 2
#endif

#define ENTRY(split)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) experts_fp4_##split(                                     \
        const uint8_t* w, const uint8_t* w_scales, const uint8_t* x, const float* x_scales, const int* groups,           \
        const unsigned* inputs, float* y, unsigned rows, unsigned cols) {                                                \
        longwave::overlap();                                                                                             \
        experts<split>(w, w_scales, x, x_scales, groups, inputs, y, rows, cols);                                         \
    }

// From 4096 columns on, and fewer.
ENTRY(4)
ENTRY(2)

#define MANY(split)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT_MANY) experts_fp4_many_##split(                                \
        const uint8_t* w, const uint8_t* w_scales, const uint8_t* x, const float* x_scales, const int* groups,           \
        const unsigned* inputs, float* y, unsigned rows, unsigned cols) {                                                \
        longwave::overlap();                                                                                             \
        many_of<split>(w, w_scales, x, x_scales, groups, inputs, y, rows, cols);                                         \
    }

MANY(4)
MANY(2)

// Columns 0 to 3 of a word (s e e m each, column 0 lowest) go to bits 7, 3, 2, 1 of bytes 0 to 3, columns 4 to 7 to bits
// 0, 6, 5, 4.
__device__ __forceinline__ uint32_t arrange(uint32_t codes) {
    uint32_t out = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint32_t a = codes >> (4 * k) & 15, b = codes >> (16 + 4 * k) & 15;
        out |= ((a & 8) << 4 | (a & 7) << 1 | (b & 7) << 4 | b >> 3) << (8 * k);
    }
    return out;
}

// Within each 64 bytes (128 columns) of a row: word 4 j + c goes to word 4 c + j, so that a thread's sixteen bytes hold
// eight columns of each group of 32; within a word as above. One thread per 64 bytes, once, when weights are loaded.
extern "C" __global__ void repack(uint4* w, unsigned long long pieces) {
    longwave::overlap();
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < pieces) {
        const uint4 a = w[4 * i], b = w[4 * i + 1], c = w[4 * i + 2], d = w[4 * i + 3];
        w[4 * i] = make_uint4(arrange(a.x), arrange(b.x), arrange(c.x), arrange(d.x));
        w[4 * i + 1] = make_uint4(arrange(a.y), arrange(b.y), arrange(c.y), arrange(d.y));
        w[4 * i + 2] = make_uint4(arrange(a.z), arrange(b.z), arrange(c.z), arrange(d.z));
        w[4 * i + 3] = make_uint4(arrange(a.w), arrange(b.w), arrange(c.w), arrange(d.w));
    }
}
