// architectures: 90a 100a
// Angles of a step's rows (model.md 3.3): the product of position and frequency in float, its cosine and sine in double,
// rounded once. As the CPU's, but for results within 1e-15 of the middle between two floats.
#include <stdint.h>

#include "common/overlap.cuh"
#include "common/pages.cuh"

// Grid (tokens / 8 rounded up), 256 threads: a warp has a row. Rows are rotated at position - position % ratio; out
// [tokens, 64]: 32 cosines, 32 sines. Rows without a seat get the angle 0.
extern "C" __global__ void __launch_bounds__(256)
rope_angles(const longwave::BatchRow* __restrict__ rows, const float* __restrict__ frequencies, float* __restrict__ out,
            unsigned tokens, unsigned ratio) {
    longwave::overlap();
    const unsigned token = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) {
        return;
    }
    const longwave::BatchRow row = rows[token];
    const unsigned position = row.seat == longwave::UNMAPPED ? 0 : row.position - row.position % ratio;
    const double x = double(__fmul_rn(float(position), __ldg(frequencies + lane)));
    // x = quarter * pi / 2 + r with |r| <= pi / 4; pi / 2 in two parts, quarter below 2^20.
    const double quarter = rint(x * 0.63661977236758134308);
    double r = fma(-quarter, 1.5707963267948965580e0, x);
    r = fma(-quarter, 6.1232339957367660359e-17, r);
    const double z = r * r;
    double s = -7.6471637318198164759e-13;
    s = fma(s, z, 1.6059043836821614599e-10);
    s = fma(s, z, -2.5052108385441718775e-8);
    s = fma(s, z, 2.7557319223985890653e-6);
    s = fma(s, z, -1.9841269841269841270e-4);
    s = fma(s, z, 8.3333333333333333333e-3);
    s = fma(s, z, -1.6666666666666666667e-1);
    s = fma(s * z, r, r);
    double c = 4.7794773323873852974e-14;
    c = fma(c, z, -1.1470745597729724714e-11);
    c = fma(c, z, 2.0876756987868098979e-9);
    c = fma(c, z, -2.7557319223985890653e-7);
    c = fma(c, z, 2.4801587301587301587e-5);
    c = fma(c, z, -1.3888888888888888889e-3);
    c = fma(c, z, 4.1666666666666666667e-2);
    c = fma(c, z, -0.5);
    c = fma(c, z, 1.0);
    const unsigned q = unsigned(static_cast<int>(quarter)) & 3;
    const double cosine = q == 0 ? c : q == 1 ? -s : q == 2 ? -c : s;
    const double sine = q == 0 ? s : q == 1 ? c : q == 2 ? -s : -c;
    out[size_t(token) * 64 + lane] = static_cast<float>(cosine);
    out[size_t(token) * 64 + 32 + lane] = static_cast<float>(sine);
}
