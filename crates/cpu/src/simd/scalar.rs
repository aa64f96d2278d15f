//! Sixteen lanes in plain Rust: the definition that the vector versions must match bit for bit.
//! Used where the CPU has neither AVX2 nor AVX-512, aarch64 included; `mul_add` is fused there too.

use longwave_model::formats::{bf16_value, e2m1, e4m3, round_bf16};

use super::Lanes;

/// Lanes as an array.
#[derive(Clone, Copy)]
pub struct Scalar([f32; 16]);

impl Scalar {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Scalar(self.0.map(f))
    }
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Scalar(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

impl Lanes for Scalar {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Scalar([x; 16])
    }
    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        Scalar(*x)
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; 16]) {
        *out = self.0;
    }
    #[inline(always)]
    fn load_bf16(x: &[u8; 32]) -> Self {
        Scalar(std::array::from_fn(|i| bf16_value(u16::from_le_bytes([x[2 * i], x[2 * i + 1]]))))
    }
    #[inline(always)]
    fn load_e4m3_small(x: &[u8; 16]) -> Self {
        Scalar(x.map(|code| e4m3::decode(code) * (1.0 / 256.0)))
    }
    #[inline(always)]
    fn load_e2m1(x: &[u8; 8]) -> Self {
        Scalar(std::array::from_fn(|i| e2m1::decode(if i % 2 == 0 { x[i / 2] & 15 } else { x[i / 2] >> 4 })))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Scalar(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        self.map(f32::abs)
    }
    #[inline(always)]
    fn round_bf16(self) -> Self {
        self.map(round_bf16)
    }
    #[inline(always)]
    fn round_int(self) -> Self {
        self.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        self.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn sums(v: &[Self; 16]) -> Self {
        Scalar(std::array::from_fn(|i| v[i].sum()))
    }
    #[inline(always)]
    fn keep_above(self, x: Self, limit: f32) -> Self {
        self.zip(x, |v, x| if x > limit { v } else { 0.0 })
    }
}
