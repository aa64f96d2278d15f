// What the warpgroups of attend_wide.cu share: where all lies in shared memory, barriers, the order of rows and tiles.
#pragma once
#include <stdint.h>

#include "attend.cuh"
#include "pages.cuh"

namespace longwave::attention {

constexpr unsigned THREADS = 512, PRODUCERS = 128, ROWS = 64, TILE = 64, PARTS = 8, CHANNELS = 256;
// Tiles, queries, weights and products of the other block that are there at once.
constexpr unsigned STAGES = 3, QUERIES = 2, WEIGHTS = 2, PARTIALS = 2;
constexpr unsigned STAGE_BYTES = TILE * CHANNELS * 2, QUERY_BYTES = ROWS * CHANNELS * 2;
// Weights, bf16, and four floats of each row.
constexpr unsigned FACTORS = ROWS * TILE * 2, WEIGHT_BYTES = FACTORS + ROWS * 16;
constexpr unsigned PARTIAL_BYTES = ROWS * TILE * 2;
// Codes of a row on their way out: 128 and 16 bytes, eight rows of each warp.
constexpr unsigned CODE_ROW = 144;
// Codes on their way in, of each producing thread: of each of its rows five times sixteen bytes, and scales.
constexpr unsigned OWN = 4 * TILE / PRODUCERS, RAW_ROW = 5 * 16 * PRODUCERS, RAW_SCALES = OWN * RAW_ROW,
                   RAW_BYTES = RAW_SCALES + OWN * 4 * PRODUCERS;
// Bytes of a tile that come from the other block: weights and factors of half of the rows.
constexpr unsigned SENT = ROWS / 2 * (TILE * 2 + 16);

// Where all lies in shared memory, and barriers behind it.
constexpr unsigned AT_QUERIES = STAGES * STAGE_BYTES, AT_WEIGHTS = AT_QUERIES + QUERIES * QUERY_BYTES,
                   AT_PARTIALS = AT_WEIGHTS + WEIGHTS * WEIGHT_BYTES, AT_CODES = AT_PARTIALS + PARTIALS * PARTIAL_BYTES,
                   AT_RAW = AT_CODES + ROWS * CODE_ROW, FULL = AT_RAW + RAW_BYTES, EMPTY = FULL + 8 * STAGES,
                   QUERY_FULL = EMPTY + 8 * STAGES, QUERY_EMPTY = QUERY_FULL + 8 * QUERIES, WEIGHT_FULL = QUERY_EMPTY + 8 * QUERIES,
                   WEIGHT_EMPTY = WEIGHT_FULL + 8 * WEIGHTS, PARTIAL_FULL = WEIGHT_EMPTY + 8 * WEIGHTS,
                   ITEMS = PARTIAL_FULL + 8 * PARTIALS, PAGES = ITEMS + PRODUCERS / 32 * 64, MARKS = PAGES + 2 * 32,
                   SHARED_BYTES = MARKS + 4 * STAGES;
// What a tile is: its first row, a multiple of 64, and these.
constexpr uint32_t THERE = 1, FIRST = 2, WINDOW = 4, ENDS_PART = 8, ENDS_ITEM = 16;
static_assert(SHARED_BYTES == 229836, "ops/attend.rs says so too");

struct Operands {
    const uint16_t* q;
    const float* sinks;
    const float* angles;
    const Job* jobs;
    Pages window, entries;
    const unsigned* picks;
    unsigned picks_len;
    const unsigned* counts;
    uint16_t* out;
    uint8_t* codes;
    float* scales;
    unsigned heads, block_tokens, reach, ratio, items;

    // The first item from n on, of those of this cluster, whose job has tokens.
    __device__ __forceinline__ unsigned skip(unsigned n) const {
        while (n < items && __ldg(&jobs[n / groups()].tokens) == 0) {
            n += gridDim.x / 2;
        }
        return n;
    }

    // Rows of a token are 2^shift heads: tokens of a block are a power of two.
    __device__ __forceinline__ unsigned shift() const {
        return 7 - __ffs(block_tokens);
    }

    __device__ __forceinline__ unsigned token_of(unsigned r) const {
        return r >> shift();
    }

    __device__ __forceinline__ unsigned head_of(unsigned r) const {
        return r & ((1u << shift()) - 1);
    }

    // Blocks of heads of a job.
    __device__ __forceinline__ unsigned groups() const {
        return (heads + (1u << shift()) - 1) >> shift();
    }
};

// What an item's rows see: window tiles w0 to w_end - 1, and `count` entries.
struct Item {
    unsigned seat, row, tokens, position, job_oldest, first_head, oldest, last, w0, w_end, count;

    __device__ __forceinline__ void find(const Operands& o, unsigned n) {
        const Job job = o.jobs[n / o.groups()];
        seat = job.seat;
        row = job.row;
        tokens = job.tokens;
        position = job.position;
        job_oldest = job.oldest;
        first_head = n % o.groups() << o.shift();
        last = position + tokens - 1;
        oldest = max(position > o.reach ? position - o.reach : 0u, job_oldest);
        w0 = oldest / TILE;
        // At least one tile, which may show nothing.
        w_end = max(last / TILE + 1, w0 + 1);
        count = o.picks ? o.counts[row] : o.ratio ? (last + 1) / o.ratio : 0;
    }
};

// A tile among those of an item: in each part first those of the window.
struct Place {
    unsigned part, tile;
    bool window;

    // The first tile from here on that is there.
    __device__ __forceinline__ bool settle(const Item& item) {
        while (part < PARTS) {
            if (window && tile < item.w_end) {
                return true;
            }
            if (window) {
                window = false;
                tile = part;
            }
            if (tile * TILE < item.count) {
                return true;
            }
            enter(item, part + 1);
        }
        return false;
    }

    __device__ __forceinline__ void enter(const Item& item, unsigned to) {
        part = to;
        window = true;
        tile = item.w0 + ((part - item.w0) & (PARTS - 1));
    }

    __device__ __forceinline__ bool begin(const Item& item) {
        enter(item, 0);
        return settle(item);
    }

    __device__ __forceinline__ bool advance(const Item& item) {
        tile += PARTS;
        return settle(item);
    }
};

// A place in a ring of N, and the parity of the phase that fills it.
template <unsigned N>
struct Ring {
    unsigned at = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        at = at + 1 == N ? 0 : at + 1;
        parity ^= at == 0;
    }
};

__device__ __forceinline__ unsigned cluster_id() {
    return blockIdx.x / 2;
}

// Marks of the tile of a stage. A plain read, of which the compiler sees that it is the same in all threads: what depends on
// it may stay in uniform registers.
__device__ __forceinline__ uint32_t marks_of(const uint8_t* memory, unsigned stage) {
    return *reinterpret_cast<const volatile uint32_t*>(memory + MARKS + 4 * stage);
}

}  // namespace longwave::attention
