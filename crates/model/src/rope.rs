//! Frequencies of the rotary embedding (model.md 3.3), in f32 as the reference computes them.
//! Assumes a checked configuration; refuses nothing.

use crate::ModelConfig;
use crate::config::Yarn;

/// For window layers and MTP: `theta^(-2i/64)` for the 32 pairs.
pub fn main(config: &ModelConfig) -> [f32; 32] {
    base(config.rope_theta)
}

/// For c4 and c128 layers: base `compress_rope_theta` with YaRN at every length.
pub fn compressed(config: &ModelConfig) -> [f32; 32] {
    let b = base(config.compress_rope_theta);
    let Some(y) = config.yarn else { return b };
    let (lo, hi) = ramp(config.compress_rope_theta, y);
    std::array::from_fn(|i| {
        let t = ((i as f32 - lo) / (hi - lo).max(0.001)).clamp(0.0, 1.0);
        b[i] / y.factor as f32 * t + b[i] * (1.0 - t)
    })
}

fn base(theta: f64) -> [f32; 32] {
    std::array::from_fn(|i| 1.0 / (theta as f32).powf(2.0 * i as f32 / 64.0))
}

/// First and last pair of YaRN's ramp, `floor(g(beta_fast))` and `ceil(g(beta_slow))`.
fn ramp(theta: f64, y: Yarn) -> (f32, f32) {
    let g = |r: f64| {
        64.0 * (f64::from(y.original_max_position_embeddings) / (r * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
    };
    (g(y.beta_fast).floor().max(0.0) as f32, g(y.beta_slow).ceil().min(63.0) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn frequencies_are_those_of_the_specification() {
        let close = |got: f32, want: f32| assert!((got - want).abs() <= want * 3e-6, "{got} {want}");
        let (m, c) = (main(&presets::flash()), compressed(&presets::flash()));
        for (i, f) in
            [(0, 1.0), (1, 7.498942e-1), (4, 3.162278e-1), (15, 1.333521e-2), (20, 3.162278e-3), (31, 1.333521e-4)]
        {
            close(m[i], f);
        }
        for (i, f) in [
            (0, 1.0),
            (1, 6.87656e-1),
            (8, 5.0e-2),
            (15, 3.635539e-3),
            (16, 2.265625e-3),
            (18, 8.496897e-4),
            (20, 2.969778e-4),
            (24, 1.953125e-5),
            (25, 5.372313e-6),
            (31, 5.680529e-7),
        ] {
            close(c[i], f);
        }
    }
}
