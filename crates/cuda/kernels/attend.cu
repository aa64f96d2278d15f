// architectures: 90a 100a
// Attention of decode and verify steps (model.md 6.3, 6.6, 6.7): window rows, compressed entries and the sink in one
// softmax, inverse rotation, result as bf16 or as e4m3 codes with a float scale per 128 channels. attend.md has floor,
// design and steps. Many rows, as in prefill, take attend_wide.cu on Hopper; prefill has its own rows in pages of their own.
//
// Tile t (64 entries at absolute places) belongs to part t % 8; each part has a softmax of its own, and parts are joined in
// order. For few rows a cluster of eight blocks serves ROWS query rows, a part each; for many one block does all parts, one
// after the other. So a row has the same bits in any batch, beside any drafts, with any number of rows per block and in
// either form. ROWS = tokens x heads of a block; heads beyond the last one are zeros and not stored. A list of picks only
// with one token per block. A job without tokens does nothing. Rows whose page is not there count as zeros.
#include <stdint.h>

#include "common/attend.cuh"
#include "common/bf16.cuh"
#include "common/cluster.cuh"
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"
#include "common/widen.cuh"

namespace {

using longwave::Job;
using longwave::join;
using longwave::Joined;
using longwave::LOG2E;
using longwave::Pages;
using longwave::SCALE;
using longwave::shared_address;

constexpr unsigned THREADS = 256, TILE = 64, PARTS = 8;
constexpr unsigned ROW_BYTES = 1024, BUFFER_BYTES = TILE * ROW_BYTES;
// Bytes of a row of scores (and of weights, which take their place): 64 floats and 16 bytes against bank conflicts.
constexpr unsigned SCORE_BYTES = 272;

// Steps of the scores' products that are unrolled: what registers allow without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int STEPS = 2;
#else
constexpr int STEPS = 4;
#endif

struct Raw {
    uint4 data[9];
    uint2 scales;
};

// A row of a tile: its position in a window, or its entry.
struct Spot {
    unsigned row;
    bool window, there;
};

// A tile among those of a block: window tiles of a part, then entry tiles.
struct Place {
    unsigned part, i, w_first, w_tiles, tiles;
};

// ALONE: one block does all parts.
template <unsigned ROWS, bool FP8, bool ALONE>
__device__ __forceinline__ void attend(const uint16_t* __restrict__ q, const float* __restrict__ sinks,
                                       const float* __restrict__ angles, const Job* __restrict__ jobs, const Pages& window,
                                       const Pages& entries, const unsigned* __restrict__ picks, unsigned picks_len,
                                       const unsigned* __restrict__ counts, uint16_t* __restrict__ out,
                                       uint8_t* __restrict__ codes, float* __restrict__ scales, unsigned heads,
                                       unsigned block_tokens, unsigned reach, unsigned ratio) {
    // Few rows leave registers for rows that are on their way during all of the work on a tile.
    constexpr bool EARLY = FP8 && ROWS == 16;
    constexpr int MT = ROWS / 16, WM = MT == 4 ? 2 : 1, TM = MT / WM, WN = 4 / WM, TN = TILE / WN / 8;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* const queries = shared;
    uint8_t* const buffers = queries + ROWS * ROW_BYTES;
    uint8_t* const scores = buffers + 2 * BUFFER_BYTES;
    float* const keep_of = reinterpret_cast<float*>(scores + 2 * ROWS * SCORE_BYTES);
    float* const max_of = keep_of + ROWS;
    float* const sum_of = max_of + ROWS;
    float2* const factors_of = reinterpret_cast<float2*>(max_of);

    const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    const unsigned rank = ALONE ? 0 : longwave::cluster_rank();
    const Job job = jobs[blockIdx.z];
    if (job.tokens == 0) {
        return;
    }
    const unsigned block_heads = ROWS / block_tokens, first_head = blockIdx.y * block_heads;
    const unsigned last = job.position + job.tokens - 1;
    const unsigned oldest = max(job.position > reach ? job.position - reach : 0u, job.oldest);
    const unsigned w0 = oldest / TILE, w_end = last / TILE + 1;
    const unsigned count = picks ? counts[job.row] : ratio ? (last + 1) / ratio : 0;
    const unsigned e_tiles = (count + TILE - 1) / TILE;
    const auto enter = [&](Place& p, unsigned part) {
        p.part = part;
        p.i = 0;
        p.w_first = w0 + (part + PARTS - w0 % PARTS) % PARTS;
        p.w_tiles = p.w_first < w_end ? (w_end - p.w_first + PARTS - 1) / PARTS : 0;
        p.tiles = p.w_tiles + (part < e_tiles ? (e_tiles - part + PARTS - 1) / PARTS : 0);
    };
    // The first tile of this part, or of one behind it; whether there is one.
    const auto begin = [&](Place& p, unsigned part) {
        enter(p, part);
        while (ALONE && p.tiles == 0 && p.part + 1 < PARTS) {
            enter(p, p.part + 1);
        }
        return p.tiles > 0;
    };
    const auto advance = [&](Place& p) {
        p.i++;
        return p.i < p.tiles || (ALONE && p.part + 1 < PARTS && begin(p, p.part + 1));
    };

    // Four threads load a row. Where it lies takes up to two loads: the pick, then the page.
    const unsigned load_row = thread / 4, part = thread % 4;
    const auto spot_of = [&](const Place& p, bool there) {
        Spot s;
        s.window = p.i < p.w_tiles;
        s.row = (s.window ? p.w_first + p.i * PARTS : p.part + (p.i - p.w_tiles) * PARTS) * TILE + load_row;
        s.there = there && (s.window ? s.row >= oldest && s.row <= last : s.row < count);
        if (picks && !s.window && s.there) {
            s.row = __ldg(picks + static_cast<size_t>(job.row) * picks_len + s.row);
        }
        return s;
    };
    // The block alone: whatever is made of it waits for the load.
    const auto block_of = [&](const Spot& s) {
        const unsigned* table = s.window ? window.table : entries.table;
        const unsigned len = s.window ? window.table_len : entries.table_len, shift = s.window ? window.shift : entries.shift;
        return s.there ? __ldg(table + static_cast<size_t>(job.seat) * len + (s.row >> shift)) : longwave::UNMAPPED;
    };
    const auto locate = [&](const Spot& s, unsigned block, const uint8_t*& row_scales) {
        const unsigned shift = s.window ? window.shift : entries.shift, slot = s.row & ((1u << shift) - 1);
        const uint8_t* pool = s.window ? window.pool : entries.pool;
        const uint8_t* page = pool + (s.window ? window.unit_bytes : entries.unit_bytes) * block;
        row_scales = page + (576u << shift) + slot * 8;
        return page + static_cast<size_t>(slot) * (FP8 ? 576 : 1024);
    };
    const auto load = [&](Raw& raw, const Spot& s, unsigned block) {
        if (block != longwave::UNMAPPED) {
            const uint8_t* row_scales;
            const uint4* from = reinterpret_cast<const uint4*>(locate(s, block, row_scales)) + part;
#pragma unroll
            for (int n = 0; n < 9; n++) {
                raw.data[n] = __ldg(from + 4 * n);
            }
            raw.scales = __ldg(reinterpret_cast<const uint2*>(row_scales));
        } else {
#pragma unroll
            for (int n = 0; n < 9; n++) {
                raw.data[n] = make_uint4(0, 0, 0, 0);
            }
            raw.scales = make_uint2(0x7f7f7f7fu, 0x7f7f7f7fu);
        }
    };
    const auto place = [&](uint8_t* buffer, unsigned row, unsigned chunk) {
        return reinterpret_cast<uint4*>(buffer + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4));
    };
    const auto widen = [&](const Raw& raw, uint8_t* buffer) {
#pragma unroll
        for (int n = 0; n < 7; n++) {
            const uint32_t byte = (n < 4 ? raw.scales.x >> (8 * n) : raw.scales.y >> (8 * n - 32)) & 0xff;
            const uint32_t s = byte << 7 | byte << 23, up = 0x7b807b80u;  // 2^120
            const uint32_t words[4] = {raw.data[n].x, raw.data[n].y, raw.data[n].z, raw.data[n].w};
            uint32_t v[8];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                v[2 * w] = longwave::times_bf16(longwave::times_bf16(longwave::spread_e4m3(words[w], 0x1404), up), s);
                v[2 * w + 1] = longwave::times_bf16(longwave::times_bf16(longwave::spread_e4m3(words[w], 0x3424), up), s);
            }
            *place(buffer, load_row, n * 8 + part * 2) = make_uint4(v[0], v[1], v[2], v[3]);
            *place(buffer, load_row, n * 8 + part * 2 + 1) = make_uint4(v[4], v[5], v[6], v[7]);
        }
        *place(buffer, load_row, 56 + part) = raw.data[7];
        *place(buffer, load_row, 60 + part) = raw.data[8];
    };
    // bf16 rows go straight to their place.
    const auto copy = [&](const Spot& s, uint8_t* buffer) {
        const unsigned block = block_of(s);
        const uint8_t* unused;
        const uint8_t* row = block == longwave::UNMAPPED ? nullptr : locate(s, block, unused);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const uint32_t to = shared_address(place(buffer, load_row, 4 * n + part));
            const uint8_t* from = row ? row + (4 * n + part) * 16 : reinterpret_cast<const uint8_t*>(q);
            const uint32_t bytes = row ? 16 : 0;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
        }
    };

    // A tile's rows are asked for while the one before it is worked on, where they lie one tile earlier, and picks another one earlier:
    // each of these loads waits for the one before.
    Raw raw;
    Place now, then, behind;
    bool more = begin(now, rank), goes_on = false, comes = false;
    const auto follow = [&]() {
        behind = then;
        comes = goes_on && advance(behind);
    };
    then = now;
    goes_on = more && advance(then);
    follow();
    const Spot first = spot_of(now, more);
    Spot next_spot = spot_of(then, goes_on), last_spot = spot_of(behind, comes && EARLY);
    unsigned next_block = longwave::UNMAPPED;
    if constexpr (FP8) {
        const unsigned block = block_of(first);
        next_block = EARLY ? block_of(next_spot) : next_block;
        load(raw, first, block);
    } else if (more) {
        // Without a tile nobody would wait for the copy, and what a part gives lies there at its end.
        copy(first, buffers);
    }
    for (unsigned i = thread; i < ROWS * 64; i += THREADS) {
        const unsigned r = i / 64, chunk = i % 64, j = r / block_heads, head = first_head + r % block_heads;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (j < job.tokens && head < heads) {
            v = __ldg(reinterpret_cast<const uint4*>(q + (static_cast<size_t>(job.row + j) * heads + head) * 512) + chunk);
        }
        *place(queries, r, chunk) = v;
    }
    if constexpr (FP8) {
        if (more) {
            widen(raw, buffers);
        }
    }

    float acc[MT][8][4] = {};
    float row_max[(MT + 1) / 2], row_sum[(MT + 1) / 2];
#pragma unroll
    for (int i = 0; i < (MT + 1) / 2; i++) {
        row_max[i] = -INFINITY;
        row_sum[i] = 0.f;
    }
    const unsigned half = warp & 1, wn = (warp >> 1) % WN, wm = (warp >> 1) / WN;
    // Of a block that does all parts: what they give so far.
    float whole[ALONE ? MT : 1][8][4] = {};
    Joined joined[(MT + 1) / 2];
#pragma unroll
    for (int p = 0; p < (MT + 1) / 2; p++) {
        const unsigned r = p * 32 + warp * 4 + lane / 8;
        joined[p] = {ALONE ? __ldg(sinks + min(first_head + r % block_heads, heads - 1)) * LOG2E : 0.f, 1.f};
    }

    for (unsigned turn = 0; more; turn++) {
        uint8_t* const buffer = buffers + (turn & 1) * BUFFER_BYTES;
        uint8_t* const next = buffers + (~turn & 1) * BUFFER_BYTES;
        if constexpr (EARLY) {
            load(raw, next_spot, next_block);
        }
        if constexpr (!FP8) {
            asm volatile("cp.async.wait_all;" ::: "memory");
        }
        __syncthreads();
        if constexpr (!FP8) {
            if (goes_on) {
                copy(next_spot, next);
            }
        }
        {
            float s[TM][TN][4] = {};
            const uint32_t qs = shared_address(queries), ks = shared_address(buffer);
#pragma unroll STEPS
            for (unsigned k = 0; k < 16; k++) {
                const unsigned chunk = half * 32 + k * 2;
                uint32_t a[TM][4];
#pragma unroll
                for (int m = 0; m < TM; m++) {
                    const unsigned r = (wm * TM + m) * 16 + (lane & 15);
                    longwave::load_pieces(a[m], qs + r * ROW_BYTES + (((chunk + (lane >> 4)) ^ (r & 7)) << 4));
                }
#pragma unroll
                for (int n = 0; n < TN; n += 2) {
                    const unsigned r = (wn * TN + n) * 8 + (lane & 7) + (lane >> 4) * 8;
                    uint32_t b[4];
                    longwave::load_pieces(b, ks + r * ROW_BYTES + (((chunk + (lane >> 3 & 1)) ^ (r & 7)) << 4));
#pragma unroll
                    for (int m = 0; m < TM; m++) {
                        longwave::mma_bf16(s[m][n], a[m], b[0], b[1]);
                        longwave::mma_bf16(s[m][n + 1], a[m], b[2], b[3]);
                    }
                }
            }
            if constexpr (FP8 && !EARLY) {
                if (goes_on) {
                    load(raw, next_spot, block_of(next_spot));
                }
            }
            if constexpr (EARLY) {
                next_block = block_of(last_spot);
            }
#pragma unroll
            for (int m = 0; m < TM; m++) {
#pragma unroll
                for (int n = 0; n < TN; n++) {
                    const unsigned r = (wm * TM + m) * 16 + g, col = (wn * TN + n) * 8 + 2 * c;
                    uint8_t* to = scores + (half * ROWS + r) * SCORE_BYTES + col * 4;
                    *reinterpret_cast<float2*>(to) = make_float2(s[m][n][0], s[m][n][1]);
                    *reinterpret_cast<float2*>(to + 8 * SCORE_BYTES) = make_float2(s[m][n][2], s[m][n][3]);
                }
            }
        }
        __syncthreads();
        // Eight lanes per row; weights take the place of the first half's scores.
#pragma unroll
        for (int p = 0; p < (MT + 1) / 2; p++) {
            const unsigned r = p * 32 + warp * 4 + lane / 8, l = lane % 8, j = r / block_heads;
            if (p * 32 + warp * 4 < ROWS) {
                const int position = static_cast<int>(job.position + j);
                int from = 0, to = 0;
                if (j < job.tokens) {
                    if (now.i < now.w_tiles) {
                        const int base = static_cast<int>((now.w_first + now.i * PARTS) * TILE);
                        from = max(position - static_cast<int>(reach), static_cast<int>(job.oldest)) - base;
                        to = position + 1 - base;
                    } else {
                        const unsigned seen = picks ? count : (position + 1) / ratio;
                        to = static_cast<int>(seen) - static_cast<int>((now.part + (now.i - now.w_tiles) * PARTS) * TILE);
                    }
                }
                uint8_t* row = scores + r * SCORE_BYTES;
                float v[8], top = -INFINITY;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float4 a = *reinterpret_cast<const float4*>(row + h * 128 + l * 16);
                    const float4 b = *reinterpret_cast<const float4*>(row + ROWS * SCORE_BYTES + h * 128 + l * 16);
                    const float both[4] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int col = h * 32 + static_cast<int>(l) * 4 + e;
                        v[h * 4 + e] = col >= from && col < to ? both[e] * SCALE : -INFINITY;
                        top = fmaxf(top, v[h * 4 + e]);
                    }
                }
#pragma unroll
                for (int step = 4; step > 0; step /= 2) {
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
                }
                top = fmaxf(top, row_max[p]);
                const float base = top == -INFINITY ? 0.f : top;
                float sum = 0.f;
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    v[e] = exp2f(v[e] - base);
                    sum += v[e];
                }
#pragma unroll
                for (int step = 4; step > 0; step /= 2) {
                    sum += __shfl_xor_sync(0xffffffffu, sum, step);
                }
                const float keep = exp2f(row_max[p] - base);
                row_sum[p] = row_sum[p] * keep + sum;
                row_max[p] = top;
                __syncwarp();
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    *reinterpret_cast<uint2*>(row + h * 64 + l * 8) = make_uint2(
                        longwave::narrow(v[h * 4], v[h * 4 + 1]), longwave::narrow(v[h * 4 + 2], v[h * 4 + 3]));
                }
                if (l == 0) {
                    keep_of[r] = keep;
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const float low = keep_of[m * 16 + g], high = keep_of[m * 16 + g + 8];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                acc[m][n][0] *= low;
                acc[m][n][1] *= low;
                acc[m][n][2] *= high;
                acc[m][n][3] *= high;
            }
        }
        const uint32_t ps = shared_address(scores), vs = shared_address(buffer);
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            uint32_t a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                longwave::load_pieces(a[m], ps + (m * 16 + (lane & 15)) * SCORE_BYTES + (k * 2 + (lane >> 4)) * 16);
            }
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                const unsigned r = k * 16 + (lane & 15), chunk = warp * 8 + n + (lane >> 4);
                uint32_t b[4];
                longwave::load_pieces_transposed(b, vs + r * ROW_BYTES + ((chunk ^ (r & 7)) << 4));
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    longwave::mma_bf16(acc[m][n], a[m], b[0], b[1]);
                    longwave::mma_bf16(acc[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
        if constexpr (FP8) {
            if (goes_on) {
                widen(raw, next);
            }
        }
        if constexpr (ALONE) {
            if (!goes_on || then.part != now.part) {
#pragma unroll
                for (int p = 0; p < (MT + 1) / 2; p++) {
                    const unsigned r = p * 32 + warp * 4 + lane / 8;
                    const float2 factors = joined[p].add(row_max[p], row_sum[p]);
                    if (r < ROWS && lane % 8 == 0) {
                        factors_of[r] = factors;
                    }
                    row_max[p] = -INFINITY;
                    row_sum[p] = 0.f;
                }
                __syncthreads();
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const float2 low = factors_of[m * 16 + g], high = factors_of[m * 16 + g + 8];
#pragma unroll
                    for (int n = 0; n < 8; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            whole[m][n][e] = join(whole[m][n][e], acc[m][n][e], e < 2 ? low : high);
                            acc[m][n][e] = 0.f;
                        }
                    }
                }
            }
        }
        now = then;
        more = goes_on;
        then = behind;
        goes_on = comes;
        follow();
        next_spot = EARLY ? last_spot : spot_of(then, goes_on);
        last_spot = spot_of(behind, comes && EARLY);
    }

    // Numerators over the buffers: column col of row r at col ^ (r % 8) * 8.
    __syncthreads();
    float* const numerators = reinterpret_cast<float*>(buffers);
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const unsigned r = m * 16 + g, col = (warp * 64 + n * 8 + 2 * c) ^ (g << 3);
            const float* v = ALONE ? whole[m][n] : acc[m][n];
            *reinterpret_cast<float2*>(numerators + r * 512 + col) = make_float2(v[0], v[1]);
            *reinterpret_cast<float2*>(numerators + (r + 8) * 512 + col) = make_float2(v[2], v[3]);
        }
    }
#pragma unroll
    for (int p = 0; p < (MT + 1) / 2; p++) {
        const unsigned r = p * 32 + warp * 4 + lane / 8;
        if (r < ROWS && lane % 8 == 0) {
            max_of[r] = row_max[p];
            sum_of[r] = ALONE ? joined[p].sum : row_sum[p];
        }
    }
    if constexpr (ALONE) {
        __syncthreads();
    } else {
        longwave::cluster_sync();
    }

    // A warp ends 128 channels of a row: of the ROWS / 8 that this block of a cluster ends, or of all.
    constexpr int UNITS = ALONE ? MT * PARTS : MT;
#pragma unroll 2
    for (int u = 0; u < UNITS; u++) {
        const unsigned unit = warp * UNITS + u, r = (ALONE ? 0 : rank * (ROWS / PARTS)) + unit / 4, quarter = unit % 4;
        const unsigned j = r / block_heads, head = first_head + r % block_heads, col = quarter * 128 + lane * 4;
        float denominator;
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
        const uint32_t at_own = shared_address(numerators + r * 512 + (col ^ ((r & 7) << 3)));
        if constexpr (ALONE) {
            denominator = sum_of[r];
            o = *reinterpret_cast<const float4*>(numerators + r * 512 + (col ^ ((r & 7) << 3)));
        } else {
            Joined all = {__ldg(sinks + min(head, heads - 1)) * LOG2E, 1.f};
#pragma unroll
            for (unsigned b = 0; b < PARTS; b++) {
                const float2 factors = all.add(longwave::load_cluster(longwave::address_in(shared_address(max_of + r), b)),
                                               longwave::load_cluster(longwave::address_in(shared_address(sum_of + r), b)));
                const float4 a = longwave::load_cluster4(longwave::address_in(at_own, b));
                o = make_float4(join(o.x, a.x, factors), join(o.y, a.y, factors), join(o.z, a.z, factors),
                                join(o.w, a.w, factors));
            }
            denominator = all.sum;
        }
        const float inverse = 1.f / denominator;
        o = make_float4(longwave::round_bf16(o.x * inverse), longwave::round_bf16(o.y * inverse),
                        longwave::round_bf16(o.z * inverse), longwave::round_bf16(o.w * inverse));
        if (j < job.tokens && head < heads) {
            const unsigned token = job.row + j;
            if (col >= 448) {
                o = longwave::round_bf16(longwave::turn<true>(o, angles + static_cast<size_t>(token) * 64, (col - 448) / 2));
            }
            const size_t at = (static_cast<size_t>(token) * heads + head) * 512 + col;
            if (out) {
                *reinterpret_cast<uint2*>(out + at) = make_uint2(longwave::narrow(o.x, o.y), longwave::narrow(o.z, o.w));
            }
            if (codes) {
                float amax = fmaxf(fmaxf(fabsf(o.x), fabsf(o.y)), fmaxf(fabsf(o.z), fabsf(o.w)));
#pragma unroll
                for (int step = 16; step > 0; step /= 2) {
                    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
                }
                const uint32_t byte = longwave::scale_byte(amax);
                const float s = longwave::inverse_of(byte);
                *reinterpret_cast<uint32_t*>(codes + at) = longwave::codes_of(o.x * s, o.y * s, o.z * s, o.w * s);
                if (lane == 0) {
                    scales[at / 128] = longwave::scale_of(byte);
                }
            }
        }
    }
    if constexpr (!ALONE) {
        longwave::cluster_sync();
    }
}

}  // namespace

#define ENTRY(name, rows, fp8, alone)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                             \
        name(const uint16_t* q, const float* sinks, const float* angles, const Job* jobs, uint8_t* window_pool,          \
             const unsigned* window_table, unsigned long long window_bytes, unsigned window_len, unsigned window_shift,  \
             uint8_t* entry_pool, const unsigned* entry_table, unsigned long long entry_bytes, unsigned entry_len, \
             unsigned entry_shift, const unsigned* picks, unsigned picks_len, const unsigned* counts, uint16_t* out,     \
             uint8_t* codes, float* scales, unsigned heads, unsigned block_tokens, unsigned reach, unsigned ratio) {     \
        longwave::overlap();                                                                                             \
        const Pages window = {window_pool, window_table, window_bytes, window_len, window_shift};                        \
        const Pages entries = {entry_pool, entry_table, entry_bytes, entry_len, entry_shift};                            \
        attend<rows, fp8, alone>(q, sinks, angles, jobs, window, entries, picks, picks_len, counts, out, codes, scales, heads,  \
                          block_tokens, reach, ratio);                                                                   \
    }

ENTRY(attend_fp8_16, 16, true, false)
ENTRY(attend_fp8_32, 32, true, false)
ENTRY(attend_fp8_64, 64, true, false)
ENTRY(attend_bf16_16, 16, false, false)
ENTRY(attend_bf16_32, 32, false, false)
ENTRY(attend_bf16_64, 64, false, false)
ENTRY(attend_fp8_alone, 32, true, true)
ENTRY(attend_bf16_alone, 32, false, true)
