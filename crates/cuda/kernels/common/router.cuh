// What all forms of the router have in common: scores, keys and weights have the same bits in all of them.
#pragma once
#include <stdint.h>

#include "pages.cuh"

namespace longwave {

// sqrt(log(1 + e^v)), with the identity above 20.
__device__ __forceinline__ float router_score(float v) {
    const float softplus = v > 20.f ? v : static_cast<float>(log1p(exp(static_cast<double>(v))));
    return __fsqrt_rn(softplus);
}

__device__ __forceinline__ float router_key(float score, float bias) {
    const float key = score + bias;
    return isnan(key) ? -1e30f : key;
}

// The weight of the expert of every lane below k.
__device__ __forceinline__ float router_weight(unsigned own, float own_score, unsigned k, float scale) {
    float sum = 0.f;
    for (unsigned slot = 0; slot < k; slot++) {
        sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, own_score, slot));
    }
    return own == UNMAPPED ? 0.f : __fmul_rn(__fdiv_rn(own_score, sum), scale);
}

}  // namespace longwave
