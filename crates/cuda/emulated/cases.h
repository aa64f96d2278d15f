// What the cases share: fresh inputs and how they end.
#pragma once
#include "ptx.h"

// Inputs and orders of one case.
struct Fresh {
    std::mt19937 chance;

    explicit Fresh(unsigned seed) : chance(seed) {}
    unsigned seed() { return static_cast<unsigned>(chance()); }
    unsigned below(unsigned n) { return seed() % n; }
    // From -2 to 2.
    float value() { return static_cast<float>(static_cast<int>(below(20001)) - 10000) / 5000.f; }
    std::vector<float> floats(size_t n) {
        std::vector<float> v(n);
        for (float& e : v) e = value();
        return v;
    }
    std::vector<uint16_t> halves(size_t n) {
        std::vector<uint16_t> v(n);
        for (uint16_t& e : v) e = longwave::bf16_of(value());
        return v;
    }
    std::vector<uint32_t> pairs(size_t n) {
        std::vector<uint32_t> v(n);
        for (uint32_t& e : v) e = longwave::narrow(value(), value());
        return v;
    }
    // e4m3 without its NaN.
    std::vector<uint8_t> codes(size_t n) {
        std::vector<uint8_t> v(n);
        for (uint8_t& e : v) do e = static_cast<uint8_t>(chance()); while ((e & 127) == 127);
        return v;
    }
};

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Each checks one case of its kernels and ends the program where something is wrong.
void check_mhc(Fresh& fresh);
void check_linear_bf16(Fresh& fresh);
void check_linear_fp8(Fresh& fresh);

#define CHECK(condition, ...)                 \
    do {                                      \
        if (!(condition)) {                   \
            printf("not so: %s: ", #condition); \
            printf(__VA_ARGS__);              \
            printf("\n");                     \
            exit(1);                          \
        }                                     \
    } while (false)
