//! Products on their way into the next matrix: rounded to bf16, or quantised per 128 (model.md 3.1). Kernels: quantise.cu.
//! Assumes a multiple of 128 values; refuses nothing.

use crate::driver::{Argument, Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};
use crate::scratch::Codes;

/// Kernels.
pub struct Quantise {
    quantise: Kernel,
    narrow: Kernel,
}

impl Quantise {
    /// Loads them.
    pub fn new(context: &Context) -> Result<Quantise, DriverError> {
        let module = Module::load(context, "quantise")?;
        Ok(Quantise { quantise: module.kernel("quantise", 0)?, narrow: module.kernel("narrow", 0)? })
    }

    /// `values` floats, a multiple of 128, rounded to bf16 and quantised.
    pub fn codes(&self, stream: &Stream, x: &DeviceSlice<f32>, out: &Codes, values: u32) -> Result<(), DriverError> {
        let groups = values / 128;
        let arguments: [Argument; 4] = [x.into(), (&out.codes).into(), (&out.scales).into(), groups.into()];
        stream.launch(&self.quantise, Grid::new(groups.div_ceil(8), 256), &arguments)
    }

    /// `values` floats, a multiple of 128, rounded to bf16.
    pub fn bf16(
        &self,
        stream: &Stream,
        x: &DeviceSlice<f32>,
        out: &DeviceSlice<u16>,
        values: u32,
    ) -> Result<(), DriverError> {
        let groups = values / 128;
        let arguments: [Argument; 3] = [x.into(), out.into(), groups.into()];
        stream.launch(&self.narrow, Grid::new(groups.div_ceil(8), 256), &arguments)
    }
}
