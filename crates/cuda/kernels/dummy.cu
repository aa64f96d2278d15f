// architectures: 90a 100a
// Random words with some bits cleared and some set, for weights of the real shapes without a download: a hash of (seed,
// place), so the same seed gives the same weights. A part of a matrix has the words of the whole one: rows of `width` words,
// of which the first begins at word `first` and every next one `stride` words behind.
#include <stdint.h>

#include "common/overlap.cuh"

extern "C" __global__ void dummy_words(uint32_t* __restrict__ out, unsigned long long count, unsigned long long first,
                                       unsigned long long width, unsigned long long stride, unsigned long long seed,
                                       uint32_t kept, uint32_t set) {
    longwave::overlap();
    const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const unsigned long long place = first + i / width * stride + i % width;
        unsigned long long x = (place + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 31) * 0x94d049bb133111ebull;
        out[i] = (static_cast<uint32_t>(x >> 32) & kept) | set;
    }
}
