// The warpgroup of attend_wide.cu that brings queries and entries into shared memory, entries widened to bf16.
#pragma once
#include <stdint.h>

#include "attend_layout.cuh"
#include "barrier.cuh"
#include "copy.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"
#include "widen.cuh"

namespace longwave::attention {

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
        const size_t from = (static_cast<size_t>(row + j) * o.heads + head) * 512 + rank * CHANNELS + piece * 8;
        copy_16_if(there, to + operand_piece(ROWS, r ^ rank * 8, piece), o.q + (there ? from : 0));
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
            write_16(own(), make_uint4(item.seat, item.row, item.oldest, item.last));
            write_16(own() + 16, make_uint4(item.w0, item.w_end, item.count, n));
        }
        __syncwarp();
    }

    __device__ __forceinline__ Item get(unsigned& n) const {
        const uint4 a = read_16(own()), b = read_16(own() + 16);
        n = b.w;
        return {a.x, a.y, 0, 0, 0, 0, a.z, a.w, b.x, b.y, b.z};
    }

    __device__ __forceinline__ void put(const Place& p) const {
        __syncwarp();
        if (thread % 32 == 0) {
            write_16(own() + 32, make_uint4(p.part, p.tile, p.window, 0));
        }
        __syncwarp();
    }

    __device__ __forceinline__ Place get() const {
        const uint4 v = read_16(own() + 32);
        return {v.x, v.y, v.z != 0};
    }

    // Item whose queries are copied next, and how many were.
    __device__ __forceinline__ void put(unsigned n, unsigned queries) const {
        __syncwarp();
        if (thread % 32 == 0) {
            write_8(own() + 48, make_uint2(n, queries));
        }
        __syncwarp();
    }

    // How many have arrived.
    __device__ __forceinline__ unsigned next_arrival() const {
        const unsigned queries = read_4(own() + 56);
        __syncwarp();
        if (thread % 32 == 0) {
            write_4(own() + 56, queries + 1);
        }
        __syncwarp();
        return queries;
    }

    // The cache's pages likewise: window, entries.
    __device__ __forceinline__ void put(const Pages& pages, uint32_t to) const {
        const uint64_t pool = reinterpret_cast<uint64_t>(pages.pool), table = reinterpret_cast<uint64_t>(pages.table);
        if (thread == 0) {
            write_16(base + to, make_uint4(uint32_t(pool), uint32_t(pool >> 32), uint32_t(pages.unit_bytes),
                                                     uint32_t(pages.unit_bytes >> 32)));
            write_16(base + to + 16, make_uint4(uint32_t(table), uint32_t(table >> 32), pages.table_len, pages.shift));
        }
    }

    __device__ __forceinline__ Pages pages(uint32_t marks) const {
        const uint32_t from = base + PAGES + (marks & WINDOW ? 0 : 32);
        const uint4 a = read_16(from), b = read_16(from + 16);
        return {reinterpret_cast<uint8_t*>(a.x | uint64_t(a.y) << 32),
                reinterpret_cast<const unsigned*>(b.x | uint64_t(b.y) << 32), a.z | uint64_t(a.w) << 32, b.z, b.w};
    }

    // The rows' indices; behind the last one UNMAPPED.
    __device__ __forceinline__ void index(Ahead& a, const Item& item, const Place& p) const {
        a.seat = item.seat;
#pragma unroll
        for (unsigned h = 0; h < OWN; h++) {
            const unsigned e = p.tile * TILE + thread / 4 + 32 * h;
            const bool seen = p.window ? e >= item.oldest && e <= item.last : e < item.count;
            a.row[h] = seen ? e : UNMAPPED;
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
            a.block[h] = UNMAPPED;
            if (a.row[h] != UNMAPPED) {
                a.block[h] = __ldg(table + (a.row[h] >> from.shift));
            }
        }
    }

    // Codes of a row and their scales, to where this thread alone reads them.
    __device__ __forceinline__ void copy_codes(const Ahead& a, const Pages& from, unsigned h) const {
        const uint8_t *row = reinterpret_cast<const uint8_t*>(o.q), *scales = row;
        const bool there = a.block[h] != UNMAPPED;
        if (there) {
            const unsigned slot = from.slot(a.row[h]);
            const uint8_t* const page = from.pool + from.unit_bytes * a.block[h];
            row = page + (slot * 576 + rank * CHANNELS + thread % 4 * 16);
            scales = page + ((576u << from.shift) + slot * 8 + rank * 4);
        }
        const uint32_t to = base + AT_RAW + h * RAW_ROW + thread * 16;
#pragma unroll
        for (int n = 0; n < (rank == 1 ? 5 : 4); n++) {
            copy_16_if(there, to + n * 16 * PRODUCERS, row + 64 * n);
        }
        copy_4_if(there, base + AT_RAW + RAW_SCALES + h * 4 * PRODUCERS + thread * 4, scales);
    }

    // Sixteen codes, which `factor` takes from 2^-120 of their values.
    __device__ __forceinline__ void widen(const uint4& codes, uint32_t factor, uint32_t to) const {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        uint32_t v[8];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            v[2 * w] = times_bf16(spread_e4m3(words[w], 0x1404), factor);
            v[2 * w + 1] = times_bf16(spread_e4m3(words[w], 0x3424), factor);
        }
        write_16(to + at_codes, make_uint4(v[0], v[1], v[2], v[3]));
        write_16(to + (at_codes ^ 16), make_uint4(v[4], v[5], v[6], v[7]));
    }

    // A row's codes. Scales between 2^-63 and 1 are one factor with 2^120; a row that is not there has zeros. Others, which no
    // model has, take a second product.
    __device__ __forceinline__ void widen(uint32_t to, unsigned h) const {
        constexpr uint32_t BLOCK = TILE * 128, GROUPS = rank == 0 ? 4 : 3, MASK = rank == 0 ? 0xc0c0c0c0u : 0x00c0c0c0u;
        const uint32_t from = base + AT_RAW + h * RAW_ROW + thread * 16;
        const uint32_t scales = read_4(base + AT_RAW + RAW_SCALES + h * 4 * PRODUCERS + thread * 4);
        const bool fits = (scales & MASK) == (0x40404040u & MASK) || scales == 0;
        const uint32_t factors = scales == 0 ? 0 : fits ? scales + 0x78787878u : 0xf7f7f7f7u;
        to += h * 32 * 128;
        uint4 raw[5];
#pragma unroll
        for (int n = 0; n < (rank == 1 ? 5 : 4); n++) {
            raw[n] = read_16(from + n * 16 * PRODUCERS);
        }
#pragma unroll
        for (unsigned n = 0; n < GROUPS; n++) {
            // The byte in the upper half of both halves of a word, then where bf16 has its exponent.
            const uint32_t factor = __byte_perm(factors, 0, 0x0404 | n << 12 | n << 4) >> 1;
            widen(raw[n], factor, to + n * BLOCK);
        }
        if (rank == 1) {
            const uint32_t at_plain = operand_piece(TILE, thread / 4, thread % 4);
            write_16(to + 3 * BLOCK + at_plain, raw[3]);
            write_16(to + 3 * BLOCK + (at_plain ^ 64), raw[4]);
        }
        if (!fits) {
#pragma unroll 1
            for (unsigned n = 0; n < 2 * GROUPS; n++) {
                const uint32_t byte = scales >> (n / 2 * 8) & 0xff, s = byte << 7 | byte << 23;
                const uint32_t at = to + n / 2 * BLOCK + (at_codes ^ n % 2 * 16);
                const uint4 v = read_16(at);
                write_16(at, make_uint4(times_bf16(v.x, s), times_bf16(v.y, s),
                                                  times_bf16(v.z, s), times_bf16(v.w, s)));
            }
        }
    }

    // bf16 rows go straight to their place.
    __device__ __forceinline__ void copy(const Ahead& a, uint32_t to, unsigned h) const {
        const uint8_t* from = reinterpret_cast<const uint8_t*>(o.q);
        const bool there = a.block[h] != UNMAPPED;
        if (there) {
            const Pages pages = this->pages(a.marks);
            const unsigned at = pages.slot(a.row[h]) * 1024 + rank * CHANNELS * 2 + thread % 4 * 16;
            from = pages.pool + pages.unit_bytes * a.block[h] + at;
        }
#pragma unroll
        for (unsigned n = 0; n < 8; n++) {
            const uint32_t at = to + operand_piece(TILE, thread / 4 + 32 * h, 4 * n + thread % 4);
            copy_16_if(there, at, from + (there ? n * 64 : 0));
        }
    }

    __device__ __forceinline__ void run() {
        at_codes = operand_piece(TILE, thread / 4, thread % 4 * 2);
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
            write_4(own() + 56, 0);
            put(n, 0);
            enter(n);
        }
        // Tiles ahead: indices are loaded, pages are looked up, rows are loaded or copied.
        constexpr unsigned NONE = UNMAPPED;
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
                const uint2 next = read_8(own() + 48);
                wait(base + QUERY_EMPTY + 8 * (next.y % QUERIES), ~(next.y / QUERIES) & 1);
                copy_queries(o, next.x, rank, base + AT_QUERIES + next.y % QUERIES * QUERY_BYTES);
                put(o.skip(next.x + gridDim.x / 2), next.y + 1);
            }
            if (!FP8 && found.marks) {
                wait(base + EMPTY + 8 * in.at, in.parity ^ 1);
                copy(found, base + in.at * STAGE_BYTES, 0);
                copy(found, base + in.at * STAGE_BYTES, 1);
            }
            if (!FP8) {
                commit_copies();
            }
        };
        const auto copy_half = [&](const Pages& from, unsigned h) {
            copy_codes(found, from, h);
            commit_copies();
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
                wait_copies<1>();
                wait(base + EMPTY + 8 * stage.at, stage.parity ^ 1);
                widen(to, 0);
                copy_half(from, 0);
                wait_copies<1>();
                widen(to, 1);
                copy_half(from, 1);
            } else {
                wait_copies<1>();
            }
            if (thread == 0) {
                write_4(base + MARKS + 4 * stage.at, loaded);
            }
            fence_shared();
            if (loaded & FIRST) {
                arrive(base + QUERY_FULL + 8 * (next_arrival() % QUERIES));
            }
            arrive(base + FULL + 8 * stage.at);
            stage = in;
            loaded = found.marks;
            step();
        }
    }
};

}  // namespace longwave::attention
