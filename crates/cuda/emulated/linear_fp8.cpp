// fp8 products in tiles: all bits of column blocks that are summed, scaled and added one after the other.
#include "cases.h"

extern "C" {
#define TILES(name) void name(longwave::TensorMap, longwave::TensorMap, const float*, const float*, float*, unsigned, unsigned, unsigned, unsigned);
TILES(linear_fp8_tiles)
TILES(linear_fp8_tiles_64)
TILES(linear_fp8_tiles_32)
TILES(linear_fp8_tiles_16)
}

void check_linear_fp8(Fresh& fresh) {
    // Rows of a tile, blocks of a cluster, stages: as ops/linear_fp8.rs says.
    const unsigned which = fresh.below(4), of_tile[] = {128, 64, 32, 16}, of_cluster[] = {2, 2, 4, 4}, stages[] = {6, 8, 10, 10};
    const unsigned tile = of_tile[which], cluster = of_cluster[which];
    const unsigned groups = 1 + (fresh.below(3) == 0), rows = groups > 1 ? 128 * (1 + fresh.below(2)) : 16 * (1 + fresh.below(24));
    const unsigned cols = 128 * (1 + fresh.below(14)), tokens = 1 + fresh.below(200), blocks = cols / 128, scale_rows = (rows + 127) / 128;
    const std::vector<uint8_t> w = fresh.codes(size_t(groups) * rows * cols), x = fresh.codes(size_t(tokens) * groups * cols);
    const std::vector<float> w_scales = fresh.floats(groups * scale_rows * blocks), x_scales = fresh.floats(tokens * groups * blocks);
    std::vector<float> y(size_t(tokens) * groups * rows + 64, NAN);
    const longwave::TensorMap of_w = {w.data(), groups * rows, cols, tile}, of_x = {x.data(), tokens, groups * cols, 128 / cluster};
    const unsigned clusters = (tokens + 127) / 128 * ((rows + cluster * tile - 1) / (cluster * tile)) * groups;
    const unsigned at_once = 1 + fresh.below(std::min(clusters, 3u)), bytes = stages[which] * ((tile + 128) * 128 + 16);
    const auto kernels = {linear_fp8_tiles, linear_fp8_tiles_64, linear_fp8_tiles_32, linear_fp8_tiles_16};
    device::launch({{cluster * at_once, 1, 1}, 384, cluster, bytes, fresh.seed()}, [&] {
        kernels.begin()[which](of_w, of_x, w_scales.data(), x_scales.data(), y.data(), rows, cols, tokens, groups);
    });
    for (unsigned t = 0; t < tokens; t++) {
        for (unsigned g = 0; g < groups; g++) {
            for (unsigned r = 0; r < rows; r++) {
                float total = 0;
                for (unsigned b = 0; b < blocks; b++) {
                    float sum = 0;
                    for (unsigned k = b * 128; k < b * 128 + 128; k++) {
                        sum += longwave::e4m3(x[(size_t(t) * groups + g) * cols + k]) * longwave::e4m3(w[(size_t(g) * rows + r) * cols + k]);
                    }
                    const float scale = w_scales[(g * scale_rows + r / 128) * blocks + b] * x_scales[(t * groups + g) * blocks + b];
                    total = fmaf(sum, scale, total);
                }
                const float ours = y[(size_t(t) * groups + g) * rows + r];
                CHECK(ours == total, "tiles of %u rows, %u x %u x %u, token %u of %u, row %u: %g for %g", tile, groups, rows, cols, t,
                      tokens, r, ours, total);
            }
        }
    }
    CHECK(std::all_of(y.end() - 64, y.end(), [](float v) { return std::isnan(v); }), "tiles of %u rows write behind their results", tile);
}
