// What the kernels of attention share (attend.cu, attend_wide.cu): jobs, and how parts of a row are joined.
#pragma once
#include <stdint.h>

namespace longwave {

// 512^-0.5 / ln 2: weights are powers of two.
constexpr float SCALE = 0.044194174f * 1.4426950409f;
constexpr float LOG2E = 1.4426950409f;

struct Job {
    unsigned seat, row, tokens, position, oldest, unused[3];
};

// What the parts so far give, in one row: the largest score, and the sum of weights relative to it.
struct Joined {
    float top, sum;

    // Adds a part: what is there is multiplied by .x, what comes by .y.
    __device__ __forceinline__ float2 add(float part_top, float part_sum) {
        const float next = fmaxf(top, part_top), keep = exp2f(top - next), weight = exp2f(part_top - next);
        top = next;
        sum = fmaf(weight, part_sum, __fmul_rn(sum, keep));
        return make_float2(keep, weight);
    }
};

__device__ __forceinline__ float join(float have, float comes, float2 factors) {
    return fmaf(factors.y, comes, __fmul_rn(have, factors.x));
}

}  // namespace longwave
