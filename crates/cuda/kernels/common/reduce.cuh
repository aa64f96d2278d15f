// Sums over a warp and a block in one fixed tree.
#pragma once

namespace longwave {

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        v += __shfl_xor_sync(0xffffffffu, v, step);
    }
    return v;
}

// The sum of all threads' values, in every thread. Blocks of at most 1024 threads, a multiple of 32. Ends with a
// barrier, so it may be called again at once.
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float partial[32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = v;
    }
    __syncthreads();
    const unsigned warps = blockDim.x / 32;
    v = threadIdx.x % 32 < warps ? partial[threadIdx.x % 32] : 0.f;
    v = warp_sum(v);
    __syncthreads();
    return v;
}

}  // namespace longwave
