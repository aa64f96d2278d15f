//! ue8m0: a power of two as one byte, value `2^(byte - 127)`; scales of groups round *up* (model.md 3.1).
//! Assumes a finite group maximum. Rounding up means that a group never saturates.

/// Smallest group maximum of FP8 groups; the smallest scale exponent is then -22.
pub const FLOOR_FP8: f32 = 1e-4;
/// Smallest group maximum of FP4 groups, `6 * 2^-126`; the smallest byte is then 1.
pub const FLOOR_FP4: f32 = 6.0 * f32::from_bits(1 << 23);

/// Value of `byte`; 255 is NaN, 0 is 2^-127.
#[inline]
pub fn value(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        b => f32::from_bits(u32::from(b) << 23),
    }
}

/// Byte of the smallest power of two `s` with `u <= s`, for a normal positive `u`.
#[inline]
fn ceil_log2_byte(u: f32) -> u8 {
    let b = u.to_bits();
    ((b >> 23) + u32::from(b & 0x7f_ffff != 0)) as u8
}

/// Scale byte of an FP8 group whose largest magnitude is `amax`: `2^ceil(log2(amax / 448))`.
#[inline]
pub fn scale_fp8(amax: f32) -> u8 {
    ceil_log2_byte(amax.max(FLOOR_FP8) * (1.0 / 448.0))
}

/// Scale byte of an FP4 group whose largest magnitude is `amax`: `2^ceil(log2(amax / 6))`.
#[inline]
pub fn scale_fp4(amax: f32) -> u8 {
    ceil_log2_byte(amax.max(FLOOR_FP4) * (1.0 / 6.0))
}

/// `1 / value(byte)` for bytes 1..=253, exact; 0 for the bytes of infinite groups, so that nothing overflows.
#[inline]
pub fn inverse(byte: u8) -> f32 {
    f32::from_bits(254u32.saturating_sub(u32::from(byte)) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_vectors_of_the_specification() {
        let fp8 = |a: f32| i32::from(scale_fp8(a)) - 127;
        for (a, e) in [
            (1e-4, -22),
            (0.875, -9),
            (1.0, -8),
            (1.75, -8),
            (3.5, -7),
            (7.0, -6),
            (7.03125, -5),
            (447.0, 0),
            (448.0, 0),
            (449.0, 1),
        ] {
            assert_eq!(fp8(a), e, "amax {a}");
        }
        let fp4 = |a: f32| i32::from(scale_fp4(a)) - 127;
        for (a, e) in [(0.75, -3), (1.0, -2), (1.5, -2), (3.0, -1), (5.96875, 0), (6.0, 0), (6.03125, 1)] {
            assert_eq!(fp4(a), e, "amax {a}");
        }
        assert_eq!((scale_fp8(0.0), scale_fp4(0.0)), (127 - 22, 1));
    }

    #[test]
    fn every_byte_is_its_power_of_two() {
        for b in 0..255u8 {
            assert_eq!(f64::from(value(b)), 2f64.powi(i32::from(b) - 127));
        }
        for b in 1..=253u8 {
            assert_eq!(value(b) * inverse(b), 1.0);
        }
        assert!(value(255).is_nan());
    }

    #[test]
    fn scales_round_up_so_that_nothing_saturates() {
        let mut a = 1e-4f32;
        while a < 1e6 {
            let s = value(scale_fp8(a));
            assert!(a / s <= 448.0 && a / s > 224.0 - 1e-3, "{a}");
            a *= 1.013;
        }
    }
}
