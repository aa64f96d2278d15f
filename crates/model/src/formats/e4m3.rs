//! e4m3fn: 1 sign, 4 exponent, 3 mantissa bits, bias 7, largest value 448, no infinity, one NaN code per sign.
//! Nothing is refused: values beyond 448, infinities included, saturate; NaN stays NaN.

/// Largest finite value.
pub const MAX: f32 = 448.0;

/// Value of every code.
pub static VALUES: [f32; 256] = {
    let mut table = [0.0f32; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = value_of(code as u8);
        code += 1;
    }
    table
};

const fn value_of(code: u8) -> f32 {
    let (sign, exp, man) = (code >> 7, (code >> 3) & 15, code & 7);
    if exp == 15 && man == 7 {
        return f32::NAN;
    }
    // 2^(exp-7) * (1 + man/8), or man * 2^-9 below the normal range; both are exact in f32.
    let magnitude = if exp == 0 {
        man as f32 * f32::from_bits((127 - 9) << 23)
    } else {
        f32::from_bits((exp as u32 + 120) << 23 | (man as u32) << 20)
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// Value of `code`.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[code as usize]
}

/// Nearest code of `x`, ties to even, clamped to +-448; NaN stays NaN.
#[inline]
pub fn encode(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let sign = ((x.to_bits() >> 31) as u8) << 7;
    let a = x.abs().min(MAX);
    // Below 2^-6 the step is 2^-9: adding and subtracting 2^14 (whose last bit is 2^-9) rounds to it, ties to even.
    if a < f32::from_bits((127 - 6) << 23) {
        let magic = 16384.0f32;
        return sign | (((a + magic) - magic) * 512.0) as u8;
    }
    // Keep 3 mantissa bits: round the f32 bits at position 20.
    let b = a.to_bits();
    let r = b + 0x7ffff + ((b >> 20) & 1);
    let code = (r >> 20) - (120 << 3);
    sign | code.min(0x7e) as u8
}

/// `x` rounded onto the e4m3 grid.
#[inline]
pub fn round(x: f32) -> f32 {
    decode(encode(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nearest by exhaustive search over all finite codes, ties to the even code.
    fn nearest(x: f32) -> u8 {
        let a = x.abs().min(MAX);
        let best = (0..0x7fu8).min_by(|&p, &q| {
            let (dp, dq) = ((f64::from(decode(p)) - f64::from(a)).abs(), (f64::from(decode(q)) - f64::from(a)).abs());
            dp.total_cmp(&dq).then((p & 1).cmp(&(q & 1)))
        });
        best.unwrap() | if x.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn every_code_survives_a_round_trip() {
        for code in 0..=255u8 {
            if code & 0x7f == 0x7f {
                assert!(decode(code).is_nan());
            } else {
                assert_eq!(encode(decode(code)), code, "code {code:#x}");
            }
        }
        assert_eq!((decode(0x7e), decode(0x01), decode(0x08)), (448.0, 1.0 / 512.0, 1.0 / 64.0));
    }

    #[test]
    fn rounding_is_nearest_even_at_and_around_every_midpoint() {
        for code in 0..0x7eu8 {
            let mid = (decode(code) + decode(code + 1)) / 2.0;
            for x in [mid, f32::from_bits(mid.to_bits() + 1), f32::from_bits(mid.to_bits() - 1)] {
                assert_eq!(encode(x), nearest(x), "{x}");
                assert_eq!(encode(-x), nearest(-x), "{x}");
            }
        }
        assert_eq!((encode(449.0), encode(1e9), encode(-1e9), encode(f32::INFINITY)), (0x7e, 0x7e, 0xfe, 0x7e));
        assert!(decode(encode(f32::NAN)).is_nan());
    }

    #[test]
    fn a_dense_sweep_equals_the_search() {
        let mut x = 1e-5f32;
        while x < 500.0 {
            assert_eq!(encode(x), nearest(x), "{x}");
            x *= 1.0009;
        }
    }
}
