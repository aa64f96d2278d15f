// architectures: 90a 100a
// Changes of the block tables: data[writes[i].x] = writes[i].y. Places are distinct. One thread per change.
#include <stdint.h>

#include "common/overlap.cuh"

extern "C" __global__ void write_tables(unsigned* __restrict__ data, const uint2* __restrict__ writes, unsigned count) {
    longwave::overlap();
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        data[writes[i].x] = writes[i].y;
    }
}
