//! Rotary embedding (model.md 3.3): interleaved pairs in the last 64 channels, tables in f32.
//! Window layers and MTP use the plain table, c4 and c128 layers the YaRN table for every rotation. No mscale anywhere.

use longwave_model::ModelConfig;
use longwave_model::config::Yarn;

/// Frequencies of the 32 pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct Frequencies([f32; 32]);

/// cos and sin of one position, 32 pairs.
#[derive(Debug, Clone, Copy)]
pub struct Angles {
    cos: [f32; 32],
    sin: [f32; 32],
}

impl Frequencies {
    /// For window layers and MTP: `theta^(-2i/64)`.
    pub fn main(config: &ModelConfig) -> Frequencies {
        Frequencies(base(config.rope_theta))
    }

    /// For c4 and c128 layers: base `compress_rope_theta` with YaRN at every length.
    pub fn compressed(config: &ModelConfig) -> Frequencies {
        let b = base(config.compress_rope_theta);
        let Some(y) = config.yarn else { return Frequencies(b) };
        let (lo, hi) = ramp(config.compress_rope_theta, y);
        Frequencies(std::array::from_fn(|i| {
            let t = ((i as f32 - lo) / (hi - lo).max(0.001)).clamp(0.0, 1.0);
            b[i] / y.factor as f32 * t + b[i] * (1.0 - t)
        }))
    }

    /// Angles of `position`. The product is f32, as in the reference: a double-precision table would differ near one
    /// million positions by up to 0.05 rad.
    pub fn angles(&self, position: u32) -> Angles {
        let mut a = Angles { cos: [0.0; 32], sin: [0.0; 32] };
        for i in 0..32 {
            let (sin, cos) = f64::from(position as f32 * self.0[i]).sin_cos();
            (a.cos[i], a.sin[i]) = (cos as f32, sin as f32);
        }
        a
    }
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

impl Angles {
    /// Rotates the last 64 channels of `head`: `(a, b) -> (a cos - b sin, a sin + b cos)`.
    pub fn rotate(&self, head: &mut [f32]) {
        self.turn(head, 1.0);
    }

    /// Rotates back.
    pub fn rotate_back(&self, head: &mut [f32]) {
        self.turn(head, -1.0);
    }

    fn turn(&self, head: &mut [f32], sign: f32) {
        let tail = head.len() - 64;
        for (i, p) in head[tail..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (c, s) = (self.cos[i], self.sin[i] * sign);
            *p = [p[0] * c - p[1] * s, p[0] * s + p[1] * c];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_model::presets;

    #[test]
    fn frequencies_are_those_of_the_specification() {
        let close = |got: f32, want: f32| assert!((got - want).abs() <= want * 3e-6, "{got} {want}");
        let (m, c) = (Frequencies::main(&presets::flash()).0, Frequencies::compressed(&presets::flash()).0);
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

    #[test]
    fn rotating_back_undoes_and_touches_only_the_tail() {
        let f = Frequencies::compressed(&presets::flash());
        let x: Vec<f32> = (0..512).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut y = x.clone();
        f.angles(12_345).rotate(&mut y);
        assert_eq!(x[..448], y[..448]);
        assert!(x[448..].iter().zip(&y[448..]).any(|(a, b)| (a - b).abs() > 0.1));
        f.angles(12_345).rotate_back(&mut y);
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}
