// Tensor core products of a warpgroup (Hopper) of e4m3 codes as they are, 32 columns a step; operands in shared memory, A in registers
// too.
//
// Operands are rows of 128 bytes, a block of 128 columns, at a multiple of 1,024 bytes, whose pieces change places as
// common/wgmma.cuh says. Every row of a result depends on its own operands alone, not on N. The sums of a block of 128 columns keep
// about 14 bits (Hopper's fp8 tensor cores), six more than what they are rounded to afterwards.
#pragma once
#include <stdint.h>

#include "wgmma.cuh"

namespace longwave {

// The lower half of the descriptor of rows at `address`; those of a step are FP8_STEP further than those of the step before it.
__device__ __forceinline__ uint32_t fp8_rows(uint32_t address) {
    return (address >> 4 & 0x3fff) | 1 << 16;
}

constexpr uint32_t FP8_STEP = 2;

// d += A B, or d = A B without ADDS: A has 64 rows, B N of them, twice the length of d. Warp w of the group has rows 16 w ..
// 16 w + 15 of A; with lane = 4 g + c, d[4 n], d[4 n + 1] are row g and columns 8 n + 2 c, 8 n + 2 c + 1, the next two row g + 8.
// A descriptor's upper half says that eight rows are 1,024 bytes and that their pieces change places.
template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[8], uint32_t a, uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %10, 0;\n"
        "mov.b64 a, {%8, 0x40000040};\nmov.b64 b, {%9, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "a, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[16], uint32_t a, uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %18, 0;\n"
        "mov.b64 a, {%16, 0x40000040};\nmov.b64 b, {%17, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "a, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], uint32_t a, uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\n"
        "mov.b64 a, {%32, 0x40000040};\nmov.b64 b, {%33, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "a, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint32_t a, uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\n"
        "mov.b64 a, {%64, 0x40000040};\nmov.b64 b, {%65, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "a, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a), "r"(b), "n"(int(ADDS)));
}

// Begins the sums of a block of 128 columns, of rows at `a` and `b` as fp8_rows says.
template <int LENGTH>
__device__ __forceinline__ void begin_block(float (&product)[LENGTH], uint32_t a, uint32_t b) {
    wgmma_fence();
    wgmma_e4m3<false>(product, a, b);
#pragma unroll
    for (int s = 1; s < 4; s++) {
        wgmma_e4m3<true>(product, a + FP8_STEP * s, b + FP8_STEP * s);
    }
    wgmma_commit();
}

// What goes to the tensor cores from registers is there before the fence that follows.
__device__ __forceinline__ void wgmma_ready(uint32_t (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
    }
}

// The same with A in registers: row g's columns 4 c .. 4 c + 3 of a step, row g + 8's, and of both the sixteen columns further.
template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %9, 0;\nmov.b64 b, {%8, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[8], const uint32_t (&a)[4], uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %13, 0;\nmov.b64 b, {%12, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[16], const uint32_t (&a)[4], uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[20], const uint32_t (&a)[4], uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %25, 0;\nmov.b64 b, {%24, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n40k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19}, "
        "{%20, %21, %22, %23}, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[24], const uint32_t (&a)[4], uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %29, 0;\nmov.b64 b, {%28, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, "
        "{%24, %25, %26, %27}, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[28], const uint32_t (&a)[4], uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %33, 0;\nmov.b64 b, {%32, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n56k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, "
        "{%28, %29, %30, %31}, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(int(ADDS)));
}

template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, b, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(int(ADDS)));
}

// Begins the sums of a block of 128 columns: A in registers, which stay as they are until the sums are there; B's rows of 128 bytes
// at `b`.
template <int LENGTH>
__device__ __forceinline__ void begin_block(float (&product)[LENGTH], uint32_t (&a)[4][4], uint32_t b) {
    const uint32_t rows = fp8_rows(b);
    wgmma_ready(a);
    wgmma_fence();
    wgmma_e4m3<false>(product, a[0], rows);
#pragma unroll
    for (int j = 1; j < 4; j++) {
        wgmma_e4m3<true>(product, a[j], rows + FP8_STEP * j);
    }
    wgmma_commit();
}

// The same, and waits for them.
template <int LENGTH>
__device__ __forceinline__ void sum_block(float (&product)[LENGTH], uint32_t (&a)[4][4], uint32_t b) {
    begin_block(product, a, b);
    wgmma_wait<0>();
    wgmma_done(product);
}

}  // namespace longwave
