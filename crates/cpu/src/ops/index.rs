//! Indexer scores and the exact top-k (model.md 6.5), streamed over the keys: no score row of a whole context exists.
//! Future entries are never offered, so nothing has to be masked; among equal scores the lower entry wins.

use super::dots::products;
use crate::dispatch;
use crate::numerics::Profile;
use crate::simd::Lanes;
use longwave_model::formats::round_bf16;

/// Constant of the head weights: `128^-0.5 * 64^-0.5` for 64 heads of 128; in general `di^-0.5 * Hi^-0.5`.
pub fn weight_scale(heads: usize, dim: usize) -> f32 {
    ((dim as f64).powf(-0.5) * (heads as f64).powf(-0.5)) as f32
}

dispatch! {
    /// Scores of `keys.len() / 128` keys for each of `g.len() / heads` tokens: `sum_h relu(q_h . k) * g_h`.
    ///
    /// `q` is `[tokens * heads, 128]`, `g` `[tokens, heads]`, `out` `[tokens, keys]`, `dots` scratch `[tokens * heads, keys]`.
    /// The reference profile rounds products and the sum to bf16.
    pub fn scores(q: &[f32], g: &[f32], heads: usize, keys: &[f32], profile: Profile, dots: &mut [f32], out: &mut [f32]) = scores_body;
}

#[inline(always)]
fn scores_body<V: Lanes>(
    q: &[f32],
    g: &[f32],
    heads: usize,
    keys: &[f32],
    profile: Profile,
    dots: &mut [f32],
    out: &mut [f32],
) {
    let n = keys.len() / 128;
    let rows = q.len() / 128;
    products::<V>(q, rows, keys, n, 128, dots, n);
    for t in 0..rows / heads {
        let out = &mut out[t * n..(t + 1) * n];
        if profile == Profile::Reference {
            for (j, o) in out.iter_mut().enumerate() {
                let term = |h: usize| round_bf16(round_bf16(dots[(t * heads + h) * n + j]).max(0.0) * g[t * heads + h]);
                *o = round_bf16((0..heads).map(term).sum());
            }
            continue;
        }
        out.fill(0.0);
        for h in 0..heads {
            let (d, w) = (&dots[(t * heads + h) * n..][..n], g[t * heads + h]);
            for (o, d) in out.iter_mut().zip(d) {
                *o += d.max(0.0) * w;
            }
        }
    }
}

/// The `k` best of a stream of (score, index) with rising indices; equal scores prefer the lower index.
#[derive(Debug, Clone)]
pub struct TopK {
    k: usize,
    kept: Vec<(f32, u32)>,
    /// A later entry must score above this to matter: `k` entries at least this good are kept already.
    bar: f32,
}

impl TopK {
    /// Room for the best `k`.
    pub fn new(k: usize) -> TopK {
        TopK { k, kept: Vec::with_capacity(2 * k), bar: f32::NEG_INFINITY }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.kept.clear();
        self.bar = f32::NEG_INFINITY;
    }

    /// Offers the scores of entries `first..first + scores.len()`. NaN counts as minus infinity.
    pub fn offer(&mut self, scores: &[f32], first: u32) {
        for (i, &s) in scores.iter().enumerate() {
            // While fewer than k are kept everything is taken, -inf included; afterwards only what beats the bar.
            if s > self.bar || self.kept.len() < self.k {
                self.kept.push((if s.is_nan() { f32::NEG_INFINITY } else { s }, first + i as u32));
                if self.kept.len() == 2 * self.k {
                    self.cut();
                }
            }
        }
    }

    fn cut(&mut self) {
        if self.kept.len() > self.k {
            self.kept.select_nth_unstable_by(self.k - 1, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            self.kept.truncate(self.k);
        }
        if self.kept.len() == self.k {
            self.bar = self.kept.iter().map(|e| e.0).fold(f32::INFINITY, f32::min);
        }
    }

    /// Appends the chosen indices, ascending.
    pub fn finish(&mut self, out: &mut Vec<u32>) {
        self.cut();
        let from = out.len();
        out.extend(self.kept.iter().map(|e| e.1));
        out[from..].sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_selection_equals_a_full_sort_with_many_ties() {
        let mut s = 1u64;
        for round in 0..200usize {
            let (n, k) = (1 + round * 7 % 900, 1 + round % 64);
            let scores: Vec<f32> = (0..n)
                .map(|_| {
                    s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    ((s >> 60) as f32) - 7.0
                })
                .map(|v: f32| if v == 3.0 { 0.0 } else { v })
                .collect();
            let mut top = TopK::new(k);
            let step = 1 + round % 97;
            for first in (0..n).step_by(step) {
                top.offer(&scores[first..(first + step).min(n)], first as u32);
            }
            let mut got = Vec::new();
            top.finish(&mut got);
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
            let mut want: Vec<u32> = order[..k.min(n)].iter().map(|&i| i as u32).collect();
            want.sort_unstable();
            assert_eq!(got, want, "round {round}");
        }
    }

    #[test]
    fn a_negative_head_weight_lowers_the_score_and_relu_stays_inside_the_sum() {
        let (mut q, mut k) = (vec![0.0; 256], vec![0.0; 128]);
        (q[0], q[128], k[0]) = (1.0, -1.0, 2.0);
        let (mut dots, mut out) = (vec![0.0; 2], vec![0.0; 1]);
        scores(&q, &[-3.0, 5.0], 2, &k, Profile::Exact, &mut dots, &mut out);
        assert_eq!(out[0], -6.0, "head 0 contributes relu(2) * -3, head 1 relu(-2) * 5 = 0");
    }
}
