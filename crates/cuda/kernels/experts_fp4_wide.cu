// architectures: 90a
// The products of experts_fp4.cu on Hopper's warpgroups, for groups of up to 64 pairs of one expert; a pair has the same bits
// from either file. experts_fp4.md has floor, design and measured steps.
//
// Blocks stay and take tiles of 192 weight rows of one group in turn. Three warpgroups have 64 rows each: every warp copies the
// codes of its sixteen rows to a ring of its own, some column blocks ahead and across tiles, and widens them in registers. A
// fourth warpgroup widens the pairs' codes into shared memory, where the tensor cores read them. Sums run as in experts_fp4.cu: two steps over a group of 32
// columns, scaled; four of these, scaled by the pair's scale, added to the part; parts in order.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/experts.cuh"
#include "common/halves.cuh"
#include "common/overlap.cuh"
#include "common/tiles.cuh"
#include "common/wgmma.cuh"

namespace {

constexpr int BLOCK = 128, GROUPS = 3, TILE = GROUPS * 64, CONSUMERS = GROUPS * 128;
// Stages of the pairs' halves in shared memory, and of their codes on their way to be widened.
constexpr int STAGES = 4, RAW = 4;
// Column blocks of a warp's weights on their way, and the bytes of one.
constexpr int AHEAD = 4, WEIGHTS = longwave::EXPERT_CODES + longwave::EXPERT_SCALES;
constexpr unsigned NOWHERE = 0xffffffffu;

// A kernel for groups of up to MOST pairs.
template <int MOST_PAIRS, int PARTS>
struct Form {
    static constexpr int MOST = MOST_PAIRS, SPLIT = PARTS;
    // Bytes of a stage: 128 columns of every pair. Scales of all stages lie behind them.
    static constexpr int STAGE = MOST * 2 * BLOCK, SCALES = STAGES * STAGE;
    static constexpr int SLOT = 128 * MOST + 4 * MOST;
    // Behind the stages: codes (in whole rounds of 128 threads), a float of each product for the sum of its parts, the warps'
    // weights, barriers.
    static constexpr int CODES = SCALES + STAGES * MOST * 4, SUMS = CODES + RAW * SLOT, RINGS = SUMS + CONSUMERS * MOST / 2 * 4;
    static constexpr int BARRIERS = RINGS + CONSUMERS / 32 * AHEAD * WEIGHTS;
};

using Operands = longwave::ExpertOperands;

// A tile: rows of one group. Groups that have no pairs come last.
struct Tile {
    unsigned expert, pair, pairs, row;

    __device__ __forceinline__ bool find(const Operands& o, unsigned t) {
        const unsigned of_group = (o.rows + TILE - 1) / TILE, group = t / of_group;
        pairs = 0;
        if (group < o.group_count) {
            expert = o.groups[3 * group];
            pair = o.groups[3 * group + 1];
            pairs = o.groups[3 * group + 2];
            row = t % of_group * TILE;
        }
        return pairs > 0;
    }
};

// The column block after `block`: the next one of its part, or the first of the next part.
template <int SPLIT>
__device__ __forceinline__ void advance(unsigned& block, unsigned& part, unsigned blocks) {
    block += SPLIT;
    block = block < blocks ? block : ++part;
}

__device__ __forceinline__ unsigned columns_of(unsigned pairs) {
    return pairs <= 8 ? 8 : (pairs + 15) / 16 * 16;
}

// Fills the stages: 128 threads. Pieces 4 j .. 4 j + 3 of a pair are those of both steps over group j of 32 columns.
template <class F>
__device__ __forceinline__ void produce(const Operands& o, uint32_t base, uint32_t full, uint32_t empty) {
    const unsigned blocks = o.cols / BLOCK, thread = threadIdx.x - CONSUMERS;
    constexpr int SLOT = F::SLOT;
    const uint32_t raw = base + F::CODES + thread * 16, raw_scale = base + F::CODES + F::SLOT - 4 * F::MOST + thread * 4;
    unsigned stage = 0, phase = 1, left = 0;
    // What is copied next, of this tile or one after it. A thread has at most two of the 4 * columns pieces of 32 codes, and the
    // scale of a pair; it widens what it copied itself: loads into registers would have to arrive before each fence.
    Tile coming;
    unsigned t = blockIdx.x, step = 0, block = 0, part = 0, from[2], scales = 0;
    bool has[2], more;
    const auto begin = [&]() {
        more = coming.find(o, t);
        if (more) {
            const unsigned columns = columns_of(coming.pairs);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const unsigned piece = thread + 128 * i, group = piece / columns, n = piece % columns;
                const unsigned p = coming.pair + min(n, coming.pairs - 1);
                from[i] = o.input_of(p) * o.cols + 32 * group;
                has[i] = group < 4;
            }
            const unsigned p = coming.pair + min(thread, coming.pairs - 1);
            scales = o.input_of(p) * blocks;
            step = block = part = 0;
        }
    };
    const auto copy = [&](unsigned to) {
        if (more) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (has[i]) {
                    const uint8_t* codes = o.x + from[i] + block * BLOCK;
                    longwave::copy_16(raw + to * SLOT + i * 4096, codes);
                    longwave::copy_16(raw + to * SLOT + i * 4096 + 2048, codes + 16);
                }
            }
            if (thread < F::MOST) {
                longwave::copy_4(raw_scale + to * SLOT, o.x_scales + scales + block);
            }
            advance<F::SPLIT>(block, part, blocks);
            if (++step == blocks) {
                t += gridDim.x;
                begin();
            }
        }
        longwave::commit_copies();
    };
    begin();
#pragma unroll
    for (int i = 0; i < RAW - 1; i++) {
        copy(i);
    }
    // What is widened next.
    Tile tile;
    unsigned tile_index = blockIdx.x, columns = 0, at[2];
    const auto next = [&]() {
        const bool found = tile.find(o, tile_index);
        left = found ? blocks : 0;
        columns = columns_of(tile.pairs);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned piece = thread + 128 * i, group = piece / columns, n = piece % columns;
            at[i] = group < 4 ? 4 * group << 16 | n : NOWHERE;
        }
        tile_index += gridDim.x;
        return found;
    };
    unsigned slot = 0;
    while (left > 0 || next()) {
        left--;
        copy(slot == 0 ? RAW - 1 : slot - 1);
        longwave::wait_copies<RAW - 1>();
        longwave::wait(empty + 8 * stage, phase);
        const uint32_t to = base + stage * F::STAGE;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (at[i] != NOWHERE) {
                const uint4 low = longwave::read_16(raw + slot * SLOT + i * 4096);
                const uint4 high = longwave::read_16(raw + slot * SLOT + i * 4096 + 2048);
                const uint32_t v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                // Words 2 c and 2 c + 1 are the eight columns of lane c: two columns of each piece of both steps.
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int half = k % 2 * 16, of = k / 2;
                    longwave::write_16(to + longwave::operand_piece(columns, at[i] & 0xffff, (at[i] >> 16) + k),
                                       make_uint4(longwave::widen_e4m3(v[of] >> half), longwave::widen_e4m3(v[2 + of] >> half),
                                                  longwave::widen_e4m3(v[4 + of] >> half), longwave::widen_e4m3(v[6 + of] >> half)));
                }
            }
        }
        if (thread < columns) {
            // 2^14 of the widened weights comes back here.
            const float scale = __uint_as_float(longwave::read_4(raw_scale + slot * SLOT));
            longwave::write_4(base + F::SCALES + (stage * F::MOST + thread) * 4, __float_as_uint(scale * 16384.f));
        }
        longwave::fence_shared();
        longwave::arrive(full + 8 * stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        phase ^= stage == 0;
        slot = slot + 1 == RAW ? 0 : slot + 1;
    }
}

// A warp's weights on their way, of its tile or the ones after it.
template <class F>
struct Ring {
    const Operands& o;
    const uint8_t* codes;
    const uint8_t* scales;
    // The first slot, its barrier (others follow), and the lane's place in a slot.
    uint32_t slots, barriers, lane_codes, lane_scales;
    unsigned t, step, block, part, slot, phase;
    bool more;

    __device__ __forceinline__ Ring(const Operands& operands, uint32_t base) : o(operands), slot(0), phase(0) {
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        slots = base + F::RINGS + warp * AHEAD * WEIGHTS;
        barriers = base + F::BARRIERS + 16 * STAGES + warp * AHEAD * 8;
        lane_codes = slots + lane * 16;
        lane_scales = slots + longwave::EXPERT_CODES + lane / 4 * 4;
        begin(blockIdx.x);
        for (unsigned s = 0; s < AHEAD; s++) {
            copy(s);
        }
    }

    __device__ __forceinline__ void begin(unsigned tile_index) {
        t = tile_index;
        step = block = part = 0;
        Tile tile;
        more = tile.find(o, t);
        if (more) {
            // Behind the last rows a warp computes the last ones again and stores nothing.
            const unsigned first = min(tile.row + threadIdx.x / 32 * 16, o.rows - 16);
            const size_t at = (size_t(tile.expert) * o.rows + first) / longwave::EXPERT_TILE * (o.cols / BLOCK);
            codes = o.w + at * longwave::EXPERT_CODES;
            scales = o.w_scales + at * longwave::EXPERT_SCALES;
        }
    }

    __device__ __forceinline__ void copy(unsigned to) {
        if (more) {
            if (threadIdx.x % 32 == 0) {
                const uint32_t at = slots + to * WEIGHTS, barrier = barriers + 8 * to;
                longwave::arrive_expecting(barrier, WEIGHTS);
                longwave::copy_counted(at, codes + block * longwave::EXPERT_CODES, longwave::EXPERT_CODES, barrier);
                longwave::copy_counted(at + longwave::EXPERT_CODES, scales + block * longwave::EXPERT_SCALES,
                                       longwave::EXPERT_SCALES, barrier);
            }
            const unsigned blocks = o.cols / BLOCK;
            advance<F::SPLIT>(block, part, blocks);
            if (++step == blocks) {
                begin(t + gridDim.x);
            }
        }
    }

    // The next column block; its slot is filled again.
    __device__ __forceinline__ longwave::ExpertWeights next() {
        longwave::wait(barriers + 8 * slot, phase);
        const uint32_t c = lane_codes + slot * WEIGHTS, s = lane_scales + slot * WEIGHTS;
        const longwave::ExpertWeights weights = {longwave::read_16(c), longwave::read_16(c + longwave::EXPERT_CODES / 2),
                                                 longwave::read_4(s), longwave::read_4(s + longwave::EXPERT_SCALES / 2)};
        __syncwarp();
        copy(slot);
        slot = slot + 1 == AHEAD ? 0 : slot + 1;
        phase ^= slot == 0;
        return weights;
    }
};

// The products of a tile whose group has up to N pairs.
template <int N, class F>
__device__ __forceinline__ void consume(const Operands& o, const Tile& tile, Ring<F>& ring, uint32_t base, uint32_t full,
                                        uint32_t empty, float* own, unsigned& stage, unsigned& phase) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, blocks = o.cols / BLOCK;
    float total[N / 2], product[N / 2], sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        total[i] = product[i] = 0.f;
    }
    unsigned block = 0, part = 0;
    for (unsigned step = 0; step < blocks; step++) {
        const longwave::ExpertWeights weights = ring.next();
        const uint32_t from = base + stage * F::STAGE;
        longwave::wait(full + 8 * stage, phase);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t l[4], h[4];
            longwave::widen_e2m1(longwave::word(weights.low, j), l);
            longwave::widen_e2m1(longwave::word(weights.high, j), h);
            const uint32_t first[4] = {l[0], h[0], l[1], h[1]}, second[4] = {l[2], h[2], l[3], h[3]};
            longwave::wgmma_fence();
            longwave::wgmma_f16<false>(product, first, longwave::operand(from, N, 2 * j));
            longwave::wgmma_f16<true>(product, second, longwave::operand(from, N, 2 * j + 1));
            longwave::wgmma_commit();
            const float sl = longwave::ue8m0(weights.low_scale >> (8 * j) & 0xff);
            const float sh = longwave::ue8m0(weights.high_scale >> (8 * j) & 0xff);
            longwave::wgmma_wait<0>();
            longwave::wgmma_done(product);
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                sum[i] = fmaf(product[i], i % 4 < 2 ? sl : sh, j == 0 ? 0.f : sum[i]);
            }
        }
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            const uint2 s = longwave::read_8(base + F::SCALES + (stage * F::MOST + 8 * n + 2 * c) * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                total[4 * n + i] = fmaf(sum[4 * n + i], __uint_as_float(i % 2 ? s.y : s.x), total[4 * n + i]);
            }
        }
        longwave::arrive_of_warp(empty + 8 * stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        phase ^= stage == 0;
        if (block + F::SPLIT >= blocks) {
            // The end of a part. The last one's sums stay in registers.
            const bool begins = part == 0, more = step + 1 < blocks;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                total[i] += begins ? 0.f : own[i * CONSUMERS];
                if (more) {
                    own[i * CONSUMERS] = total[i];
                    total[i] = 0.f;
                }
            }
        }
        advance<F::SPLIT>(block, part, blocks);
    }
    const unsigned row = tile.row + warp * 16;
    if (row < o.rows) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const unsigned p = i / 4 * 8 + 2 * c + i % 2;
            if (p < tile.pairs) {
                o.y[size_t(tile.pair + p) * o.rows + row + g + i % 4 / 2 * 8] = total[i];
            }
        }
    }
}

template <class F>
__device__ __forceinline__ void experts(const Operands& o) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = longwave::shared_address(memory), full = base + F::BARRIERS, empty = full + 8 * STAGES;
    if (threadIdx.x < CONSUMERS / 32 * AHEAD) {
        longwave::init_barrier(full + 16 * STAGES + 8 * threadIdx.x, 1);
    }
    longwave::init_ring<STAGES>(full, empty, 128, CONSUMERS / 32 * longwave::WARP_ARRIVALS);
    if (threadIdx.x >= CONSUMERS) {
        longwave::fewer_registers<80>();
        produce<F>(o, base, full, empty);
        return;
    }
    longwave::more_registers<144>();
    float* own = reinterpret_cast<float*>(memory + F::SUMS) + threadIdx.x;
    Ring<F> ring(o, base);
    unsigned stage = 0, phase = 0;
    Tile tile;
    for (unsigned t = blockIdx.x; tile.find(o, t); t += gridDim.x) {
        const unsigned columns = columns_of(tile.pairs);
        if (columns == 8) {
            consume<8, F>(o, tile, ring, base, full, empty, own, stage, phase);
        } else if (columns == 16) {
            consume<16, F>(o, tile, ring, base, full, empty, own, stage, phase);
        } else if (columns == 32) {
            consume<32, F>(o, tile, ring, base, full, empty, own, stage, phase);
        } else if (columns == 48) {
            consume<48, F>(o, tile, ring, base, full, empty, own, stage, phase);
        } else {
            consume<64, F>(o, tile, ring, base, full, empty, own, stage, phase);
        }
    }
}

}  // namespace

// Grid: as many blocks as multiprocessors, 512 threads. Dynamic shared memory: BARRIERS + 16 STAGES + 96 AHEAD. With 4 parts from
// 4096 columns on, and 2 for fewer.
#define ENTRY(name, most, split)                                                                                         \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)                                                     \
        name##_##split(const uint8_t* w, const uint8_t* w_scales, const uint8_t* x, const float* x_scales,               \
                       const int* groups, const unsigned* inputs, float* y, unsigned rows, unsigned cols,                \
                       unsigned group_count) {                                                                           \
        longwave::overlap();                                                                                             \
        experts<Form<most, split>>({w, w_scales, x, x_scales, groups, inputs, y, rows, cols, group_count});              \
    }

ENTRY(experts_fp4_wide, 64, 4)
ENTRY(experts_fp4_wide, 64, 2)
