// architectures: 90a 100a
// A boundary of hyper-connections (model.md 5) of few tokens in one launch, on the tensor cores (common/mhc_tensor.cuh): what
// mhc_tensor_after and mhc_pre do, the same bits. A cluster of 2 to 16 blocks has up to eight tokens, a block one or two units of 128
// columns of their streams: as many partial products and groups of squares of a token. Sums go to the blocks of the cluster that need
// them by stores that arrive at a barrier there, so nobody waits for more than what is sent.
//   mhc_tensor_one_n    a cluster has one token: a lane updates two columns of one stream
//   mhc_tensor_eight_n  a cluster has up to eight: a lane updates four columns of all streams of a token
// with n units a block.
#include <stdint.h>

#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/mhc_tensor.cuh"
#include "common/overlap.cuh"

namespace {

using namespace longwave::hyper;

constexpr unsigned MOST_BLOCKS = 16;

struct Operands {
    uint32_t* streams;
    const uint32_t* y;
    const float2* wide_y;
    float* mix;
    const float4* fn;
    const float* base;
    const float* scale;
    const float4* weight;
    uint32_t* normed;
    uint32_t* codes;
    float* scales;
    float norm_eps, hc_eps;
    unsigned iters, tokens;
};

// Rows of the products that a sublayer's input needs, and the squares: every block has them of all tokens. Of the others, which the mix
// needs, a token's are sent to one block.
__device__ __forceinline__ bool for_all(unsigned row) {
    return row < 4 || row == ROWS;
}
constexpr unsigned FOR_ALL = 5;

// What a block has of its cluster's tokens, of which there are at most N.
template <unsigned UNITS, unsigned N>
struct Shared {
    // A token's products of all units beside each other in rows, and as many floats against bank conflicts.
    static constexpr unsigned PAIRS = UNITS * COLUMNS / 2, SENT = UNITS * (PARTIAL + 1);
    // Of a token's streams, with room that puts neighbouring tokens in different banks.
    static constexpr unsigned STREAMS = 4 * PAIRS + 8;

    alignas(16) uint64_t barriers[2];
    alignas(16) float products[N][MOST_BLOCKS * SENT];
    alignas(16) uint32_t now[N][STREAMS];
    alignas(16) float mixes[N][4 * MIX];
    float sums[8 * UNITS * TOKENS * PITCH];
    float units[N][UNITS * PARTIAL];
    float squares[N][UNITS * MOST_BLOCKS];
    float dots[8][PARTIAL];
    float bases[ROWS], factors[3];
};

// A block's bytes, which who launches it counts too.
static_assert(sizeof(Shared<1, 1>) == 13808 && sizeof(Shared<2, 1>) == 26352);
static_assert(sizeof(Shared<1, 8>) == 37888 && sizeof(Shared<2, 8>) == 73728);

// The lane's two columns of one stream of a token, updated and stored; then its four columns of all streams in every lane, multiplied.
template <class Shared>
__device__ __forceinline__ float multiply_one(const Operands& o, const Function& f, Shared& shared, Products& p, unsigned unit,
                                              unsigned token, unsigned half) {
    const unsigned lane = threadIdx.x % 32, c = lane % 4, stream = lane / 4 % 4, second = lane / 16;
    const unsigned pair = unit * 64 + threadIdx.x / 32 % 8 * 8 + 2 * c + second, column = blockIdx.x * Shared::PAIRS + pair;
    uint32_t* row = o.streams + size_t(token) * (4 * half);
    float2 old[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        old[i] = longwave::widen(row[i * half + column]);
    }
    const float2 sum = updated(o.mix + size_t(token) * 20, stream, output_of(o.y, o.wide_y, size_t(token) * half + column), old);
    const uint32_t rounded = longwave::narrow(sum.x, sum.y);
    shared.now[0][stream * Shared::PAIRS + pair] = rounded;
    const float2 x = longwave::widen(rounded);
    float squares = fmaf(x.x, x.x, __fmul_rn(x.y, x.y));
    squares += __shfl_xor_sync(0xffffffffu, squares, 16);
    squares += __shfl_xor_sync(0xffffffffu, squares, 4);
    squares += __shfl_xor_sync(0xffffffffu, squares, 8);
#pragma unroll
    for (unsigned s = 0; s < 4; s++) {
        const uint32_t low = __shfl_sync(0xffffffffu, rounded, 4 * s + c), high = __shfl_sync(0xffffffffu, rounded, 16 + 4 * s + c);
        p.add(f, s, widen_four(make_uint2(low, high)));
    }
    // The other streams' lanes have read what this replaces.
    row[stream * half + column] = rounded;
    return over_columns(squares);
}

// The lane's four columns of all streams of token g of the cluster's `count`, which are at `tile`, updated, stored and multiplied.
template <class Shared>
__device__ __forceinline__ float multiply_eight(const Operands& o, const Function& f, const Tile& tile, Shared& shared, Products& p,
                                                unsigned quad, unsigned column, unsigned first, unsigned count, unsigned quads) {
    const unsigned g = threadIdx.x % 32 / 4;
    uint2 x[4];
    tile.update(shared.mixes[g], o.wide_y ? tile.output<Before::Wide>() : tile.output<Before::Rounded>(), x);
    // Behind the last token a lane multiplies what nobody reads.
    if (g < count) {
        uint2* row = reinterpret_cast<uint2*>(o.streams) + size_t(first + g) * (4 * quads) + column;
        uint2* now = reinterpret_cast<uint2*>(shared.now[g]) + quad;
#pragma unroll
        for (unsigned s = 0; s < 4; s++) {
            row[s * quads] = x[s];
            now[s * (Shared::PAIRS / 2)] = x[s];
        }
    }
    return multiply(p, f, x);
}

template <unsigned UNITS, unsigned N>
__device__ __forceinline__ void boundary(const Operands& o) {
    using Own = Shared<UNITS, N>;
    extern __shared__ __align__(16) uint8_t memory[];
    Own& shared = *reinterpret_cast<Own*>(memory);
    constexpr unsigned WARPS = 8 * UNITS;
    const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned blocks = gridDim.x, rank = blockIdx.x, first = blockIdx.y * N, width = UNITS * COLUMNS * blocks;
    const unsigned count = min(N, o.tokens - first);
    // Tokens of the cluster are taken in turn by its blocks for their mix: here every `blocks`-th one from `rank` on.
    const unsigned mixed = rank < count ? (count - rank + blocks - 1) / blocks : 0;
    const uint32_t products_here = longwave::shared_address(shared.barriers), squares_here = products_here + 8;
    if (thread == 0) {
        longwave::init_barrier(products_here, 1);
        longwave::init_barrier(squares_here, 1);
        longwave::show_barriers();
        longwave::arrive_expecting(products_here, blocks * UNITS * 4 * (count * FOR_ALL + mixed * (ROWS + 1 - FOR_ALL)));
        longwave::arrive_expecting(squares_here, count * blocks * UNITS * 4);
    }
    // The whole barrier of a cluster would wait for the weights.
    longwave::cluster_arrive_relaxed();
    // Weights, before the kernel before this one has ended.
    const bool multiplies = warp < WARPS;
    const unsigned quad = warp * 4 + lane % 4, column = rank * (Own::PAIRS / 2) + quad;
    Function f;
    if (multiplies) {
        f.load(o.fn, width / 4, column);
    }
    // A warp has a group of 128 columns of a token's input.
    const unsigned own = warp / UNITS, group = warp % UNITS;
    const bool collapses = multiplies && own < count;
    float4 gains = make_float4(0.f, 0.f, 0.f, 0.f);
    if (collapses) {
        gains = __ldg(o.weight + rank * (Own::PAIRS / 2) + group * 32 + lane);
    }
    if (thread < ROWS) {
        shared.bases[thread] = __ldg(o.base + thread);
    }
    if (thread < 3) {
        shared.factors[thread] = __ldg(o.scale + thread);
    }
    longwave::wait_before();
    longwave::cluster_wait();

    if constexpr (N == 1) {
        if (multiplies) {
            Products p;
            const float squares = multiply_one(o, f, shared, p, warp / 8, first, width / 2);
            write_sums(p, squares, shared.sums + warp * TOKENS * PITCH);
        }
    } else {
        Tile tile;
        if (multiplies) {
            const uint2* streams = reinterpret_cast<const uint2*>(o.streams);
            if (o.wide_y) {
                tile.load<Before::Wide>(streams, o.wide_y, width / 4, column, first + lane / 4, o.tokens);
            } else {
                tile.load<Before::Rounded>(streams, o.y, width / 4, column, first + lane / 4, o.tokens);
            }
        }
        if (thread < N * MIX) {
            const bool there = thread < count * MIX;
            const float4* from = reinterpret_cast<const float4*>(o.mix) + size_t(first) * MIX;
            reinterpret_cast<float4*>(shared.mixes)[thread] = there ? from[thread] : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        __syncthreads();
        if (multiplies) {
            Products p;
            const float squares = multiply_eight(o, f, tile, shared, p, quad, column, first, count, width / 4);
            write_sums(p, squares, shared.sums + warp * TOKENS * PITCH);
        }
    }
    __syncthreads();
    // A lane has a row. A token's sums are needed by every block; where there are more tokens each is added up once.
    const auto sum_of = [&](unsigned token, unsigned unit) {
        return lane <= ROWS ? over_warps(shared.sums + unit * 8 * TOKENS * PITCH, token, lane) : 0.f;
    };
    if constexpr (N > 1) {
        if (multiplies && warp < count * UNITS) {
            shared.units[warp / UNITS][UNITS * lane + warp % UNITS] = sum_of(warp / UNITS, warp % UNITS);
        }
        __syncthreads();
    }
    if (multiplies) {
        float units[UNITS];
        for (unsigned i = warp; i < count * blocks; i += WARPS) {
            const unsigned token = i / blocks, to = i % blocks;
#pragma unroll
            for (unsigned u = 0; u < UNITS; u++) {
                if constexpr (N > 1) {
                    units[u] = shared.units[token][UNITS * lane + u];
                } else {
                    units[u] = sum_of(token, u);
                }
            }
            if (lane <= ROWS && (for_all(lane) || token % blocks == to)) {
                const uint32_t at = longwave::shared_address(shared.products[token] + rank * Own::SENT + UNITS * lane);
                const uint32_t there = longwave::address_in(at, to), barrier = longwave::address_in(products_here, to);
                if constexpr (UNITS == 2) {
                    longwave::send_8(there, __float_as_uint(units[0]), __float_as_uint(units[1]), barrier);
                } else {
                    longwave::send_4(there, __float_as_uint(units[0]), barrier);
                }
            }
        }
    }
    // Row `row` of a token's products of all units: a unit a lane.
    const auto product_at = [&](unsigned token, unsigned row) {
        return lane < UNITS * blocks ? shared.products[token][lane / UNITS * Own::SENT + UNITS * row + lane % UNITS] : 0.f;
    };
    if (!multiplies) {
        const unsigned token = rank + (warp - WARPS) * blocks;
        if (token >= count) {
            return;
        }
        longwave::wait(products_here, 0);
        float v[PARTIAL];
#pragma unroll
        for (int r = 0; r < PARTIAL; r++) {
            v[r] = r <= ROWS ? product_at(token, r) : 0.f;
        }
        float* dots = shared.dots[warp - WARPS];
        dots[lane] = longwave::warp_sums(v);
        __syncwarp();
        const float r = norm_of(dots, width, o.norm_eps);
        make_mix(dots, r, shared.factors, shared.bases, o.hc_eps, o.iters, o.mix + size_t(first + token) * 20);
        return;
    }
    if (!collapses) {
        return;
    }
    longwave::wait(products_here, 0);
    // Four columns per thread.
    float dots[ROWS + 1];
#pragma unroll
    for (int r : {0, 1, 2, 3, ROWS}) {
        dots[r] = longwave::warp_sum(product_at(own, r));
    }
    const float r = norm_of(dots, width, o.norm_eps);
    float w[4];
    uint2 x[4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        w[s] = weight_of(dots[s], r, shared.factors[0], shared.bases[s], o.hc_eps);
        x[s] = reinterpret_cast<const uint2*>(shared.now[own] + s * Own::PAIRS)[group * 32 + lane];
    }
    const float4 h = collapsed(x, w);
    const float of_group = longwave::warp_sum(squares_of(h));
    if (lane < blocks) {
        const uint32_t to = longwave::shared_address(shared.squares[own] + UNITS * rank + group);
        longwave::send_4(longwave::address_in(to, lane), __float_as_uint(of_group), longwave::address_in(squares_here, lane));
    }
    longwave::wait(squares_here, 0);
    const float all = longwave::warp_sum(lane < UNITS * blocks ? shared.squares[own][lane] : 0.f);
    const float factor = rsqrtf(all / float(width) + o.norm_eps);
    const size_t token = first + own, place = token * (width / 4) + rank * (Own::PAIRS / 2) + group * 32 + lane;
    write_input(h, factor, gains, o.normed, o.codes, place, o.scales + token * (width / COLUMNS) + UNITS * rank + group);
}

}  // namespace

// Grid (blocks, tokens or their eighths) in clusters of `blocks`, 256 threads a unit and as many warps for mixes as tokens of a cluster
// fall to one of its blocks; width is 128 times the units of a cluster. Dynamic shared memory: sizeof(Shared). streams in place; y or
// wide_y and mix of the sublayer before, fn, base, scale and weight of the site behind; the other arguments as in mhc.cu.
#define ENTRY(name, units, most, threads)                                                                                \
    extern "C" __global__ void __launch_bounds__(threads, 1)                                                             \
        name(uint32_t* streams, const uint32_t* y, const float2* wide_y, float* mix, const float4* fn,                   \
             const float* base, const float* scale, const float4* weight, uint32_t* normed, uint32_t* codes,             \
             float* scales, float norm_eps, float hc_eps, unsigned iters, unsigned tokens) {                             \
        longwave::start_next();                                                                                          \
        boundary<units, most>({streams, y, wide_y, mix, fn, base, scale, weight, normed, codes, scales, norm_eps,        \
                               hc_eps, iters, tokens});                                                                  \
    }

ENTRY(mhc_tensor_one_1, 1, 1, 288)
ENTRY(mhc_tensor_one_2, 2, 1, 544)
ENTRY(mhc_tensor_eight_1, 1, 8, 384)
ENTRY(mhc_tensor_eight_2, 2, 8, 544)
