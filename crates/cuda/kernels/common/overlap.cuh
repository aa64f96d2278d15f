// Kernels may begin while the one before them in the stream ends (programmatic dependent launch). Every kernel calls overlap(),
// or both of its parts in either order, or wait_before() alone, before it reads or writes what another kernel writes or reads:
// after the wait the kernels before it are done and what they wrote is seen, by loads of read-only data as well (__ldg; before
// the wait stand only those of weights). A kernel that ends without waiting would let the one behind it begin too early. Nothing keeps
// the assembler from moving such a load above the wait where its address is known by then: in the machine code of a new kernel see that
// nothing but weights is loaded before ACQBULK.
#pragma once

#include "timeline.cuh"

namespace longwave {

// The next kernel may take multiprocessors that become free.
__device__ __forceinline__ void start_next() {
    note(Moment::Begun);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits for the kernels before this one.
__device__ __forceinline__ void wait_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    note(Moment::Ready);
}

__device__ __forceinline__ void overlap() {
    start_next();
    wait_before();
}

}  // namespace longwave
