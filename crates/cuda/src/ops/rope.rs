//! Rotation of a step's rows (model.md 3.3): one table `[T, 64]` of cosines and sines per base and ratio, filled at the
//! start of a step.
//!
//! A table over all positions would have 256 MB per base at one million; a step needs a few rows. Ratio 1 rotates queries
//! and window rows; 4 and 128 rotate the entries that rows end. Refuses nothing.

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
    /// f32 `[32]`: those of `longwave_model::rope`.
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
