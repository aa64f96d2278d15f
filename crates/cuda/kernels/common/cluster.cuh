// Blocks of a cluster: barrier, and reads of each other's shared memory.
#pragma once
#include <stdint.h>

namespace longwave {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster; what they wrote to shared memory before is seen after it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The two halves of such a barrier where nothing but barriers that were shown (barrier.cuh) has to be seen after it: arriving does
// not wait for memory, and a block may work on its own between the two.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in block `rank` of what lies at `address` here.
__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ float load_cluster(uint32_t address) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float4 load_cluster4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// Stores to another block of the cluster that count as bytes at a barrier there, when they have arrived: who waits for it there
// reads what they wrote.
__device__ __forceinline__ void send_16(uint32_t there, float a, float b, float c, float d, uint32_t barrier_there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there), "f"(a),
                 "f"(b), "f"(c), "f"(d), "r"(barrier_there)
                 : "memory");
}

__device__ __forceinline__ void send_8(uint32_t there, uint32_t a, uint32_t b, uint32_t barrier_there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(there), "r"(a), "r"(b),
                 "r"(barrier_there)
                 : "memory");
}

__device__ __forceinline__ void send_4(uint32_t there, uint32_t a, uint32_t barrier_there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(a), "r"(barrier_there)
                 : "memory");
}

}  // namespace longwave
