//! Linear layers `y = W x` on weights in their stored form (model.md 3.5).
//!
//! FP8 and FP4 weights are widened a few rows at a time: a code times its power-of-two scale is exact in f32, so the
//! block sums of model.md 3.5 need no separate treatment; only their order of addition is ours, and it is fixed.

use std::cell::RefCell;

use longwave_model::checkpoint::Tensor;
use longwave_model::formats::ue8m0;
use longwave_model::tensors::DType;
use rayon::prelude::*;

use super::dots::{row, tile};
use crate::dispatch;
use crate::simd::Lanes;

/// A weight matrix `[rows, cols]` as it is stored.
pub struct Matrix {
    rows: usize,
    cols: usize,
    data: Data,
}

enum Data {
    F32(Vec<f32>),
    Bf16(Tensor),
    /// e4m3 with one scale per 128 x 128 block.
    Fp8 {
        codes: Tensor,
        scales: Vec<f32>,
    },
    /// e2m1 with one ue8m0 byte per 32 columns.
    Fp4 {
        codes: Tensor,
        scales: Tensor,
    },
}

impl Matrix {
    /// A matrix of f32 values, `[rows, cols]`; `cols` is a multiple of 16.
    pub fn from_f32(values: Vec<f32>, rows: usize, cols: usize) -> Matrix {
        assert_eq!(values.len(), rows * cols);
        assert!(cols.is_multiple_of(16));
        Matrix { rows, cols, data: Data::F32(values) }
    }

    /// A bf16 or f32 tensor, used where it lies.
    pub fn plain(t: Tensor) -> Matrix {
        let (rows, cols) = (t.shape[0], t.shape[1]);
        let data = if t.dtype == DType::F32 { Data::F32(t.to_f32()) } else { Data::Bf16(t) };
        assert!(cols.is_multiple_of(16));
        Matrix { rows, cols, data }
    }

    /// An FP8 or FP4 tensor with its scales; which one follows from the dtype.
    pub fn scaled(codes: Tensor, scales: Tensor) -> Matrix {
        let rows = codes.shape[0];
        if codes.dtype == DType::I8 {
            let cols = 2 * codes.shape[1];
            assert_eq!(scales.dtype, DType::F8E8M0, "fp4 experts have ue8m0 scales");
            return Matrix { rows, cols, data: Data::Fp4 { codes, scales } };
        }
        let cols = codes.shape[1];
        let scales = match scales.dtype {
            DType::F8E8M0 => scales.bytes().iter().map(|&b| ue8m0::value(b)).collect(),
            _ => scales.to_f32(),
        };
        Matrix { rows, cols, data: Data::Fp8 { codes, scales } }
    }

    /// `(rows, cols)`.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Bytes that one pass over the weights reads.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(v) => 4 * v.len(),
            Data::Bf16(t) => t.bytes().len(),
            Data::Fp8 { codes, scales } => codes.bytes().len() + 4 * scales.len(),
            Data::Fp4 { codes, scales } => codes.bytes().len() + scales.bytes().len(),
        }
    }

    /// Whether inputs are quantised to FP8 before the product (model.md 2.3).
    pub fn quantises_input(&self) -> bool {
        matches!(self.data, Data::Fp8 { .. } | Data::Fp4 { .. })
    }

    /// Widens row `row` into `out`.
    #[inline(always)]
    pub(crate) fn widen<V: Lanes>(&self, row: usize, out: &mut [f32]) {
        let n = self.cols / 16;
        let out = &mut out.as_chunks_mut::<16>().0[..n];
        // One match per row instead of one per chunk.
        match &self.data {
            Data::F32(v) => out.as_flattened_mut().copy_from_slice(&v[row * self.cols..(row + 1) * self.cols]),
            Data::Bf16(t) => {
                let src = t.bytes()[2 * row * self.cols..2 * (row + 1) * self.cols].as_chunks::<32>().0;
                for (o, s) in out.iter_mut().zip(src) {
                    V::load_bf16(s).store(o);
                }
            }
            Data::Fp8 { codes, scales } => {
                let src = codes.bytes()[row * self.cols..(row + 1) * self.cols].as_chunks::<16>().0;
                let blocks = self.cols.div_ceil(128);
                let scales = &scales[(row / 128) * blocks..][..blocks];
                for (c, (o, s)) in out.iter_mut().zip(src).enumerate() {
                    V::load_e4m3(s).mul(V::splat(scales[c / 8])).store(o);
                }
            }
            Data::Fp4 { codes, scales } => {
                let src = codes.bytes()[row * self.cols / 2..(row + 1) * self.cols / 2].as_chunks::<8>().0;
                let scales = &scales.bytes()[row * self.cols / 32..][..self.cols / 32];
                for (c, (o, s)) in out.iter_mut().zip(src).enumerate() {
                    V::load_e2m1(s).mul(V::splat(ue8m0::value(scales[c / 2]))).store(o);
                }
            }
        }
    }
}

/// Row `row` of an embedding table, widened.
pub fn embed(table: &Matrix, row: usize, out: &mut [f32]) {
    table.widen::<crate::simd::Scalar>(row, out);
}

thread_local! {
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Below this many multiply-adds a product runs on the calling thread.
const SERIAL: usize = 1 << 18;
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
        Data::Fp8 { codes, scales } => {
            let rows = Fp8Rows { v: &codes.bytes()[first * k..], scales, k, first };
            few_rows::<V, _>(x, k, n, out, rows);
        }
        Data::Fp4 { codes, scales } => {
            let rows = Fp4Rows { v: &codes.bytes()[first * k / 2..], scales: &scales.bytes()[first * k / 32..], k };
            few_rows::<V, _>(x, k, n, out, rows);
        }
    }
}

/// Stored rows of one format, sixteen values at a time.
trait StoredRows: Copy {
    /// What one row is read from.
    type Row: Copy;
    fn row(self, i: usize) -> Self::Row;
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V;
}

#[derive(Clone, Copy)]
struct F32Rows<'w> {
    v: &'w [f32],
    k: usize,
}

impl<'w> StoredRows for F32Rows<'w> {
    type Row = &'w [[f32; 16]];
    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        self.v[i * self.k..(i + 1) * self.k].as_chunks::<16>().0
    }
    #[inline(always)]
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V {
        V::load(&row[c])
    }
}

#[derive(Clone, Copy)]
struct Bf16Rows<'w> {
    v: &'w [u8],
    k: usize,
}

impl<'w> StoredRows for Bf16Rows<'w> {
    type Row = &'w [[u8; 32]];
    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        self.v[2 * i * self.k..2 * (i + 1) * self.k].as_chunks::<32>().0
    }
    #[inline(always)]
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V {
        V::load_bf16(&row[c])
    }
}

#[derive(Clone, Copy)]
struct Fp8Rows<'w> {
    v: &'w [u8],
    scales: &'w [f32],
    k: usize,
    first: usize,
}

impl<'w> StoredRows for Fp8Rows<'w> {
    type Row = (&'w [[u8; 16]], &'w [f32]);
    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        let blocks = self.k.div_ceil(128);
        let codes = self.v[i * self.k..(i + 1) * self.k].as_chunks::<16>().0;
        (codes, &self.scales[(self.first + i) / 128 * blocks..][..blocks])
    }
    #[inline(always)]
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V {
        V::load_e4m3(&row.0[c]).mul(V::splat(row.1[c / 8]))
    }
}

#[derive(Clone, Copy)]
struct Fp4Rows<'w> {
    v: &'w [u8],
    scales: &'w [u8],
    k: usize,
}

impl<'w> StoredRows for Fp4Rows<'w> {
    type Row = (&'w [[u8; 8]], &'w [u8]);
    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        let codes = self.v[i * self.k / 2..(i + 1) * self.k / 2].as_chunks::<8>().0;
        (codes, &self.scales[i * self.k / 32..(i + 1) * self.k / 32])
    }
    #[inline(always)]
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V {
        V::load_e2m1(&row.0[c]).mul(V::splat(ue8m0::value(row.1[c / 2])))
    }
}

#[inline(always)]
fn few_rows<V: Lanes, R: StoredRows>(x: &[f32], k: usize, n: usize, out: &mut [f32], stored: R) {
    for block in (0..n).step_by(16) {
        let m = 16.min(n - block);
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
