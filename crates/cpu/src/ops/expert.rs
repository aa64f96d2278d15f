//! The clamped SwiGLU of an expert (model.md 7.2), routed and shared alike.
//! The gate is clamped from above only, before silu; the router weight is applied before the down projection.

use crate::dispatch;
use crate::numerics::Profile;
use crate::simd::Lanes;

dispatch! {
    /// `h = silu(min(g, limit)) * clamp(u, -limit, limit) * weight`, in place in `g`, rounded to bf16 unless exact.
    /// The shared expert has weight 1.
    pub fn swiglu(g: &mut [f32], u: &[f32], limit: f32, weight: f32, profile: Profile) = swiglu_body;
}

#[inline(always)]
fn swiglu_body<V: Lanes>(g: &mut [f32], u: &[f32], limit: f32, weight: f32, profile: Profile) {
    let (lim, neg, one, w) = (V::splat(limit), V::splat(-limit), V::splat(1.0), V::splat(weight));
    for (g, u) in g.as_chunks_mut::<16>().0.iter_mut().zip(u.as_chunks::<16>().0) {
        let gate = V::load(g).min(lim);
        let up = V::load(u).min(lim).max(neg);
        // Below -80 silu is 0 to f32 precision; the bound keeps e^-g finite.
        let e = V::splat(0.0).sub(gate.max(V::splat(-80.0))).exp();
        let h = gate.div(one.add(e)).mul(up).mul(w);
        if profile.rounds() { h.round_bf16() } else { h }.store(g);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_of_the_specification() {
        let mut g = [0.0; 16];
        let mut u = [0.0; 16];
        (g[0], u[0]) = (12.0, -15.0);
        (g[1], u[1]) = (-12.0, 3.0);
        (g[2], u[2]) = (10.0, 10.0);
        swiglu(&mut g, &u, 10.0, 1.0, Profile::Exact);
        assert!(
            (g[0] + 99.99546).abs() < 2e-5 && (g[1] + 2.2119e-4).abs() < 1e-8 && (g[2] - 99.99546).abs() < 2e-5,
            "{g:?}"
        );
    }
}
