// Barriers in shared memory between the threads that fill buffers and those that read them.
#pragma once
#include <stdint.h>

namespace longwave {

// Opens after `count` arrivals.
__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes barriers that this thread initialised visible to the copy engine and to other blocks.
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Two barriers for each of STAGES buffers, eight bytes apart: who fills them arrives at `full`, who reads them at `empty`. All
// threads of the block call it.
template <int STAGES>
__device__ __forceinline__ void init_ring(uint32_t full, uint32_t empty, uint32_t fillers, uint32_t readers) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + 8 * s, fillers);
            init_barrier(empty + 8 * s, readers);
        }
        show_barriers();
    }
    __syncthreads();
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and keeps the phase open until copies have brought `bytes` more.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives for the whole warp, behind its reads: WARP_ARRIVALS arrivals. The order of memory goes through the warp's barrier to the
// one lane that arrives; compute-sanitizer's racecheck does not follow it there, so a build for it lets all lanes arrive.
#ifdef LONGWAVE_RACECHECK
constexpr unsigned WARP_ARRIVALS = 32;
#else
constexpr unsigned WARP_ARRIVALS = 1;
#endif

__device__ __forceinline__ void arrive_of_warp(uint32_t barrier) {
    __syncwarp();
    if (WARP_ARRIVALS == 32 || threadIdx.x % 32 == 0) {
        arrive(barrier);
    }
}

// Waits for the end of the phase with this parity; a fresh barrier has ended the phase of parity 1.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

// Arrives at a barrier of another block of the cluster, for what this one read: reads of its own shared memory need no fence.
__device__ __forceinline__ void arrive_there(uint32_t barrier_there) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_there) : "memory");
}

// Registers of a thread of this warpgroup from here on.
template <int N>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace longwave
