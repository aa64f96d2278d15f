// Tensor core products of a warpgroup (Hopper): A in registers, B in shared memory, sums of floats in registers.
//
// A step of sixteen columns gives the bits of mma.sync (common/mma.cuh) with the same columns in the same places, for any
// number of columns of B; tests of the products that use both rely on it.
#pragma once
#include <stdint.h>

namespace longwave {

// Where piece `piece` (sixteen bytes, 0 to 15) of row n of B's block of 128 columns lies: two tiles of 64 columns, one behind
// the other, of rows of 128 bytes whose pieces change places with the row, so that neither reads nor writes meet in a bank.
// The block begins at a multiple of 1,024 bytes. `rows` is a multiple of eight.
__device__ __forceinline__ uint32_t operand_piece(uint32_t rows, uint32_t n, uint32_t piece) {
    return piece / 8 * rows * 128 + n * 128 + ((piece % 8 ^ n % 8) << 4);
}

// B of step `step` (columns 16 step .. 16 step + 15) of a block at `address`.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t rows, uint32_t step) {
    const uint32_t at = address + step / 4 * rows * 128 + step % 4 * 32;
    // Eight rows are 1,024 bytes; the highest bits say how pieces change places.
    return static_cast<uint64_t>(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Before the first step that reads registers which ordinary instructions wrote.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most N of the latest groups are under way.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Ties sums to the wait before this: the compiler must not use them earlier.
template <int N>
__device__ __forceinline__ void wgmma_done(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

// Makes what this thread wrote to shared memory visible to tensor cores.
__device__ __forceinline__ void fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// d += A B, or d = A B without ADDS: A 64 x 16 and B 16 x N of bf16, N twice the length of d. Warp w of the group has rows
// 16 w .. 16 w + 15 of A and d as in mma_bf16; d[4 n ..] are columns 8 n .. 8 n + 7. That d is read either way keeps what used it
// before this.
template <bool ADDS>
__device__ __forceinline__ void wgmma_bf16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADDS)));
}

}  // namespace longwave
