// architectures: 90a 100a
// What follows the projections of a row in a c4 layer, in one launch: keys_* of keys.cu and both compress4_* of compress.cu, the same
// bits. None of them needs what another one writes; each by itself is hardly more than a launch.
#include <stdint.h>

#include "common/compress.cuh"
#include "common/keys.cuh"
#include "common/overlap.cuh"

namespace {

using longwave::BatchRow;
using longwave::Entry;
using longwave::Pages;

}  // namespace

// Grid (tokens, 4), 256 threads: main compressor, index compressor, query latent, window row. `rows` for the last two, `closing` for the
// compressors; other operands as in those files, of both compressors one after the other.
#define PAGES(name)                                                                                                       \
    uint8_t *name##_pool, const unsigned *name##_table, unsigned long long name##_bytes, unsigned name##_len,             \
        unsigned name##_shift
#define OF(name) {name##_pool, name##_table, name##_bytes, name##_len, name##_shift}
#define C4_ROWS(name, main, index)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                     \
        name(const float* projected, const BatchRow* rows, const float* angles, const float* q_norm, const float* kv_norm, \
             uint8_t* codes, float* scales, PAGES(window), PAGES(local), unsigned q_width, float eps,                     \
             const BatchRow* closing, const float* entry_angles, const float* main_products, const float* main_ape,       \
             const float* main_norm, PAGES(main_state), PAGES(main_entries), const float* index_products,                 \
             const float* index_ape, const float* index_norm, PAGES(index_state), PAGES(index_entries)) {                 \
        longwave::overlap();                                                                                              \
        if (blockIdx.y == 0) {                                                                                            \
            const Pages state = OF(main_state), entries = OF(main_entries);                                               \
            longwave::compress4<main>(main_products, main_ape, closing, entry_angles, main_norm, state, entries, eps);    \
        } else if (blockIdx.y == 1) {                                                                                     \
            const Pages state = OF(index_state), entries = OF(index_entries);                                             \
            longwave::compress4<index>(index_products, index_ape, closing, entry_angles, index_norm, state, entries, eps); \
        } else {                                                                                                          \
            const Pages window = OF(window), local = OF(local);                                                           \
            longwave::project_keys<main == Entry::MainFp8>(blockIdx.y == 2, blockIdx.x, projected, rows, angles, q_norm,  \
                                                           kv_norm, codes, scales, window, local, q_width, eps);         \
        }                                                                                                                 \
    }

C4_ROWS(c4_rows_fp8_fp8, Entry::MainFp8, Entry::IndexFp8)
C4_ROWS(c4_rows_fp8_fp4, Entry::MainFp8, Entry::IndexFp4)
C4_ROWS(c4_rows_fp8_bf16, Entry::MainFp8, Entry::IndexBf16)
C4_ROWS(c4_rows_bf16_fp8, Entry::MainBf16, Entry::IndexFp8)
C4_ROWS(c4_rows_bf16_fp4, Entry::MainBf16, Entry::IndexFp4)
C4_ROWS(c4_rows_bf16_bf16, Entry::MainBf16, Entry::IndexBf16)
