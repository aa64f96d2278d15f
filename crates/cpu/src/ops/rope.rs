//! Rotary embedding (model.md 3.3): interleaved pairs in the last 64 channels, tables in f32.
//! Window layers and MTP use the plain table, c4 and c128 layers the YaRN table for every rotation. No mscale anywhere.

use longwave_model::{ModelConfig, rope};

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
    /// For window layers and MTP.
    pub fn main(config: &ModelConfig) -> Frequencies {
        Frequencies(rope::main(config))
    }

    /// For c4 and c128 layers.
    pub fn compressed(config: &ModelConfig) -> Frequencies {
        Frequencies(rope::compressed(config))
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
