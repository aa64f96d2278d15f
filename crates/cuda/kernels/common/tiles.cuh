// Tiles of rows of 128 bytes in shared memory, filled by asynchronous copies.
//
// A tile has two planes: bytes 0 to 63 of every row, then, half a row of banks further, bytes 64 to 127. Lane 4 g + c of a
// warp that reads sixteen bytes at row g, byte 16 c touches every bank once per quarter of the warp, and so do the copies.
#pragma once
#include <stdint.h>

#include "copy.cuh"

namespace longwave {

// Bytes from a plane to the next, and of a tile.
__host__ __device__ constexpr int plane_bytes(int rows) {
    return rows * 64 + 64;
}

__host__ __device__ constexpr int tile_bytes(int rows) {
    return 2 * plane_bytes(rows);
}

// Rows first, first + 1, ... of `from` (bytes of a row `stride`); behind the last row comes the last one again.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_tile(uint32_t to, const uint8_t* from, size_t stride, unsigned first, unsigned rows) {
    static_assert(ROWS * 8 % THREADS == 0);
#pragma unroll
    for (int i = 0; i < ROWS * 8 / THREADS; i++) {
        const unsigned piece = i * THREADS + threadIdx.x, row = piece / 8, at = piece % 8;
        const unsigned source = min(first + row, rows - 1);
        copy_16(to + at / 4 * plane_bytes(ROWS) + row * 64 + at % 4 * 16, from + source * stride + at * 16);
    }
}

__device__ __forceinline__ uint4 read_16(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 read_8(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t read_4(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void write_16(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void write_8(uint32_t address, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void write_4(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

}  // namespace longwave
