//! Sixteen lanes in two AVX2 registers.
//!
//! Every function is `#[inline(always)]` and is only reached through `dispatch!`, inside a function compiled with AVX2,
//! FMA and F16C on a CPU that has them.

use std::arch::x86_64::*;

use super::Lanes;

/// Lanes as two 256-bit registers: 0..8 and 8..16.
#[derive(Clone, Copy)]
pub struct Avx2(__m256, __m256);

/// Applies an expression to both halves. A macro, because a closure would be compiled without AVX2.
macro_rules! halves {
    ($x:expr, $y:expr, |$a:ident, $b:ident| $e:expr) => {{
        // SAFETY: the CPU has AVX2 (see the head of this file).
        unsafe {
            let (x, y) = ($x, $y);
            let lo = {
                let ($a, $b) = (x.0, y.0);
                $e
            };
            let hi = {
                let ($a, $b) = (x.1, y.1);
                $e
            };
            Avx2(lo, hi)
        }
    }};
}

impl Lanes for Avx2 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the CPU has AVX2 (see the head of this file).
        let v = unsafe { _mm256_set1_ps(x) };
        Avx2(v, v)
    }
    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        // SAFETY: AVX2 present; the reference covers sixteen floats.
        unsafe { Avx2(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; 16]) {
        // SAFETY: AVX2 present; the reference covers sixteen floats.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), self.0);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), self.1);
        }
    }
    #[inline(always)]
    fn load_bf16(x: &[u8; 32]) -> Self {
        // SAFETY: AVX2 present; the reference covers 32 bytes.
        unsafe {
            macro_rules! half {
                ($p:expr) => {{
                    let h = _mm_loadu_si128($p.cast());
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(h)))
                }};
            }
            Avx2(half!(x.as_ptr()), half!(x.as_ptr().add(16)))
        }
    }
    #[inline(always)]
    fn load_e4m3_small(x: &[u8; 16]) -> Self {
        // See avx512.rs for the idea.
        // SAFETY: AVX2 and F16C present; the reference covers 16 bytes.
        unsafe {
            let b = _mm256_cvtepu8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
            let magnitude = _mm256_slli_epi16::<7>(_mm256_and_si256(b, _mm256_set1_epi16(0x7f)));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(b, _mm256_set1_epi16(0x80)));
            let h = _mm256_or_si256(magnitude, sign);
            Avx2(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(h)))
        }
    }
    #[inline(always)]
    fn load_e2m1(x: &[u8; 8]) -> Self {
        // SAFETY: AVX2 present; the references cover what is loaded.
        unsafe {
            let table = _mm256_loadu_ps(longwave_model::formats::e2m1::VALUES.as_ptr());
            let b = _mm_cvtepu8_epi16(_mm_loadl_epi64(x.as_ptr().cast()));
            let pairs = _mm_or_si128(
                _mm_and_si128(b, _mm_set1_epi16(0x0f)),
                _mm_slli_epi16::<4>(_mm_and_si128(b, _mm_set1_epi16(0xf0))),
            );
            macro_rules! half {
                ($codes:expr) => {{
                    let codes = $codes;
                    let magnitude = _mm256_castps_si256(_mm256_permutevar8x32_ps(table, codes));
                    let sign = _mm256_slli_epi32::<28>(_mm256_and_si256(codes, _mm256_set1_epi32(8)));
                    _mm256_castsi256_ps(_mm256_or_si256(magnitude, sign))
                }};
            }
            Avx2(half!(_mm256_cvtepu8_epi32(pairs)), half!(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(pairs))))
        }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        halves!(self, b, |a, b| _mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        halves!(self, b, |a, b| _mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        halves!(self, b, |a, b| _mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        halves!(self, b, |a, b| _mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: AVX2 and FMA present.
        unsafe { Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        halves!(self, b, |a, b| _mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        halves!(self, b, |a, b| _mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        halves!(self, self, |a, _b| _mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }
    #[inline(always)]
    fn round_bf16(self) -> Self {
        halves!(self, self, |a, _b| {
            let b = _mm256_castps_si256(a);
            let tie = _mm256_and_si256(_mm256_srli_epi32::<16>(b), _mm256_set1_epi32(1));
            let r = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), tie);
            _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(0xffff_0000_u32 as i32)))
        })
    }
    #[inline(always)]
    fn round_int(self) -> Self {
        halves!(self, self, |a, _b| _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        halves!(self, self, |a, _b| {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    fn sums(v: &[Self; 16]) -> Self {
        // SAFETY: AVX2 present.
        unsafe {
            // Quarter sums as in avx512.rs; a register holds two quarters, so four vectors give (q0 | q1) and (q2 | q3).
            macro_rules! pair {
                ($a:expr, $b:expr) => {
                    _mm256_add_ps(_mm256_unpacklo_ps($a, $b), _mm256_unpackhi_ps($a, $b))
                };
            }
            macro_rules! quad {
                ($i:expr, $half:tt) => {{
                    let (p, q) = (pair!(v[$i].$half, v[$i + 1].$half), pair!(v[$i + 2].$half, v[$i + 3].$half));
                    let lo = _mm256_shuffle_ps::<0b01_00_01_00>(p, q);
                    let hi = _mm256_shuffle_ps::<0b11_10_11_10>(p, q);
                    let s = _mm256_add_ps(lo, hi);
                    _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s))
                }};
            }
            macro_rules! four {
                ($i:expr) => {
                    _mm_add_ps(quad!($i, 0), quad!($i, 1))
                };
            }
            Avx2(_mm256_set_m128(four!(4), four!(0)), _mm256_set_m128(four!(12), four!(8)))
        }
    }
    #[inline(always)]
    fn keep_above(self, x: Self, limit: f32) -> Self {
        halves!(self, x, |v, x| _mm256_and_ps(v, _mm256_cmp_ps::<_CMP_GT_OQ>(x, _mm256_set1_ps(limit))))
    }
}
