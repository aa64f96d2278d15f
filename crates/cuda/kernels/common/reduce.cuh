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

// 32 sums at once, of which lane l gets that of v[l]; each has the bits of warp_sum. Lanes give half of what they have to
// their partner and keep the sums of the other half, so there are 31 exchanges in place of 160.
template <int STEP = 16>
__device__ __forceinline__ float warp_sums(float (&v)[32]) {
    const bool upper = threadIdx.x & STEP;
#pragma unroll
    for (int r = 0; r < STEP; r++) {
        const float received = __shfl_xor_sync(0xffffffffu, upper ? v[r] : v[r + STEP], STEP);
        v[r] = (upper ? v[r + STEP] : v[r]) + received;
    }
    if constexpr (STEP > 1) {
        return warp_sums<STEP / 2>(v);
    } else {
        return v[0];
    }
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
