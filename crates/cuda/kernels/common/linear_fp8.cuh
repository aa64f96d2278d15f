// Operands of a product with fp8 weights: W e4m3 [groups, rows, cols] with a float scale per 128 x 128 block, x e4m3 [tokens, groups,
// cols] with a float scale per 128 columns, y float [tokens, groups, rows].
#pragma once
#include <stdint.h>

namespace longwave {

struct Fp8Operands {
    const uint8_t* w;
    const float* w_scales;
    const uint8_t* x;
    const float* x_scales;
    float* y;
    unsigned rows, cols, tokens, groups;
};

}  // namespace longwave
