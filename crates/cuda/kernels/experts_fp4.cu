// architectures: 90a 100a
// y = W_e x for a few rows per expert: W e2m1, packed [experts, rows, cols / 2], with one ue8m0 scale per 32 columns
// [experts, rows, cols / 32], both in the order of common/experts.cuh; x e4m3 [inputs, cols] with a float scale per 128
// columns. A group is up to eight rows (64 for the kernels called many, 32 for each z of the grid) of one expert, or none:
// {expert, first pair, pairs}; pair p reads input inputs[p] (p where inputs is null) and writes y [pairs, rows] float.
// experts_fp4.md has floor, design and measured steps.
//
// A row's column blocks are summed in SPLIT parts: part p has the blocks p, p + SPLIT, ..., and the parts are added in
// order. For eight rows SPLIT warps share sixteen weight rows and have a part each; for 32 a warp visits all parts. Sums
// have one order, so a pair's result has the same bits whatever else is in its group, and from either kernel. Needs
// rows % 16 == 0, cols % 128 == 0.
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/experts.cuh"
#include "common/halves.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int ROWS = 16;
constexpr int BLOCK = 128;
// Column blocks of a thread's weights on their way: for up to eight pairs, and for more.
constexpr int AHEAD = 4, AHEAD_MANY = 2;
// For 32 pairs: column blocks of codes and scales on their way, and the bytes of one.
constexpr int STAGES = 4;
constexpr int STAGE = 32 * (BLOCK + 4);

using Operands = longwave::ExpertOperands;

// Up to eight pairs per group. Blocks stay and have a share of all tiles, which are neighbours: WARPS / SPLIT times sixteen rows
// of a group; weights of the next tile are on their way while a tile ends. Shared memory: the inputs of up to eight pairs as
// halves, then a scale of each pair and column block. WHOLE: every warp's column blocks are a multiple of AHEAD.
template <int SPLIT, bool WHOLE>
__device__ __forceinline__ void experts(const Operands& o, float (&sums)[2][WARPS][8][ROWS + 1]) {
    constexpr unsigned TEAMS = WARPS / SPLIT;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned blocks = o.cols / BLOCK, part = warp % SPLIT, team = warp / SPLIT;
    const unsigned of_group = (o.rows / ROWS + TEAMS - 1) / TEAMS, tiles = o.used_groups<WARPS * 32>() * of_group;
    const unsigned share = tiles / gridDim.x, rest = tiles % gridDim.x;
    const unsigned begin = blockIdx.x * share + min(blockIdx.x, rest), end = begin + share + (blockIdx.x < rest);
    if (begin == end) {
        return;
    }

    // The weights that are loaded next: AHEAD column blocks of this warp's part from `coming_block` on.
    longwave::ExpertTile from;
    unsigned coming = begin, coming_block = part;
    const auto find = [&]() {
        // Behind the last rows a team computes the last ones again and stores nothing.
        const unsigned row = min((coming % of_group * TEAMS + team) * ROWS, o.rows - ROWS);
        from.find(o.w, o.w_scales, size_t(o.groups[3 * (coming / of_group)]) * o.rows + row, o.cols);
        from.skip(part);
    };
    longwave::ExpertWeights ahead[AHEAD];
    const auto load = [&](int a) {
        if ((WHOLE ? coming_block : coming_block + a * SPLIT) < blocks) {
            ahead[a] = from.load(a * SPLIT);
        }
    };
    const auto advance = [&]() {
        coming_block += AHEAD * SPLIT;
        from.skip(AHEAD * SPLIT);
        if (coming_block >= blocks) {
            coming_block = blocks;
            if (++coming < end) {
                coming_block = part;
                find();
            }
        }
    };
    find();
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        load(a);
    }

    // Piece (8 columns of a group of 32) 4 i + c of pair n is at (8 i + n) * 4 + c, in the order of the threads.
    extern __shared__ uint4 widened[];
    float* pair_scales = reinterpret_cast<float*>(widened + o.cols);
    unsigned group = ~0u, pair = 0, pairs = 0;
    for (unsigned t = begin; t < end; t++) {
        if (t / of_group != group) {
            // Nobody reads the last group's inputs any more: all threads were at the barrier of its sums.
            group = t / of_group;
            pair = o.groups[3 * group + 1];
            pairs = o.groups[3 * group + 2];
            const unsigned pieces = o.cols / 8;
            for (unsigned i = threadIdx.x; i < pairs * pieces; i += WARPS * 32) {
                const unsigned n = i / pieces, piece = i % pieces;
                const uint2 v = __ldg(reinterpret_cast<const uint2*>(o.x + size_t(o.input_of(pair + n)) * o.cols + 8 * piece));
                widened[(piece / 4 * 8 + n) * 4 + piece % 4] = make_uint4(
                    longwave::widen_e4m3(v.x), longwave::widen_e4m3(v.x >> 16), longwave::widen_e4m3(v.y), longwave::widen_e4m3(v.y >> 16));
            }
            for (unsigned i = threadIdx.x; i < 8 * blocks; i += WARPS * 32) {
                // 2^14 of the widened weights comes back here.
                const unsigned input = o.input_of(pair + min(i % 8, pairs - 1));
                pair_scales[i] = __ldg(o.x_scales + size_t(input) * blocks + i / 8) * 16384.f;
            }
            __syncthreads();
        }
        float total[4] = {};
        for (unsigned start = part; start < blocks; start += AHEAD * SPLIT) {
            const uint4* own = widened + (start * 32 + min(g, pairs - 1)) * 4 + c;
            const float2* own_scales = reinterpret_cast<const float2*>(pair_scales) + start * 4 + c;
            advance();
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (WHOLE || start + a * SPLIT < blocks) {
                    const longwave::ExpertWeights& weights = ahead[a];
                    const uint32_t wl[4] = {weights.low.x, weights.low.y, weights.low.z, weights.low.w};
                    const uint32_t wh[4] = {weights.high.x, weights.high.y, weights.high.z, weights.high.w};
                    float sum[4] = {};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const uint4 xs = own[(a * SPLIT * 4 + j) * 32];
                        uint32_t l[4], h[4];
                        longwave::widen_e2m1(wl[j], l);
                        longwave::widen_e2m1(wh[j], h);
                        float products[4];
                        longwave::mma_f16_first(products, l[0], h[0], l[1], h[1], xs.x, xs.y);
                        longwave::mma_f16(products, l[2], h[2], l[3], h[3], xs.z, xs.w);
                        const float sl = longwave::ue8m0(weights.low_scale >> (8 * j) & 0xff);
                        const float sh = longwave::ue8m0(weights.high_scale >> (8 * j) & 0xff);
                        sum[0] = fmaf(products[0], sl, sum[0]);
                        sum[1] = fmaf(products[1], sl, sum[1]);
                        sum[2] = fmaf(products[2], sh, sum[2]);
                        sum[3] = fmaf(products[3], sh, sum[3]);
                    }
                    const float2 s = own_scales[a * SPLIT * 4];
                    total[0] = fmaf(sum[0], s.x, total[0]);
                    total[1] = fmaf(sum[1], s.y, total[1]);
                    total[2] = fmaf(sum[2], s.x, total[2]);
                    total[3] = fmaf(sum[3], s.y, total[3]);
                }
                load(a);
            }
        }
        // The parts, added in order.
        float(&of_tile)[WARPS][8][ROWS + 1] = sums[t % 2];
        of_tile[warp][2 * c][g] = total[0];
        of_tile[warp][2 * c + 1][g] = total[1];
        of_tile[warp][2 * c][g + 8] = total[2];
        of_tile[warp][2 * c + 1][g + 8] = total[3];
        __syncthreads();
        for (unsigned i = threadIdx.x; i < TEAMS * pairs * ROWS; i += WARPS * 32) {
            const unsigned r = i % ROWS, of = i / ROWS % TEAMS, p = i / ROWS / TEAMS;
            const unsigned to = (t % of_group * TEAMS + of) * ROWS;
            if (to < o.rows) {
                float sum = 0.f;
#pragma unroll
                for (int v = 0; v < SPLIT; v++) {
                    sum += of_tile[of * SPLIT + v][p][r];
                }
                o.y[size_t(pair + p) * o.rows + to + r] = sum;
            }
        }
    }
}

// Eight warps with sixteen weight rows each and TILES tiles of eight pairs, whose codes come through shared memory: of a
// column block, group j of 32 columns of pair t is at 1024 j + 32 t.
template <int TILES, int SPLIT>
__device__ __forceinline__ void many(const Operands& o, unsigned expert, unsigned pair, unsigned pairs, uint32_t staged) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned blocks = o.cols / BLOCK;
    const unsigned wanted = (blockIdx.x * WARPS + warp) * ROWS, first = min(wanted, o.rows - ROWS);
    longwave::ExpertTile from_tile;
    from_tile.find(o.w, o.w_scales, size_t(expert) * o.rows + first, o.cols);
    // Column blocks in the order of the parts.
    const auto advance = [&](unsigned& block, unsigned& part) {
        block += SPLIT;
        block = block < blocks ? block : ++part;
    };
    const unsigned copied = threadIdx.x / 8, piece = threadIdx.x % 8;
    const unsigned input = o.input_of(pair + min(copied, pairs - 1));
    const uint8_t* source = o.x + size_t(input) * o.cols + 16 * piece;
    const float* scale = o.x_scales + size_t(input) * blocks;
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
    longwave::ExpertWeights ahead[AHEAD_MANY];
    unsigned next = 0, next_part = 0;
#pragma unroll
    for (int a = 0; a < AHEAD_MANY; a++) {
        if (a < blocks) {
            ahead[a] = from_tile.load(next);
            advance(next, next_part);
        }
    }
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        copy();
    }
    float parts[TILES][4] = {}, total[TILES][4] = {};
    unsigned b = 0, b_part = 0;
    for (unsigned start = 0; start < blocks; start += AHEAD_MANY) {
#pragma unroll
        for (int a = 0; a < AHEAD_MANY; a++) {
            const unsigned step = start + a;
            if (step >= blocks) {
                break;
            }
            const longwave::ExpertWeights tile = ahead[a];
            if (step + AHEAD_MANY < blocks) {
                ahead[a] = from_tile.load(next);
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
            if (p < pairs && wanted < o.rows) {
                o.y[size_t(pair + p) * o.rows + wanted + g + i / 2 * 8] = parts[n][i];
            }
        }
    }
}

template <int SPLIT>
__device__ __forceinline__ void many_of(const Operands& o) {
    __shared__ uint4 staged[STAGES * STAGE / 16];
    const uint32_t at = longwave::shared_address(staged);
    const unsigned expert = o.groups[3 * blockIdx.y], pair = o.groups[3 * blockIdx.y + 1] + 32 * blockIdx.z;
    const unsigned left = max(o.groups[3 * blockIdx.y + 2] - int(32 * blockIdx.z), 0), pairs = min(left, 32u);
    switch ((pairs + 7) / 8) {
        case 0:
            return;
        case 1:
            return many<1, SPLIT>(o, expert, pair, pairs, at);
        case 2:
            return many<2, SPLIT>(o, expert, pair, pairs, at);
        case 3:
            return many<3, SPLIT>(o, expert, pair, pairs, at);
        default:
            return many<4, SPLIT>(o, expert, pair, pairs, at);
    }
}

}  // namespace

// Blocks of a multiprocessor: as many as registers allow without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define RESIDENT_MANY 1
#else
#define RESIDENT_MANY 2
#endif

#define ENTRY(split)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) experts_fp4_##split(                                     \
        const uint8_t* w, const uint8_t* w_scales, const uint8_t* x, const float* x_scales, const int* groups,           \
        const unsigned* inputs, float* y, unsigned rows, unsigned cols, unsigned group_count) {                          \
        longwave::overlap();                                                                                             \
        __shared__ float sums[2][WARPS][8][ROWS + 1];                                                                    \
        const Operands o = {w, w_scales, nullptr, x, x_scales, groups, inputs, y, rows, cols, group_count};              \
        cols % (BLOCK * split * AHEAD) == 0 ? experts<split, true>(o, sums) : experts<split, false>(o, sums);            \
    }

// Grid: as many blocks as the multiprocessors hold at once, at most two each, 256 threads. Dynamic shared memory: 16 cols +
// cols / 4 bytes. With 4 parts from 4096 columns on, and 2 for fewer.
ENTRY(4)
ENTRY(2)

#define MANY(split)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT_MANY) experts_fp4_many_##split(                                \
        const uint8_t* w, const uint8_t* w_scales, const uint8_t* x, const float* x_scales, const int* groups,           \
        const unsigned* inputs, float* y, unsigned rows, unsigned cols) {                                                \
        longwave::overlap();                                                                                             \
        many_of<split>({w, w_scales, nullptr, x, x_scales, groups, inputs, y, rows, cols, 0});                           \
    }

MANY(4)
MANY(2)

// A word of eight codes (s e e m each, column 0 lowest) in the order of widen_e2m1: of even columns in the lower half, of odd
// ones in the upper half, and there columns 0 and 1 have bits 15 and 11 to 9, 2 and 3 bits 12 and 8 to 6, 4 and 5 bits 14 and
// 5 to 3, 6 and 7 bits 13 and 2 to 0.
__device__ __forceinline__ uint32_t arrange(uint32_t codes) {
    constexpr int SIGN[4] = {15, 12, 14, 13}, REST[4] = {9, 6, 3, 0};
    uint32_t out = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint32_t code = codes >> (4 * k) & 15;
        out |= ((code >> 3) << SIGN[k / 2] | (code & 7) << REST[k / 2]) << (16 * (k % 2));
    }
    return out;
}

// Arranges a tile of sixteen rows in place (common/experts.cuh), once, when weights are loaded. Grid: all experts' rows / 16,
// 256 threads; dynamic shared memory: 8.5 cols bytes.
extern "C" __global__ void repack(uint4* w, uint32_t* w_scales, unsigned cols) {
    longwave::overlap();
    extern __shared__ uint4 tile[];
    const unsigned blocks = cols / BLOCK, codes = ROWS * blocks * 4, scales = ROWS * blocks;
    uint32_t* tile_scales = reinterpret_cast<uint32_t*>(tile + codes);
    w += size_t(blockIdx.x) * codes;
    w_scales += size_t(blockIdx.x) * scales;
    for (unsigned i = threadIdx.x; i < codes; i += blockDim.x) {
        tile[i] = w[i];
    }
    for (unsigned i = threadIdx.x; i < scales; i += blockDim.x) {
        tile_scales[i] = w_scales[i];
    }
    __syncthreads();
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
    for (unsigned i = threadIdx.x; i < codes; i += blockDim.x) {
        const unsigned block = i / (ROWS * 4), row = i / 4 % ROWS, c = i % 4, from = (row * blocks + block) * 16 + c;
        w[i] = make_uint4(arrange(words[from]), arrange(words[from + 4]), arrange(words[from + 8]), arrange(words[from + 12]));
    }
    for (unsigned i = threadIdx.x; i < scales; i += blockDim.x) {
        w_scales[i] = tile_scales[i % ROWS * blocks + i / ROWS];
    }
}
