//! Both ends of the layers: embedding, and the head's mix of the streams with its norm.
//! Assumes a width that is a multiple of 256, up to 8192. A row has the same bits whatever else is in the batch.

use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// The kernels.
pub struct Ends {
    embed: Kernel,
    head: Kernel,
}

/// A head's mix of some rows of the streams; addresses.
#[derive(Debug, Clone, Copy)]
pub struct HeadMix {
    /// bf16 `[_, 4, width]`.
    pub streams: u64,
    /// Which rows, `u32 [count]`; UNMAPPED gives zeros.
    pub rows: u64,
    /// `fn`, float `[4, 4 * width]`.
    pub function: u64,
    /// float `[4]`.
    pub base: u64,
    /// float `[1]`.
    pub scale: u64,
    /// Norm, float `[width]`.
    pub weight: u64,
    /// Results, bf16 `[count, width]`.
    pub out: u64,
    /// Rows.
    pub count: u32,
    /// Model width.
    pub width: u32,
    /// `rms_norm_eps`.
    pub norm_eps: f32,
    /// `hc_eps`.
    pub hc_eps: f32,
}

impl Ends {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Ends, DriverError> {
        let module = Module::load(context, "ends")?;
        Ok(Ends { embed: module.kernel("embed", 0)?, head: module.kernel("head_mix", 0)? })
    }

    /// Streams bf16 `[tokens, 4, width]` of token ids (`u32 [tokens]`, UNMAPPED for a padded one) from a table of bf16
    /// `[vocab, width]`.
    pub fn embed(
        &self,
        stream: &Stream,
        ids: u64,
        table: u64,
        streams: u64,
        width: u32,
        tokens: u32,
    ) -> Result<(), DriverError> {
        if tokens == 0 {
            return Ok(());
        }
        let [ids, table, streams] = [ids, table, streams].map(Argument::Pointer);
        stream.launch(&self.embed, Grid::new(tokens, 256), &[ids, table, streams, width.into()])
    }

    /// Mixes and norms rows of the streams.
    pub fn head(&self, stream: &Stream, h: &HeadMix) -> Result<(), DriverError> {
        assert!(h.width.is_multiple_of(256) && h.width <= 8192, "a head of width {}", h.width);
        if h.count == 0 {
            return Ok(());
        }
        let pointers = [h.streams, h.rows, h.function, h.base, h.scale, h.weight, h.out].map(Argument::Pointer);
        let [streams, rows, function, base, scale, weight, out] = pointers;
        let sizes = [h.width.into(), h.norm_eps.into(), h.hc_eps.into()];
        let arguments = [streams, rows, function, base, scale, weight, out, sizes[0], sizes[1], sizes[2]];
        stream.launch(&self.head, Grid::new(h.count, 256), &arguments)
    }
}
