// architectures: 90a 100a
// Products of hyper-connections (model.md 5) for any number of tokens on the tensor cores (common/mhc_tensor.cuh), in place of
// mhc_dots and mhc_post_dots of mhc.cu, with other bits: a model takes all its products from here or none.
//   mhc_tensor             partial products of the 24 rows of fn with a token's streams, and of their squares
//   mhc_tensor_after       the same of the streams as the sublayer before this leaves them, which are stored; its output in bf16
//   mhc_tensor_after_wide  the same, its output in float, still to be rounded
#include <stdint.h>

#include "common/mhc_tensor.cuh"
#include "common/overlap.cuh"

namespace {

using namespace longwave::hyper;

// A block has a unit of columns and every gridDim.y-th tile of tokens.
template <Before BEFORE>
__device__ __forceinline__ void products(uint2* streams, const void* output, const float4* mix, const float4* fn, float* partial,
                                         unsigned width, unsigned tokens) {
    constexpr bool AFTER = BEFORE != Before::Nothing;
    __shared__ float sums[2][8 * TOKENS * PITCH];
    __shared__ float4 mixes[2][TOKENS * MIX];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, quads = width / 4;
    const unsigned column = blockIdx.x * (COLUMNS / 4) + warp * 4 + lane % 4;
    const auto mix_of = [&](unsigned first) {
        const bool there = threadIdx.x < TOKENS * MIX && first + threadIdx.x / MIX < tokens;
        return there ? mix[first * MIX + threadIdx.x] : make_float4(0.f, 0.f, 0.f, 0.f);
    };
    Function f;
    f.load(fn, quads, column);
    longwave::wait_before();
    unsigned first = blockIdx.y * TOKENS, turn = 0;
    Tile tile;
    tile.load<BEFORE>(streams, output, quads, column, first + g, tokens);
    if (AFTER) {
        if (threadIdx.x < TOKENS * MIX) {
            mixes[0][threadIdx.x] = mix_of(first);
        }
        __syncthreads();
    }
    for (; first < tokens; turn ^= 1) {
        const unsigned next = first + gridDim.y * TOKENS, token = first + g;
        uint2 x[4];
        if constexpr (AFTER) {
            tile.update(reinterpret_cast<const float*>(mixes[turn] + MIX * g), tile.output<BEFORE>(), x);
            if (token < tokens) {
#pragma unroll
                for (unsigned s = 0; s < 4; s++) {
                    streams[size_t(token) * (4 * quads) + s * quads + column] = x[s];
                }
            }
        } else {
#pragma unroll
            for (int s = 0; s < 4; s++) {
                x[s] = tile.x[s];
            }
        }
        // The next tile is on its way while this one is multiplied.
        tile.load<BEFORE>(streams, output, quads, column, next + g, tokens);
        float4 mix_coming;
        if (AFTER) {
            mix_coming = mix_of(next);
        }
        f.forget();
        Products p;
        const float squares = multiply(p, f, x);
        write_sums(p, squares, sums[turn] + warp * TOKENS * PITCH);
        if (AFTER && threadIdx.x < TOKENS * MIX) {
            mixes[turn ^ 1][threadIdx.x] = mix_coming;
        }
        // Sums of this tile are read below while the next tile's are written to the other half.
        __syncthreads();
        if (first + warp < tokens) {
            const float sum = lane <= ROWS ? over_warps(sums[turn], warp, lane) : 0.f;
            partial[(size_t(first + warp) * gridDim.x + blockIdx.x) * PARTIAL + lane] = sum;
        }
        first = next;
    }
}

}  // namespace

// Grid (width / COLUMNS, at most eighths of the tokens), 256 threads; partial [tokens, blocks, PARTIAL], mix as mhc_pre left it.
#define ENTRY(name, before)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                                 \
        name(uint2* streams, const void* output, const float4* mix, const float4* fn, float* partial, unsigned width,    \
             unsigned tokens) {                                                                                          \
        longwave::start_next();                                                                                          \
        products<before>(streams, output, mix, fn, partial, width, tokens);                                              \
    }

ENTRY(mhc_tensor, Before::Nothing)
ENTRY(mhc_tensor_after, Before::Rounded)
ENTRY(mhc_tensor_after_wide, Before::Wide)
