// bf16 products of many tokens on warpgroups: all bits of sums in the order of linear_bf16.cu.
#include "cases.h"

extern "C" {
#define WIDE(name)                                                                                                       \
    void name(longwave::TensorMap, longwave::TensorMap, longwave::TensorMap, float*, float*, float*, unsigned, unsigned, \
              unsigned, const uint16_t*, unsigned, unsigned);
WIDE(linear_bf16_wide_128)
WIDE(linear_bf16_wide_64)
WIDE(linear_bf16_wide_32)
WIDE(linear_bf16_wide_low)
}

namespace {

// Eight parts of column blocks; a step has the first or the second four of every eight columns.
float product(const uint16_t* w, const uint16_t* x, unsigned cols) {
    float sum = 0;
    for (unsigned part = 0; part < 8; part++) {
        float total = 0;
        for (unsigned block = part; block < cols / 128; block += 8) {
            for (unsigned step = 0; step < 8; step++) {
                double s = total;
                for (unsigned k = 0; k < 16; k++) {
                    const unsigned col = block * 128 + step / 2 * 32 + k % 8 / 2 * 8 + step % 2 * 4 + k / 8 * 2 + k % 2;
                    s += static_cast<double>(longwave::float_of(w[col])) * longwave::float_of(x[col]);
                }
                total = static_cast<float>(s);
            }
        }
        sum += total;
    }
    return sum;
}

}  // namespace

void check_linear_bf16(Fresh& fresh) {
    // Rows and tokens of a tile, stages: as ops/linear_bf16.rs says.
    const unsigned which = fresh.below(4), rows_of_tile = which == 3 ? 64 : 128;
    const unsigned tokens_of_tile[] = {128, 64, 32, 64}, stages[] = {6, 8, 10, 12};
    const unsigned cols = 128 * (16 + fresh.below(9)), tokens = 1 + fresh.below(2 * tokens_of_tile[which]);
    const unsigned rows[3] = {1 + fresh.below(200), fresh.below(2) * (1 + fresh.below(140)), fresh.below(2) * (1 + fresh.below(70))};
    const std::vector<uint16_t> x = fresh.halves(size_t(tokens) * cols);
    std::vector<uint16_t> w[3];
    std::vector<float> y[3];
    longwave::TensorMap maps[3];
    unsigned tiles = 0;
    for (unsigned m = 0; m < 3; m++) {
        w[m] = fresh.halves(size_t(rows[m]) * cols);
        y[m].assign(size_t(rows[m]) * tokens + 64, NAN);
        const unsigned of = rows[m] ? m : 0;
        maps[m] = {reinterpret_cast<uint8_t*>(w[of].data()), rows[of], 2 * cols, rows_of_tile};
        tiles += (rows[m] + rows_of_tile - 1) / rows_of_tile * ((tokens + tokens_of_tile[which] - 1) / tokens_of_tile[which]);
    }
    const unsigned bytes = stages[which] * ((rows_of_tile + tokens_of_tile[which]) * 128 + 16);
    const auto kernels = {linear_bf16_wide_128, linear_bf16_wide_64, linear_bf16_wide_32, linear_bf16_wide_low};
    device::launch({{std::min(tiles, 1 + fresh.below(4)), 1, 1}, 2 * rows_of_tile + 128, 1, bytes, fresh.seed()}, [&] {
        kernels.begin()[which](maps[0], maps[1], maps[2], y[0].data(), y[1].data(), y[2].data(), rows[0], rows[1], rows[2], x.data(),
                               cols, tokens);
    });
    for (unsigned m = 0; m < 3; m++) {
        for (unsigned t = 0; t < tokens; t++) {
            for (unsigned r = 0; r < rows[m]; r++) {
                const float theirs = product(&w[m][size_t(r) * cols], &x[size_t(t) * cols], cols), ours = y[m][size_t(t) * rows[m] + r];
                CHECK(ours == theirs, "kernel %u, matrix %u, row %u of %u, token %u of %u, %u columns: %g for %g", which, m, r, rows[m], t,
                      tokens, cols, ours, theirs);
            }
        }
        const bool behind = std::any_of(y[m].end() - 64, y[m].end(), [](float v) { return !std::isnan(v); });
        CHECK(!behind, "kernel %u writes behind matrix %u", which, m);
    }
}
