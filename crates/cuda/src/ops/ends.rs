//! The two ends of the model (model.md 4): embeddings into the streams, streams into the input of the head. Kernels: ends.cu.
//! Assumes token ids below the vocabulary and rows of the batch; refuses nothing.

use crate::driver::{Argument, Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};
use crate::weights::Mixer;

/// Kernels.
pub struct Ends {
    embed: Kernel,
    collapse: Kernel,
    hc_eps: f32,
    norm_eps: f32,
}

impl Ends {
    /// Loads them.
    pub fn new(context: &Context, hc_eps: f32, norm_eps: f32) -> Result<Ends, DriverError> {
        let module = Module::load(context, "ends")?;
        Ok(Ends { embed: module.kernel("embed", 0)?, collapse: module.kernel("collapse", 0)?, hc_eps, norm_eps })
    }

    /// Streams bf16 `[T, 4, D]` of tokens (address of `u32 [T]`) from the table bf16 `[V, D]`.
    pub fn embed(
        &self,
        stream: &Stream,
        table: &DeviceSlice<u16>,
        tokens: u64,
        streams: &DeviceSlice<u16>,
        width: u32,
        count: u32,
    ) -> Result<(), DriverError> {
        let arguments: [Argument; 4] = [table.into(), Argument::Pointer(tokens), streams.into(), width.into()];
        stream.launch(&self.embed, Grid::new(count, 256), &arguments)
    }

    /// Normalised inputs of the head, bf16 `[n, D]`, of `count` rows (address of `u32 [n]`) of the streams.
    pub fn collapse(
        &self,
        stream: &Stream,
        streams: &DeviceSlice<u16>,
        rows: u64,
        mixer: &Mixer,
        norm: &DeviceSlice<f32>,
        out: &DeviceSlice<u16>,
        width: u32,
        count: u32,
    ) -> Result<(), DriverError> {
        let arguments: [Argument; 10] = [
            streams.into(),
            Argument::Pointer(rows),
            (&mixer.function).into(),
            (&mixer.base).into(),
            (&mixer.scale).into(),
            norm.into(),
            out.into(),
            width.into(),
            self.norm_eps.into(),
            self.hc_eps.into(),
        ];
        stream.launch(&self.collapse, Grid::new(count, 256), &arguments)
    }
}
