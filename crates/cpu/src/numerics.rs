//! Which intermediate values are rounded: the profiles of model.md 0.3 and one without any rounding.
//! Assumes finite values; scales come from `longwave_model::formats`, whose tables these roundings equal.

use longwave_model::formats::{bf16_value, round_bf16, ue8m0};

/// Rounding profile. Weights, masks, selection rules and positions are the same in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// f32 everywhere, no activation quantisation: agrees with an f32 reference to 1e-5.
    Exact,
    /// R: the released reference program's roundings.
    Reference,
    /// S: what GPU serving does (fp8 `wo_a`, fewer roundings between fused steps).
    Serving,
}

impl Profile {
    /// Parses the command-line spelling.
    pub fn by_name(name: &str) -> Option<Profile> {
        match name {
            "exact" => Some(Profile::Exact),
            "reference" | "r" => Some(Profile::Reference),
            "serving" | "s" => Some(Profile::Serving),
            _ => None,
        }
    }

    /// Whether tensors between ops are bf16.
    pub fn rounds(self) -> bool {
        self != Profile::Exact
    }

    /// Rounds a tensor between ops to bf16, or leaves it.
    #[inline]
    pub fn round(self, x: &mut [f32]) {
        if self.rounds() {
            round_slice(x);
        }
    }
}

/// Rounds finite values to bf16.
#[inline]
pub fn round_slice(x: &mut [f32]) {
    for v in x {
        *v = round_bf16(*v);
    }
}

/// `v` on the e4m3 grid, for |v| <= 448; branch-free so that loops over it vectorise. Same values as
/// `longwave_model::formats::e4m3::round`.
#[inline(always)]
pub fn round_e4m3(v: f32) -> f32 {
    let b = v.to_bits();
    let coarse = f32::from_bits((b.wrapping_add(0x7ffff + ((b >> 20) & 1))) & 0xfff0_0000);
    // 2^14 has last bit 2^-9, the subnormal step of e4m3.
    let a = f32::from_bits(b & 0x7fff_ffff);
    let fine = (a + 16384.0) - 16384.0;
    let fine = f32::from_bits(fine.to_bits() | (b & 0x8000_0000));
    if a < 1.0 / 64.0 { fine } else { coarse }
}

crate::dispatch! {
    /// Quantises one group of activations to e4m3 with a power-of-two scale and back (model.md 3.1), in place.
    pub fn fake_fp8_group(x: &mut [f32]) = fake_fp8_group_body;
}

#[inline(always)]
fn fake_fp8_group_body<V: crate::simd::Lanes>(x: &mut [f32]) {
    let mut top = V::splat(0.0);
    for c in x.as_chunks::<16>().0 {
        top = top.max(V::load(c).abs());
    }
    let byte = ue8m0::scale_fp8(top.max_lane());
    let (s, inv) = (ue8m0::value(byte), ue8m0::inverse(byte));
    for v in x {
        *v = round_e4m3((*v * inv).clamp(-448.0, 448.0)) * s;
    }
}

/// Widens little-endian bf16 bytes.
#[inline]
pub fn widen_bf16(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *o = bf16_value(u16::from_le_bytes([b[0], b[1]]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_model::formats::e4m3;

    #[test]
    fn the_branch_free_rounding_is_the_table_rounding() {
        let mut x = 1e-6f32;
        while x <= 448.0 {
            assert_eq!(round_e4m3(x), e4m3::round(x), "{x}");
            assert_eq!(round_e4m3(-x), e4m3::round(-x), "{x}");
            x *= 1.000_37;
        }
        for code in 0..0x7eu8 {
            let mid = (e4m3::decode(code) + e4m3::decode(code + 1)) / 2.0;
            assert_eq!(round_e4m3(mid), e4m3::round(mid));
        }
    }
}
