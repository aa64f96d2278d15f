// Gumbel noise of a token at a position: to the bits of the CPU backend (ops/noise.rs), which uses IEEE additions,
// multiplications and divisions in one order. Nothing here may be contracted.
#pragma once
#include <stdint.h>

namespace longwave {

constexpr uint64_t NOISE_STEP = 0x9e3779b97f4a7c15ull;
constexpr double LN_2 = 0.693147180559945309417232121458;
// What LN_2 lacks of the logarithm of two.
constexpr double LN_2_REST = 2.3190468138462996e-17;

__device__ __forceinline__ uint64_t noise_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The state of one position.
__device__ __forceinline__ uint64_t noise_of(uint64_t seed, unsigned position) {
    return noise_mix(noise_mix(seed + NOISE_STEP * (static_cast<uint64_t>(position) + 1)));
}

__device__ __forceinline__ uint64_t noise_bits(uint64_t noise, unsigned token) {
    return noise_mix(noise + NOISE_STEP * (static_cast<uint64_t>(token) + 1));
}

// 1 / (2 k + 3), of the series of atanh.
__host__ __device__ constexpr double odd_part(int k) {
    return 1.0 / (2 * k + 3);
}

// 1 / k!, of the series of exp.
__host__ __device__ constexpr double inverse_factorial(int k) {
    double product = 1.0;
    for (int i = 1; i <= k; i++) {
        product *= i;
    }
    return 1.0 / product;
}

// Natural logarithm of a normal positive number.
__device__ __forceinline__ double noise_ln(double x) {
    const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x));
    long long e = static_cast<long long>(bits >> 52) - 1023;
    double m = __longlong_as_double(static_cast<long long>((bits & ((1ull << 52) - 1)) | 1023ull << 52));
    if (m > 1.41421356237309504880168872420969808) {
        m = __dmul_rn(m, 0.5);
        e += 1;
    }
    const double f = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0)), f2 = __dmul_rn(f, f);
    double s = 0.0;
    constexpr double PARTS[11] = {odd_part(0), odd_part(1), odd_part(2), odd_part(3), odd_part(4), odd_part(5),
                                  odd_part(6), odd_part(7), odd_part(8), odd_part(9), odd_part(10)};
#pragma unroll
    for (int k = 10; k >= 0; k--) {
        s = __dmul_rn(__dadd_rn(s, PARTS[k]), f2);
    }
    const double twice = __dmul_rn(2.0, f);
    return __dadd_rn(__dmul_rn(static_cast<double>(e), LN_2), __dadd_rn(twice, __dmul_rn(twice, s)));
}

// e to the power of x <= 0; 0 below -700.
__device__ __forceinline__ double noise_exp(double x) {
    if (x < -700.0) {
        return 0.0;
    }
    const double k = round(__ddiv_rn(x, LN_2));
    const double r = __dsub_rn(__dsub_rn(x, __dmul_rn(k, LN_2)), __dmul_rn(k, LN_2_REST));
    constexpr double PARTS[15] = {inverse_factorial(0),  inverse_factorial(1),  inverse_factorial(2),  inverse_factorial(3),
                                  inverse_factorial(4),  inverse_factorial(5),  inverse_factorial(6),  inverse_factorial(7),
                                  inverse_factorial(8),  inverse_factorial(9),  inverse_factorial(10), inverse_factorial(11),
                                  inverse_factorial(12), inverse_factorial(13), inverse_factorial(14)};
    double s = 0.0;
#pragma unroll
    for (int i = 14; i >= 0; i--) {
        s = __dadd_rn(__dmul_rn(s, r), PARTS[i]);
    }
    return __dmul_rn(s, __longlong_as_double((static_cast<long long>(k) + 1023) << 52));
}

__device__ __forceinline__ double gumbel(uint64_t bits) {
    const double u = __dmul_rn(__dadd_rn(static_cast<double>(bits >> 12), 0.5), 1.0 / 4503599627370496.0);
    return -noise_ln(-noise_ln(u));
}

// Not less than gumbel(bits).
__device__ __forceinline__ double gumbel_bound(uint64_t bits) {
    return __dmul_rn(static_cast<double>(__clzll(static_cast<long long>(~bits)) + 1), LN_2 + 1e-9);
}

}  // namespace longwave
