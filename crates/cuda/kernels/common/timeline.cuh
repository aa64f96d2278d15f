// When a kernel begins and when the kernels before it have ended, in builds with LONGWAVE_TIMELINE: the first thread of the first
// block notes the GPU's clock (src/driver/timeline.rs reads the notes). In other builds nothing is left of this.
#pragma once

#ifdef LONGWAVE_TIMELINE
// Set when the module is loaded: a counter with CAPACITY notes 16 bytes behind it, and the module's number.
struct LongwaveTimeline {
    unsigned long long notes;
    unsigned capacity, module;
};
extern "C" {
__device__ LongwaveTimeline longwave_timeline;
}
#endif

namespace longwave {

enum class Moment : unsigned { Begun, Ready };

__device__ __forceinline__ void note(Moment moment) {
#ifdef LONGWAVE_TIMELINE
    if (threadIdx.x == 0 && blockIdx.x + blockIdx.y + blockIdx.z == 0 && longwave_timeline.notes) {
        unsigned long long ns;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
        const unsigned long long what = static_cast<unsigned long long>(longwave_timeline.module) << 40 |
                                        static_cast<unsigned long long>(gridDim.x) << 8 | static_cast<unsigned>(moment);
        const unsigned at = atomicAdd(reinterpret_cast<unsigned*>(longwave_timeline.notes), 1u) % longwave_timeline.capacity;
        reinterpret_cast<ulonglong2*>(longwave_timeline.notes)[1 + at] = make_ulonglong2(ns, what);
    }
#endif
}

}  // namespace longwave
