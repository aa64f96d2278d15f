//! Hyper-connections (model.md 5): four residual streams, mixed in and out of every sublayer.
//!
//! All arithmetic is f32; only the outputs are rounded. The product with `fn` is a linear layer and comes in as `dots`.

use super::norm::inverse_rms;
use crate::dispatch;
use crate::numerics::Profile;
use crate::simd::{Lanes, exp};

/// What `hc_pre` hands to `hc_post`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mix {
    /// `post_j`.
    pub post: [f32; 4],
    /// `C[i][j]`, source stream first.
    pub comb: [[f32; 4]; 4],
}

/// Constants of one mixing site.
pub struct Site {
    /// `base`: 24 for a sublayer, 4 for a head.
    pub base: Vec<f32>,
    /// `scale`: pre, post, comb; or one for a head.
    pub scale: Vec<f32>,
    /// `hc_eps`.
    pub hc_eps: f32,
    /// `rms_norm_eps`.
    pub norm_eps: f32,
    /// Column passes of Sinkhorn.
    pub iters: u32,
}

fn sigmoid(x: f32) -> f32 {
    // `exp` ends at 88; beyond it the sigmoid is 0 to f32 precision.
    1.0 / (1.0 + exp((-x).min(88.0)))
}

/// Sinkhorn normalisation (model.md 5.2): row softmax plus eps, then columns, then `iters - 1` times rows and columns.
pub fn sinkhorn(a: [[f32; 4]; 4], eps: f32, iters: u32) -> [[f32; 4]; 4] {
    let mut c = [[0.0; 4]; 4];
    for i in 0..4 {
        let m = a[i].iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let e = a[i].map(|v| exp(v - m));
        let sum = (e[0] + e[1]) + (e[2] + e[3]);
        c[i] = e.map(|v| v / sum + eps);
    }
    columns(&mut c, eps);
    for _ in 1..iters {
        for row in &mut c {
            let sum = (row[0] + row[1]) + (row[2] + row[3]) + eps;
            *row = row.map(|v| v / sum);
        }
        columns(&mut c, eps);
    }
    c
}

fn columns(c: &mut [[f32; 4]; 4], eps: f32) {
    for j in 0..4 {
        let sum = (c[0][j] + c[1][j]) + (c[2][j] + c[3][j]) + eps;
        for row in c.iter_mut() {
            row[j] /= sum;
        }
    }
}

dispatch! {
    /// `hc_pre` of one token (model.md 5.1): `x` is `[4, D]`, `dots` the 24 products `fn . z`; writes the collapsed
    /// `[D]` input and returns the mix for `hc_post`.
    pub fn pre(x: &[f32], dots: &[f32], site: &Site, profile: Profile, out: &mut [f32]) -> Mix = pre_body;
}

#[inline(always)]
fn pre_body<V: Lanes>(x: &[f32], dots: &[f32], site: &Site, profile: Profile, out: &mut [f32]) -> Mix {
    let r = inverse_rms::<V>(x, site.norm_eps);
    let m = |i: usize, s: usize| dots[i] * r * site.scale[s] + site.base[i];
    let pre: [f32; 4] = std::array::from_fn(|i| sigmoid(m(i, 0)) + site.hc_eps);
    let post = std::array::from_fn(|i| 2.0 * sigmoid(m(4 + i, 1)));
    let a = std::array::from_fn(|i| std::array::from_fn(|j| m(8 + 4 * i + j, 2)));
    collapse::<V>(x, pre, profile, out);
    Mix { post, comb: sinkhorn(a, site.hc_eps, site.iters) }
}

dispatch! {
    /// `hc_head` of one token (model.md 5.4): `dots` are the 4 products with `hc_head_fn`.
    pub fn head(x: &[f32], dots: &[f32], site: &Site, profile: Profile, out: &mut [f32]) = head_body;
}

#[inline(always)]
fn head_body<V: Lanes>(x: &[f32], dots: &[f32], site: &Site, profile: Profile, out: &mut [f32]) {
    let r = inverse_rms::<V>(x, site.norm_eps);
    let w = std::array::from_fn(|i| sigmoid(dots[i] * r * site.scale[0] + site.base[i]) + site.hc_eps);
    collapse::<V>(x, w, profile, out);
}

/// `sum_i w_i x_i` over the streams.
#[inline(always)]
fn collapse<V: Lanes>(x: &[f32], w: [f32; 4], profile: Profile, out: &mut [f32]) {
    let d = out.len();
    let xs: [&[[f32; 16]]; 4] = std::array::from_fn(|i| x[i * d..(i + 1) * d].as_chunks::<16>().0);
    let w = w.map(V::splat);
    for (c, o) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let mut s = w[0].mul(V::load(&xs[0][c]));
        for i in 1..4 {
            s = w[i].fma(V::load(&xs[i][c]), s);
        }
        if profile.rounds() { s.round_bf16() } else { s }.store(o);
    }
}

dispatch! {
    /// `hc_post` of one token (model.md 5.3), in place: `x_j = post_j y + sum_i C[i][j] x_i`.
    pub fn post(x: &mut [f32], y: &[f32], mix: &Mix, profile: Profile) = post_body;
}

#[inline(always)]
fn post_body<V: Lanes>(x: &mut [f32], y: &[f32], mix: &Mix, profile: Profile) {
    let d = y.len();
    let (x0, rest) = x.split_at_mut(d);
    let (x1, rest) = rest.split_at_mut(d);
    let (x2, x3) = rest.split_at_mut(d);
    let xs = [x0, x1, x2, x3].map(|s| s.as_chunks_mut::<16>().0);
    let [x0, x1, x2, x3] = xs;
    for (c, y) in y.as_chunks::<16>().0.iter().enumerate() {
        let y = V::load(y);
        let old = [V::load(&x0[c]), V::load(&x1[c]), V::load(&x2[c]), V::load(&x3[c])];
        for (j, out) in [&mut x0[c], &mut x1[c], &mut x2[c], &mut x3[c]].into_iter().enumerate() {
            let mut s = V::splat(mix.post[j]).mul(y);
            for i in 0..4 {
                s = V::splat(mix.comb[i][j]).fma(old[i], s);
            }
            if profile.rounds() { s.round_bf16() } else { s }.store(out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinkhorn_gives_the_matrix_of_the_specification() {
        let a = [[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0], [0.5, 0.0, 0.0, 1.0]];
        let want = [
            [0.0486320, 0.205718, 0.2067713, 0.5388777],
            [0.5032352, 0.2880993, 0.1065293, 0.1021352],
            [0.1358746, 0.2114475, 0.5777158, 0.0749611],
            [0.3122572, 0.2947342, 0.1089826, 0.284025],
        ];
        let c = sinkhorn(a, 1e-6, 20);
        for i in 0..4 {
            for j in 0..4 {
                assert!((c[i][j] - want[i][j]).abs() < 1e-6, "{i} {j}: {} {}", c[i][j], want[i][j]);
            }
            assert!((c[i].iter().sum::<f32>() - 0.999999).abs() < 2e-6);
        }
    }

    #[test]
    fn sigmoid_is_right_far_out() {
        assert!((sigmoid(0.0) - 0.5).abs() < 1e-7);
        for x in [1.0f32, 20.0, 87.0, 89.0, 95.0, 100.0, 1e4, f32::INFINITY] {
            let want = |x: f32| (1.0 / (1.0 + (-f64::from(x)).exp())) as f32;
            assert!((sigmoid(x) - want(x)).abs() < 1e-6 && (sigmoid(-x) - want(-x)).abs() < 1e-6, "{x}");
        }
    }

    #[test]
    fn post_applies_the_mixing_matrix_transposed() {
        // Only C[0][2] is set: stream 0 must arrive in stream 2 and nowhere else.
        let mut mix = Mix::default();
        mix.comb[0][2] = 1.0;
        let mut x = vec![0.0; 64];
        x[..16].fill(3.0);
        post(&mut x, &[0.0; 16], &mix, Profile::Exact);
        assert_eq!((x[0], x[16], x[32], x[48]), (0.0, 0.0, 3.0, 0.0));
    }
}
