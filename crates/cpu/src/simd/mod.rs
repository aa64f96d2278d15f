//! Sixteen f32 lanes on every CPU, with the same bits everywhere.
//!
//! Every op of this crate is written once over [`Lanes`] and instantiated for AVX-512, AVX2 and plain Rust by
//! [`dispatch!`]; the level is chosen at run time. All three do the same fused multiply-adds in the same lanes and
//! reduce them in the same tree, so a result does not depend on the CPU, the batch or the thread count.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use scalar::Scalar;

use std::sync::atomic::{AtomicU8, Ordering};

/// Instruction sets that ops are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Plain Rust: every architecture.
    Scalar = 1,
    /// AVX2, FMA and F16C.
    Avx2 = 2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512 = 3,
}

impl Level {
    /// Name for `longwave doctor`.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2+fma",
            Level::Avx512 => "avx512",
        }
    }
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

/// Best level of this CPU.
pub fn best_level() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx512 {
            return Level::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Level::Avx2;
        }
    }
    Level::Scalar
}

/// Level in use: the best one, or the one `LONGWAVE_SIMD` (scalar, avx2, avx512) asks for if the CPU has it.
#[inline]
pub fn level() -> Level {
    match LEVEL.load(Ordering::Relaxed) {
        1 => Level::Scalar,
        2 => Level::Avx2,
        3 => Level::Avx512,
        _ => {
            let asked = match std::env::var("LONGWAVE_SIMD").as_deref() {
                Ok("scalar") => Level::Scalar,
                Ok("avx2") => Level::Avx2,
                _ => Level::Avx512,
            };
            set_level(asked);
            level()
        }
    }
}

/// Uses `wanted`, or the best this CPU has if that is less. Tests compare levels with it.
pub fn set_level(wanted: Level) {
    LEVEL.store(wanted.min(best_level()) as u8, Ordering::Relaxed);
}

/// Sixteen f32 lanes. Methods are exact or round once, to nearest even; `fma` is fused on every implementation.
pub trait Lanes: Copy {
    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// Sixteen values.
    fn load(x: &[f32; 16]) -> Self;
    /// Stores sixteen values.
    fn store(self, out: &mut [f32; 16]);
    /// Sixteen bf16 (little endian), widened.
    fn load_bf16(x: &[u8; 32]) -> Self;
    /// Sixteen e4m3 codes as `2^-8` of their values: what the bits mean when read as f16. NaN codes are not treated.
    fn load_e4m3_small(x: &[u8; 16]) -> Self;
    /// Sixteen e4m3 codes, widened; NaN codes are not treated.
    #[inline(always)]
    fn load_e4m3(x: &[u8; 16]) -> Self {
        Self::load_e4m3_small(x).mul(Self::splat(256.0))
    }
    /// Sixteen e2m1 codes in eight bytes, low nibble first, widened.
    fn load_e2m1(x: &[u8; 8]) -> Self;
    /// `self + b`.
    fn add(self, b: Self) -> Self;
    /// `self - b`.
    fn sub(self, b: Self) -> Self;
    /// `self * b`.
    fn mul(self, b: Self) -> Self;
    /// `self / b`.
    fn div(self, b: Self) -> Self;
    /// `self * b + c`, fused.
    fn fma(self, b: Self, c: Self) -> Self;
    /// Larger of each lane; neither is NaN.
    fn max(self, b: Self) -> Self;
    /// Smaller of each lane; neither is NaN.
    fn min(self, b: Self) -> Self;
    /// Magnitudes.
    fn abs(self) -> Self;
    /// Rounded onto the bf16 grid (finite lanes).
    fn round_bf16(self) -> Self;
    /// Nearest whole number, ties to even, for magnitudes below 2^22.
    fn round_int(self) -> Self;
    /// `2^self` for lanes that are whole numbers in -126..=127.
    fn exp2_int(self) -> Self;
    /// Lane sums of sixteen vectors: lane `i` of the result is the sum of `v[i]`, in the tree of [`sum`](Lanes::sum).
    fn sums(v: &[Self; 16]) -> Self;

    /// Sum of the lanes in one fixed tree: within each quarter `(l0 + l2) + (l1 + l3)`, then `(q0 + q1) + (q2 + q3)`.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut l = [0.0; 16];
        self.store(&mut l);
        let q = |i: usize| (l[i] + l[i + 2]) + (l[i + 1] + l[i + 3]);
        (q(0) + q(4)) + (q(8) + q(12))
    }

    /// Largest lane.
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let mut l = [0.0; 16];
        self.store(&mut l);
        l.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    /// `e^self` for lanes at most 88; below -87.3 the result is 0. Within 1.3e-7 of the true value, relatively.
    #[inline(always)]
    fn exp(self) -> Self {
        // Range reduction with ln 2 in two parts (the first has few bits, so n times it is exact), then the series of
        // e^r to r^7 on [-ln2/2, ln2/2], whose remainder is below 6e-9; the last two terms are added smallest first.
        let x = self.max(Self::splat(-87.3));
        let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round_int();
        let r = n.fma(Self::splat(-0.693_359_4), x);
        let r = n.fma(Self::splat(2.121_944_4e-4), r);
        let p = Self::splat(1.0 / 5040.0);
        let p = p.fma(r, Self::splat(1.0 / 720.0));
        let p = p.fma(r, Self::splat(1.0 / 120.0));
        let p = p.fma(r, Self::splat(1.0 / 24.0));
        let p = p.fma(r, Self::splat(1.0 / 6.0));
        let p = p.fma(r, Self::splat(0.5));
        let p = p.fma(r.mul(r), r).add(Self::splat(1.0));
        p.mul(n.exp2_int()).keep_above(self, -87.3)
    }

    /// Lanes where `x > limit` keep their value, the others become 0.
    fn keep_above(self, x: Self, limit: f32) -> Self;
}

/// Asks the CPU to bring `bytes` into its caches; rows of a weight block are too short for it to guess.
#[inline(always)]
pub(crate) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        // SAFETY: a prefetch reads nothing; the address is inside a slice. SSE is part of x86-64.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// `e^x` of one number with the same bits as [`Lanes::exp`].
pub fn exp(x: f32) -> f32 {
    let mut out = [0.0; 16];
    Lanes::exp(<Scalar as Lanes>::splat(x)).store(&mut out);
    out[0]
}

/// Instantiates an op for each instruction set and picks one at run time.
///
/// `dispatch! { /// docs  pub fn name(a: A, b: B) -> R = body; }` calls `body::<V>(a, b)`, an `#[inline(always)]`
/// function generic over [`Lanes`].
#[macro_export]
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body::<$crate::simd::Avx512>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body::<$crate::simd::Avx2>($($arg),*)
                }
                match $crate::simd::level() {
                    // SAFETY: `level` never exceeds what the CPU was found to have.
                    $crate::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::simd::Level::Scalar => {}
                }
            }
            $body::<$crate::simd::Scalar>($($arg),*)
        }
    };
}

#[cfg(test)]
mod tests;
