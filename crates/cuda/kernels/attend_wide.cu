// architectures: 90a
// The attention of attend.cu for many rows on Hopper's warpgroups; a row has the same bits from either file. attend.md has
// floor, design and measured steps.
//
// Two blocks of a cluster have 64 query rows (tokens x heads), each block half of the channels: of the products with the
// entries, whose halves attend.cu sums apart as well, and of the sums over them. So the sums of a part and those of all parts
// have room in registers. Clusters stay and take rows in turn. In a block one warpgroup widens entries into shared memory
// (common/attend_produce.cuh), one makes scores and weights, two sum up 128 channels each; they meet at barriers, tiles of 64
// entries apart. The scores' warpgroups of both blocks have half of the rows each: they send partial products of the other rows
// to the other block, and weights to both.
#include <stdint.h>

#include "common/attend_layout.cuh"
#include "common/attend_produce.cuh"
#include "common/bf16.cuh"
#include "common/cluster.cuh"
#include "common/fp8.cuh"
#include "common/overlap.cuh"
#include "common/rows.cuh"
#include "common/wgmma_bf16.cuh"

namespace {

using namespace longwave::attention;
using longwave::Job;
using longwave::join;
using longwave::Joined;
using longwave::LOG2E;
using longwave::Pages;
using longwave::SCALE;
using longwave::WARP_ARRIVALS;

// Scores and weights of all rows; the weights of rows g + 8 rank of each warp's sixteen are made here.
__device__ __forceinline__ void score(const Operands& o, unsigned rank, uint32_t base, const uint8_t* memory) {
    const unsigned thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    const unsigned r = warp * 16 + g + 8 * rank, odd = c & 1;
    const uint32_t there = longwave::address_in(base, rank ^ 1);
    Ring<STAGES> stage;
    Ring<QUERIES> query;
    Ring<WEIGHTS> weight;
    Ring<PARTIALS> partial;
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        d[i] = 0.f;
    }
    // The products of the next tile, into d; behind the last tile those of an old one, which nobody reads: steps follow each
    // other only where no branch goes around them.
    const auto multiply = [&]() {
        const longwave::Operand a = longwave::operand_of(base + AT_QUERIES + query.at * QUERY_BYTES);
        const longwave::Operand b = longwave::operand_of(base + stage.at * STAGE_BYTES);
        longwave::wgmma_fence();
        longwave::wgmma_bf16<false>(d, a.at(0), b.at(0));
#pragma unroll
        for (int s = 1; s < 16; s++) {
            longwave::wgmma_bf16<true>(d, a.at(s), b.at(s));
        }
        longwave::wgmma_commit();
    };
    unsigned n = o.skip(cluster_id());
    if (n < o.items) {
        longwave::wait(base + QUERY_FULL, 0);
        longwave::wait(base + FULL, 0);
    }
    multiply();
    longwave::wgmma_wait<0>();
    longwave::wgmma_done(d);
    while (n < o.items) {
        Item item;
        item.find(o, n);
        n = o.skip(n + gridDim.x / 2);
        const unsigned j = o.token_of(r), head = item.first_head + o.head_of(r);
        // What this row sees of the window and of the entries; nothing if it is none.
        const int position = static_cast<int>(item.position + j);
        int oldest = max(position - static_cast<int>(o.reach), static_cast<int>(item.job_oldest)), newest = 0, seen = 0;
        if (j < item.tokens) {
            newest = position + 1;
            seen = static_cast<int>(o.picks ? item.count : o.ratio ? (position + 1) / o.ratio : 0);
        }
        float row_max = -INFINITY, row_sum = 0.f;
        Joined joined = {__ldg(o.sinks + min(head, o.heads - 1)) * LOG2E, 1.f};
        bool more = true;
        while (more) {
            const uint32_t marks = marks_of(memory, stage.at);
            more = !(marks & ENDS_ITEM);
            longwave::arrive_of_warp(base + EMPTY + 8 * stage.at);
            stage.advance();
            // The other block's rows go there.
            const uint32_t own = AT_PARTIALS + partial.at * PARTIAL_BYTES + thread * 16;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                longwave::send_16(there + own + i * 2048, d[8 * i + 2], d[8 * i + 3], d[8 * i + 6], d[8 * i + 7],
                                  there + PARTIAL_FULL + 8 * partial.at);
            }
            if (thread == 0) {
                longwave::arrive_expecting(base + PARTIAL_FULL + 8 * partial.at, PARTIAL_BYTES);
            }
            float v[16];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                // A copy: d's registers are those of the products.
                asm volatile("mov.b32 %0, %1;" : "=f"(v[i]) : "f"(d[i / 2 * 4 + i % 2]));
            }
            if (!more) {
                longwave::arrive_of_warp(base + QUERY_EMPTY + 8 * query.at);
                query.advance();
            }
            if (more || n < o.items) {
                if (!more) {
                    longwave::wait(base + QUERY_FULL + 8 * query.at, query.parity);
                }
                longwave::wait(base + FULL + 8 * stage.at, stage.parity);
            }
            multiply();
            const int first = static_cast<int>(marks & ~(TILE - 1));
            const int from = (marks & WINDOW ? oldest : 0) - first, to = (marks & WINDOW ? newest : seen) - first;
            longwave::wait(base + PARTIAL_FULL + 8 * partial.at, partial.parity);
            partial.advance();
            float top = -INFINITY;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint4 w = longwave::read_16(base + own + i * 2048);
                const float other[4] = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z),
                                        __uint_as_float(w.w)};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int col = (2 * i + e / 2) * 8 + static_cast<int>(2 * c) + e % 2;
                    const float score = __fmul_rn(__fadd_rn(v[4 * i + e], other[e]), SCALE);
                    v[4 * i + e] = col >= from && col < to ? score : -INFINITY;
                    top = fmaxf(top, v[4 * i + e]);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            top = fmaxf(top, row_max);
            const float least = top == -INFINITY ? 0.f : top;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                v[i] = exp2f(v[i] - least);
            }
            // Lanes change halves, so that each has columns 8 i + 4 (c / 2) .. + 3 and those 32 further for i = 2 odd and
            // 2 odd + 1: attend.cu sums these eight first.
            const uint32_t slot = AT_WEIGHTS + weight.at * WEIGHT_BYTES;
            const uint32_t piece = slot + longwave::operand_piece(ROWS, r, 2 * odd) + c / 2 * 8;
            float sums[2] = {0.f, 0.f};
            longwave::wait(base + WEIGHT_EMPTY + 8 * weight.at, weight.parity ^ 1);
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float eight[4];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float low = v[2 * (m + 4 * h) + e], high = v[2 * (2 + m + 4 * h) + e];
                        const float got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
                        eight[e] = odd ? got : low;
                        eight[2 + e] = odd ? high : got;
                    }
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        sums[m] += eight[e];
                    }
                    const uint32_t pair[2] = {longwave::narrow(eight[0], eight[1]), longwave::narrow(eight[2], eight[3])};
                    const uint32_t at = piece ^ (m * 16 + h * 64);
                    longwave::write_8(base + at, make_uint2(pair[0], pair[1]));
                    longwave::send_8(there + at, pair[0], pair[1], there + WEIGHT_FULL + 8 * weight.at);
                }
            }
            sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 1);
            sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], 1);
            float sum = sums[0] + sums[1];
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const float keep = exp2f(row_max - least);
            row_sum = fmaf(row_sum, keep, sum);
            row_max = top;
            float2 factors = make_float2(0.f, 0.f);
            if (marks & ENDS_PART) {
                factors = joined.add(row_max, row_sum);
                row_max = -INFINITY;
                row_sum = 0.f;
            }
            if (c == 0) {
                const uint32_t at = slot + FACTORS + r * 16;
                longwave::write_16(base + at, make_uint4(__float_as_uint(keep), __float_as_uint(factors.x),
                                                         __float_as_uint(factors.y), __float_as_uint(joined.sum)));
                longwave::send_16(there + at, keep, factors.x, factors.y, joined.sum, there + WEIGHT_FULL + 8 * weight.at);
            }
            if (thread == 0) {
                longwave::arrive_expecting(base + WEIGHT_FULL + 8 * weight.at, SENT);
            }
            longwave::arrive_of_warp(base + WEIGHT_FULL + 8 * weight.at);
            weight.advance();
            longwave::wgmma_wait<0>();
            longwave::wgmma_done(d);
        }
    }
}

// What is left to do with 128 channels of sixteen rows of a warp, from `channel` on.
__device__ __forceinline__ void end(const Operands& o, const Item& item, const float (&whole)[64], const float (&sums)[2],
                                    unsigned channel, uint8_t* codes) {
    const unsigned warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    // Where a row's 128 channels lie; none of a row that is not there.
    const auto place = [&](unsigned r, size_t& at) {
        const unsigned j = o.token_of(r), head = item.first_head + o.head_of(r);
        at = (static_cast<size_t>(item.row + j) * o.heads + head) * 512 + channel;
        return j < item.tokens && head < o.heads;
    };
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const unsigned r = warp * 16 + g + 8 * h, j = o.token_of(r);
        const float inverse = 1.f / sums[h];
        float v[32];
#pragma unroll
        for (int i = 0; i < 32; i++) {
            v[i] = longwave::round_bf16(whole[i / 2 * 4 + 2 * h + i % 2] * inverse);
        }
        size_t at;
        const bool there = place(r, at);
        if (channel == 384 && there) {
            const float* const angles = o.angles + static_cast<size_t>(item.row + j) * 64;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float cosine = __ldg(angles + 4 * i + c), sine = __ldg(angles + 32 + 4 * i + c);
                const float2 turned = longwave::turn(v[16 + 2 * i], v[17 + 2 * i], cosine, -sine);
                v[16 + 2 * i] = longwave::round_bf16(turned.x);
                v[17 + 2 * i] = longwave::round_bf16(turned.y);
            }
        }
        if (o.out && there) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                *reinterpret_cast<uint32_t*>(o.out + at + 8 * i + 2 * c) = longwave::narrow(v[2 * i], v[2 * i + 1]);
            }
        }
        if (o.codes) {
            float amax = 0.f;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                amax = fmaxf(amax, fabsf(v[i]));
            }
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
            const uint32_t byte = longwave::scale_byte(amax);
            const float s = longwave::inverse_of(byte);
            uint8_t* const row = codes + g * CODE_ROW + 2 * c;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t four = longwave::codes_of(v[4 * i] * s, v[4 * i + 1] * s, v[4 * i + 2] * s, v[4 * i + 3] * s);
                *reinterpret_cast<uint16_t*>(row + 16 * i) = static_cast<uint16_t>(four);
                *reinterpret_cast<uint16_t*>(row + 16 * i + 8) = static_cast<uint16_t>(four >> 16);
            }
            if (c == 0 && there) {
                o.scales[at / 128] = longwave::scale_of(byte);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const unsigned k = i * 4 + lane / 8;
                if (place(warp * 16 + 8 * h + k, at)) {
                    *reinterpret_cast<uint4*>(o.codes + at + lane % 8 * 16) =
                        *reinterpret_cast<const uint4*>(codes + k * CODE_ROW + lane % 8 * 16);
                }
            }
            __syncwarp();
        }
    }
}

// Sums of 128 channels of all rows.
__device__ __forceinline__ void gather(const Operands& o, unsigned rank, uint32_t base, uint8_t* memory) {
    const unsigned group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4;
    const uint32_t there = longwave::address_in(base, rank ^ 1);
    Ring<STAGES> stage;
    Ring<WEIGHTS> weight;
    float acc[64];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        acc[i] = 0.f;
    }
    for (unsigned n = o.skip(cluster_id()); n < o.items; n = o.skip(n + gridDim.x / 2)) {
        float whole[64], sums[2];
#pragma unroll
        for (int i = 0; i < 64; i++) {
            whole[i] = 0.f;
        }
        bool more = true;
        uint32_t adds = 0;
        while (more) {
            const uint32_t weights = base + AT_WEIGHTS + weight.at * WEIGHT_BYTES;
            const uint32_t factors = weights + FACTORS + (warp * 16 + g) * 16;
            longwave::wait(base + WEIGHT_FULL + 8 * weight.at, weight.parity);
            if (adds) {
                const float keeps[2] = {__uint_as_float(longwave::read_4(factors)),
                                        __uint_as_float(longwave::read_4(factors + 128))};
#pragma unroll
                for (int i = 0; i < 64; i++) {
                    acc[i] *= keeps[i / 2 % 2];
                }
            }
            longwave::wait(base + FULL + 8 * stage.at, stage.parity);
            const uint32_t marks = marks_of(memory, stage.at);
            more = !(marks & ENDS_ITEM);
            // Weights came as ordinary writes, of this block and of the other one.
            longwave::fence_shared();
            const longwave::Operand a = longwave::operand_of(weights);
            const uint32_t entries = base + stage.at * STAGE_BYTES + group * (STAGE_BYTES / 2);
            const longwave::Operand b = longwave::operand_of_columns(entries);
            longwave::wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                longwave::wgmma_bf16_rows(acc, a.at(k), b.rows_at(k), k == 0 ? adds : 1);
            }
            longwave::wgmma_commit();
            longwave::wgmma_wait<0>();
            longwave::wgmma_done(acc);
            longwave::arrive_of_warp(base + EMPTY + 8 * stage.at);
            stage.advance();
            adds = !(marks & ENDS_PART);
            if (!adds) {
                const uint4 low = longwave::read_16(factors), high = longwave::read_16(factors + 128);
                const float2 joining[2] = {make_float2(__uint_as_float(low.y), __uint_as_float(low.z)),
                                           make_float2(__uint_as_float(high.y), __uint_as_float(high.z))};
#pragma unroll
                for (int i = 0; i < 64; i++) {
                    whole[i] = join(whole[i], acc[i], joining[i / 2 % 2]);
                }
                sums[0] = __uint_as_float(low.w);
                sums[1] = __uint_as_float(high.w);
            }
            longwave::arrive_of_warp(base + WEIGHT_EMPTY + 8 * weight.at);
            if (WARP_ARRIVALS == 32 || lane == 0) {
                longwave::arrive_there(there + WEIGHT_EMPTY + 8 * weight.at);
            }
            weight.advance();
        }
        Item item;
        item.find(o, n);
        end(o, item, whole, sums, rank * CHANNELS + group * 128, memory + AT_CODES + threadIdx.x / 32 * 8 * CODE_ROW);
    }
}

template <bool FP8>
__device__ __forceinline__ void attend(const Operands& o) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = longwave::shared_address(memory), rank = longwave::cluster_rank();
    if (threadIdx.x == 0) {
        const auto init = [&](uint32_t at, unsigned n, unsigned arrivals) {
            for (unsigned i = 0; i < n; i++) {
                longwave::init_barrier(base + at + 8 * i, arrivals);
            }
        };
        init(FULL, STAGES, PRODUCERS);
        init(EMPTY, STAGES, 12 * WARP_ARRIVALS);
        init(QUERY_FULL, QUERIES, PRODUCERS);
        init(QUERY_EMPTY, QUERIES, 4 * WARP_ARRIVALS);
        init(WEIGHT_FULL, WEIGHTS, 4 * WARP_ARRIVALS + 1);
        init(WEIGHT_EMPTY, WEIGHTS, 16 * WARP_ARRIVALS);
        init(PARTIAL_FULL, PARTIALS, 1);
        longwave::show_barriers();
    }
    longwave::cluster_sync();
    if (threadIdx.x >= 384) {
        longwave::fewer_registers<96>();
        if (rank == 0) {
            Producer<FP8, 0>{o, threadIdx.x - 384, base, 0}.run();
        } else {
            Producer<FP8, 1>{o, threadIdx.x - 384, base, 0}.run();
        }
    } else if (threadIdx.x >= 256) {
        longwave::fewer_registers<96>();
        score(o, rank, base, memory);
    } else {
        longwave::more_registers<160>();
        gather(o, rank, base, memory);
    }
    // The other block may still send here.
    longwave::cluster_sync();
}

}  // namespace

// Grid: clusters of two blocks of 512 threads, at most as many blocks as multiprocessors. Dynamic shared memory:
// SHARED_BYTES.
#define ENTRY(name, fp8)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                             \
        name(const uint16_t* q, const float* sinks, const float* angles, const Job* jobs, uint8_t* window_pool,          \
             const unsigned* window_table, unsigned long long window_bytes, unsigned window_len, unsigned window_shift,  \
             uint8_t* entry_pool, const unsigned* entry_table, unsigned long long entry_bytes, unsigned entry_len,       \
             unsigned entry_shift, const unsigned* picks, unsigned picks_len, const unsigned* counts, uint16_t* out,     \
             uint8_t* codes, float* scales, unsigned heads, unsigned block_tokens, unsigned reach, unsigned ratio,       \
             unsigned items) {                                                                                           \
        longwave::overlap();                                                                                             \
        const Pages window = {window_pool, window_table, window_bytes, window_len, window_shift};                        \
        const Pages entries = {entry_pool, entry_table, entry_bytes, entry_len, entry_shift};                            \
        attend<fp8>({q, sinks, angles, jobs, window, entries, picks, picks_len, counts, out, codes, scales, heads,       \
                     block_tokens, reach, ratio, items});                                                                \
    }

ENTRY(attend_wide_fp8, true)
ENTRY(attend_wide_bf16, false)
