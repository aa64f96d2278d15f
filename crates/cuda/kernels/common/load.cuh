// Loads of what no kernel writes while this one runs.
#pragma once
#include <stdint.h>

namespace longwave {

// Loads it here: the compiler would leave a load of constant data for where it is used.
__device__ __forceinline__ float load_now(const float* from) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(from));
    return v;
}

// The same of two that lie at a multiple of eight bytes.
__device__ __forceinline__ float2 load_two_now(const float* from) {
    float2 v;
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
    return v;
}

// Sixteen bytes that are read once, or leaves `v` as it is. Written so that nothing is copied, since a copy would wait for the load.
__device__ __forceinline__ void load_16_if(bool there, uint4& v, const void* from) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(int(there)));
}

// What the kernel before this one may have written, asked for here and behind its end: the compiler would leave such a load for behind a
// branch in which nobody needs it, and the assembler may move one of constant data (as above) before the wait.
__device__ __forceinline__ unsigned load_here(const unsigned* from) {
    unsigned v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

// Sixteen bytes, or leaves `v` as it is.
__device__ __forceinline__ void load_16_here(bool there, uint4& v, const void* from) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(from), "r"(int(there))
                 : "memory");
}

}  // namespace longwave
