//! RMS norm (model.md 3.2): `y = w * (x * rsqrt(mean(x^2) + eps))`, f32 inside, one rounding at the end.
//! Weights are widened bf16 and multiplied as they are; no `1 + w`. Rows are multiples of 16 long.

use super::dots::sum_squares;
use crate::dispatch;
use crate::numerics::Profile;
use crate::simd::Lanes;

dispatch! {
    /// Norm of one row. `weight` may be empty: the weightless norm of query heads. `x` and `out` have equal length, a
    /// multiple of 16. The result is rounded to bf16 unless the profile is exact.
    pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, profile: Profile, out: &mut [f32]) = rms_norm_body;
}

#[inline(always)]
fn rms_norm_body<V: Lanes>(x: &[f32], weight: &[f32], eps: f32, profile: Profile, out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    let r = V::splat(inverse_rms::<V>(x, eps));
    let (xs, os) = (x.as_chunks::<16>().0, out.as_chunks_mut::<16>().0);
    let ws = weight.as_chunks::<16>().0;
    for (i, (x, o)) in xs.iter().zip(os).enumerate() {
        let mut y = V::load(x).mul(r);
        if !ws.is_empty() {
            y = y.mul(V::load(&ws[i]));
        }
        if profile.rounds() {
            y = y.round_bf16();
        }
        y.store(o);
    }
}

/// `rsqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms<V: Lanes>(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares::<V>(x) / x.len() as f32 + eps).sqrt()
}
