//! Linear layers `y = W x` on weights in their stored form (model.md 3.5).
//!
//! FP8 and FP4 weights are widened a few rows at a time: a code times its power-of-two scale is exact in f32, so the
//! block sums of model.md 3.5 need no separate treatment; only their order of addition is ours, and it is fixed.

use std::cell::RefCell;

use rayon::prelude::*;

use super::dots::{row, tile};
use super::matrix::{Bf16Rows, Data, F32Rows, Fp4Rows, Fp8Rows, Matrix, StoredRows};
use crate::dispatch;
use crate::simd::{Lanes, prefetch};

/// Row `row` of an embedding table, widened.
pub fn embed(table: &Matrix, row: usize, out: &mut [f32]) {
    table.widen::<crate::simd::Scalar>(row, out);
}

thread_local! {
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Below this many multiply-adds a product runs on the calling thread.
const SERIAL: usize = 1 << 16;
/// Tokens from which weights are widened to f32 once and reused.
const MANY: usize = 8;
/// Rows of a weight block.
const BLOCK: usize = 16;

/// `out[t, o] = W[o] . x[t]` for `t` in 0..tokens and `o` in `rows`; `x` is `[tokens, cols]`, `out` `[tokens, rows.len()]`.
pub fn linear_rows(x: &[f32], w: &Matrix, rows: std::ops::Range<usize>, out: &mut [f32]) {
    let (n, k) = (rows.len(), w.cols);
    let tokens = x.len() / k;
    assert!(x.len() == tokens * k && out.len() == tokens * n && rows.end <= w.rows, "linear: shapes");
    if tokens * n * k <= SERIAL {
        return few_or_many(x, w, rows.start, n, out);
    }
    let threads = rayon::current_num_threads();
    if tokens >= MANY * threads {
        let per = tokens.div_ceil(threads).min(128).next_multiple_of(4);
        out.par_chunks_mut(per * n).zip(x.par_chunks(per * k)).for_each(|(o, x)| few_or_many(x, w, rows.start, n, o));
        return;
    }
    // Few tokens: threads take output rows, so the weights are read once; results are laid out [rows, tokens] first.
    let per = n.div_ceil(4 * threads).next_multiple_of(BLOCK);
    let mut by_row = vec![0.0; n * tokens];
    by_row.par_chunks_mut(per * tokens).enumerate().for_each(|(i, o)| {
        let m = o.len() / tokens;
        if tokens == 1 {
            few(x, w, rows.start + i * per, m, o);
        } else {
            let mut tmp = vec![0.0; o.len()];
            few_or_many(x, w, rows.start + i * per, m, &mut tmp);
            for t in 0..tokens {
                for r in 0..m {
                    o[r * tokens + t] = tmp[t * m + r];
                }
            }
        }
    });
    for t in 0..tokens {
        for r in 0..n {
            out[t * n + r] = by_row[r * tokens + t];
        }
    }
}

/// `y = W x` for every token: `x` `[tokens, cols]`, `out` `[tokens, rows]`.
pub fn linear(x: &[f32], w: &Matrix, out: &mut [f32]) {
    linear_rows(x, w, 0..w.rows, out);
}

fn few_or_many(x: &[f32], w: &Matrix, first: usize, n: usize, out: &mut [f32]) {
    if x.len() / w.cols < MANY {
        few(x, w, first, n, out);
    } else {
        WIDE.with_borrow_mut(|wide| {
            wide.resize(BLOCK * w.cols, 0.0);
            many(x, w, first, n, out, wide);
        });
    }
}

dispatch! {
    fn many(x: &[f32], w: &Matrix, first: usize, n: usize, out: &mut [f32], wide: &mut [f32]) = many_body;
}

#[inline(always)]
fn many_body<V: Lanes>(x: &[f32], w: &Matrix, first: usize, n: usize, out: &mut [f32], wide: &mut [f32]) {
    let k = w.cols;
    let tokens = x.len() / k;
    for block in (0..n).step_by(BLOCK) {
        let m = BLOCK.min(n - block);
        for r in 0..m {
            w.widen::<V>(first + block + r, &mut wide[r * k..(r + 1) * k]);
        }
        for t in (0..tokens).step_by(4) {
            let xr = std::array::from_fn(|i| row(x, (t + i).min(tokens - 1), k));
            for o in (0..m).step_by(4) {
                let wr = std::array::from_fn(|i| row(wide, (o + i).min(m - 1), k));
                let p = tile::<V>(xr, wr);
                let width = 4.min(m - o);
                for i in 0..4.min(tokens - t) {
                    let at = (t + i) * n + block + o;
                    out[at..at + width].copy_from_slice(&p[4 * i..4 * i + width]);
                }
            }
        }
    }
}

dispatch! {
    fn few(x: &[f32], w: &Matrix, first: usize, n: usize, out: &mut [f32]) = few_body;
}

/// One token at a time over eight rows, weights widened in registers. The storage is matched once, outside the loops.
#[inline(always)]
fn few_body<V: Lanes>(x: &[f32], w: &Matrix, first: usize, n: usize, out: &mut [f32]) {
    let k = w.cols;
    match &w.data {
        Data::F32(v) => few_rows::<V, _>(x, k, n, out, F32Rows { v: &v[first * k..], k }),
        Data::Bf16(t) => few_rows::<V, _>(x, k, n, out, Bf16Rows { v: &t.bytes()[2 * first * k..], k }),
        // Blocks of sixteen rows that start at a multiple of sixteen share their scales.
        Data::Fp8 { codes, scales, exact: true } if first.is_multiple_of(16) => {
            few_fp8::<V>(x, k, n, out, &codes.bytes()[first * k..], scales, first);
        }
        Data::Fp8 { codes, scales, .. } => {
            let rows = Fp8Rows { v: &codes.bytes()[first * k..], scales, k, first };
            few_rows::<V, _>(x, k, n, out, rows);
        }
        Data::Fp4 { codes, scales } => {
            let rows = Fp4Rows { v: &codes.bytes()[first * k / 2..], scales: &scales.bytes()[first * k / 32..], k };
            few_rows::<V, _>(x, k, n, out, rows);
        }
    }
}

/// FP8 rows with power-of-two scales: the scale and the 2^8 of `load_e4m3_small` are multiplied into the input once for
/// sixteen rows. Exact, so the bits are those of [`few_rows`].
#[inline(always)]
fn few_fp8<V: Lanes>(x: &[f32], k: usize, n: usize, out: &mut [f32], codes: &[u8], scales: &[f32], first: usize) {
    let blocks = k.div_ceil(128);
    for block in (0..n).step_by(16) {
        let m = 16.min(n - block);
        prefetch(&codes[((block + 16) * k).min(n * k)..((block + 32) * k).min(n * k)]);
        let scales = &scales[(first + block) / 128 * blocks..][..blocks];
        for (t, out) in out.chunks_exact_mut(n).enumerate() {
            let xr = &row(x, t, k)[..k / 16];
            let mut acc = [V::splat(0.0); 16];
            for half in 0..2 {
                // Eight rows at a time keep the accumulators and the addresses in registers.
                let rows: [&[[u8; 16]]; 8] = std::array::from_fn(|i| {
                    let r = block + (8 * half + i).min(m - 1);
                    &codes[r * k..(r + 1) * k].as_chunks::<16>().0[..k / 16]
                });
                let mut a = [V::splat(0.0); 8];
                for (c, xc) in xr.iter().enumerate() {
                    let xv = V::load(xc).mul(V::splat(scales[c / 8] * 256.0));
                    for i in 0..8 {
                        a[i] = V::load_e4m3_small(&rows[i][c]).fma(xv, a[i]);
                    }
                }
                acc[8 * half..8 * half + 8].copy_from_slice(&a);
            }
            let mut p = [0.0; 16];
            V::sums(&acc).store(&mut p);
            out[block..block + m].copy_from_slice(&p[..m]);
        }
    }
}

#[inline(always)]
fn few_rows<V: Lanes, R: StoredRows>(x: &[f32], k: usize, n: usize, out: &mut [f32], stored: R) {
    for block in (0..n).step_by(16) {
        let m = 16.min(n - block);
        prefetch(stored.bytes((block + 16).min(n)..(block + 32).min(n)));
        for (t, out) in out.chunks_exact_mut(n).enumerate() {
            let xr = row(x, t, k);
            let mut acc = [V::splat(0.0); 16];
            for half in 0..2 {
                // Eight rows at a time keep the accumulators and the addresses in registers.
                let rows: [R::Row; 8] = std::array::from_fn(|i| stored.row(block + (8 * half + i).min(m - 1)));
                let mut a = [V::splat(0.0); 8];
                for (c, xc) in xr.iter().enumerate() {
                    let xv = V::load(xc);
                    for i in 0..8 {
                        a[i] = R::chunk::<V>(rows[i], c).fma(xv, a[i]);
                    }
                }
                acc[8 * half..8 * half + 8].copy_from_slice(&a);
            }
            let mut p = [0.0; 16];
            V::sums(&acc).store(&mut p);
            out[block..block + m].copy_from_slice(&p[..m]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_model::Checkpoint;
    use longwave_model::checkpoint::Tensor;
    use longwave_model::formats::{e2m1, e4m3, ue8m0};

    fn numbers(n: usize, seed: u64) -> Vec<f32> {
        let mut s = seed | 1;
        let step = |s: &mut u64| {
            *s ^= *s << 13;
            *s ^= *s >> 7;
            *s ^= *s << 17;
            (*s >> 40) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(|_| step(&mut s)).collect()
    }

    /// A checkpoint is the only source of tensors; this one holds what a test asks for.
    fn tensors(parts: &[(&str, safetensors::Dtype, Vec<usize>, Vec<u8>)]) -> Vec<Tensor> {
        let views = parts
            .iter()
            .map(|(n, d, s, b)| (n.to_string(), safetensors::tensor::TensorView::new(*d, s.clone(), b).unwrap()));
        let bytes: &'static [u8] = safetensors::serialize(views, None).unwrap().leak();
        parts.iter().map(|(n, ..)| Checkpoint::loose_tensor(bytes, n).unwrap()).collect()
    }

    fn check(w: &Matrix, dense: &[f64]) {
        let (rows, cols) = w.shape();
        for tokens in [1, 3, 8, 21, 64] {
            let x = numbers(tokens * cols, 99 + tokens as u64);
            let mut out = vec![f32::NAN; tokens * rows];
            linear(&x, w, &mut out);
            for t in 0..tokens {
                // One token alone has the same bits as in company.
                let mut alone = vec![f32::NAN; rows];
                linear(&x[t * cols..(t + 1) * cols], w, &mut alone);
                assert_eq!(alone, out[t * rows..(t + 1) * rows]);
                for r in 0..rows {
                    let want: f64 = (0..cols).map(|c| dense[r * cols + c] * f64::from(x[t * cols + c])).sum();
                    let size: f64 = (0..cols).map(|c| (dense[r * cols + c] * f64::from(x[t * cols + c])).abs()).sum();
                    assert!((f64::from(out[t * rows + r]) - want).abs() <= size * 1e-6, "{tokens} tokens, row {r}");
                }
            }
        }
    }

    #[test]
    fn fp8_with_power_of_two_and_with_float_scales() {
        let (rows, cols) = (257usize, 384usize);
        let codes: Vec<u8> =
            (0..rows * cols).map(|i| (i * 37 % 256) as u8).map(|c| if c & 0x7f == 0x7f { 0 } else { c }).collect();
        let blocks = rows.div_ceil(128) * 3;
        let bytes: Vec<u8> = (0..blocks).map(|i| 120 + i as u8).collect();
        // Base checkpoints keep float scales; these are no powers of two.
        let floats: Vec<f32> = (0..blocks).map(|i| 0.013 * (i as f32 + 1.0)).collect();
        let t = tensors(&[
            ("codes", safetensors::Dtype::F8_E4M3, vec![rows, cols], codes.clone()),
            ("e8m0", safetensors::Dtype::F8_E8M0, vec![rows.div_ceil(128), 3], bytes.clone()),
            (
                "f32",
                safetensors::Dtype::F32,
                vec![rows.div_ceil(128), 3],
                floats.iter().flat_map(|f| f.to_le_bytes()).collect(),
            ),
        ]);
        let scaled = |s: &dyn Fn(usize) -> f64| -> Vec<f64> {
            (0..rows * cols)
                .map(|i| f64::from(e4m3::decode(codes[i])) * s(i / cols / 128 * 3 + i % cols / 128))
                .collect()
        };
        check(&Matrix::scaled(t[0].clone(), t[1].clone()), &scaled(&|b| f64::from(ue8m0::value(bytes[b]))));
        check(&Matrix::scaled(t[0].clone(), t[2].clone()), &scaled(&|b| f64::from(floats[b])));
    }

    #[test]
    fn packed_fp4_low_nibble_first_with_groups_of_32() {
        let (rows, cols) = (48, 256);
        let packed: Vec<u8> = (0..rows * cols / 2).map(|i| (i * 91 % 256) as u8).collect();
        let scales: Vec<u8> = (0..rows * cols / 32).map(|i| 118 + (i % 11) as u8).collect();
        let t = tensors(&[
            ("codes", safetensors::Dtype::I8, vec![rows, cols / 2], packed.clone()),
            ("scales", safetensors::Dtype::F8_E8M0, vec![rows, cols / 32], scales.clone()),
        ]);
        let dense: Vec<f64> = (0..rows * cols)
            .map(|i| {
                let byte = packed[i / 2];
                let code = if i % 2 == 0 { byte & 15 } else { byte >> 4 };
                f64::from(e2m1::decode(code)) * f64::from(ue8m0::value(scales[i / 32]))
            })
            .collect();
        check(&Matrix::scaled(t[0].clone(), t[1].clone()), &dense);
    }

    #[test]
    fn bf16_and_f32() {
        let (rows, cols) = (33, 128);
        let values = numbers(rows * cols, 5);
        check(&Matrix::from_f32(values.clone(), rows, cols), &values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
        let bits: Vec<u8> = values.iter().flat_map(|v| longwave_model::formats::bf16_bits(*v).to_le_bytes()).collect();
        let t = tensors(&[("w", safetensors::Dtype::BF16, vec![rows, cols], bits)]);
        let rounded: Vec<f64> = values.iter().map(|v| f64::from(longwave_model::formats::round_bf16(*v))).collect();
        check(&Matrix::plain(t[0].clone()), &rounded);
    }
}
