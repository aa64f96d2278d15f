// A GPU on the CPU, as far as kernels of this backend need one: their sources are compiled for the host and every thread is a fiber.
// Threads of all blocks of a cluster run side by side, warps in random order; what is asynchronous (copies, stores to other blocks, products
// of warpgroups) happens at a random time, as late as the program allows. So a barrier that counts wrongly ends in a deadlock here, a
// buffer that is given back too early has wrong contents, and a store to a block that has ended is found. Rounding of tensor cores is not
// that of a GPU: sums are rounded once a step. ptx.h stands in for the headers of kernels/common that are assembly.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <random>
#include <vector>

using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return std::min(a, static_cast<unsigned>(b)); }
inline unsigned min(int a, unsigned b) { return std::min(static_cast<unsigned>(a), b); }

#define __device__
#define __global__
#define __host__
#define __shared__ static
#define __restrict__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Index { unsigned x, y, z; };
extern Index threadIdx, blockIdx, gridDim, blockDim;

namespace device {

// Ends the program with what went wrong.
[[noreturn]] void fail(const char* what);

// What a launch needs; `seed` says in which order all happens.
struct Launch {
    Index grid;
    unsigned threads, cluster, shared_bytes, seed;
};
void launch(const Launch& launch, const std::function<void()>& kernel);

// The running thread among all of its cluster, its block's rank there, blocks of the cluster, and the shared memory of a block.
unsigned thread();
unsigned rank();
unsigned cluster_blocks();
uint8_t* shared(unsigned of_rank);

// Lets others run until `ready`.
void wait_until(std::function<bool()> ready);
// Does `work` at a random time from now on, at the latest when the cluster's threads have ended.
void later(std::function<void()> work);
// Whether a block has threads left.
bool lives(unsigned of_rank);

// Of all lanes of a warp: waits for them, then lane l gets what `pick` says of the 32 values that they brought.
enum class Pick { Own, Lane, Xor };
uint32_t exchange(Pick pick, uint32_t value, uint32_t argument);
void sync_block();

template <class T>
T exchange_of(Pick pick, T value, unsigned argument) {
    static_assert(sizeof(T) == 4);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = exchange(pick, bits, argument);
    memcpy(&value, &bits, 4);
    return value;
}

}  // namespace device

template <class T>
T __shfl_sync(unsigned, T value, int lane) { return device::exchange_of(device::Pick::Lane, value, lane); }
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) { return device::exchange_of(device::Pick::Xor, value, mask); }
inline void __syncwarp() { device::exchange(device::Pick::Own, 0, 0); }
inline void __syncthreads() { device::sync_block(); }

template <class T>
T __ldg(const T* from) { return *from; }
inline float __uint_as_float(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
inline uint32_t __float_as_uint(float v) { uint32_t bits; memcpy(&bits, &v, 4); return bits; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
