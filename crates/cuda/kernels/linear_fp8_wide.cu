// architectures: 90a
// The products of linear_fp8.cu for many tokens on Hopper's warpgroups; a token has the same bits from either file.
// linear_fp8.md has floor, design and measured steps.
//
// Blocks stay and take tiles of 128 weight rows and N tokens in turn. Two warpgroups have 64 rows each: their codes come
// straight to registers, a column block ahead and across tiles, and are widened there. A third one widens the tokens' codes
// into shared memory, where the tensor cores read them. Sums run as in linear_fp8.cu: eight steps over a block of 128 columns,
// scaled, added to the part; parts in order. Needs rows % 16 == 0 (128 with several groups), cols % 128 == 0.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/halves.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"
#include "common/wgmma.cuh"

namespace {

constexpr int BLOCK = 128, TILE = 128, CONSUMERS = 256;
// Stages of halves, and of codes on their way to be widened.
constexpr int STAGES = 3, RAW = 3;

template <int N>
struct Form {
    // Bytes of a stage: 128 columns of every token. Scales of all stages lie behind them.
    static constexpr int STAGE = N * 2 * BLOCK, SCALES = STAGES * STAGE;
    // Behind the stages: codes, a float of each product for the sum of its parts, barriers.
    static constexpr int CODES = SCALES + STAGES * N * 4, SUMS = CODES + RAW * N * (BLOCK + 4), BARRIERS = SUMS + CONSUMERS * N / 2 * 4;
};

struct Operands {
    const uint8_t* w;
    const float* w_scales;
    const uint8_t* x;
    const float* x_scales;
    float* y;
    unsigned rows, cols, tokens, split, groups;

    // Tile t: token tiles of a row tile follow each other, so that its weights come from memory once.
    template <int N>
    __device__ __forceinline__ bool find(unsigned t, unsigned& group, unsigned& row, unsigned& token) const {
        const unsigned of_tokens = (tokens + N - 1) / N, of_rows = (rows + TILE - 1) / TILE;
        token = t % of_tokens * N;
        row = t / of_tokens % of_rows * TILE;
        group = t / of_tokens / of_rows;
        return group < groups;
    }

    // The column block after `block`: the next one of its part, or the first of the next part.
    __device__ __forceinline__ void advance(unsigned& block, unsigned& part) const {
        block += split;
        block = block < cols / BLOCK ? block : ++part;
    }
};

// Fills the stages: 128 threads. Pieces 2 s and 2 s + 1 are those of step s. A thread copies what it widens itself: loads into registers would have to arrive before each fence.
template <int N>
__device__ __forceinline__ void produce(const Operands& o, uint32_t base, uint32_t full, uint32_t empty) {
    // Halves of 64 columns of a token that a thread has.
    constexpr int OWN = N * 2 / 128;
    const unsigned blocks = o.cols / BLOCK, thread = threadIdx.x - CONSUMERS, n = thread % N;
    const uint32_t raw = base + Form<N>::CODES + thread * 16, raw_scale = base + Form<N>::CODES + N * BLOCK + thread * 4;
    unsigned stage = 0, phase = 1;
    // What is copied next, of this tile or one after it.
    const uint8_t* from = nullptr;
    const float* scales = nullptr;
    unsigned t = blockIdx.x, step = 0, block = 0, part = 0;
    bool more;
    const auto begin = [&]() {
        unsigned group, row, token;
        more = o.find<N>(t, group, row, token);
        if (more) {
            const size_t own = min(token + n, o.tokens - 1) * size_t(o.groups) + group;
            from = o.x + own * o.cols + (OWN == 2 ? 0 : thread / N * 64);
            scales = o.x_scales + own * blocks;
            step = block = part = 0;
        }
    };
    const auto copy = [&](unsigned to) {
        if (more) {
#pragma unroll
            for (int i = 0; i < 4 * OWN; i++) {
                longwave::copy_16(raw + to * N * (BLOCK + 4) + i * 2048, from + block * BLOCK + 16 * i);
            }
            if (thread < N) {
                longwave::copy_4(raw_scale + to * N * (BLOCK + 4), scales + block);
            }
            o.advance(block, part);
            if (++step == blocks) {
                t += gridDim.x;
                begin();
            }
        }
        longwave::commit_copies();
    };
    begin();
    unsigned left = 0;
    for (unsigned tile = blockIdx.x, group, row, token; o.find<N>(tile, group, row, token); tile += gridDim.x) {
        left += blocks;
    }
#pragma unroll
    for (int i = 0; i < RAW - 1; i++) {
        copy(i);
    }
    for (; left > 0; left -= min(left, unsigned(RAW))) {
#pragma unroll
        for (int i = 0; i < RAW; i++) {
            if (i >= left) {
                break;
            }
            copy((i + RAW - 1) % RAW);
            longwave::wait_copies<RAW - 1>();
            uint4 codes[OWN][4];
#pragma unroll
            for (int k = 0; k < 4 * OWN; k++) {
                codes[k / 4][k % 4] = longwave::read_16(raw + i * N * (BLOCK + 4) + k * 2048);
            }
            longwave::wait(empty + 8 * stage, phase);
            const uint32_t to = base + stage * Form<N>::STAGE;
#pragma unroll
            for (int h = 0; h < OWN; h++) {
                const unsigned half = OWN == 2 ? h : thread / N;
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    uint4 low, high;
                    longwave::widen_e4m3(longwave::word(codes[h][0], s), low.x, high.x);
                    longwave::widen_e4m3(longwave::word(codes[h][1], s), low.y, high.y);
                    longwave::widen_e4m3(longwave::word(codes[h][2], s), low.z, high.z);
                    longwave::widen_e4m3(longwave::word(codes[h][3], s), low.w, high.w);
                    longwave::write_16(to + longwave::operand_piece(N, n, 8 * half + 2 * s), low);
                    longwave::write_16(to + longwave::operand_piece(N, n, 8 * half + 2 * s + 1), high);
                }
            }
            if (thread < N) {
                longwave::write_4(base + Form<N>::SCALES + stage * N * 4 + 4 * thread,
                                  longwave::read_4(raw_scale + i * N * (BLOCK + 4)));
            }
            longwave::fence_shared();
            longwave::arrive(full + 8 * stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
        }
    }
}

// One thread's weights of a column block: rows g and g + 8, columns 16 c .. and 64 + 16 c .. of the block.
struct Weights {
    uint4 low[2], high[2];
    float scale;
};

// The weights that are loaded next, of this tile or the one after it.
template <int N>
struct Stream {
    const uint8_t* low;
    const float* scales;
    unsigned t, step, block, part;
    bool more;

    __device__ __forceinline__ void begin(const Operands& o, unsigned tile) {
        unsigned group, row, token;
        t = tile;
        step = block = part = 0;
        more = o.find<N>(t, group, row, token);
        if (more) {
            const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            const unsigned first = min(row + warp * 16, o.rows - 16);
            low = o.w + (size_t(group) * o.rows + first + lane / 4) * o.cols + 16 * (lane % 4);
            scales = o.w_scales + (size_t(group) * (o.rows / BLOCK) + first / BLOCK) * (o.cols / BLOCK);
        }
    }

    __device__ __forceinline__ void load(const Operands& o, Weights& to) {
        if (more) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                to.low[half] = __ldg(reinterpret_cast<const uint4*>(low + block * BLOCK + 64 * half));
                to.high[half] = __ldg(reinterpret_cast<const uint4*>(low + block * BLOCK + 64 * half + 8 * o.cols));
            }
            to.scale = __ldg(scales + block);
            o.advance(block, part);
            if (++step == o.cols / BLOCK) {
                begin(o, t + gridDim.x);
            }
        }
    }
};

template <int N>
__device__ __forceinline__ void consume(const Operands& o, uint32_t base, uint32_t full, uint32_t empty, float* own) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, blocks = o.cols / BLOCK;
    Stream<N> stream;
    stream.begin(o, blockIdx.x);
    Weights ahead;
    stream.load(o, ahead);
    float total[N / 2], product[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        product[i] = 0.f;
    }
    unsigned stage = 0, phase = 0, group, first_row, first_token;
    for (unsigned t = blockIdx.x; o.find<N>(t, group, first_row, first_token); t += gridDim.x) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            total[i] = own[i * CONSUMERS] = 0.f;
        }
        unsigned block = 0, part = 0;
        for (unsigned step = 0; step < blocks; step++) {
            const Weights weights = ahead;
            stream.load(o, ahead);
            const uint32_t from = base + stage * Form<N>::STAGE;
            longwave::wait(full + 8 * stage, phase);
            // All of A first: a fence between two steps would let the second wait for the first.
            uint32_t a[8][4];
#pragma unroll
            for (int s = 0; s < 8; s++) {
                longwave::widen_e4m3(longwave::word(weights.low[s / 4], s % 4), a[s][0], a[s][2]);
                longwave::widen_e4m3(longwave::word(weights.high[s / 4], s % 4), a[s][1], a[s][3]);
            }
            longwave::wgmma_fence();
            longwave::wgmma_f16<false>(product, a[0], longwave::operand(from, N, 0));
#pragma unroll
            for (int s = 1; s < 8; s++) {
                longwave::wgmma_f16<true>(product, a[s], longwave::operand(from, N, s));
            }
            longwave::wgmma_commit();
            longwave::wgmma_wait<0>();
            longwave::wgmma_done(product);
            const bool ends = block + o.split >= blocks;
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                const uint2 scales = longwave::read_8(base + Form<N>::SCALES + (stage * N + 8 * n + 2 * c) * 4);
                const float s[2] = {weights.scale * __uint_as_float(scales.x), weights.scale * __uint_as_float(scales.y)};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    total[4 * n + i] = fmaf(product[4 * n + i], s[i % 2], total[4 * n + i]);
                }
            }
            longwave::arrive_of_warp(empty + 8 * stage);
            if (ends) {
#pragma unroll
                for (int i = 0; i < N / 2; i++) {
                    own[i * CONSUMERS] += total[i];
                    total[i] = 0.f;
                }
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
            o.advance(block, part);
        }
        const unsigned row = first_row + warp * 16;
        if (row < o.rows) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const unsigned token = first_token + i / 4 * 8 + 2 * c + i % 2;
                if (token < o.tokens) {
                    o.y[(size_t(token) * o.groups + group) * o.rows + row + g + i % 4 / 2 * 8] = own[i * CONSUMERS];
                }
            }
        }
    }
}

template <int N>
__device__ __forceinline__ void linear(const Operands& o) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = longwave::shared_address(memory), full = base + Form<N>::BARRIERS, empty = full + 8 * STAGES;
    longwave::init_ring<STAGES>(full, empty, 128, CONSUMERS / 32 * longwave::WARP_ARRIVALS);
    if (threadIdx.x >= CONSUMERS) {
        longwave::fewer_registers<72>();
        produce<N>(o, base, full, empty);
    } else {
        longwave::more_registers<216>();
        consume<N>(o, base, full, empty, reinterpret_cast<float*>(memory + Form<N>::SUMS) + threadIdx.x);
    }
}

}  // namespace

// Grid: at most as many blocks as multiprocessors, 384 threads. Dynamic shared memory: BARRIERS + 64.
#define ENTRY(n)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) linear_fp8_wide_##n(                                \
        const uint8_t* w, const float* w_scales, const uint8_t* x, const float* x_scales, float* y, unsigned rows,       \
        unsigned cols, unsigned tokens, unsigned split, unsigned groups) {                                               \
        longwave::overlap();                                                                                             \
        linear<n>({w, w_scales, x, x_scales, y, rows, cols, tokens, split, groups});                                     \
    }

ENTRY(64)
ENTRY(128)
