// architectures: 90a 100a
// Compressors (model.md 6.4), from a linear product [tokens, 2 n] (n values, then n scores) to entries in pages:
//   compress4_main_*     ratio 4, 512 channels (n = 1024): 8 overlapping rows into one entry
//   compress4_index_*    ratio 4, 128 channels (n = 256): index keys, as fp8, fp4 (Hadamard) or bf16
//   compress128_*        ratio 128, 512 channels (n = 512): running sums of the open group and rows of drafts
// Positions before a sequence's first row of the step are in state pages, later ones in the batch: an entry has the same
// bits however its group was split over steps. Bits are those of the CPU. Rows without a seat write nothing; rows, sums
// and entries whose page is not there are not stored. angles [tokens, 64] of the first position of each row's group.
#include <stdint.h>

#include "common/compress.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"

namespace {

using longwave::BatchRow;
using longwave::compress4;
using longwave::Entry;
using longwave::exp_of;
using longwave::Pages;
using longwave::store_entry;

// Rows of one sequence in a step.
struct Sequence {
    unsigned seat, start, start_row, rows, drafts, unused[3];
};

// A state page of ratio 128: rows folded into the sums (u32), at 64 max, sum and weighted sum [512] each, then the rows of
// up to seven drafts [1024], row of position p at p % 7.
constexpr unsigned SUMS = 16, PENDING = SUMS + 3 * 512, DRAFTS = 7;

// One block per sequence and group of 128 positions that it touches, one thread per channel.
template <bool FP8>
__device__ __forceinline__ void compress128(const float* __restrict__ products, const float* __restrict__ ape,
                                            const Sequence* __restrict__ sequences, const float* __restrict__ angles,
                                            const float* __restrict__ norm, const Pages& state, const Pages& entries,
                                            float eps) {
    __shared__ __align__(16) float pooled[512];
    const unsigned seat = sequences[blockIdx.x].seat, start = sequences[blockIdx.x].start;
    const unsigned start_row = sequences[blockIdx.x].start_row, end = start + sequences[blockIdx.x].rows;
    const unsigned committed = end - sequences[blockIdx.x].drafts, group = start / 128 + blockIdx.y;
    const unsigned from = max(start, group * 128), to = min(end, group * 128 + 128), c = threadIdx.x;
    if (seat == longwave::UNMAPPED || from >= to) {
        return;
    }
    uint8_t* const page = state.page(seat, from);
    float* const sums = reinterpret_cast<float*>(page) + SUMS;
    float* const pending = reinterpret_cast<float*>(page) + PENDING;
    float most = 0.f, sum = 0.f, weighted = 0.f;
    bool empty = true;
    const auto fold = [&](float value, float score) {
        if (empty) {
            most = score;
            sum = 1.f;
            weighted = value;
            empty = false;
            return;
        }
        const float top = most > score ? most : score;
        const float keep = exp_of(most - top), p = exp_of(score - top);
        most = top;
        sum = fmaf(sum, keep, p);
        weighted = __fadd_rn(__fmul_rn(weighted, keep), __fmul_rn(p, value));
    };
    if (from % 128 != 0) {
        // The group was begun before this step.
        if (!page) {
            return;
        }
        const unsigned folded = *reinterpret_cast<const volatile unsigned*>(page);
        if (folded > 0) {
            most = sums[c];
            sum = sums[512 + c];
            weighted = sums[1024 + c];
            empty = false;
        }
        for (unsigned p = group * 128 + folded; p < start; p++) {
            const float* row = pending + p % DRAFTS * 1024;
            fold(row[c], row[512 + c]);
        }
    }
    // All have read the header before one changes it.
    __syncthreads();
    const auto store = [&]() {
        if (page && committed % 128 != 0) {
            sums[c] = most;
            sums[512 + c] = sum;
            sums[1024 + c] = weighted;
            if (c == 0) {
                *reinterpret_cast<unsigned*>(page) = committed % 128;
            }
        }
    };
    // Loads of eight rows are under way at once.
    for (unsigned first = from; first < to; first += 8) {
        float values[8], scores[8];
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            const unsigned p = min(first + i, to - 1);
            const float* row = products + size_t(start_row + p - start) * 1024;
            values[i] = __ldg(row + c);
            scores[i] = __ldg(row + 512 + c) + __ldg(ape + p % 128 * 512 + c);
        }
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            const unsigned p = first + i;
            if (p >= to) {
                break;
            }
            if (p == committed) {
                store();
            }
            if (p >= committed && page) {
                if (p % 128 == 0 && c == 0) {
                    *reinterpret_cast<unsigned*>(page) = 0;
                }
                pending[p % DRAFTS * 1024 + c] = values[i];
                pending[p % DRAFTS * 1024 + 512 + c] = scores[i];
            }
            fold(values[i], scores[i]);
        }
    }
    if (to == committed) {
        store();
    }
    if (to % 128 == 0) {
        pooled[c] = weighted / sum;
        __syncthreads();
        if (c < 128) {
            const float* of_group = angles + size_t(start_row + to - 1 - start) * 64;
            store_entry<FP8 ? Entry::MainFp8 : Entry::MainBf16>(pooled, norm, of_group, entries, seat, group, eps);
        }
    }
}

}  // namespace

// Grid tokens, 256 threads (main) or 128 (index).
#define COMPRESS4(name, format, threads)                                                                                  \
    extern "C" __global__ void __launch_bounds__(threads)                                                                 \
        name(const float* products, const float* ape, const BatchRow* rows, const float* angles, const float* norm,       \
             uint8_t* state_pool, const unsigned* state_table, unsigned long long state_bytes, unsigned state_len,        \
             unsigned state_shift, uint8_t* entry_pool, const unsigned* entry_table, unsigned long long entry_bytes,      \
             unsigned entry_len, unsigned entry_shift, float eps) {                                                       \
        longwave::overlap();                                                                                             \
        const Pages state = {state_pool, state_table, state_bytes, state_len, state_shift};                               \
        const Pages entries = {entry_pool, entry_table, entry_bytes, entry_len, entry_shift};                             \
        compress4<format>(products, ape, rows, angles, norm, state, entries, eps);                                        \
    }

COMPRESS4(compress4_main_fp8, Entry::MainFp8, 256)
COMPRESS4(compress4_main_bf16, Entry::MainBf16, 256)
COMPRESS4(compress4_index_fp8, Entry::IndexFp8, 128)
COMPRESS4(compress4_index_fp4, Entry::IndexFp4, 128)
COMPRESS4(compress4_index_bf16, Entry::IndexBf16, 128)

// Grid (sequences, groups that the longest may touch), 512 threads. State pages of one group, shift 7.
#define COMPRESS128(name, fp8)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512)                                                                     \
        name(const float* products, const float* ape, const Sequence* sequences, const float* angles, const float* norm,  \
             uint8_t* state_pool, const unsigned* state_table, unsigned long long state_bytes, unsigned state_len,        \
             unsigned state_shift, uint8_t* entry_pool, const unsigned* entry_table, unsigned long long entry_bytes,      \
             unsigned entry_len, unsigned entry_shift, float eps) {                                                       \
        longwave::overlap();                                                                                             \
        const Pages state = {state_pool, state_table, state_bytes, state_len, state_shift};                               \
        const Pages entries = {entry_pool, entry_table, entry_bytes, entry_len, entry_shift};                             \
        compress128<fp8>(products, ape, sequences, angles, norm, state, entries, eps);                                    \
    }

COMPRESS128(compress128_fp8, true)
COMPRESS128(compress128_bf16, false)
