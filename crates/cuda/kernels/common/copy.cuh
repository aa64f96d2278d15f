// Copies from memory into shared memory that run beside the computation.
#pragma once
#include <stdint.h>

namespace longwave {

__device__ __forceinline__ void copy_16(uint32_t shared, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_4(uint32_t shared, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
}

// As those, or zeros: `from` is not read then, but is an address.
__device__ __forceinline__ void copy_16_if(bool there, uint32_t shared, const void* from) {
    const uint32_t bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_4_if(bool there, uint32_t shared, const void* from) {
    const uint32_t bytes = there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most N of the latest groups are under way.
template <int N>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// `bytes` that lie one behind the other, brought by the copy engine (Hopper) and counted at `barrier`; both addresses and the number
// are multiples of sixteen. Each thread that calls it brings its own.
__device__ __forceinline__ void copy_run(uint32_t shared, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

}  // namespace longwave
