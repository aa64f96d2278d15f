//! Rotation of a step's rows (model.md 3.3): one table `[T, 64]` of cosines and sines per base and ratio, filled at the
//! start of a step.
//!
//! A table over all positions would have 256 MB per base at one million; a step needs a few rows. Ratio 1 rotates queries
//! and window rows; 4 and 128 rotate the entries that rows end. Refuses nothing.

use longwave_model::ModelConfig;
use longwave_model::config::Yarn;

use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// The kernel that fills tables.
pub struct Rope {
    angles: Kernel,
}

/// One table of a step.
#[derive(Debug, Clone, Copy)]
pub struct Angles {
    /// [`BatchRow`](super::BatchRow)s `[T]`.
    pub rows: u64,
    /// f32 `[32]`: [`main_frequencies`] or [`compressed_frequencies`].
    pub frequencies: u64,
    /// f32 `[T, 64]`: 32 cosines, then 32 sines.
    pub out: u64,
    /// Rows, padded ones included.
    pub tokens: u32,
    /// Row at position `p` is rotated at `p - p % ratio`.
    pub ratio: u32,
}

impl Rope {
    /// Loads the kernel.
    pub fn new(context: &Context) -> Result<Rope, DriverError> {
        Ok(Rope { angles: Module::load(context, "rope")?.kernel("rope_angles", 0)? })
    }

    /// Fills a table; padded rows get the angle 0.
    pub fn fill(&self, stream: &Stream, a: &Angles) -> Result<(), DriverError> {
        let arguments = [
            Argument::Pointer(a.rows),
            Argument::Pointer(a.frequencies),
            Argument::Pointer(a.out),
            a.tokens.into(),
            a.ratio.into(),
        ];
        stream.launch(&self.angles, Grid::new(a.tokens.div_ceil(8), 256), &arguments)
    }
}

/// Frequencies of window layers and MTP: `theta^(-2i/64)`.
pub fn main_frequencies(config: &ModelConfig) -> [f32; 32] {
    base(config.rope_theta)
}

/// Frequencies of c4 and c128 layers: base `compress_rope_theta` with YaRN at every length.
pub fn compressed_frequencies(config: &ModelConfig) -> [f32; 32] {
    let b = base(config.compress_rope_theta);
    let Some(yarn) = config.yarn else { return b };
    let (low, high) = ramp(config.compress_rope_theta, yarn);
    std::array::from_fn(|i| {
        let t = ((i as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        b[i] / yarn.factor as f32 * t + b[i] * (1.0 - t)
    })
}

fn base(theta: f64) -> [f32; 32] {
    std::array::from_fn(|i| 1.0 / (theta as f32).powf(2.0 * i as f32 / 64.0))
}

/// First and last pair of YaRN's ramp, `floor(g(beta_fast))` and `ceil(g(beta_slow))`.
fn ramp(theta: f64, yarn: Yarn) -> (f32, f32) {
    let g = |turns: f64| {
        let trained = f64::from(yarn.original_max_position_embeddings);
        64.0 * (trained / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
    };
    (g(yarn.beta_fast).floor().max(0.0) as f32, g(yarn.beta_slow).ceil().min(63.0) as f32)
}
