// Copies of tiles of a matrix into shared memory by the copy engine (Hopper).
//
// A map (src/driver/tensor_map.rs) describes a matrix of bytes and a box of 128 columns: rows of 128 bytes whose pieces of sixteen
// change places with the row, as wgmma reads them (common/wgmma.cuh). What lies outside of the matrix arrives as zeros and counts.
#pragma once
#include <stdint.h>

namespace longwave {

struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

// Brings the map itself near.
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box whose first byte is column `col` of row `row` to `to`, counted at `barrier`. One thread calls it.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, unsigned col, unsigned row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(col), "r"(row), "r"(barrier)
        : "memory");
}

// The same to this place, and counted at this barrier, of the blocks of the cluster whose bits are set in `blocks`.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, unsigned col, unsigned row, uint32_t barrier,
                                         uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(to),
        "l"(&map), "r"(col), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}

}  // namespace longwave
