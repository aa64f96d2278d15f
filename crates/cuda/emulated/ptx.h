// Stands in for those headers of kernels/common that are assembly: barriers, clusters, copies, tensor cores. Addresses of shared memory have
// the block's rank from bit 24 on, as in a cluster.
#pragma once
#include <map>

#include "device.h"

namespace longwave {

// bf16.
inline uint16_t bf16_of(float v) {
    uint32_t bits = __float_as_uint(v);
    if (std::isnan(v)) {
        return 0x7fff;
    }
    bits += 0x7fff + (bits >> 16 & 1);
    return bits >> 16;
}
inline float float_of(uint16_t bf16) { return __uint_as_float(static_cast<uint32_t>(bf16) << 16); }
inline float2 widen(uint32_t pair) { return make_float2(float_of(pair), float_of(pair >> 16)); }
inline uint32_t narrow(float low, float high) { return bf16_of(low) | static_cast<uint32_t>(bf16_of(high)) << 16; }
inline float round_bf16(float v) { return float_of(bf16_of(v)); }

// e4m3.
inline float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float v = exponent ? ldexpf(1 + fraction / 8.f, exponent - 7) : ldexpf(fraction / 8.f, -6);
    return code & 128 ? -v : v;
}

// Launches that overlap: here one runs behind the other.
inline void start_next() {}
inline void wait_before() {}
inline void overlap() {}

inline float load_now(const float* from) { return *from; }
inline float2 load_two_now(const float* from) { return {from[0], from[1]}; }

// Shared memory: a block's own, or a variable, which is a static one here and lies near `statics`; of these only one block runs at once.
extern uint8_t statics;
constexpr uint32_t OF_STATICS = 1u << 31, HALF = 1u << 30;
inline uint32_t shared_address(const void* at) {
    const std::ptrdiff_t offset = static_cast<const uint8_t*>(at) - device::shared(device::rank());
    if (offset >= 0 && offset < 1 << 24) {
        return device::rank() << 24 | static_cast<uint32_t>(offset);
    }
    return OF_STATICS | static_cast<uint32_t>(static_cast<const uint8_t*>(at) - &statics + HALF);
}
inline uint8_t* at_shared(uint32_t address, unsigned bytes) {
    uint8_t* at = address & OF_STATICS ? &statics + static_cast<std::ptrdiff_t>(address & ~OF_STATICS) - HALF
                                       : device::shared(address >> 24) + (address & 0xffffff);
    if (reinterpret_cast<uintptr_t>(at) % bytes) {
        device::fail("an address is not aligned");
    }
    return at;
}
inline uint4 read_16(uint32_t from) { uint4 v; memcpy(&v, at_shared(from, 16), 16); return v; }
inline void write_16(uint32_t to, uint4 v) { memcpy(at_shared(to, 16), &v, 16); }
inline void fence_shared() {}
inline void copy_16(uint32_t to, const void* from) { memcpy(at_shared(to, 16), from, 16); }
inline void commit_copies() {}
template <int N>
void wait_copies() {}

// A barrier of a block's first threads.
void sync_first(unsigned threads);

// Four neighbouring values a lane as bytes that depend on all of the warp's: in place of e4m3, for kernels whose bytes are compared with
// each other's alone.
inline uint32_t quantise_group(float a, float b, float c, float d, float* scale) {
    float most = fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d)));
    for (unsigned step = 16; step > 0; step /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    }
    if (threadIdx.x % 32 == 0) {
        *scale = most / 127;
    }
    const auto byte = [&](float v) { return static_cast<uint32_t>(static_cast<int>(v / most * 127)) & 255; };
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

// Clusters.
uint32_t cluster_rank();
void cluster_arrive_relaxed();
void cluster_wait();
inline void cluster_sync() { cluster_arrive_relaxed(); cluster_wait(); }
inline uint32_t address_in(uint32_t address, uint32_t rank) { return (address & 0xffffff) | rank << 24; }

// Barriers.
constexpr unsigned WARP_ARRIVALS = 1;
void init_barrier(uint32_t barrier, uint32_t count);
inline void show_barriers() {}
void arrive(uint32_t barrier);
void arrive_expecting(uint32_t barrier, uint32_t bytes);
void wait(uint32_t barrier, uint32_t parity);
inline void arrive_there(uint32_t barrier) { arrive(barrier); }
inline void arrive_of_warp(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        arrive(barrier);
    }
}
template <int STAGES>
void init_ring(uint32_t full, uint32_t empty, uint32_t fillers, uint32_t readers) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + 8 * s, fillers);
            init_barrier(empty + 8 * s, readers);
        }
    }
    __syncthreads();
}
template <int N>
void more_registers() {}
template <int N>
void fewer_registers() {}

// Stores to other blocks of the cluster.
void send(uint32_t there, const void* bytes, unsigned count, uint32_t barrier_there);
inline void send_4(uint32_t there, uint32_t a, uint32_t barrier) { send(there, &a, 4, barrier); }
inline void send_8(uint32_t there, uint32_t a, uint32_t b, uint32_t barrier) {
    const uint32_t both[2] = {a, b};
    send(there, both, 8, barrier);
}

// The copy engine: a matrix of bytes and the rows of a box of 128 of its columns.
struct TensorMap {
    const uint8_t* bytes;
    unsigned rows, cols, box_rows;
};
inline void fetch_map(const TensorMap&) {}
void copy_box(uint32_t to, const TensorMap& map, unsigned col, unsigned row, uint32_t barrier, uint16_t blocks);
inline void copy_box(uint32_t to, const TensorMap& map, unsigned col, unsigned row, uint32_t barrier) {
    copy_box(to, map, col, row, barrier, 1u << device::rank());
}

// A warp's product of tf32.
void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1);

// Where a piece of sixteen bytes of row n lies in a block of 128 columns of bf16, and the descriptor of sixteen of these columns.
inline uint32_t operand_piece(uint32_t rows, uint32_t n, uint32_t piece) {
    return piece / 8 * rows * 128 + n * 128 + ((piece % 8 ^ n % 8) << 4);
}
inline uint64_t operand(uint32_t address, uint32_t rows, uint32_t step) {
    const uint32_t at = address + step / 4 * rows * 128 + step % 4 * 32;
    return static_cast<uint64_t>(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Products of a warpgroup, which read their operands when somebody waits for them. A null `a` is e4m3 from shared memory, a block of 128
// columns, with the descriptors of both operands in `b`; else bf16 from registers with B's descriptor.
struct Product {
    float* d;
    int length;
    const uint32_t* a;
    uint64_t b;
    bool adds;
};
void begin(const Product& product);
void wgmma_commit();
void wait_for_products(int but);
inline void wgmma_fence() {}
template <int N>
void wgmma_wait() { wait_for_products(N); }
template <int LENGTH>
void wgmma_done(float (&)[LENGTH]) {}
template <int LENGTH>
void wgmma_bf16_if(float (&d)[LENGTH], const uint32_t (&a)[4], uint64_t b, uint32_t adds) {
    begin({d, LENGTH, a, b, adds != 0});
}
inline uint32_t fp8_rows(uint32_t address) { return (address >> 4 & 0x3fff) | 1 << 16; }
template <int LENGTH>
void begin_block(float (&d)[LENGTH], uint32_t a, uint32_t b) {
    begin({d, LENGTH, nullptr, static_cast<uint64_t>(a) << 32 | b, false});
    wgmma_commit();
}

}  // namespace longwave
