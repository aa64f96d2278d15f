//! e2m1 (FP4): sign and one of {0, 0.5, 1, 1.5, 2, 3, 4, 6}; two codes per byte, low nibble = even index (model.md 2.5).
//! Nothing is refused: values beyond 6 saturate and NaN becomes 0.

/// Value of every code.
pub static VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Value of a 4-bit code.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[(code & 15) as usize]
}

/// Nearest code of `x`, ties to the even code, clamped to +-6. NaN becomes 0.
#[inline]
pub fn encode(x: f32) -> u8 {
    let a = x.abs();
    // A midpoint belongs to the even of its two codes: 0.25->0, 0.75->1.0, 1.25->1.0, 1.75->2, 2.5->2, 3.5->4, 5->4.
    let code = u8::from(a > 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a > 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a > 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a > 5.0);
    code | if x < 0.0 { 8 } else { 0 }
}

/// The two values of a packed byte: (even index, odd index).
#[inline]
pub fn decode_pair(byte: u8) -> (f32, f32) {
    (decode(byte & 15), decode(byte >> 4))
}

/// Packs the codes of an even and the following odd index.
#[inline]
pub fn pack(even: u8, odd: u8) -> u8 {
    (even & 15) | (odd << 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_a_round_trip() {
        for code in 0..16u8 {
            // Minus zero has a code but nothing encodes to it: the sign of a value that rounds to zero is kept by `<`.
            let expected = if code == 8 { 0 } else { code };
            assert_eq!(encode(decode(code)), expected);
        }
    }

    #[test]
    fn midpoints_go_to_the_even_code() {
        for (x, v) in [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)] {
            assert_eq!(decode(encode(x)), v, "{x}");
            assert_eq!(decode(encode(-x)), -v, "{x}");
            let (up, down) = (f32::from_bits(x.to_bits() + 1), f32::from_bits(x.to_bits() - 1));
            assert!(decode(encode(up)) > decode(encode(down)), "{x}");
        }
        assert_eq!((decode(encode(7.0)), decode(encode(-1e9))), (6.0, -6.0));
        assert_eq!(encode(f32::NAN), 0);
    }

    #[test]
    fn byte_0x2a_holds_minus_one_then_plus_one() {
        assert_eq!(decode_pair(0x2a), (-1.0, 1.0));
        assert_eq!(pack(0xa, 0x2), 0x2a);
    }
}
