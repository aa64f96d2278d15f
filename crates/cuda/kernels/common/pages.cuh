// Pages of a cache and rows of a batch, as src/ops/mod.rs describes them.
#pragma once
#include <stdint.h>

namespace longwave {

constexpr unsigned UNMAPPED = 0xffffffffu;

struct Pages {
    uint8_t* pool;
    const unsigned* table;
    unsigned long long unit_bytes;
    unsigned table_len, shift;

    // The page of the row with this index (an entry, or a position), or null.
    __device__ __forceinline__ uint8_t* page(unsigned seat, unsigned row) const {
        const unsigned block = __ldg(table + static_cast<size_t>(seat) * table_len + (row >> shift));
        return block == UNMAPPED ? nullptr : pool + unit_bytes * block;
    }

    __device__ __forceinline__ unsigned slot(unsigned row) const {
        return row & ((1u << shift) - 1);
    }
};

struct BatchRow {
    unsigned seat, position, start, start_row;

    // Entries of a c4 layer that it sees; a padded row none.
    __device__ __forceinline__ unsigned visible_c4() const {
        return seat == UNMAPPED ? 0 : (position + 1) / 4;
    }
};

}  // namespace longwave
