//! Rounding between products: float to bf16 and to e4m3 with a scale per 128 values.
//! Assumes sizes that are multiples of 128.

use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// The kernels.
pub struct Quantise {
    groups: Kernel,
}

impl Quantise {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Quantise, DriverError> {
        let module = Module::load(context, "quantise")?;
        Ok(Quantise { groups: module.kernel("quantise", 0)? })
    }

    /// `len` floats at `x`, rounded to bf16 and then to e4m3 at `codes`, with float scales `[len / 128]` at `scales`.
    pub fn quantise(&self, stream: &Stream, x: u64, codes: u64, scales: u64, len: u64) -> Result<(), DriverError> {
        assert!(len.is_multiple_of(128), "groups of 128, not {len} values");
        if len == 0 {
            return Ok(());
        }
        let [x, codes, scales] = [x, codes, scales].map(Argument::Pointer);
        let grid = Grid::new((len / 128).div_ceil(8) as u32, 256);
        stream.launch(&self.groups, grid, &[x, codes, scales, Argument::U64(len / 128)])
    }
}
