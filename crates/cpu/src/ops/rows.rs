//! Rows of the cache as bytes inside a page (model.md 11.2), and back.
//!
//! A page of `n` rows first holds the data of all rows, then their scales. Widening what was stored gives exactly the
//! values that the step computes with: a row is rounded once, by storing it.

use longwave_model::formats::{bf16_bits, e2m1, e4m3, ue8m0};
use longwave_model::{IndexFormat, MainFormat};

use crate::dispatch;
use crate::numerics::widen_bf16;
use crate::simd::Lanes;

/// Stores the 512-wide entry `x` as row `slot` of a page of `rows` rows.
pub fn store_main(format: MainFormat, x: &[f32], page: &mut [u8], slot: usize, rows: usize) {
    assert_eq!(x.len(), 512);
    match format {
        MainFormat::Fp8 => {
            let scales = rows * 576 + slot * 8;
            for (g, group) in x[..448].chunks_exact(64).enumerate() {
                let amax = group.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let byte = ue8m0::scale_fp8(amax);
                page[scales + g] = byte;
                let inv = ue8m0::inverse(byte);
                for (o, v) in page[slot * 576 + g * 64..][..64].iter_mut().zip(group) {
                    *o = e4m3::encode(v * inv);
                }
            }
            page[scales + 7] = 0;
            store_bf16(&x[448..], &mut page[slot * 576 + 448..][..128]);
        }
        MainFormat::Bf16 => store_bf16(x, &mut page[slot * 1024..][..1024]),
        MainFormat::F32 => store_f32(x, &mut page[slot * 2048..][..2048]),
    }
}

/// Widens row `slot` of a page of `rows` rows.
pub fn load_main(format: MainFormat, page: &[u8], slot: usize, rows: usize, out: &mut [f32]) {
    match format {
        MainFormat::Fp8 => load_fp8_entry(&page[slot * 576..][..576], &page[rows * 576 + slot * 8..][..8], out),
        MainFormat::Bf16 => widen_bf16(&page[slot * 1024..][..1024], out),
        MainFormat::F32 => load_f32(&page[slot * 2048..][..2048], out),
    }
}

dispatch! {
    fn load_fp8_entry(data: &[u8], scales: &[u8], out: &mut [f32]) = load_fp8_entry_body;
}

#[inline(always)]
fn load_fp8_entry_body<V: Lanes>(data: &[u8], scales: &[u8], out: &mut [f32]) {
    let out = out.as_chunks_mut::<16>().0;
    for (c, x) in data[..448].as_chunks::<16>().0.iter().enumerate() {
        V::load_e4m3(x).mul(V::splat(ue8m0::value(scales[c / 4]))).store(&mut out[c]);
    }
    for (c, x) in data[448..].as_chunks::<32>().0.iter().enumerate() {
        V::load_bf16(x).store(&mut out[28 + c]);
    }
}

/// Stores the 128-wide index key `x` (Hadamard-rotated already where the format asks for it) as row `slot`.
pub fn store_index(format: IndexFormat, x: &[f32], page: &mut [u8], slot: usize, rows: usize) {
    assert_eq!(x.len(), 128);
    match format {
        IndexFormat::Fp4 => {
            for (g, group) in x.chunks_exact(32).enumerate() {
                let byte = ue8m0::scale_fp4(group.iter().fold(0.0f32, |m, v| m.max(v.abs())));
                page[rows * 64 + slot * 4 + g] = byte;
                let s = ue8m0::value(byte);
                for (o, p) in page[slot * 64 + g * 16..][..16].iter_mut().zip(group.chunks_exact(2)) {
                    *o = e2m1::pack(e2m1::encode(p[0] / s), e2m1::encode(p[1] / s));
                }
            }
        }
        IndexFormat::Fp8 => {
            let byte = ue8m0::scale_fp8(x.iter().fold(0.0f32, |m, v| m.max(v.abs())));
            let (s, inv) = (ue8m0::value(byte), ue8m0::inverse(byte));
            page[rows * 128 + slot * 4..][..4].copy_from_slice(&s.to_le_bytes());
            for (o, v) in page[slot * 128..][..128].iter_mut().zip(x) {
                *o = e4m3::encode(v * inv);
            }
        }
        IndexFormat::Bf16 => store_bf16(x, &mut page[slot * 256..][..256]),
        IndexFormat::F32 => store_f32(x, &mut page[slot * 512..][..512]),
    }
}

dispatch! {
    /// Widens `out.len() / 128` keys from row `slot` on.
    pub fn load_index(format: IndexFormat, page: &[u8], slot: usize, rows: usize, out: &mut [f32]) = load_index_body;
}

#[inline(always)]
fn load_index_body<V: Lanes>(format: IndexFormat, page: &[u8], slot: usize, rows: usize, out: &mut [f32]) {
    for (i, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let slot = slot + i;
        let out = out.as_chunks_mut::<16>().0;
        match format {
            IndexFormat::Fp4 => {
                let scales = &page[rows * 64 + slot * 4..][..4];
                for (c, x) in page[slot * 64..][..64].as_chunks::<8>().0.iter().enumerate() {
                    V::load_e2m1(x).mul(V::splat(ue8m0::value(scales[c / 2]))).store(&mut out[c]);
                }
            }
            IndexFormat::Fp8 => {
                let s: [u8; 4] = page[rows * 128 + slot * 4..][..4].try_into().expect("four bytes");
                let s = V::splat(f32::from_le_bytes(s));
                for (c, x) in page[slot * 128..][..128].as_chunks::<16>().0.iter().enumerate() {
                    V::load_e4m3(x).mul(s).store(&mut out[c]);
                }
            }
            IndexFormat::Bf16 => widen_bf16(&page[slot * 256..][..256], out.as_flattened_mut()),
            IndexFormat::F32 => load_f32(&page[slot * 512..][..512], out.as_flattened_mut()),
        }
    }
}

/// Rounds an indexer query head the way keys of `format` are rounded: grid values, in place.
pub fn round_index(format: IndexFormat, x: &mut [f32]) {
    let mut page = [0u8; 512];
    store_index(format, x, &mut page, 0, 1);
    load_index(format, &page, 0, 1, x);
}

fn store_bf16(x: &[f32], out: &mut [u8]) {
    for (o, v) in out.chunks_exact_mut(2).zip(x) {
        o.copy_from_slice(&bf16_bits(*v).to_le_bytes());
    }
}

/// Stores f32 values as bytes.
pub fn store_f32(x: &[f32], out: &mut [u8]) {
    for (o, v) in out.as_chunks_mut::<4>().0.iter_mut().zip(x) {
        *o = v.to_le_bytes();
    }
}

/// Reads f32 values back.
pub fn load_f32(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *o = f32::from_le_bytes(*b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * i) as f32 * 0.013).sin() * (1.0 + (i % 7) as f32)).collect()
    }

    #[test]
    fn main_rows_fill_their_bytes_and_storing_again_changes_nothing() {
        for format in [MainFormat::Fp8, MainFormat::Bf16, MainFormat::F32] {
            let (rows, x) = (2usize, sample(512));
            let mut page = vec![0xee; rows * format.row_bytes() as usize];
            store_main(format, &x, &mut page, 1, rows);
            let mut y = vec![0.0; 512];
            load_main(format, &page, 1, rows, &mut y);
            assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() <= a.abs() * 0.07 + 0.002), "{format:?}");
            let before = page.clone();
            store_main(format, &y, &mut page, 1, rows);
            let mut z = vec![0.0; 512];
            load_main(format, &page, 1, rows, &mut z);
            assert_eq!(y, z, "{format:?}");
            assert_eq!(page[..512], before[..512], "row 0 is untouched");
        }
    }

    #[test]
    fn index_rows_round_to_their_grid() {
        for format in [IndexFormat::Fp4, IndexFormat::Fp8, IndexFormat::Bf16, IndexFormat::F32] {
            let mut x = sample(128);
            let before = x.clone();
            round_index(format, &mut x);
            let once = x.clone();
            round_index(format, &mut x);
            assert_eq!(once, x, "{format:?} is idempotent");
            let worst = before.iter().zip(&x).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let bound = match format {
                IndexFormat::Fp4 => 1.0,
                IndexFormat::Fp8 => 0.3,
                IndexFormat::Bf16 => 0.03,
                IndexFormat::F32 => 0.0,
            };
            assert!(worst <= bound, "{format:?} {worst}");
        }
    }
}
