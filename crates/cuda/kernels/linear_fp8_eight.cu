// architectures: 90a
// y = W x with e4m3 weights and inputs for up to eight tokens on Hopper's warpgroups; operands and bits are those of
// linear_fp8_wide.cu, which takes more tokens. linear_fp8.md has floor, design and measured steps.
//
// Weights go from memory to registers and from there to the tensor cores (A), with no copy engine and no barriers in between. The
// warps of a block have the same sixteen weight rows and take turns with the column blocks. Inputs of the four blocks of a
// warpgroup are columns of B; of its products a warp uses those with its own. Sums of column blocks meet in shared memory, where
// they are scaled and added one after the other. Needs rows % 16 == 0 (128 with several groups), cols % 128 == 0.
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/linear_fp8.cuh"
#include "common/load.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_fp8.cuh"

namespace {

constexpr unsigned BLOCK = 128, ROWS = 16, WARPS = 8, THREADS = 32 * WARPS;
// Column blocks of a thread's weights on their way.
constexpr unsigned AHEAD = 4;
// Column blocks at most.
constexpr unsigned MOST = 128;
// Sums of a row lie beside each other, and rows so that who adds four at once meets no bank twice.
constexpr unsigned PAD = 4;

using Operands = longwave::Fp8Operands;

// Weights of one thread in one column block: rows g and g + 8, columns 16 c .. and 64 + 16 c .. of the block.
struct Weights {
    uint4 v[2][2];

    __device__ __forceinline__ void load_if(bool there, const uint8_t* low, const uint8_t* high) {
        longwave::load_16_if(there, v[0][0], low);
        longwave::load_16_if(there, v[0][1], low + 64);
        longwave::load_16_if(there, v[1][0], high);
        longwave::load_16_if(there, v[1][1], high + 64);
    }

    // As the tensor cores take them, 32 columns a step: lanes c and c ^ 2 give each other half of a load, so that lane c has eight
    // columns of each step, from 0, 16, 8 and 24 on.
    __device__ __forceinline__ void arrange(uint32_t (&a)[4][4]) const {
        const bool upper = threadIdx.x & 2;
#pragma unroll
        for (int row = 0; row < 2; row++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 own = v[row][half];
                const uint32_t first = __shfl_xor_sync(0xffffffffu, upper ? own.x : own.z, 2);
                const uint32_t second = __shfl_xor_sync(0xffffffffu, upper ? own.y : own.w, 2);
                a[2 * half][row] = upper ? first : own.x;
                a[2 * half][2 + row] = upper ? second : own.y;
                a[2 * half + 1][row] = upper ? own.z : first;
                a[2 * half + 1][2 + row] = upper ? own.w : second;
            }
        }
    }
};

// Brings the inputs of a group and their scales to shared memory: for each column block TOKENS rows of 128 bytes, columns in the
// order in which lanes have them. All threads of the block call it.
template <unsigned TOKENS>
__device__ __forceinline__ void bring_inputs(const Operands& o, unsigned group, uint32_t inputs, float* scales) {
    const unsigned blocks = o.cols / BLOCK, steps = 4 * blocks;
    for (unsigned i = threadIdx.x; i < o.tokens * steps; i += THREADS) {
        const unsigned n = i / steps, step = i % steps;
        const uint4* x = reinterpret_cast<const uint4*>(o.x + (size_t(n) * o.groups + group) * o.cols + 32 * step);
        const uint4 v = __ldg(x), w = __ldg(x + 1);
        const unsigned row = step / 4 * TOKENS + n, piece = step % 4 * 2;
        longwave::write_16(inputs + row * BLOCK + ((piece ^ row % 8) << 4), make_uint4(v.x, w.x, v.z, w.z));
        longwave::write_16(inputs + row * BLOCK + ((piece + 1 ^ row % 8) << 4), make_uint4(v.y, w.y, v.w, w.w));
    }
    for (unsigned i = threadIdx.x; i < o.tokens * blocks; i += THREADS) {
        const unsigned n = i / blocks, block = i % blocks;
        scales[n * MOST + block] = __ldg(o.x_scales + (size_t(n) * o.groups + group) * blocks + block);
    }
    longwave::fence_shared();
    __syncthreads();
}

// One of the four, whatever the others are.
__device__ __forceinline__ float product_of(const float (&products)[16], unsigned part, unsigned v) {
    float own;
    asm("{\n.reg .pred p, q, r;\nsetp.eq.u32 p, %5, 1;\nsetp.eq.u32 q, %5, 2;\nsetp.eq.u32 r, %5, 3;\n"
        "selp.f32 %0, %2, %1, p;\nselp.f32 %0, %3, %0, q;\nselp.f32 %0, %4, %0, r;\n}\n"
        : "=&f"(own)
        : "f"(products[v]), "f"(products[4 + v]), "f"(products[8 + v]), "f"(products[12 + v]), "r"(part));
    return own;
}

// Writes a lane's products of the column block `part` of four: rows g and g + 8, `next` values from one row to the next, of tokens
// that are ROWS rows apart.
__device__ __forceinline__ void write_own(const float (&product)[16], unsigned part, float* to, unsigned next) {
    const unsigned lane = threadIdx.x % 32;
    to += (lane % 4 * 2 * ROWS + lane / 4) * next;
#pragma unroll
    for (unsigned v = 0; v < 4; v++) {
        to[(v % 2 * ROWS + v / 2 * 8) * next] = product_of(product, part, v);
    }
}

// The same of two tokens: eight columns hold all four blocks, and a lane has two of them.
__device__ __forceinline__ void write_own(const float (&product)[4], unsigned part, float* to, unsigned next) {
    const unsigned lane = threadIdx.x % 32;
    if (lane % 4 == part) {
        to += lane / 4 * next;
#pragma unroll
        for (unsigned v = 0; v < 4; v++) {
            to[(v % 2 * ROWS + v / 2 * 8) * next] = product[v];
        }
    }
}

// A block has a share of all tiles of sixteen rows, which are neighbours. A warp has STEPS column blocks of a tile, or a multiple of
// AHEAD; behind the last one are some that nobody uses. With several groups STEPS is AHEAD. Shared memory: inputs of all these column
// blocks for TOKENS tokens, then sums (two buffers for less than AHEAD steps).
template <unsigned STEPS, unsigned TOKENS>
__device__ __forceinline__ void products(const Operands& o) {
    constexpr unsigned BUFFERS = STEPS < AHEAD ? 2 : 1;
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(16) float row_scales[2][MOST], scales[TOKENS * MOST];
    // The same for all lanes, and known to be.
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const unsigned blocks = o.cols / BLOCK, steps = STEPS < AHEAD ? STEPS : (blocks + WARPS * AHEAD - 1) / (WARPS * AHEAD) * AHEAD;
    const unsigned tiles = o.rows / ROWS * o.groups, share = tiles / gridDim.x, rest = tiles % gridDim.x;
    const unsigned begin = blockIdx.x * share + min(blockIdx.x, rest), end = begin + share + (blockIdx.x < rest);
    const uint32_t inputs = longwave::shared_address(memory);
    float* const sums = reinterpret_cast<float*>(memory + steps * WARPS * TOKENS * BLOCK);
    const unsigned of_row = steps * WARPS + PAD;

    // The weights that are loaded next. Tiles are neighbours, in memory too.
    const uint8_t* from = o.w + (size_t(begin) * ROWS + g) * o.cols + warp * BLOCK + 16 * c;
    unsigned coming = begin, coming_block = warp;
    Weights ahead[AHEAD] = {};
    const auto load = [&](unsigned a, unsigned step) {
        const uint8_t* low = from + step * WARPS * BLOCK;
        ahead[a].load_if(coming < end && coming_block + step * WARPS < blocks, low, low + size_t(8) * o.cols);
    };
    const auto advance = [&]() {
        from += STEPS * WARPS * BLOCK;
        coming_block += STEPS * WARPS;
        if (coming_block >= steps * WARPS) {
            from += size_t(ROWS) * o.cols - steps * WARPS * BLOCK;
            coming_block = warp;
            coming++;
        }
    };
    // A thread's scale of the rows of a tile in its column block.
    const auto scale_of = [&](unsigned tile) {
        const float* at = o.w_scales + size_t(tile * ROWS / BLOCK) * blocks + threadIdx.x;
        return tile < end && threadIdx.x < blocks ? longwave::load_now(at) : 0.f;
    };
    float product[2 * TOKENS] = {};
    // Sums of a tile, whose weights are in `ahead` from `place` on.
    const auto add_tile = [&](unsigned t, unsigned place, float& scale) {
        float* const of_tile = sums + (BUFFERS == 1 ? 0 : t % 2 * TOKENS * ROWS * of_row);
        for (unsigned start = 0; start < steps; start += STEPS) {
#pragma unroll
            for (unsigned i = 0; i < STEPS; i++) {
                uint32_t a[4][4];
                ahead[place + i].arrange(a);
                load(place + i, i);
                const unsigned step = (start + i) * WARPS;
                longwave::sum_block(product, a, inputs + (step + warp / 4 * 4) * TOKENS * BLOCK);
                write_own(product, warp % 4, of_tile + step + warp, of_row);
            }
            advance();
        }
        if (threadIdx.x < blocks) {
            row_scales[t % 2][threadIdx.x] = scale;
        }
        scale = scale_of(t + 1);
        __syncthreads();
        if (threadIdx.x < o.tokens * ROWS) {
            const unsigned token = threadIdx.x / ROWS, row = threadIdx.x % ROWS;
            const float *own = of_tile + threadIdx.x * of_row, *of_token = scales + token * MOST, *of_rows = row_scales[t % 2];
            const auto four = [](const float* from) { return *reinterpret_cast<const float4*>(from); };
            float total = 0.f;
            unsigned b = 0;
#pragma unroll 4
            for (; b + 4 <= blocks; b += 4) {
                const float4 p = four(own + b), x = four(of_token + b), w = four(of_rows + b);
                total = fmaf(p.x, w.x * x.x, total);
                total = fmaf(p.y, w.y * x.y, total);
                total = fmaf(p.z, w.z * x.z, total);
                total = fmaf(p.w, w.w * x.w, total);
            }
            for (; b < blocks; b++) {
                total = fmaf(own[b], of_rows[b] * of_token[b], total);
            }
            o.y[size_t(token) * o.groups * o.rows + t * ROWS + row] = total;
        }
    };
#pragma unroll
    for (unsigned a = 0; a < AHEAD; a++) {
        load(a, a % STEPS);
        if (a % STEPS == STEPS - 1) {
            advance();
        }
    }
    // What does not fit registers comes as far as the L2, if it is of the first tile or the next one.
    if (STEPS == AHEAD && lane < ROWS && coming < end && coming <= begin + 1) {
        for (unsigned block = coming_block; block < blocks; block += WARPS) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(o.w + size_t(coming * ROWS + lane) * o.cols + block * BLOCK));
        }
    }
    float scale = scale_of(begin);
    // Weights are on their way while the kernels before this one end.
    longwave::wait_before();
    if (STEPS < AHEAD) {
        bring_inputs<TOKENS>(o, 0, inputs, scales);
        for (unsigned t = begin; t < end; t += AHEAD / STEPS) {
#pragma unroll
            for (unsigned j = 0; j < AHEAD / STEPS; j++) {
                if (t + j < end) {
                    add_tile(t + j, j * STEPS, scale);
                }
            }
        }
    } else {
        const unsigned of_group = o.rows / ROWS;
        unsigned group = ~0u;
        for (unsigned t = begin; t < end; t++) {
            // The sums of the tile before are read, and its inputs.
            if (t != begin) {
                __syncthreads();
            }
            if (t / of_group != group) {
                group = t / of_group;
                bring_inputs<TOKENS>(o, group, inputs, scales);
            }
            add_tile(t, 0, scale);
        }
    }
}

}  // namespace

// Grid: at most twice as many blocks as multiprocessors, 256 threads. Dynamic shared memory: see linear_fp8.rs. For up to 16 column
// blocks in one group, and up to 128; for two tokens, and eight.
#define ENTRY(steps, held)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_fp8_eight_##steps##_##held(                          \
        const uint8_t* w, const float* w_scales, const uint8_t* x, const float* x_scales, float* y, unsigned rows,       \
        unsigned cols, unsigned tokens, unsigned groups) {                                                               \
        longwave::start_next();                                                                                          \
        products<steps, held>({w, w_scales, x, x_scales, y, rows, cols, tokens, groups});                                \
    }

ENTRY(2, 2)
ENTRY(4, 2)
ENTRY(2, 8)
ENTRY(4, 8)
