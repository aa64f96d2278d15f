// architectures: 90a 100a
// What surrounds the block of the MTP module (model.md 8):
//   mtp_input    norms of the streams before a row and of its token's embedding, as e4m3 with a scale per 128
//   mtp_streams  the streams that enter the block: both projections, rounded and added
//   keep_streams the streams of a seat's last position, for the row after it
// Norms have the CPU's bits. A row stands alone. width % 128 == 0 and width <= 8192.
#include <stdint.h>

#include "common/bf16.cuh"
#include "common/fp8.cuh"
#include "common/overlap.cuh"
#include "common/rows.cuh"

namespace {

constexpr unsigned MOST = 8192;
// A source with this bit is a seat, one without it a row of the streams.
constexpr unsigned KEPT = 0x80000000u;

}  // namespace

// Grid (rows, 5), 256 threads: four streams, then the embedding. sources u32 [rows] (UNMAPPED gives zeros), ids u32 [rows];
// streams bf16 [_, 4, width], kept bf16 [seats, 4, width], table bf16 [vocab, width]; norms float [width].
// stream_codes [rows, 4, width] and embed_codes [rows, width] with their scales.
extern "C" __global__ void __launch_bounds__(256)
mtp_input(const unsigned* __restrict__ sources, const unsigned* __restrict__ ids, const uint2* __restrict__ streams,
          const uint2* __restrict__ kept, const uint2* __restrict__ table, const float4* __restrict__ stream_norm,
          const float4* __restrict__ embed_norm, uint32_t* __restrict__ stream_codes, float* __restrict__ stream_scales,
          uint32_t* __restrict__ embed_codes, float* __restrict__ embed_scales, unsigned width, unsigned vocab, float eps) {
    longwave::overlap();
    __shared__ __align__(16) float row[MOST];
    const unsigned n = blockIdx.x, part = blockIdx.y, quads = width / 4;
    const unsigned source = sources[n], id = ids[n];
    const bool embeds = part == 4;
    const uint2* from = nullptr;
    if (embeds) {
        from = id < vocab ? table + size_t(id) * quads : nullptr;
    } else if (source != longwave::UNMAPPED) {
        from = (source & KEPT ? kept + size_t(source & ~KEPT) * 4 * quads : streams + size_t(source) * 4 * quads) + part * quads;
    }
    for (unsigned i = threadIdx.x; i < quads; i += 256) {
        const uint2 v = from ? from[i] : make_uint2(0, 0);
        const float2 a = longwave::widen(v.x), b = longwave::widen(v.y);
        *reinterpret_cast<float4*>(row + 4 * i) = make_float4(a.x, a.y, b.x, b.y);
    }
    __syncthreads();
    const float r = longwave::inverse_rms_of(row, width, eps);
    const float4* weight = embeds ? embed_norm : stream_norm;
    const size_t at = embeds ? size_t(n) * quads : (size_t(n) * 4 + part) * quads;
    uint32_t* codes = (embeds ? embed_codes : stream_codes) + at;
    float* scales = (embeds ? embed_scales : stream_scales) + at / 32;
    // A warp has 128 neighbouring channels: one group.
    for (unsigned i = threadIdx.x; i < quads; i += 256) {
        const float4 x = *reinterpret_cast<const float4*>(row + 4 * i), w = __ldg(weight + i);
        const float4 y = longwave::round_bf16(make_float4(x.x * r * w.x, x.y * r * w.y, x.z * r * w.z, x.w * r * w.w));
        codes[i] = longwave::quantise_group(y.x, y.y, y.z, y.w, scales + i / 32);
    }
}

// Grid (width / 1024 rounded up, rows), 256 threads. projected float [rows, 4, width], embedded float [rows, width];
// out bf16 [rows, 4, width].
extern "C" __global__ void __launch_bounds__(256)
mtp_streams(const float4* __restrict__ projected, const float4* __restrict__ embedded, uint2* __restrict__ out, unsigned width) {
    longwave::overlap();
    const unsigned quads = width / 4, i = blockIdx.x * 256 + threadIdx.x;
    if (i >= quads) {
        return;
    }
    const float4 e = longwave::round_bf16(embedded[size_t(blockIdx.y) * quads + i]);
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const size_t at = (size_t(blockIdx.y) * 4 + s) * quads + i;
        const float4 h = longwave::round_bf16(projected[at]);
        out[at] = make_uint2(longwave::narrow(h.x + e.x, h.y + e.y), longwave::narrow(h.z + e.z, h.w + e.w));
    }
}

// Grid (width / 512 rounded up, n), 256 threads. pairs u32 [n, 2]: row of the streams, seat; a row of UNMAPPED keeps nothing.
extern "C" __global__ void __launch_bounds__(256)
keep_streams(const uint2* __restrict__ pairs, const uint4* __restrict__ streams, uint4* __restrict__ kept, unsigned width) {
    longwave::overlap();
    const uint2 pair = pairs[blockIdx.y];
    const unsigned pieces = width / 2, i = blockIdx.x * 256 + threadIdx.x;
    if (pair.x != longwave::UNMAPPED && i < pieces) {
        kept[size_t(pair.y) * pieces + i] = streams[size_t(pair.x) * pieces + i];
    }
}
