//! Compressors (model.md 6.4): pooling 8 overlapping rows (ratio 4) or 128 rows (ratio 128) into one entry.
//!
//! Ratio 128 is pooled one token at a time with running sums, in prefill and decode alike, so that the open group needs
//! three numbers per channel and not 128 rows, and so that the order of addition is always the same.

use super::norm::rms_norm;
use super::rope::Angles;
use crate::dispatch;
use crate::numerics::{Profile, round_slice};
use crate::simd::Lanes;

/// One token's compressor row: `values` then `scores` (with ape added), each `c * w` floats.
pub type Row<'a> = &'a [f32];

dispatch! {
    /// Pools one ratio-4 entry of width `w = out.len()`: `before` are the rows of tokens `4j-4 .. 4j` (absent for entry
    /// 0), `own` those of `4j .. 4j+4`. The first half of a row feeds the next entry, the second half its own.
    pub fn pool4(before: Option<[Row; 4]>, own: [Row; 4], out: &mut [f32]) = pool4_body;
}

#[inline(always)]
fn pool4_body<V: Lanes>(before: Option<[Row; 4]>, own: [Row; 4], out: &mut [f32]) {
    let w = out.len();
    for (c, o) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let at = |r: Row, from: usize| V::load(&r[from..].as_chunks::<16>().0[c]);
        // (value, score) of the eight rows; a row of half `h` has its values at h*w and its scores at 2w + h*w.
        let pick = |r: Row, h: usize| (at(r, h * w), at(r, 2 * w + h * w));
        let mut rows = [(V::splat(0.0), V::splat(f32::NEG_INFINITY)); 8];
        if let Some(b) = before {
            for i in 0..4 {
                rows[i] = pick(b[i], 0);
            }
        }
        for i in 0..4 {
            rows[4 + i] = pick(own[i], 1);
        }
        let first = if before.is_some() { 0 } else { 4 };
        let mut m = rows[first].1;
        for r in &rows[first + 1..] {
            m = m.max(r.1);
        }
        let (mut sum, mut acc) = (V::splat(0.0), V::splat(0.0));
        for r in &rows[first..] {
            let p = r.1.sub(m).exp();
            sum = sum.add(p);
            acc = p.fma(r.0, acc);
        }
        acc.div(sum).store(o);
    }
}

/// Running sums of an open ratio-128 group: max, sum and weighted sum per channel, each `w` floats.
pub struct Running<'a> {
    /// Largest score so far.
    pub max: &'a mut [f32],
    /// Sum of `e^(score - max)`.
    pub sum: &'a mut [f32],
    /// Sum of `e^(score - max) * value`.
    pub acc: &'a mut [f32],
}

dispatch! {
    /// Folds one token's row (values, then scores) into the sums. `first` starts a group and overwrites what is there.
    pub fn fold(sums: &mut Running, row: Row, first: bool) = fold_body;
}

#[inline(always)]
fn fold_body<V: Lanes>(sums: &mut Running, row: Row, first: bool) {
    let w = sums.max.len();
    let (values, scores) = (row[..w].as_chunks::<16>().0, row[w..2 * w].as_chunks::<16>().0);
    let m = sums.max.as_chunks_mut::<16>().0;
    let s = sums.sum.as_chunks_mut::<16>().0;
    let a = sums.acc.as_chunks_mut::<16>().0;
    for c in 0..w / 16 {
        let (v, x) = (V::load(&values[c]), V::load(&scores[c]));
        if first {
            x.store(&mut m[c]);
            V::splat(1.0).store(&mut s[c]);
            v.store(&mut a[c]);
            continue;
        }
        let old = V::load(&m[c]);
        let new = old.max(x);
        let (keep, p) = (old.sub(new).exp(), x.sub(new).exp());
        new.store(&mut m[c]);
        V::load(&s[c]).fma(keep, p).store(&mut s[c]);
        V::load(&a[c]).mul(keep).add(p.mul(v)).store(&mut a[c]);
    }
}

dispatch! {
    /// The pooled entry of a complete group.
    pub fn finish(sums: &Running, out: &mut [f32]) = finish_body;
}

#[inline(always)]
fn finish_body<V: Lanes>(sums: &Running, out: &mut [f32]) {
    let (a, s) = (sums.acc.as_chunks::<16>().0, sums.sum.as_chunks::<16>().0);
    for (c, o) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        V::load(&a[c]).div(V::load(&s[c])).store(o);
    }
}

/// Norm and rotation of a pooled vector at `angles` (position `m * j`), in place. The reference rounds between the
/// steps, serving only when the entry is stored.
pub fn entry(u: &mut [f32], norm: &[f32], eps: f32, angles: &Angles, profile: Profile) {
    let mut e = [0.0; 512];
    let e = &mut e[..u.len()];
    let inner = if profile == Profile::Reference { profile } else { Profile::Exact };
    if inner.rounds() {
        round_slice(u);
    }
    rms_norm(u, norm, eps, inner, e);
    angles.rotate(e);
    if inner.rounds() {
        round_slice(e);
    }
    u.copy_from_slice(e);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n: usize, width: usize) -> Vec<Vec<f32>> {
        (0..n).map(|t| (0..width).map(|c| ((t * 31 + c * 7) as f32 * 0.11).sin() * 3.0).collect()).collect()
    }

    #[test]
    fn running_sums_equal_the_softmax() {
        let r = rows(128, 1024);
        let (mut m, mut s, mut a) = (vec![9.0; 512], vec![9.0; 512], vec![9.0; 512]);
        let mut sums = Running { max: &mut m, sum: &mut s, acc: &mut a };
        for (t, row) in r.iter().enumerate() {
            fold(&mut sums, row, t == 0);
        }
        let mut out = vec![0.0; 512];
        finish(&sums, &mut out);
        for ch in 0..512 {
            let top = r.iter().map(|x| f64::from(x[512 + ch])).fold(f64::MIN, f64::max);
            let (mut den, mut num) = (0.0, 0.0);
            for x in &r {
                let p = (f64::from(x[512 + ch]) - top).exp();
                den += p;
                num += p * f64::from(x[ch]);
            }
            assert!((f64::from(out[ch]) - num / den).abs() < 2e-6);
        }
    }

    #[test]
    fn ratio_four_takes_first_halves_of_the_previous_group_and_second_halves_of_its_own() {
        // Width 16: values at 0..32 (halves 0..16, 16..32), scores at 32..64. All scores 0: a plain mean.
        let row = |first: f32, second: f32| {
            let mut r = vec![0.0; 64];
            r[..16].fill(first);
            r[16..32].fill(second);
            r
        };
        let before: Vec<Vec<f32>> = (0..4).map(|i| row(1.0 + i as f32, 1000.0)).collect();
        let own: Vec<Vec<f32>> = (0..4).map(|i| row(-1000.0, 10.0 * (1.0 + i as f32))).collect();
        let b: [Row; 4] = std::array::from_fn(|i| before[i].as_slice());
        let o: [Row; 4] = std::array::from_fn(|i| own[i].as_slice());
        let mut out = [0.0; 16];
        pool4(Some(b), o, &mut out);
        assert!((out[0] - (10.0 + 100.0) / 8.0).abs() < 1e-5);
        // Entry 0: the rows before do not exist, they have weight exactly 0.
        pool4(None, o, &mut out);
        assert!((out[0] - 25.0).abs() < 1e-5);
    }
}
