// architectures: 90a
// y = W_e x for up to eight rows per expert on Hopper's warpgroups: W e2m1, packed [experts, rows, cols / 2], with a scale per 32
// columns [experts, rows, cols / 32] and a float factor per row, arranged by `repack_fp8` (common/experts_fp8.cuh); x e4m3 [inputs,
// cols] with a float scale per 128 columns. Groups and pairs are those of experts_fp4.cu, which other GPUs take; larger groups go
// through experts_fp4_wide.cu. experts_fp4.md has floor, design and measured steps.
//
// Codes become e4m3 in registers and go to the tensor cores as A, 64 rows of a warpgroup; pairs' codes are B as they are. A block of
// 128 columns is one sum there, scaled by the pair's scale and added up in float: even column blocks are one part and odd ones another,
// whose sum is multiplied by the row's factor. A pair's result has the same bits whatever else is in its group, from either kernel.
// Needs rows % 16 == 0, cols % 128 == 0.
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/experts_fp8.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_fp8.cuh"

namespace {

constexpr unsigned THREADS = 128, TILE = 64, BLOCK = 128;
// Column blocks of a thread's weights on their way, and blocks of a multiprocessor.
constexpr int AHEAD = 8, RESIDENT = 3;

using Operands = longwave::ExpertOperands;

// Adds a column block.
__device__ __forceinline__ void add_block(float (&total)[4], float (&product)[4], uint32_t (&a)[4][4], uint32_t x, float2 scales) {
    longwave::sum_block(product, a, x);
    total[0] = fmaf(product[0], scales.x, total[0]);
    total[1] = fmaf(product[1], scales.y, total[1]);
    total[2] = fmaf(product[2], scales.x, total[2]);
    total[3] = fmaf(product[3], scales.y, total[3]);
}

// A group's inputs, in shared memory: a row of 128 bytes of eight pairs for each column block, and their scales.
__device__ __forceinline__ void copy_inputs(const Operands& o, unsigned pair, unsigned pairs, uint32_t inputs, float* scales) {
    const unsigned blocks = o.cols / BLOCK;
    for (unsigned i = threadIdx.x; i < pairs * blocks * 8; i += THREADS) {
        const unsigned n = i / (blocks * 8), piece = i % (blocks * 8);
        const uint8_t* x = o.x + size_t(o.input_of(pair + n)) * o.cols + 16 * piece;
        longwave::copy_16(inputs + piece / 8 * 1024 + n * 128 + ((piece % 8 ^ n) << 4), x);
    }
    for (unsigned i = threadIdx.x; i < pairs * blocks; i += THREADS) {
        const unsigned n = i / blocks, block = i % blocks;
        longwave::copy_4(longwave::shared_address(scales + 8 * block + n), o.x_scales + size_t(o.input_of(pair + n)) * blocks + block);
    }
    longwave::commit_copies();
    longwave::wait_copies<0>();
}

template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// Blocks stay and have a share of all tiles (64 rows of a group), which are neighbours; a thread's weights of the next AHEAD column
// blocks are on their way, those of the next tile while a tile ends. Even column blocks are one sum and odd ones another. WHOLE:
// column blocks are a multiple of AHEAD.
template <bool WHOLE>
__device__ __forceinline__ void experts(const Operands& o) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint8_t powers[8 * longwave::EXPERT_POWERS];
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const unsigned g = lane / 4, c = lane % 4, blocks = o.cols / BLOCK;
    const unsigned of_group = (o.rows + TILE - 1) / TILE, tiles = o.used_groups_of_warp() * of_group;
    const unsigned share = tiles / gridDim.x, rest = tiles % gridDim.x;
    const unsigned begin = blockIdx.x * share + min(blockIdx.x, rest), end = begin + share + (blockIdx.x < rest);
    if (begin == end) {
        return;
    }
    const uint32_t inputs = longwave::shared_address(memory);
    float* const pair_scales = reinterpret_cast<float*>(memory + 8 * size_t(o.cols));

    // The weights that are loaded next: AHEAD column blocks from `coming_block` on.
    longwave::ExpertTile from;
    unsigned coming = begin, coming_block = 0, coming_expert = __ldcg(o.groups + 3 * (begin / of_group));
    const auto find = [&]() {
        // Behind the last rows a warp computes the last ones again and stores nothing.
        const unsigned row = min(coming % of_group * TILE + 16 * warp, o.rows - 16);
        from.find(o.w, o.w_scales, size_t(coming_expert) * o.rows + row, o.cols);
    };
    longwave::ExpertWeights ahead[AHEAD] = {};
    const auto load = [&](int a) {
        // Without a condition: with one, the compiler copies what comes, and a copy waits for it.
        if (WHOLE || coming_block + a < blocks) {
            ahead[a] = from.load(a);
        }
    };
    // False behind the last tile.
    const auto advance = [&]() {
        coming_block += AHEAD;
        from.skip(AHEAD);
        if (coming_block >= blocks) {
            if (++coming == end) {
                return false;
            }
            coming_block = 0;
            if (coming % of_group == 0) {
                coming_expert = __ldcg(o.groups + 3 * (coming / of_group));
            }
            find();
        }
        return true;
    };
    find();
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        load(a);
    }
    unsigned group, expert, pair, pairs;
    const auto enter = [&](unsigned tile) {
        group = tile / of_group;
        expert = __ldcg(o.groups + 3 * group);
        pair = __ldcg(o.groups + 3 * group + 1);
        pairs = __ldcg(o.groups + 3 * group + 2);
    };
    enter(begin);
    longwave::fill_powers(powers);
    float product[4] = {};
    for (unsigned t = begin; t < end; t++) {
        if (t == begin || t / of_group != group) {
            if (t > begin) {
                // Everybody is done with the last group's inputs.
                __syncthreads();
                enter(t);
            }
            copy_inputs(o, pair, pairs, inputs, pair_scales);
            longwave::fence_shared();
            __syncthreads();
        }
        const unsigned row = t % of_group * TILE + 16 * warp + g;
        const bool stores = row < o.rows;
        const float* factors = o.w_factors + size_t(expert) * o.rows + row;
        const float low = stores ? __ldg(factors) : 0.f, high = stores ? __ldg(factors + 8) : 0.f;
        const float2* own_scales = reinterpret_cast<const float2*>(pair_scales) + c;
        float total[2][4] = {};
        for (unsigned start = 0; start < blocks; start += AHEAD) {
            const auto add = [&](auto loads) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    const unsigned block = start + i;
                    const bool is = WHOLE || block < blocks;
                    uint32_t a[4][4];
                    if (is) {
                        longwave::widen_block(ahead[i], powers, a);
                    }
                    if constexpr (loads.value) {
                        load(i);
                    }
                    if (is) {
                        add_block(total[i % 2], product, a, inputs + block * 1024, own_scales[block * 4]);
                    }
                }
            };
            if (advance()) {
                add(Flag<true>());
            } else {
                add(Flag<false>());
            }
        }
        if (stores) {
#pragma unroll
            for (unsigned n = 0; n < 2; n++) {
                if (2 * c + n < pairs) {
                    float* y = o.y + size_t(pair + 2 * c + n) * o.rows + row;
                    y[0] = (total[0][n] + total[1][n]) * low;
                    y[8] = (total[0][2 + n] + total[1][2 + n]) * high;
                }
            }
        }
    }
}

// Sixteen bits of a lane's codes, columns 4 c .. 4 c + 3, and of the sixteen columns further, in the order of widen_e2m1.
__device__ __forceinline__ uint32_t arrange(uint32_t low, uint32_t high) {
    const uint32_t codes = low | high << 16;
    uint32_t out = codes & 0x77777777u;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        out |= (codes >> (4 * k + 3) & 1) << (8 * k + 7) | (codes >> (4 * k + 19) & 1) << (8 * k + 3);
    }
    return out;
}

}  // namespace

// Grid: three times as many blocks as multiprocessors, 128 threads. Dynamic shared memory: 8 cols + cols / 4 bytes. For columns that
// are a multiple of 1,024, and others.
#define ENTRY(name, whole)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)                                                      \
        name(const uint8_t* w, const uint8_t* w_scales, const float* w_factors, const uint8_t* x, const float* x_scales, \
             const int* groups, const unsigned* inputs, float* y, unsigned rows, unsigned cols, unsigned group_count) {  \
        /* Not earlier: the next kernel's blocks would take room from this one's that have not begun. */                 \
        longwave::wait_before();                                                                                         \
        longwave::start_next();                                                                                          \
        experts<whole>({w, w_scales, w_factors, x, x_scales, groups, inputs, y, rows, cols, group_count});               \
    }

ENTRY(experts_fp4_stream_whole, true)
ENTRY(experts_fp4_stream_any, false)

// Arranges a tile of sixteen rows in place, once, when weights are loaded, and writes the rows' factors. Grid: all experts' rows / 16,
// 256 threads; dynamic shared memory: 8.5 cols bytes.
extern "C" __global__ void repack_fp8(uint4* w, uint32_t* w_scales, float* w_factors, unsigned cols) {
    longwave::overlap();
    constexpr unsigned ROWS = longwave::EXPERT_TILE;
    extern __shared__ uint4 tile[];
    __shared__ unsigned top[ROWS];
    const unsigned blocks = cols / BLOCK, codes = ROWS * blocks * 4, scales = ROWS * blocks;
    uint32_t* tile_scales = reinterpret_cast<uint32_t*>(tile + codes);
    w += size_t(blockIdx.x) * codes;
    w_scales += size_t(blockIdx.x) * scales;
    if (threadIdx.x < ROWS) {
        top[threadIdx.x] = 0;
    }
    for (unsigned i = threadIdx.x; i < codes; i += blockDim.x) {
        tile[i] = w[i];
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < scales; i += blockDim.x) {
        const uint32_t word = tile_scales[i] = w_scales[i];
        atomicMax(top + i / blocks, max(max(word & 255, word >> 8 & 255), max(word >> 16 & 255, word >> 24)));
    }
    __syncthreads();
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile);
    for (unsigned i = threadIdx.x; i < codes; i += blockDim.x) {
        const unsigned block = i / (ROWS * 4), row = i / 4 % ROWS, c = i % 4;
        const uint16_t* from = halves + (row * blocks + block) * 32 + c;
        w[i] = make_uint4(arrange(from[0], from[4]), arrange(from[8], from[12]), arrange(from[16], from[20]), arrange(from[24], from[28]));
    }
    for (unsigned i = threadIdx.x; i < scales; i += blockDim.x) {
        const uint32_t word = tile_scales[i % ROWS * blocks + i / ROWS], most = top[i % ROWS];
        uint32_t indices = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t below = most - (word >> (8 * j) & 255);
            indices |= 8 * (longwave::EXPERT_POWERS - 1 - min(below, longwave::EXPERT_POWERS - 1)) << (8 * j);
        }
        w_scales[i] = indices;
    }
    if (threadIdx.x < ROWS) {
        w_factors[size_t(blockIdx.x) * ROWS + threadIdx.x] = ldexpf(1.f, static_cast<int>(top[threadIdx.x]) - 127 - 6);
    }
}
