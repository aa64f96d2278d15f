// Hyper-connections on the tensor cores: products against sums in double, and a boundary in one launch against two.
#include "cases.h"

extern "C" {
void mhc_tensor(uint2*, const void*, const float4*, const float4*, float*, unsigned, unsigned);
void mhc_tensor_after(uint2*, const void*, const float4*, const float4*, float*, unsigned, unsigned);
void mhc_tensor_after_wide(uint2*, const void*, const float4*, const float4*, float*, unsigned, unsigned);
void mhc_pre(const uint32_t*, const float*, const float*, const float*, const float*, float*, uint32_t*, uint32_t*, float*, unsigned,
             float, float, unsigned);
#define FEW(name)                                                                                                        \
    void name(uint32_t*, const uint32_t*, const float2*, float*, const float4*, const float*, const float*, const float4*, \
              uint32_t*, uint32_t*, float*, float, float, unsigned, unsigned);
FEW(mhc_tensor_one_1)
FEW(mhc_tensor_one_2)
FEW(mhc_tensor_eight_1)
FEW(mhc_tensor_eight_2)
}

namespace {

constexpr float EPS = 1e-6f;
constexpr unsigned ITERS = 20, PARTIAL = 32, ROWS = 24;

template <class To, class From>
To* as(std::vector<From>& v) {
    return reinterpret_cast<To*>(v.data());
}

// What a boundary leaves.
struct Left {
    std::vector<uint32_t> streams;
    std::vector<float> mix, scales;
    std::vector<uint32_t> normed, codes;

    bool operator==(const Left& b) const {
        return same(streams, b.streams) && same(mix, b.mix) && same(scales, b.scales) && same(normed, b.normed) && same(codes, b.codes);
    }
};

float half_of(uint32_t pair, unsigned which) { return longwave::float_of(which ? pair >> 16 : pair); }

}  // namespace

void check_mhc(Fresh& fresh) {
    const unsigned width = 256u << fresh.below(5), units = width / 128, half = width / 2;
    const unsigned tokens = fresh.below(3) == 0 ? 1 : fresh.below(4) == 0 ? 9 + fresh.below(12) : 1 + fresh.below(8);
    const bool wide = fresh.below(2);
    std::vector<uint32_t> y = fresh.pairs(tokens * half);
    std::vector<float> wide_y = fresh.floats(tokens * width), function = fresh.floats(ROWS * 4 * width), base = fresh.floats(ROWS);
    std::vector<float> scale = {0.7f, 1.3f, 0.9f}, weight = fresh.floats(width);
    const Left before = {fresh.pairs(tokens * 2 * width), fresh.floats(tokens * 20), std::vector<float>(tokens * units, NAN),
                         std::vector<uint32_t>(tokens * half, ~0u), std::vector<uint32_t>(tokens * width / 4, ~0u)};

    Left two = before;
    std::vector<float> partial(tokens * units * PARTIAL, NAN), again = partial;
    const unsigned tiles = 1 + fresh.below(std::min((tokens + 7) / 8, 8u));
    const auto products = [&](auto kernel, const void* output, std::vector<float>& to) {
        device::launch({{units, tiles, 1}, 256, 1, 0, fresh.seed()}, [&] {
            kernel(as<uint2>(two.streams), output, as<float4>(two.mix), as<float4>(function), to.data(), width, tokens);
        });
    };
    wide ? products(mhc_tensor_after_wide, wide_y.data(), partial) : products(mhc_tensor_after, y.data(), partial);
    const std::vector<uint32_t> streams = two.streams;
    // The streams as a sublayer leaves them, and the products of these.
    for (unsigned t = 0; t < tokens; t++) {
        std::vector<float> x(4 * width);
        for (unsigned j = 0; j < 4; j++) {
            for (unsigned k = 0; k < width; k++) {
                const auto in = [&](const std::vector<uint32_t>& s, unsigned i) { return half_of(s[(t * 4 + i) * half + k / 2], k % 2); };
                const float out = wide ? longwave::round_bf16(wide_y[t * width + k]) : half_of(y[t * half + k / 2], k % 2);
                float sum = before.mix[t * 20 + j] * out;
                for (unsigned i = 0; i < 4; i++) {
                    sum = fmaf(before.mix[t * 20 + 4 + 4 * i + j], in(before.streams, i), sum);
                }
                x[j * width + k] = longwave::round_bf16(sum);
                CHECK(x[j * width + k] == in(streams, j), "token %u, stream %u, column %u of %u", t, j, k, width);
            }
        }
        for (unsigned r = 0; r < PARTIAL; r++) {
            double sum = 0, size = 1e-30, ours = 0;
            for (unsigned i = 0; r <= ROWS && i < 4 * width; i++) {
                const double f = r < ROWS ? function[r * 4 * width + i] : x[i];
                sum += f * x[i];
                size += fabs(f * x[i]);
            }
            for (unsigned u = 0; u < units; u++) {
                ours += partial[(t * units + u) * PARTIAL + r];
            }
            CHECK(fabs(ours - sum) < 1e-6 * size, "row %u of token %u of %u: %g for %g", r, t, tokens, ours, sum);
        }
    }
    products(mhc_tensor, nullptr, again);
    CHECK(same(again, partial) && same(two.streams, streams), "products of streams that are there, %u x %u", tokens, width);
    device::launch({{tokens, 1, 1}, 288, 1, 0, fresh.seed()}, [&] {
        mhc_pre(two.streams.data(), partial.data(), base.data(), scale.data(), weight.data(), two.mix.data(), two.normed.data(),
                two.codes.data(), two.scales.data(), width, EPS, EPS, ITERS);
    });

    // Clusters of one token and of eight; shared memory as ops/mhc.rs says.
    const unsigned of_block = width > 2048 ? 2 : 1, blocks = units / of_block;
    for (unsigned most : {1u, 8u}) {
        Left one = before;
        const auto kernel = most == 1 ? of_block == 1 ? mhc_tensor_one_1 : mhc_tensor_one_2
                                      : of_block == 1 ? mhc_tensor_eight_1 : mhc_tensor_eight_2;
        const unsigned bytes = most == 1 ? of_block == 1 ? 13808 : 26352 : of_block == 1 ? 37888 : 73728;
        const unsigned threads = 256 * of_block + 32 * ((most + blocks - 1) / blocks);
        device::launch({{blocks, (tokens + most - 1) / most, 1}, threads, blocks, bytes, fresh.seed()}, [&] {
            kernel(one.streams.data(), wide ? nullptr : y.data(), wide ? as<float2>(wide_y) : nullptr, one.mix.data(),
                   as<float4>(function), base.data(), scale.data(), as<float4>(weight), one.normed.data(), one.codes.data(),
                   one.scales.data(), EPS, EPS, ITERS, tokens);
        });
        CHECK(one == two, "clusters of %u tokens, %u x %u", most, tokens, width);
    }
}
