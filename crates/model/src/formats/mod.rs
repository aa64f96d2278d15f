//! Number formats of the checkpoint and the cache, bit-exact (model.md section 3.1 and 2.5).
//!
//! All conversions round to nearest, ties to even, and saturate. Scales are powers of two stored as one exponent byte.

pub mod e2m1;
pub mod e4m3;
pub mod ue8m0;

/// bf16 of `x`, round to nearest even, as its 16 bits.
#[inline]
pub fn bf16_bits(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

/// Value of 16 bf16 bits.
#[inline]
pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `x` rounded onto the bf16 grid.
#[inline]
pub fn round_bf16(x: f32) -> f32 {
    // Finite inputs only: adding half of the last kept bit (plus the tie bit) and cutting is round to nearest even.
    let b = x.to_bits();
    let r = b.wrapping_add(0x7fff + ((b >> 16) & 1)) & 0xffff_0000;
    if b & 0x7f80_0000 == 0x7f80_0000 { half::bf16::from_f32(x).to_f32() } else { f32::from_bits(r) }
}
