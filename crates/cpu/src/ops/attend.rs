//! Attention core (model.md 6.6): one softmax over window, compressed entries and the sink; key and value are the same
//! row. Entries come in tiles; running maximum, sum and weighted sum are carried from tile to tile.
//!
//! The result depends on the sequence of tiles only, so tiles are cut at absolute positions (or at ranks of a selection)
//! and never by chunk or batch.

use super::dots::{products, weighted_sums};
use crate::dispatch;
use crate::numerics::Profile;
use crate::simd::{Lanes, exp};

/// Entries per tile.
pub const TILE: usize = 64;
/// `512^-0.5`.
pub const SCALE: f32 = 0.044_194_174;

/// Softmax state of a set of query rows (tokens x heads).
pub struct State {
    /// Running maximum per row; starts at the sink.
    pub max: Vec<f32>,
    /// Running denominator per row; starts at 1, the sink's own term.
    pub sum: Vec<f32>,
    /// Running numerator `[rows, 512]`.
    pub acc: Vec<f32>,
    scores: Vec<f32>,
}

impl State {
    /// Room for `rows` query rows.
    pub fn new(rows: usize) -> State {
        State { max: vec![0.0; rows], sum: vec![0.0; rows], acc: vec![0.0; rows * 512], scores: vec![0.0; rows * TILE] }
    }

    /// Starts `rows` rows; row `r` belongs to head `r % sinks.len()`.
    pub fn start(&mut self, rows: usize, sinks: &[f32]) {
        for r in 0..rows {
            self.max[r] = sinks[r % sinks.len()];
        }
        self.sum[..rows].fill(1.0);
        self.acc[..rows * 512].fill(0.0);
    }

    /// Weights with which row `r` took in the entries of the last tile, relative to its maximum after it.
    pub fn weights(&self, r: usize) -> &[f32] {
        &self.scores[r * TILE..(r + 1) * TILE]
    }

    /// Row `r`'s attention output.
    pub fn output(&self, r: usize, out: &mut [f32]) {
        let inv = 1.0 / self.sum[r];
        for (o, a) in out.iter_mut().zip(&self.acc[r * 512..(r + 1) * 512]) {
            *o = a * inv;
        }
    }
}

dispatch! {
    /// Takes in one tile of `n <= TILE` entries `kv` `[n, 512]` for query rows `q` `[rows, 512]`, rows `at..` of the state.
    /// Row `r` of `q` sees the entries `visible[r / heads]` of the tile, given as `(first, end)` per token.
    pub fn tile(state: &mut State, at: usize, q: &[f32], heads: usize, kv: &[f32], n: usize, visible: &[(usize, usize)], profile: Profile) = tile_body;
}

#[inline(always)]
fn tile_body<V: Lanes>(
    state: &mut State,
    at: usize,
    q: &[f32],
    heads: usize,
    kv: &[f32],
    n: usize,
    visible: &[(usize, usize)],
    profile: Profile,
) {
    let rows = visible.len() * heads;
    let scores = &mut state.scores[..rows * TILE];
    products::<V>(q, rows, kv, n, 512, scores, TILE);
    for r in 0..rows {
        let s = &mut scores[r * TILE..(r + 1) * TILE];
        let (from, to) = visible[r / heads];
        if from >= to {
            // Nothing visible: weights 0 leave sum and numerator as they are, bit for bit.
            s.fill(0.0);
            continue;
        }
        s[..from].fill(f32::NEG_INFINITY);
        s[to..].fill(f32::NEG_INFINITY);
        let chunks = s.as_chunks_mut::<16>().0;
        let scale = V::splat(SCALE);
        let mut top = V::splat(f32::NEG_INFINITY);
        for c in chunks.iter_mut() {
            let v = V::load(c).mul(scale);
            v.store(c);
            top = top.max(v);
        }
        let old = state.max[at + r];
        let new = old.max(top.max_lane());
        let m = V::splat(new);
        let mut total = V::splat(0.0);
        for c in chunks.iter_mut() {
            let p = V::load(c).sub(m).exp();
            total = total.add(p);
            if profile.rounds() { p.round_bf16() } else { p }.store(c);
        }
        if new != old {
            let keep = exp(old - new);
            state.sum[at + r] *= keep;
            let k = V::splat(keep);
            for a in state.acc[(at + r) * 512..(at + r + 1) * 512].as_chunks_mut::<16>().0 {
                V::load(a).mul(k).store(a);
            }
        }
        state.max[at + r] = new;
        state.sum[at + r] += total.sum();
    }
    weighted_sums::<V>(scores, TILE, rows, kv, n, 512, &mut state.acc[at * 512..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(n: usize, f: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * f).sin() * 2.0).collect()
    }

    #[test]
    fn tiles_give_the_softmax_with_the_sink_in_the_denominator_only() {
        let (heads, n) = (2, 100);
        let (q, kv) = (wave(heads * 512, 0.31), wave(n * 512, 0.017));
        let sinks = [0.7, -0.3];
        let mut st = State::new(heads);
        st.start(heads, &sinks);
        tile(&mut st, 0, &q, heads, &kv[..64 * 512], 64, &[(3, 64)], Profile::Exact);
        tile(&mut st, 0, &q, heads, &kv[64 * 512..], 36, &[(0, 36)], Profile::Exact);
        tile(&mut st, 0, &q, heads, &kv[..64 * 512], 64, &[(5, 5)], Profile::Exact);
        for h in 0..heads {
            let score = |e: usize| {
                (0..512).map(|c| f64::from(q[h * 512 + c]) * f64::from(kv[e * 512 + c])).sum::<f64>()
                    * 512f64.powf(-0.5)
            };
            let den: f64 = (3..n).map(|e| score(e).exp()).sum::<f64>() + f64::from(sinks[h]).exp();
            let mut out = vec![0.0; 512];
            st.output(h, &mut out);
            for c in 0..512 {
                let want = (3..n).map(|e| score(e).exp() * f64::from(kv[e * 512 + c])).sum::<f64>() / den;
                assert!((f64::from(out[c]) - want).abs() < 3e-5, "head {h} channel {c}: {} {want}", out[c]);
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let kv = wave(64 * 512, 0.013);
        let q = wave(5 * 512, 0.29);
        let visible = [(0, 64), (10, 20), (0, 1), (63, 64), (0, 0)];
        let mut all = State::new(5);
        all.start(5, &[0.1]);
        tile(&mut all, 0, &q, 1, &kv, 64, &visible, Profile::Serving);
        for r in 0..5 {
            let mut one = State::new(1);
            one.start(1, &[0.1]);
            tile(&mut one, 0, &q[r * 512..(r + 1) * 512], 1, &kv, 64, &visible[r..=r], Profile::Serving);
            let (mut a, mut b) = (vec![0.0; 512], vec![0.0; 512]);
            all.output(r, &mut a);
            one.output(0, &mut b);
            assert_eq!(a, b, "row {r}");
        }
    }
}
