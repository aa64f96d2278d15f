// architectures: 90a 100a
// Sums over ranks: every GPU has a part, all get the whole, added in the order of the ranks and rounded once. reduce.md has
// floor and design.
//
// A box is memory of one GPU that all ranks write to: a flag for each (rank, block), then two halves with a slot for each
// (rank, block) of `most` float4. A block sends its piece to the slot of its own rank in every other box, raises the flags
// to the number of the turn, waits for the same number from every rank, and adds what lies in its own box. Each block
// counts its own turns, in memory, so a graph replays it, and a launch with fewer blocks leaves the others' counts alone;
// all ranks launch the same.
//
// Two halves are enough. A rank that is in turn n + 1 of a block has seen all others in turn n, so they are done with turn
// n - 1, whose half it writes to now. Slots are a block's own for any number of values, so blocks do not meet.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/overlap.cuh"

namespace {

// As in ops/reduce.rs.
constexpr unsigned BLOCKS = 256;
// Looks at a flag between two looks at the alarm: some milliseconds.
constexpr unsigned PATIENCE = 4096;

__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
    unsigned v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_release(unsigned* address, unsigned v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

}  // namespace

// Grid at most BLOCKS, 256 threads, all of them on the GPU at once. own float [4 * quads]; boxes: addresses by rank; turns
// u32 [BLOCKS]; alarm: not 0 when a rank has failed, then nobody waits and the result is worthless; out bf16 [4 * quads]. A
// block has `piece` <= `most` of the quads.
extern "C" __global__ void __launch_bounds__(256)
sum_ranks(const float4* __restrict__ own, const unsigned long long* __restrict__ boxes, unsigned* __restrict__ turns,
          const volatile unsigned* alarm, uint2* __restrict__ out, unsigned long long quads, unsigned piece, unsigned most,
          unsigned rank, unsigned ranks) {
    // The next kernel does not take room before this one has ended: several ranks of one GPU could wait for each other's.
    longwave::wait_before();
    const unsigned block = blockIdx.x, turn = turns[block] + 1;
    const unsigned long long from = static_cast<unsigned long long>(block) * piece;
    const unsigned count = from < quads ? static_cast<unsigned>(min(quads - from, static_cast<unsigned long long>(piece))) : 0;
    own += from;
    out += from;
    const auto flag = [&](unsigned of, unsigned sender) {
        return reinterpret_cast<unsigned*>(boxes[of]) + sender * BLOCKS + block;
    };
    const auto slot = [&](unsigned of, unsigned sender) {
        float4* slots = reinterpret_cast<float4*>(boxes[of] + 4ull * ranks * BLOCKS);
        return slots + ((size_t(turn & 1) * ranks + sender) * BLOCKS + block) * most;
    };
    for (unsigned peer = 0; peer < ranks; peer++) {
        if (peer != rank) {
            float4* to = slot(peer, rank);
#pragma unroll 4
            for (unsigned i = threadIdx.x; i < count; i += 256) {
                to[i] = own[i];
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < ranks && threadIdx.x != rank) {
        store_release(flag(threadIdx.x, rank), turn);
        const unsigned* seen = flag(rank, threadIdx.x);
        // A rank that is ahead has raised it further.
        for (unsigned looks = 1; static_cast<int>(load_acquire(seen) - turn) < 0; looks++) {
            if (looks % PATIENCE == 0 && *alarm != 0) {
                break;
            }
        }
    }
    __syncthreads();
    const float4* here = slot(rank, 0);
#pragma unroll 2
    for (unsigned i = threadIdx.x; i < count; i += 256) {
        float4 sum = rank == 0 ? own[i] : __ldcg(here + i);
        for (unsigned r = 1; r < ranks; r++) {
            const float4 v = r == rank ? own[i] : __ldcg(here + size_t(r) * BLOCKS * most + i);
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
        out[i] = make_uint2(longwave::narrow(sum.x, sum.y), longwave::narrow(sum.z, sum.w));
    }
    if (threadIdx.x == 0) {
        turns[block] = turn;
    }
}
