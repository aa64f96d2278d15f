//! Weight matrices in their stored form: f32, bf16, FP8 with block scales, packed FP4 with group scales.
//!
//! Assumes shapes and dtypes that the checkpoint has checked. Widening a code times its scale is exact in f32 for
//! power-of-two scales and rounds once for the float scales of Base checkpoints.

use longwave_model::checkpoint::Tensor;
use longwave_model::formats::ue8m0;
use longwave_model::tensors::DType;

use crate::simd::Lanes;

/// A weight matrix `[rows, cols]` as it is stored.
pub struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Data,
}

pub(super) enum Data {
    F32(Vec<f32>),
    Bf16(Tensor),
    /// e4m3 with one scale per 128 x 128 block.
    Fp8 {
        codes: Tensor,
        scales: Vec<f32>,
        /// All scales are powers of two: a product may be scaled on either side without changing a bit.
        exact: bool,
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
        let exact = scales.dtype == DType::F8E8M0;
        let scales = match exact {
            true => scales.bytes().iter().map(|&b| ue8m0::value(b)).collect(),
            false => scales.to_f32(),
        };
        Matrix { rows, cols, data: Data::Fp8 { codes, scales, exact } }
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
            Data::Fp8 { codes, scales, .. } => codes.bytes().len() + 4 * scales.len(),
            Data::Fp4 { codes, scales } => codes.bytes().len() + scales.bytes().len(),
        }
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
            Data::Fp8 { codes, scales, .. } => {
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

/// Stored rows of one format, sixteen values at a time.
pub(super) trait StoredRows: Copy {
    /// What one row is read from.
    type Row: Copy;
    fn row(self, i: usize) -> Self::Row;
    /// The codes of some rows, to be prefetched; may be empty.
    fn bytes(&self, rows: std::ops::Range<usize>) -> &[u8];
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V;
}

#[derive(Clone, Copy)]
pub(super) struct F32Rows<'w> {
    pub v: &'w [f32],
    pub k: usize,
}

impl<'w> StoredRows for F32Rows<'w> {
    type Row = &'w [[f32; 16]];
    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        self.v[i * self.k..(i + 1) * self.k].as_chunks::<16>().0
    }
    #[inline(always)]
    fn bytes(&self, _: std::ops::Range<usize>) -> &[u8] {
        &[]
    }
    #[inline(always)]
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V {
        V::load(&row[c])
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bf16Rows<'w> {
    pub v: &'w [u8],
    pub k: usize,
}

impl<'w> StoredRows for Bf16Rows<'w> {
    type Row = &'w [[u8; 32]];
    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        self.v[2 * i * self.k..2 * (i + 1) * self.k].as_chunks::<32>().0
    }
    #[inline(always)]
    fn bytes(&self, rows: std::ops::Range<usize>) -> &[u8] {
        &self.v[2 * rows.start * self.k..2 * rows.end * self.k]
    }
    #[inline(always)]
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V {
        V::load_bf16(&row[c])
    }
}

#[derive(Clone, Copy)]
pub(super) struct Fp8Rows<'w> {
    pub v: &'w [u8],
    pub scales: &'w [f32],
    pub k: usize,
    pub first: usize,
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
    fn bytes(&self, rows: std::ops::Range<usize>) -> &[u8] {
        &self.v[rows.start * self.k..rows.end * self.k]
    }
    #[inline(always)]
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V {
        V::load_e4m3(&row.0[c]).mul(V::splat(row.1[c / 8]))
    }
}

#[derive(Clone, Copy)]
pub(super) struct Fp4Rows<'w> {
    pub v: &'w [u8],
    pub scales: &'w [u8],
    pub k: usize,
}

impl<'w> StoredRows for Fp4Rows<'w> {
    type Row = (&'w [[u8; 8]], &'w [u8]);
    #[inline(always)]
    fn row(self, i: usize) -> Self::Row {
        let codes = self.v[i * self.k / 2..(i + 1) * self.k / 2].as_chunks::<8>().0;
        (codes, &self.scales[i * self.k / 32..(i + 1) * self.k / 32])
    }
    #[inline(always)]
    fn bytes(&self, rows: std::ops::Range<usize>) -> &[u8] {
        &self.v[rows.start * self.k / 2..rows.end * self.k / 2]
    }
    #[inline(always)]
    fn chunk<V: Lanes>(row: Self::Row, c: usize) -> V {
        V::load_e2m1(&row.0[c]).mul(V::splat(ue8m0::value(row.1[c / 2])))
    }
}
