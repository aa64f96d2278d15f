// architectures: 90a
// Scores of all entries that a row of the indexer sees, for few rows (model.md 6.5): what index_few.cu's index_row_* write, with the same
// bits, in fewer trips to memory one after the other. At most 64 heads, pages of at least 32 keys, at most 262,144 entries; rows that
// see at most k entries and rows without a seat write nothing.
#include <stdint.h>

#include "common/load.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/score_beside.cuh"

namespace {

using longwave::BatchRow;
using longwave::Format;
using longwave::Pages;

// Warps of a block. Where a row sees few entries four of them have 16 keys each, one on each scheduler; where it sees many all have
// 32 at once.
constexpr unsigned WARPS = 8, FEW_WARPS = 4, FEW_KEYS = 16, MANY_KEYS = 32;
// Entries of a group, of which the largest score is stored.
constexpr unsigned GROUP = 16;
// Seats for which a warp looks up its first page while it does not know its row's yet.
constexpr unsigned GUESSED = 8;

// Stores the scores of a tile of KEYS from `first` on and the largest of every group. Lane 4 g + c has key 8 c + g.
template <unsigned KEYS>
__device__ __forceinline__ void store(float score, unsigned first, unsigned visible, uint32_t* scores, uint32_t* largest) {
    const unsigned lane = threadIdx.x % 32, at = 8 * (lane % 4) + lane / 4;
    const uint32_t v = at < KEYS && first + at < visible ? longwave::ordered_score(score) : 0;
    if (at < KEYS) {
        scores[first + at] = v;
    }
    // Lanes with the same second bit have sixteen neighbours.
    uint32_t most = v;
#pragma unroll
    for (unsigned step = 16; step > 0; step /= 2) {
        if (step != 2) {
            most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
        }
    }
    if ((lane & ~2u) == 0 && lane / 2 < KEYS / GROUP) {
        largest[first / GROUP + lane / 2] = most;
    }
}

template <Format FORMAT>
__device__ __forceinline__ void score_row(const uint16_t* q, const float* weights, const BatchRow* rows, const Pages& keys,
                                          uint32_t* scores, uint32_t* largest, unsigned stride, unsigned heads, unsigned k,
                                          unsigned seats) {
    __shared__ __align__(16) longwave::ScoreQueries own;
    const unsigned token = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned first_of_few = (blockIdx.x * FEW_WARPS + warp) * FEW_KEYS;
    const unsigned first_of_many = (blockIdx.x * WARPS + warp) * MANY_KEYS;
    // The row and, for each of the lowest seats and either number of keys, the block of the first tile: one trip.
    const BatchRow row = {longwave::load_here(&rows[token].seat), longwave::load_here(&rows[token].position), 0, 0};
    const unsigned guess = (lane < GUESSED ? first_of_few : first_of_many) >> keys.shift;
    unsigned guessed = longwave::UNMAPPED;
    if (lane < 2 * GUESSED && lane % GUESSED < seats && guess < keys.table_len) {
        guessed = longwave::load_here(keys.table + size_t(lane % GUESSED) * keys.table_len + guess);
    }
    const unsigned visible = row.visible_c4();
    const bool few = visible <= gridDim.x * (FEW_WARPS * FEW_KEYS);
    if (visible <= k || blockIdx.x * (few ? FEW_WARPS * FEW_KEYS : WARPS * MANY_KEYS) >= visible) {
        return;
    }
    const unsigned* const table = keys.table + size_t(row.seat) * keys.table_len;
    unsigned first = few ? first_of_few : first_of_many;
    // Four of eight warps have no tile of few; they copy queries with the others.
    const unsigned end = few && warp >= FEW_WARPS ? 0 : visible;
    unsigned block = __shfl_sync(0xffffffffu, guessed, row.seat % GUESSED + (few ? 0 : GUESSED));
    if (row.seat >= GUESSED && first < end) {
        block = __ldg(table + (first >> keys.shift));
    }
    q += size_t(token) * heads * 128;
    weights += size_t(token) * heads;
    scores += size_t(token) * stride;
    largest += size_t(token) * (stride / GROUP);
    // Keys and queries: one trip.
    const auto ask_for_queries = [&] { longwave::copy_queries<WARPS * 32>(own, q, weights, heads); };
    const auto await_queries = [] {
        longwave::wait_copies<0>();
        __syncthreads();
    };
    if (few) {
        longwave::KeysBeside<FORMAT, FEW_KEYS / 16> tile;
        tile.load(keys, block, first, end);
        ask_for_queries();
        await_queries();
        if (first < end) {
            const float score = longwave::score_beside(own, heads, tile, [] {});
            store<FEW_KEYS>(score, first, visible, scores, largest);
        }
        return;
    }
    // Lane l has the block of tile l of the next 32.
    const unsigned step = gridDim.x * (WARPS * MANY_KEYS);
    const auto blocks_from = [&](unsigned from) {
        const unsigned at = from + lane * step;
        return at < visible ? __ldg(table + (at >> keys.shift)) : longwave::UNMAPPED;
    };
    unsigned blocks = longwave::UNMAPPED, turn = 0;
    const auto next_block = [&](unsigned next) {
        const unsigned found = __shfl_sync(0xffffffffu, blocks, turn % 32);
        if (++turn % 32 == 0) {
            blocks = blocks_from(next + step);
        }
        return found;
    };
    longwave::KeysBeside<FORMAT, MANY_KEYS / 16> tile;
    if constexpr (FORMAT == Format::Fp4) {
        // Keys of the next tile come while this one is multiplied.
        __shared__ longwave::KeysAhead ahead[WARPS];
        ahead[warp].copy(keys, block, first, end);
        blocks = blocks_from(first + step);
        ask_for_queries();
        await_queries();
        for (; first < visible; first += step) {
            ahead[warp].take(tile);
            const float score = longwave::score_beside(own, heads, tile, [&] {
                const unsigned next = first + step;
                if (next < visible) {
                    ahead[warp].copy(keys, next_block(next), next, visible);
                }
            });
            store<MANY_KEYS>(score, first, visible, scores, largest);
        }
    } else {
        tile.load(keys, block, first, end);
        blocks = blocks_from(first + step);
        ask_for_queries();
        await_queries();
        while (first < visible) {
            const float score = longwave::score_beside(own, heads, tile, [] {});
            store<MANY_KEYS>(score, first, visible, scores, largest);
            first += step;
            tile.load(keys, next_block(first), first, visible);
        }
    }
}

}  // namespace

// Grid (blocks, tokens), 256 threads. scores [tokens, stride], largest [tokens, stride / 16]; stride a multiple of 32 that
// holds what any row sees. The table of keys has at least `seats` rows.
#define BESIDE(name, format)                                                                                              \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)                                                           \
        name(const uint16_t* q, const float* weights, const BatchRow* rows, uint8_t* key_pool, const unsigned* key_table, \
             unsigned long long key_bytes, unsigned key_len, unsigned key_shift, uint32_t* scores, uint32_t* largest,     \
             unsigned stride, unsigned heads, unsigned k, unsigned seats) {                                               \
        longwave::overlap();                                                                                             \
        const Pages keys = {key_pool, key_table, key_bytes, key_len, key_shift};                                          \
        score_row<format>(q, weights, rows, keys, scores, largest, stride, heads, k, seats);                              \
    }

BESIDE(index_beside_fp8, Format::Fp8)
BESIDE(index_beside_fp4, Format::Fp4)
BESIDE(index_beside_bf16, Format::Bf16)
