//! Gumbel noise of a token at a position, as a hash of (seed, position, token), and the two functions it needs.
//!
//! `ln` and `exp` are made of IEEE additions, multiplications and divisions in one order, because the system's library
//! picks code by CPU: the same seed gives the same bits of noise on every machine. They assume normal positive and
//! finite arguments; nothing is refused.

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The noise of one position: a counter-based generator whose counter is the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise(u64);

impl Noise {
    /// Noise of `position` in a request with `seed`.
    pub fn new(seed: u64, position: u32) -> Noise {
        // Two rounds: seeds and positions are small numbers that differ in a few bits.
        Noise(mix(mix(seed.wrapping_add(STEP.wrapping_mul(u64::from(position) + 1)))))
    }

    /// SplitMix64's output number `token`.
    #[inline]
    fn bits(self, token: u32) -> u64 {
        mix(self.0.wrapping_add(STEP.wrapping_mul(u64::from(token) + 1)))
    }

    /// A Gumbel variate, `-ln(-ln u)` with `u` uniform on the 2^52 midpoints of (0, 1).
    pub fn gumbel(self, token: u32) -> f64 {
        let u = ((self.bits(token) >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
        -ln(-ln(u))
    }

    /// A cheap bound: [`Noise::gumbel`] is not larger.
    ///
    /// `-ln u >= 1 - u`, and `1 - u` is at least `2^-(z + 1)` when the inverted bits begin with `z` zeros.
    #[inline]
    pub fn bound(self, token: u32) -> f64 {
        f64::from((!self.bits(token)).leading_zeros() + 1) * (LN_2 + 1e-9)
    }
}

/// SplitMix64's finaliser.
#[inline]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const LN_2: f64 = std::f64::consts::LN_2;
/// What `LN_2` lacks of the logarithm of two.
const LN_2_REST: f64 = 2.319_046_813_846_299_6e-17;

/// 1/3, 1/5, ... of the series of atanh.
const ODD_PARTS: [f64; 11] = {
    let mut c = [0.0; 11];
    let mut k = 0;
    while k < 11 {
        c[k] = 1.0 / (2 * k + 3) as f64;
        k += 1;
    }
    c
};

/// 1/0!, 1/1!, ... of the series of exp.
const FACTORIALS: [f64; 15] = {
    let mut c = [1.0; 15];
    let (mut k, mut product) = (1, 1.0);
    while k < 15 {
        product *= k as f64;
        c[k] = 1.0 / product;
        k += 1;
    }
    c
};

/// Natural logarithm of a normal positive number, to a few units of the last place.
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut e = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        e += 1;
    }
    // ln m = 2 atanh f, |f| <= 0.172.
    let f = (m - 1.0) / (m + 1.0);
    let (f2, mut s) = (f * f, 0.0);
    for c in ODD_PARTS.iter().rev() {
        s = (s + c) * f2;
    }
    e as f64 * LN_2 + (2.0 * f + 2.0 * f * s)
}

/// `e` to the power of `x <= 0`; 0 below -700.
pub fn exp(x: f64) -> f64 {
    if x < -700.0 {
        return 0.0;
    }
    let k = (x / LN_2).round();
    let r = (x - k * LN_2) - k * LN_2_REST;
    let mut s = 0.0;
    for c in FACTORIALS.iter().rev() {
        s = s * r + c;
    }
    s * f64::from_bits(((k as i64 + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_and_exponential_are_those_of_the_library_to_the_last_digits() {
        let mut x = 1e-17f64;
        while x < 1e3 {
            assert!((ln(x) - x.ln()).abs() <= 1e-15 * x.ln().abs().max(0.1), "{x}: {} {}", ln(x), x.ln());
            let y = -x;
            assert!((exp(y) - y.exp()).abs() <= 3e-15 * y.exp() * y.abs().max(1.0) + 1e-300, "{y}");
            x *= 1.000_73;
        }
        let near = 1.0 - f64::EPSILON / 2.0;
        assert!((ln(near) / near.ln() - 1.0).abs() < 1e-15, "no digits are lost beside one");
        assert_eq!((exp(0.0), ln(1.0), exp(-1e4)), (1.0, 0.0, 0.0));
    }

    #[test]
    fn the_noise_is_gumbel_and_bounded() {
        // Mean 0.5772, variance pi^2 / 6; errors of 200,000 draws are about 0.003 and 0.01.
        let (mut sum, mut squares, n) = (0.0, 0.0, 200_000u32);
        for i in 0..n {
            let (noise, token) = (Noise::new(11, i / 500), i % 500);
            let g = noise.gumbel(token);
            assert!(g <= noise.bound(token) && g > -4.0);
            sum += g;
            squares += g * g;
        }
        let mean = sum / f64::from(n);
        assert!((mean - 0.5772).abs() < 0.012, "{mean}");
        let variance = squares / f64::from(n) - mean * mean;
        assert!((variance - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.04, "{variance}");
    }

    #[test]
    fn seed_position_and_token_all_count() {
        let of = |seed, position, token| Noise::new(seed, position).gumbel(token).to_bits();
        let base = of(1, 2, 3);
        assert_eq!(base, of(1, 2, 3));
        assert!([of(2, 2, 3), of(1, 3, 3), of(1, 2, 4), of(2, 1, 3), of(1, 3, 2)].iter().all(|&v| v != base));
        // Another hash would change the tokens of every request: these bits stay.
        assert_eq!(Noise::new(7, 100).bits(5), 8_045_108_094_582_053_221);
        assert!((Noise::new(7, 100).gumbel(5) - 0.186_542_052_153_195_8).abs() < 1e-15);
    }
}
