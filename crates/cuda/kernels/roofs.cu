// architectures: 90a 100a
// What the memory can do at most, for the floors of benches: reads and copies of large arrays by a persistent grid.
#include <stdint.h>

// Reads `count` x 16 bytes; the sum goes to `out` when it is something that never happens, so the reads stay.
extern "C" __global__ void __launch_bounds__(512, 2)
read_bytes(const uint4* __restrict__ in, unsigned* __restrict__ out, unsigned long long count) {
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = __ldcs(in + i + j * stride);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
        }
    }
    for (; i < count; i += stride) {
        const uint4 v = __ldcs(in + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9e3779b9u) {
        out[0] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(512, 2)
copy_bytes(const uint4* __restrict__ in, uint4* __restrict__ out, unsigned long long count) {
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = __ldcs(in + i + j * stride);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            __stcs(out + i + j * stride, v[j]);
        }
    }
    for (; i < count; i += stride) {
        __stcs(out + i, __ldcs(in + i));
    }
}

extern "C" __global__ void empty() {}
