//! Sixteen lanes in one AVX-512 register.
//!
//! Every function is `#[inline(always)]` and is only reached through `dispatch!`, inside a function compiled with the
//! AVX-512 features on a CPU that has them.

use std::arch::x86_64::*;

use super::Lanes;

/// Lanes as a 512-bit register.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

impl Lanes for Avx512 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the CPU has AVX-512 (see the head of this file).
        unsafe { Avx512(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        // SAFETY: AVX-512 present; the reference covers sixteen floats.
        unsafe { Avx512(_mm512_loadu_ps(x.as_ptr())) }
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; 16]) {
        // SAFETY: AVX-512 present; the reference covers sixteen floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn load_bf16(x: &[u8; 32]) -> Self {
        // SAFETY: AVX-512 present; the reference covers 32 bytes.
        unsafe {
            let h = _mm256_loadu_si256(x.as_ptr().cast());
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(h))))
        }
    }
    #[inline(always)]
    fn load_e4m3_small(x: &[u8; 16]) -> Self {
        // The seven magnitude bits shifted into an f16: same mantissa and exponent fields, bias 15 instead of 7.
        // Subnormal codes are subnormal there too, and the conversion handles them.
        // SAFETY: AVX-512 present; the reference covers 16 bytes.
        unsafe {
            let b = _mm256_cvtepu8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
            let magnitude = _mm256_slli_epi16::<7>(_mm256_and_si256(b, _mm256_set1_epi16(0x7f)));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(b, _mm256_set1_epi16(0x80)));
            Avx512(_mm512_cvtph_ps(_mm256_or_si256(magnitude, sign)))
        }
    }
    #[inline(always)]
    fn load_e2m1(x: &[u8; 8]) -> Self {
        // SAFETY: AVX-512 present; the references cover what is loaded.
        unsafe {
            let table = _mm512_loadu_ps(longwave_model::formats::e2m1::VALUES.as_ptr());
            // Byte i holds codes 2i and 2i+1: widen to 16-bit pairs (low | high << 8), then to lanes.
            let b = _mm_cvtepu8_epi16(_mm_loadl_epi64(x.as_ptr().cast()));
            let pairs = _mm_or_si128(
                _mm_and_si128(b, _mm_set1_epi16(0x0f)),
                _mm_slli_epi16::<4>(_mm_and_si128(b, _mm_set1_epi16(0xf0))),
            );
            Avx512(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(pairs), table))
        }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_sub_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_max_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_min_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_abs_ps(self.0)) }
    }
    #[inline(always)]
    fn round_bf16(self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe {
            let b = _mm512_castps_si512(self.0);
            let tie = _mm512_and_si512(_mm512_srli_epi32::<16>(b), _mm512_set1_epi32(1));
            let r = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), tie);
            Avx512(_mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(0xffff_0000_u32 as i32))))
        }
    }
    #[inline(always)]
    fn round_int(self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe { Avx512(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)) }
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        // SAFETY: AVX-512 present.
        unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
        }
    }
    #[inline(always)]
    fn sums(v: &[Self; 16]) -> Self {
        // SAFETY: AVX-512 present.
        unsafe {
            // Transpose while adding. In each 128-bit quarter, a pair (a, b) becomes (a0+a2, b0+b2, a1+a3, b1+b3) and
            // two such pairs become the four quarter sums (l0+l2)+(l1+l3) of four vectors. Macros, because a closure
            // would be compiled without AVX-512.
            macro_rules! pair {
                ($a:expr, $b:expr) => {
                    _mm512_add_ps(_mm512_unpacklo_ps($a, $b), _mm512_unpackhi_ps($a, $b))
                };
            }
            macro_rules! quad {
                ($i:expr) => {{
                    let (p, q) = (pair!(v[$i].0, v[$i + 1].0), pair!(v[$i + 2].0, v[$i + 3].0));
                    let lo = _mm512_shuffle_ps::<0b01_00_01_00>(p, q);
                    let hi = _mm512_shuffle_ps::<0b11_10_11_10>(p, q);
                    _mm512_add_ps(lo, hi)
                }};
            }
            let (a, b, c, d) = (quad!(0), quad!(4), quad!(8), quad!(12));
            // Quarters: q0+q1 and q2+q3 of each of a..d, then their sum, with the results in order.
            let ab_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b); // a.q0 a.q2 b.q0 b.q2
            let ab_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b); // a.q1 a.q3 b.q1 b.q3
            let cd_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d);
            let cd_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d);
            let ab = _mm512_add_ps(ab_even, ab_odd); // a.01 a.23 b.01 b.23
            let cd = _mm512_add_ps(cd_even, cd_odd);
            let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd); // a.01 b.01 c.01 d.01
            let odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd); // a.23 b.23 c.23 d.23
            Avx512(_mm512_add_ps(even, odd))
        }
    }
    #[inline(always)]
    fn keep_above(self, x: Self, limit: f32) -> Self {
        // SAFETY: AVX-512 present.
        unsafe {
            let m = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x.0, _mm512_set1_ps(limit));
            Avx512(_mm512_maskz_mov_ps(m, self.0))
        }
    }
}
