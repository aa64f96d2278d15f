//! Products of rows: all dot products between two sets of rows, and weighted sums of rows.
//!
//! The value of one product depends on its two rows only: lane `l` accumulates elements `l, l+16, ...` in order with
//! fused multiply-adds, then the lanes are added in the tree of `Lanes::sum`.

use crate::simd::Lanes;

/// Rows of `k` floats (a multiple of 16) as chunks of sixteen.
#[inline(always)]
pub(crate) fn row(x: &[f32], i: usize, k: usize) -> &[[f32; 16]] {
    x[i * k..(i + 1) * k].as_chunks::<16>().0
}

/// One 4 x 4 tile of products, in the order a0b0 a0b1 ... a3b3.
#[inline(always)]
pub(crate) fn tile<V: Lanes>(a: [&[[f32; 16]]; 4], b: [&[[f32; 16]]; 4]) -> [f32; 16] {
    let n = a[0].len();
    let (a, b) = (a.map(|r| &r[..n]), b.map(|r| &r[..n]));
    let mut acc = [V::splat(0.0); 16];
    for i in 0..n {
        let bv = [V::load(&b[0][i]), V::load(&b[1][i]), V::load(&b[2][i]), V::load(&b[3][i])];
        for r in 0..4 {
            let av = V::load(&a[r][i]);
            for c in 0..4 {
                acc[4 * r + c] = bv[c].fma(av, acc[4 * r + c]);
            }
        }
    }
    let mut out = [0.0; 16];
    V::sums(&acc).store(&mut out);
    out
}

/// `out[i * stride + j] = a_i . b_j` for `na` rows of `a` and `nb` rows of `b`, each of `k` floats.
#[inline(always)]
pub(crate) fn products<V: Lanes>(a: &[f32], na: usize, b: &[f32], nb: usize, k: usize, out: &mut [f32], stride: usize) {
    for i in (0..na).step_by(4) {
        // At an edge the last row is computed again and thrown away.
        let ar = std::array::from_fn(|r| row(a, (i + r).min(na - 1), k));
        for j in (0..nb).step_by(4) {
            let br = std::array::from_fn(|c| row(b, (j + c).min(nb - 1), k));
            let t = tile::<V>(ar, br);
            for r in 0..4.min(na - i) {
                let o = (i + r) * stride + j;
                let m = 4.min(nb - j);
                out[o..o + m].copy_from_slice(&t[4 * r..4 * r + m]);
            }
        }
    }
}

/// `acc_i += sum_e p[i * stride + e] * v_e`, entries in ascending order; rows of `acc` and `v` have `k` floats.
#[inline(always)]
pub(crate) fn weighted_sums<V: Lanes>(
    p: &[f32],
    stride: usize,
    rows: usize,
    v: &[f32],
    n: usize,
    k: usize,
    acc: &mut [f32],
) {
    for i in (0..rows).step_by(4) {
        let m = 4.min(rows - i);
        let pr: [&[f32]; 4] = std::array::from_fn(|r| &p[(i + r.min(m - 1)) * stride..][..n]);
        for c in (0..k).step_by(64) {
            let mut s = [[V::splat(0.0); 4]; 4];
            for r in 0..m {
                let chunk = acc[(i + r) * k + c..][..64].as_chunks::<16>().0;
                s[r] = std::array::from_fn(|q| V::load(&chunk[q]));
            }
            for e in 0..n {
                let ve = v[e * k + c..][..64].as_chunks::<16>().0;
                let vv: [V; 4] = std::array::from_fn(|q| V::load(&ve[q]));
                for r in 0..4 {
                    let w = V::splat(pr[r][e]);
                    for q in 0..4 {
                        s[r][q] = w.fma(vv[q], s[r][q]);
                    }
                }
            }
            for r in 0..m {
                let chunk = acc[(i + r) * k + c..][..64].as_chunks_mut::<16>().0;
                for q in 0..4 {
                    s[r][q].store(&mut chunk[q]);
                }
            }
        }
    }
}

/// Sum of squares of a row (a multiple of 16 floats).
#[inline(always)]
pub(crate) fn sum_squares<V: Lanes>(x: &[f32]) -> f32 {
    let mut acc = V::splat(0.0);
    for c in x.as_chunks::<16>().0 {
        let v = V::load(c);
        acc = v.fma(v, acc);
    }
    acc.sum()
}
