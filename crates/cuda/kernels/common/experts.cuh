// Operands of fp4 experts: where their weights lie, as `repack` (experts_fp4.cu) arranges them, and a thread's part of them.
//
// A tile of sixteen rows is one piece of memory: for each block of 128 columns, 64 bytes of each row; its scales likewise, four
// bytes of each row. So a warp's loads are whole lines, one after the other. Within the 64 bytes, sixteen belong to lane c of
// four: word j of these has columns 8 c .. 8 c + 7 of group j of 32 columns.
#pragma once
#include <stdint.h>

namespace longwave {

constexpr unsigned EXPERT_TILE = 16, EXPERT_BLOCK = 128;
// Bytes of codes and of scales of a tile's column block.
constexpr unsigned EXPERT_CODES = EXPERT_TILE * EXPERT_BLOCK / 2, EXPERT_SCALES = EXPERT_TILE * EXPERT_BLOCK / 32;

// A product of experts. A group is {expert, first pair, pairs}; pair p reads input inputs[p], or p without a list.
struct ExpertOperands {
    const uint8_t* w;
    const uint8_t* w_scales;
    // float [experts, rows], for Hopper's arrangement (experts_fp8.cuh).
    const float* w_factors;
    const uint8_t* x;
    const float* x_scales;
    const int* groups;
    const unsigned* inputs;
    float* y;
    unsigned rows, cols, group_count;

    __device__ __forceinline__ unsigned input_of(unsigned pair) const {
        return inputs ? inputs[pair] : pair;
    }

    // Groups that have pairs; those without come last. All THREADS threads of the block call it.
    template <unsigned THREADS>
    __device__ __forceinline__ unsigned used_groups() const {
        unsigned used = 0;
        for (unsigned first = 0; first < group_count; first += THREADS) {
            const unsigned i = first + threadIdx.x;
            used += __syncthreads_count(i < group_count && groups[3 * i + 2] > 0);
        }
        return used;
    }

    // The same, which each warp that calls it counts for itself.
    __device__ __forceinline__ unsigned used_groups_of_warp() const {
        unsigned used = 0;
#pragma unroll 4
        for (unsigned i = threadIdx.x % 32; i < group_count; i += 32) {
            used += __ldcg(groups + 3 * i + 2) > 0;
        }
        return __reduce_add_sync(0xffffffffu, used);
    }
};

// A tile: ROWS rows of one group. Groups that have no pairs come last.
template <unsigned ROWS>
struct ExpertRows {
    unsigned expert, pair, pairs, row;

    __device__ __forceinline__ bool find(const ExpertOperands& o, unsigned t) {
        const unsigned of_group = (o.rows + ROWS - 1) / ROWS, group = t / of_group;
        pairs = 0;
        if (group < o.group_count) {
            expert = o.groups[3 * group];
            pair = o.groups[3 * group + 1];
            pairs = o.groups[3 * group + 2];
            row = t % of_group * ROWS;
        }
        return pairs > 0;
    }
};

// A thread's weights of a column block: rows g and g + 8, with lane = 4 g + c.
struct ExpertWeights {
    uint4 low, high;
    uint32_t low_scale, high_scale;
};

// A thread's place in a tile of an expert whose `cols` columns are a multiple of 128.
struct ExpertTile {
    const uint8_t* codes;
    const uint8_t* scales;

    // The tile that begins at `row`, a multiple of sixteen, of all experts' rows.
    __device__ __forceinline__ void find(const uint8_t* w, const uint8_t* w_scales, size_t row, unsigned cols) {
        const unsigned lane = threadIdx.x % 32;
        const size_t block = row / EXPERT_TILE * (cols / EXPERT_BLOCK);
        codes = w + block * EXPERT_CODES + lane * 16;
        scales = w_scales + block * EXPERT_SCALES + lane / 4 * 4;
    }

    __device__ __forceinline__ void skip(unsigned blocks) {
        codes += blocks * EXPERT_CODES;
        scales += blocks * EXPERT_SCALES;
    }

    __device__ __forceinline__ ExpertWeights load(unsigned block) const {
        const uint8_t* c = codes + size_t(block) * EXPERT_CODES;
        const uint8_t* s = scales + size_t(block) * EXPERT_SCALES;
        return {__ldcs(reinterpret_cast<const uint4*>(c)), __ldcs(reinterpret_cast<const uint4*>(c + EXPERT_CODES / 2)),
                __ldcs(reinterpret_cast<const uint32_t*>(s)), __ldcs(reinterpret_cast<const uint32_t*>(s + EXPERT_SCALES / 2))};
    }
};

}  // namespace longwave
