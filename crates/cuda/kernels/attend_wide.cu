// architectures: 90a
// The attention of attend.cu for many rows on Hopper's warpgroups; a row has the same bits from either file. attend.md has
// floor, design and measured steps.
//
// Two blocks of a cluster have 64 query rows (tokens x heads), each block half of the channels: of the products with the
// entries, whose halves attend.cu sums apart as well, and of the sums over them, so that sums of a part and those of all parts
// have room in registers. Clusters stay and take rows in turn. In a block one warpgroup widens entries into shared memory, one
// makes scores and weights, two sum up 128 channels each; they meet at barriers, tiles of 64 entries apart. The scores'
// warpgroups of both blocks have half of the rows each: they send the other ones' partial products to the other block, and
// weights back to both.
#include <stdint.h>

#include "common/attend.cuh"
#include "common/barrier.cuh"
#include "common/bf16.cuh"
#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/fp8.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/rows.cuh"
#include "common/tiles.cuh"
#include "common/wgmma_bf16.cuh"
#include "common/widen.cuh"

namespace {

using longwave::Job;
using longwave::join;
using longwave::Joined;
using longwave::LOG2E;
using longwave::Pages;
using longwave::SCALE;
using longwave::WARP_ARRIVALS;

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
                   AT_RAW = AT_CODES + ROWS * CODE_ROW, FULL = AT_RAW + RAW_BYTES, EMPTY = FULL + 8 * STAGES, QUERY_FULL = EMPTY + 8 * STAGES,
                   QUERY_EMPTY = QUERY_FULL + 8 * QUERIES, WEIGHT_FULL = QUERY_EMPTY + 8 * QUERIES,
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

// Queries of an item as A of the scores' products. In block 1 rows g and g + 8 change places, so that in either block those
// that it makes weights of come first.
__device__ __forceinline__ void copy_queries(const Operands& o, unsigned n, unsigned rank, uint32_t to) {
    const unsigned thread = threadIdx.x - (THREADS - PRODUCERS);
    const Job* const job = o.jobs + n / o.groups();
    const unsigned first_head = n % o.groups() << o.shift(), row = __ldg(&job->row), tokens = __ldg(&job->tokens);
#pragma unroll 4
    for (unsigned i = thread; i < ROWS * CHANNELS / 8; i += PRODUCERS) {
        const unsigned r = i / 32, piece = i % 32, j = o.token_of(r), head = first_head + o.head_of(r);
        const bool there = j < tokens && head < o.heads;
        const uint16_t* from = o.q + (there ? (static_cast<size_t>(row + j) * o.heads + head) * 512 + rank * CHANNELS + piece * 8 : 0);
        const uint32_t at = to + longwave::operand_piece(ROWS, r ^ rank * 8, piece);
        const uint32_t bytes = there ? 16 : 0;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
    }
}

// Rows of a tile that a thread loads, on their way: indices, then pages.
struct Ahead {
    unsigned row[OWN], block[OWN], seat;
    uint32_t marks;
};

// A thread has a quarter of every 32nd row from thread / 4 on.
template <bool FP8, unsigned rank>
struct Producer {
    const Operands& o;
    unsigned thread;
    uint32_t base;
    // Where a thread's sixteen codes of the first 64 channels of row thread / 4 go.
    uint32_t at_codes;

    // What is used once in a tile or an item waits in shared memory, a copy for each warp: registers are few.
    __device__ __forceinline__ uint32_t own() const {
        return base + ITEMS + thread / 32 * 64;
    }

    __device__ __forceinline__ void put(const Item& item, unsigned n) const {
        __syncwarp();
        if (thread % 32 == 0) {
            longwave::write_16(own(), make_uint4(item.seat, item.row, item.oldest, item.last));
            longwave::write_16(own() + 16, make_uint4(item.w0, item.w_end, item.count, n));
        }
        __syncwarp();
    }

    __device__ __forceinline__ Item get(unsigned& n) const {
        const uint4 a = longwave::read_16(own()), b = longwave::read_16(own() + 16);
        n = b.w;
        return {a.x, a.y, 0, 0, 0, 0, a.z, a.w, b.x, b.y, b.z};
    }

    __device__ __forceinline__ void put(const Place& p) const {
        __syncwarp();
        if (thread % 32 == 0) {
            longwave::write_16(own() + 32, make_uint4(p.part, p.tile, p.window, 0));
        }
        __syncwarp();
    }

    __device__ __forceinline__ Place get() const {
        const uint4 v = longwave::read_16(own() + 32);
        return {v.x, v.y, v.z != 0};
    }

    // Item whose queries are copied next, and how many were.
    __device__ __forceinline__ void put(unsigned n, unsigned queries) const {
        __syncwarp();
        if (thread % 32 == 0) {
            longwave::write_8(own() + 48, make_uint2(n, queries));
        }
        __syncwarp();
    }

    // How many have arrived.
    __device__ __forceinline__ unsigned next_arrival() const {
        const unsigned queries = longwave::read_4(own() + 56);
        __syncwarp();
        if (thread % 32 == 0) {
            longwave::write_4(own() + 56, queries + 1);
        }
        return queries;
    }

    // The cache's pages likewise: window, entries.
    __device__ __forceinline__ void put(const Pages& pages, uint32_t to) const {
        const uint64_t pool = reinterpret_cast<uint64_t>(pages.pool), table = reinterpret_cast<uint64_t>(pages.table);
        if (thread == 0) {
            longwave::write_16(base + to, make_uint4(uint32_t(pool), uint32_t(pool >> 32), uint32_t(pages.unit_bytes),
                                                     uint32_t(pages.unit_bytes >> 32)));
            longwave::write_16(base + to + 16, make_uint4(uint32_t(table), uint32_t(table >> 32), pages.table_len, pages.shift));
        }
    }

    __device__ __forceinline__ Pages pages(uint32_t marks) const {
        const uint32_t from = base + PAGES + (marks & WINDOW ? 0 : 32);
        const uint4 a = longwave::read_16(from), b = longwave::read_16(from + 16);
        return {reinterpret_cast<uint8_t*>(a.x | uint64_t(a.y) << 32), reinterpret_cast<const unsigned*>(b.x | uint64_t(b.y) << 32),
                a.z | uint64_t(a.w) << 32, b.z, b.w};
    }

    // The rows' indices; behind the last one UNMAPPED.
    __device__ __forceinline__ void index(Ahead& a, const Item& item, const Place& p) const {
        a.seat = item.seat;
#pragma unroll
        for (unsigned h = 0; h < OWN; h++) {
            const unsigned e = p.tile * TILE + thread / 4 + 32 * h;
            const bool seen = p.window ? e >= item.oldest && e <= item.last : e < item.count;
            a.row[h] = seen ? e : longwave::UNMAPPED;
            if (seen && !p.window && o.picks) {
                a.row[h] = __ldg(o.picks + static_cast<size_t>(item.row) * o.picks_len + e);
            }
        }
    }

    __device__ __forceinline__ void find(Ahead& a) const {
        const Pages from = pages(a.marks);
        const unsigned* const table = from.table + static_cast<size_t>(a.seat) * from.table_len;
#pragma unroll
        for (unsigned h = 0; h < OWN; h++) {
            a.block[h] = longwave::UNMAPPED;
            if (a.row[h] != longwave::UNMAPPED) {
                a.block[h] = __ldg(table + (a.row[h] >> from.shift));
            }
        }
    }

    // Sixteen bytes, or zeros.
    static __device__ __forceinline__ void copy_16(uint32_t to, const uint8_t* from, uint32_t bytes) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    }

    // Codes of a row and their scales, to where this thread alone reads them.
    __device__ __forceinline__ void copy_codes(const Ahead& a, const Pages& from, unsigned h) const {
        const uint8_t *row = reinterpret_cast<const uint8_t*>(o.q), *scales = row;
        uint32_t there = 0;
        if (a.block[h] != longwave::UNMAPPED) {
            const unsigned slot = from.slot(a.row[h]);
            const uint8_t* const page = from.pool + from.unit_bytes * a.block[h];
            row = page + (slot * 576 + rank * CHANNELS + thread % 4 * 16);
            scales = page + ((576u << from.shift) + slot * 8 + rank * 4);
            there = 16;
        }
        const uint32_t to = base + AT_RAW + h * RAW_ROW + thread * 16;
#pragma unroll
        for (int n = 0; n < (rank == 1 ? 5 : 4); n++) {
            copy_16(to + n * 16 * PRODUCERS, row + 64 * n, there);
        }
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(base + AT_RAW + RAW_SCALES + h * 4 * PRODUCERS + thread * 4),
                     "l"(scales), "r"(there / 4)
                     : "memory");
    }

    // Sixteen codes, which `factor` takes from 2^-120 of their values.
    __device__ __forceinline__ void widen(const uint4& codes, uint32_t factor, uint32_t to) const {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        uint32_t v[8];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            v[2 * w] = longwave::times_bf16(longwave::spread_e4m3(words[w], 0x1404), factor);
            v[2 * w + 1] = longwave::times_bf16(longwave::spread_e4m3(words[w], 0x3424), factor);
        }
        longwave::write_16(to + at_codes, make_uint4(v[0], v[1], v[2], v[3]));
        longwave::write_16(to + (at_codes ^ 16), make_uint4(v[4], v[5], v[6], v[7]));
    }

    // A row's codes. Scales between 2^-63 and 1 are one factor with 2^120, and those of a row that is not there, whose codes are
    // zeros. Others, which no model has, take a second product.
    __device__ __forceinline__ void widen(uint32_t to, unsigned h) const {
        constexpr uint32_t BLOCK = TILE * 128, GROUPS = rank == 0 ? 4 : 3, MASK = rank == 0 ? 0xc0c0c0c0u : 0x00c0c0c0u;
        const uint32_t from = base + AT_RAW + h * RAW_ROW + thread * 16;
        const uint32_t scales = longwave::read_4(base + AT_RAW + RAW_SCALES + h * 4 * PRODUCERS + thread * 4);
        const bool fits = (scales & MASK) == (0x40404040u & MASK) || scales == 0;
        const uint32_t factors = fits ? scales + 0x78787878u : 0xf7f7f7f7u;
        to += h * 32 * 128;
        uint4 raw[5];
#pragma unroll
        for (int n = 0; n < (rank == 1 ? 5 : 4); n++) {
            raw[n] = longwave::read_16(from + n * 16 * PRODUCERS);
        }
#pragma unroll
        for (unsigned n = 0; n < GROUPS; n++) {
            // The byte in the upper half of both halves of a word, then where bf16 has its exponent.
            const uint32_t factor = __byte_perm(factors, 0, 0x0404 | n << 12 | n << 4) >> 1;
            widen(raw[n], factor, to + n * BLOCK);
        }
        if (rank == 1) {
            const uint32_t at_plain = longwave::operand_piece(TILE, thread / 4, thread % 4);
            longwave::write_16(to + 3 * BLOCK + at_plain, raw[3]);
            longwave::write_16(to + 3 * BLOCK + (at_plain ^ 64), raw[4]);
        }
        if (!fits) {
#pragma unroll 1
            for (unsigned n = 0; n < 2 * GROUPS; n++) {
                const uint32_t byte = scales >> (n / 2 * 8) & 0xff, s = byte << 7 | byte << 23;
                const uint32_t at = to + n / 2 * BLOCK + (at_codes ^ n % 2 * 16);
                const uint4 v = longwave::read_16(at);
                longwave::write_16(at, make_uint4(longwave::times_bf16(v.x, s), longwave::times_bf16(v.y, s),
                                                  longwave::times_bf16(v.z, s), longwave::times_bf16(v.w, s)));
            }
        }
    }

    // bf16 rows go straight to their place.
    __device__ __forceinline__ void copy(const Ahead& a, uint32_t to, unsigned h) const {
        const uint8_t* from = reinterpret_cast<const uint8_t*>(o.q);
        uint32_t bytes = 0;
        if (a.block[h] != longwave::UNMAPPED) {
            const Pages pages = this->pages(a.marks);
            const unsigned at = pages.slot(a.row[h]) * 1024 + rank * CHANNELS * 2 + thread % 4 * 16;
            from = pages.pool + pages.unit_bytes * a.block[h] + at;
            bytes = 16;
        }
#pragma unroll
        for (unsigned n = 0; n < 8; n++) {
            copy_16(to + longwave::operand_piece(TILE, thread / 4 + 32 * h, 4 * n + thread % 4), from + (bytes ? n * 64 : 0), bytes);
        }
    }

    __device__ __forceinline__ void run() {
        at_codes = longwave::operand_piece(TILE, thread / 4, thread % 4 * 2);
        // Kept, not computed again each time.
        asm volatile("" : "+r"(at_codes));
        put(o.window, PAGES);
        put(o.entries, PAGES + 32);
        // Of these 128 threads.
        asm volatile("bar.sync 1, 128;" ::: "memory");
        Ring<STAGES> stage;
        bool more, first = true;
        const auto enter = [&](unsigned n) {
            more = n < o.items;
            if (more) {
                Item item;
                item.find(o, n);
                Place p;
                p.begin(item);
                put(item, n);
                put(p);
            }
        };
        {
            const unsigned n = o.skip(cluster_id());
            longwave::write_4(own() + 56, 0);
            put(n, 0);
            enter(n);
        }
        // Tiles ahead: indices are loaded, pages are looked up, rows are loaded or copied.
        constexpr unsigned NONE = longwave::UNMAPPED;
        Ahead indexed = {{NONE, NONE}, {NONE, NONE}, 0, 0}, found = indexed;
        const auto step = [&]() {
            found = indexed;
            find(found);
            indexed.marks = 0;
            indexed.row[0] = indexed.row[1] = NONE;
            if (more) {
                unsigned n;
                const Item item = get(n);
                Place p = get();
                index(indexed, item, p);
                indexed.marks = p.tile * TILE | THERE | (first ? FIRST : 0) | (p.window ? WINDOW : 0);
                const unsigned part = p.part;
                first = !p.advance(item);
                indexed.marks |= (first ? ENDS_ITEM | ENDS_PART : 0) | (p.part != part ? ENDS_PART : 0);
                if (first) {
                    enter(o.skip(n + gridDim.x / 2));
                } else {
                    put(p);
                }
            }
        };
        // The queries and, where they go straight, the rows of the tile that is found, into stage `in`.
        const auto begin = [&](Ring<STAGES> in) {
            if (found.marks & FIRST) {
                const uint2 next = longwave::read_8(own() + 48);
                longwave::wait(base + QUERY_EMPTY + 8 * (next.y % QUERIES), ~(next.y / QUERIES) & 1);
                copy_queries(o, next.x, rank, base + AT_QUERIES + next.y % QUERIES * QUERY_BYTES);
                put(o.skip(next.x + gridDim.x / 2), next.y + 1);
            }
            if (!FP8 && found.marks) {
                longwave::wait(base + EMPTY + 8 * in.at, in.parity ^ 1);
                copy(found, base + in.at * STAGE_BYTES, 0);
                copy(found, base + in.at * STAGE_BYTES, 1);
            }
            if (!FP8) {
                longwave::commit_copies();
            }
        };
        const auto copy_half = [&](const Pages& from, unsigned h) {
            copy_codes(found, from, h);
            longwave::commit_copies();
        };
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            step();
        }
        begin(stage);
        if constexpr (FP8) {
            const Pages from = pages(found.marks);
            copy_half(from, 0);
            copy_half(from, 1);
        }
        uint32_t loaded = found.marks;
        step();
        while (loaded) {
            Ring<STAGES> in = stage;
            in.advance();
            begin(in);
            // The latest group of copies belongs to the next tile, or to the other half of this one.
            if constexpr (FP8) {
                const uint32_t to = base + stage.at * STAGE_BYTES;
                const Pages from = pages(found.marks);
                longwave::wait_copies<1>();
                longwave::wait(base + EMPTY + 8 * stage.at, stage.parity ^ 1);
                widen(to, 0);
                copy_half(from, 0);
                longwave::wait_copies<1>();
                widen(to, 1);
                copy_half(from, 1);
            } else {
                longwave::wait_copies<1>();
            }
            if (thread == 0) {
                longwave::write_4(base + MARKS + 4 * stage.at, loaded);
            }
            longwave::fence_shared();
            if (loaded & FIRST) {
                longwave::arrive(base + QUERY_FULL + 8 * (next_arrival() % QUERIES));
            }
            longwave::arrive(base + FULL + 8 * stage.at);
            stage = in;
            loaded = found.marks;
            step();
        }
    }
};

// Marks of the tile of a stage. A plain read, of which the compiler sees that it is the same in all threads: what depends on it
// may stay in uniform registers.
__device__ __forceinline__ uint32_t marks_of(const uint8_t* memory, unsigned stage) {
    return *reinterpret_cast<const volatile uint32_t*>(memory + MARKS + 4 * stage);
}

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
    // The products of the next tile, into d; behind the last one of some tile, which nobody reads: that all of it stands in one
    // path lets steps follow each other.
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
                const float other[4] = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
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
            const uint32_t piece = AT_WEIGHTS + weight.at * WEIGHT_BYTES + longwave::operand_piece(ROWS, r, 2 * odd) + c / 2 * 8;
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
                const uint32_t at = AT_WEIGHTS + weight.at * WEIGHT_BYTES + FACTORS + r * 16;
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
            const uint32_t weights = base + AT_WEIGHTS + weight.at * WEIGHT_BYTES, factors = weights + FACTORS + (warp * 16 + g) * 16;
            longwave::wait(base + WEIGHT_FULL + 8 * weight.at, weight.parity);
            if (adds) {
                const float keeps[2] = {__uint_as_float(longwave::read_4(factors)), __uint_as_float(longwave::read_4(factors + 128))};
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
            const longwave::Operand b = longwave::operand_of_columns(base + stage.at * STAGE_BYTES + group * (STAGE_BYTES / 2));
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
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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

// Grid: clusters of two blocks of 512 threads, at most as many blocks as multiprocessors. Dynamic shared memory: SHARED_BYTES.
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
