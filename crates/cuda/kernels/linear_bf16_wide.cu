// architectures: 90a
// The products of linear_bf16.cu for many tokens on Hopper's warpgroups, of up to three matrices with the same inputs; a token has the
// same bits from either file. linear_bf16.md has floor and design. Needs at least 2,048 columns, a multiple of 128.
//
// Blocks stay and take tiles of 64 GROUPS weight rows and N tokens in turn. Weights come to shared memory by the copy engine and go to the
// tensor cores through registers (A), tokens from shared memory (B). A step of sixteen columns has to have the columns that it has in
// linear_bf16.cu, where a thread has eight neighbours of which each of two steps takes four: so tokens pass through the registers of
// a warpgroup that puts pairs of columns in that order.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/overlap.cuh"
#include "common/tensor_map.cuh"
#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_bf16.cuh"

namespace {

// Columns of a stage, half of a block of those that linear_bf16.cu gives to its PARTS parts in turn.
constexpr unsigned COLUMNS = 64, PARTS = 8, MATRICES = 3;

using longwave::TensorMap;

struct Operands {
    const TensorMap* w[MATRICES];
    float* y[MATRICES];
    unsigned rows[MATRICES];
    const uint16_t* x;
    unsigned cols, tokens;
};

template <unsigned GROUPS, unsigned N, unsigned STAGES>
struct Shape {
    static constexpr unsigned TILE = 64 * GROUPS, CONSUMERS = 128 * GROUPS, WEIGHTS = TILE * 128, STAGE = WEIGHTS + N * 128;
    static constexpr unsigned BARRIERS = STAGES * STAGE;
    // Stages whose inputs are loaded at once: the fence behind their stores waits for all of a thread's loads, so each of these costs a way
    // to the L2 and back, which is longer than the products of a stage of 64 tokens.
    static constexpr unsigned BATCH = N > 64 ? 1 : 2;

    // A tile: the tokens of a matrix's rows are neighbours, so that blocks at work together share weights.
    struct Tile {
        const TensorMap* w;
        float* y;
        unsigned rows, row, token;

        __device__ __forceinline__ bool find(const Operands& o, unsigned t) {
            const unsigned of_tokens = (o.tokens + N - 1) / N;
            unsigned at = t / of_tokens;
            token = t % of_tokens * N;
#pragma unroll
            for (unsigned m = 0; m < MATRICES; m++) {
                const unsigned tiles = (o.rows[m] + TILE - 1) / TILE;
                if (at < tiles) {
                    w = o.w[m];
                    y = o.y[m];
                    rows = o.rows[m];
                    row = at * TILE;
                    return true;
                }
                at -= tiles;
            }
            return false;
        }
    };

    // Where the copying warpgroup is: a stage of a tile.
    struct Cursor {
        Tile tile;
        unsigned t, block, part, half;
        bool there;

        __device__ __forceinline__ void begin(const Operands& o, unsigned index) {
            t = index;
            block = part = half = 0;
            there = tile.find(o, t);
        }

        __device__ __forceinline__ unsigned column() const {
            return 2 * COLUMNS * block + COLUMNS * half;
        }

        __device__ __forceinline__ void advance(const Operands& o) {
            half ^= 1;
            if (half == 0) {
                block += PARTS;
                if (block * 2 * COLUMNS >= o.cols) {
                    block = ++part;
                    if (part == PARTS) {
                        begin(o, t + gridDim.x);
                    }
                }
            }
        }
    };

    // 32 columns of a token that a thread brings: eight neighbours in each of four.
    static constexpr unsigned OWN = (2 * N + 127) / 128;
    struct Inputs {
        uint4 v[OWN][4];

        __device__ __forceinline__ void load(const Operands& o, const Cursor& at, unsigned thread) {
            if (!at.there) {
                return;
            }
#pragma unroll
            for (unsigned i = 0; i < OWN; i++) {
                const unsigned u = thread + 128 * i;
                if (u < 2 * N) {
                    const unsigned token = min(at.tile.token + u / 2, o.tokens - 1);
                    const uint16_t* from = o.x + size_t(token) * o.cols + at.column() + u % 2 * 32;
#pragma unroll
                    for (unsigned c = 0; c < 4; c++) {
                        v[i][c] = __ldg(reinterpret_cast<const uint4*>(from) + c);
                    }
                }
            }
        }

        // The first of two steps has each thread's first four columns: pairs of all four threads, then their second pairs.
        __device__ __forceinline__ void store(uint32_t to, unsigned thread) const {
#pragma unroll
            for (unsigned i = 0; i < OWN; i++) {
                const unsigned u = thread + 128 * i, n = u / 2, first = u % 2 * 4;
                if (u < 2 * N) {
                    const uint4(&p)[4] = v[i];
                    const auto put = [&](unsigned piece, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
                        longwave::write_16(to + longwave::operand_piece(N, n, first + piece), make_uint4(a, b, c, d));
                    };
                    put(0, p[0].x, p[1].x, p[2].x, p[3].x);
                    put(1, p[0].y, p[1].y, p[2].y, p[3].y);
                    put(2, p[0].z, p[1].z, p[2].z, p[3].z);
                    put(3, p[0].w, p[1].w, p[2].w, p[3].w);
                }
            }
        }
    };

    // A stage's weights; its barrier expects them.
    static __device__ __forceinline__ void copy(const Cursor& at, uint32_t to, uint32_t barrier) {
        longwave::arrive_expecting(barrier, WEIGHTS);
        longwave::copy_box(to, *at.tile.w, 2 * at.column(), at.tile.row, barrier);
    }

    static __device__ __forceinline__ void produce(const Operands& o, uint32_t base, uint32_t full, uint32_t empty) {
        const unsigned thread = threadIdx.x - CONSUMERS;
        Cursor now, next;
        now.begin(o, blockIdx.x);
        if (thread == 0) {
            // Weights are there before the kernels before this one have ended.
            next = now;
            for (unsigned s = 0; s < STAGES && next.there; s++) {
                copy(next, base + s * STAGE, full + 8 * s);
                next.advance(o);
            }
        }
        longwave::wait_before();
        next = now;
        Inputs inputs[BATCH];
        const auto load = [&]() {
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++) {
                inputs[b].load(o, next, thread);
                next.advance(o);
            }
        };
        load();
        unsigned stage = 0, phase = 1;
        bool first = true;
        while (now.there) {
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++) {
                longwave::wait(empty + 8 * stage, phase);
                const uint32_t to = base + stage * STAGE;
                if (thread == 0 && !first) {
                    copy(now, to, full + 8 * stage);
                }
                inputs[b].store(to + WEIGHTS, thread);
                longwave::fence_shared();
                longwave::arrive_of_warp(full + 8 * stage);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                phase ^= stage == 0;
                first &= stage != 0;
                now.advance(o);
            }
            load();
        }
    }

    // The row of eight that lanes 4 g .. 4 g + 3 take: pieces of neighbouring lanes' rows are in different banks then.
    static __device__ __forceinline__ unsigned row_of(unsigned g) {
        return g / 2 | (g % 2) << 2;
    }

    // A thread's weights of a stage, four steps: a row of its warp's sixteen, and the one eight further.
    static __device__ __forceinline__ void load(uint32_t (&a)[4][4], uint32_t row, unsigned c, unsigned of_eight) {
#pragma unroll
        for (unsigned j = 0; j < 2; j++) {
            const uint32_t at = row + (((j * 4 + c) ^ of_eight) << 4);
            const uint4 low = longwave::read_16(at), high = longwave::read_16(at + 8 * 128);
            a[2 * j][0] = low.x, a[2 * j][1] = high.x, a[2 * j][2] = low.y, a[2 * j][3] = high.y;
            a[2 * j + 1][0] = low.z, a[2 * j + 1][1] = high.z, a[2 * j + 1][2] = low.w, a[2 * j + 1][3] = high.w;
        }
        // There before the fence that follows.
#pragma unroll
        for (int i = 0; i < 16; i++) {
            asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
        }
    }

    static __device__ __forceinline__ void consume(const Operands& o, uint32_t base, uint32_t full, uint32_t empty) {
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        const unsigned blocks = o.cols / (2 * COLUMNS);
        const unsigned r = warp * 16 + row_of(g);
        unsigned stage = 0, phase = 0, free = 0;
        float total[N / 2], sum[N / 2];
        uint32_t a[2][4][4];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            total[i] = 0.f;
        }
        const auto begin = [&](uint32_t (&weights)[4][4], uint32_t adds) {
            longwave::wait(full + 8 * stage, phase);
            const uint32_t at = base + stage * STAGE;
            load(weights, at + r * 128, c, r % 8);
            longwave::wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++) {
                longwave::wgmma_bf16_if(total, weights[s], longwave::operand(at + WEIGHTS, N, s), s == 0 ? adds : 1);
            }
            longwave::wgmma_commit();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
        };
        const auto release = [&]() {
            longwave::arrive_of_warp(empty + 8 * free);
            free = free + 1 == STAGES ? 0 : free + 1;
        };
        Tile tile;
        for (unsigned t = blockIdx.x; tile.find(o, t); t += gridDim.x) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                sum[i] = 0.f;
            }
            for (unsigned part = 0; part < PARTS; part++) {
                begin(a[0], 0);
                for (unsigned block = part;;) {
                    begin(a[1], 1);
                    longwave::wgmma_wait<1>();
                    release();
                    block += PARTS;
                    if (block >= blocks) {
                        break;
                    }
                    begin(a[0], 1);
                    longwave::wgmma_wait<1>();
                    release();
                }
                longwave::wgmma_wait<0>();
                longwave::wgmma_done(total);
                release();
#pragma unroll
                for (int i = 0; i < N / 2; i++) {
                    sum[i] += total[i];
                }
            }
            const unsigned row = tile.row + r;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const unsigned to = row + i % 4 / 2 * 8, token = tile.token + i / 4 * 8 + 2 * c + i % 2;
                if (to < tile.rows && token < o.tokens) {
                    tile.y[size_t(token) * tile.rows + to] = sum[i];
                }
            }
        }
    }

    static __device__ __forceinline__ void run(const Operands& o) {
        extern __shared__ __align__(1024) uint8_t memory[];
        const uint32_t base = longwave::shared_address(memory), full = base + BARRIERS, empty = full + 8 * STAGES;
        longwave::init_ring<STAGES>(full, empty, 4 * longwave::WARP_ARRIVALS + 1, CONSUMERS / 32 * longwave::WARP_ARRIVALS);
        if (threadIdx.x >= CONSUMERS) {
            if constexpr (GROUPS == 2) {
                longwave::fewer_registers<96>();
            }
            produce(o, base, full, empty);
        } else {
            longwave::wait_before();
            if constexpr (GROUPS == 2) {
                longwave::more_registers<208>();
            }
            consume(o, base, full, empty);
        }
    }
};

}  // namespace

// Grid: at most as many blocks as multiprocessors, 128 GROUPS + 128 threads. Dynamic shared memory: STAGES of 64 GROUPS + N rows
// of 128 bytes, and sixteen bytes each. Boxes of 64 GROUPS rows of the matrices; those that are not there have no rows, and any map.
#define WIDE(name, groups, n, stages)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128 * groups + 128, 1)                                                  \
        linear_bf16_##name(const __grid_constant__ TensorMap w0, const __grid_constant__ TensorMap w1,                   \
                           const __grid_constant__ TensorMap w2, float* y0, float* y1, float* y2, unsigned rows0,        \
                           unsigned rows1, unsigned rows2, const uint16_t* x, unsigned cols, unsigned tokens) {          \
        longwave::start_next();                                                                                          \
        Shape<groups, n, stages>::run({{&w0, &w1, &w2}, {y0, y1, y2}, {rows0, rows1, rows2}, x, cols, tokens});          \
    }

WIDE(wide_128, 2, 128, 6)
WIDE(wide_64, 2, 64, 8)
WIDE(wide_32, 2, 32, 10)
// For few rows.
WIDE(wide_low, 1, 64, 12)
