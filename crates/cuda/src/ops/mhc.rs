//! Hyper-connections around a sublayer (model.md 5): `before` it the mix, its input and that quantised, `after` it the
//! streams. Kernels: mhc.cu.

use crate::driver::{Argument, Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};
use crate::scratch::Codes;
use crate::weights::Mixer;

/// Columns of the streams whose partial products one block makes.
const COLUMNS: usize = 512;

/// Floats of partial products that `tokens` tokens need.
pub fn partial_len(tokens: usize, width: usize) -> usize {
    tokens * (4 * width).div_ceil(COLUMNS) * 32
}

/// Kernels.
pub struct Mhc {
    dots: Kernel,
    pre: Kernel,
    post: Kernel,
    /// Added in pre-weights and in Sinkhorn.
    hc_eps: f32,
    /// Of the norms.
    norm_eps: f32,
    /// Column passes of Sinkhorn.
    iters: u32,
}

/// Buffers of `before`.
pub struct Before<'a> {
    /// bf16 `[T, 4, D]`.
    pub streams: &'a DeviceSlice<u16>,
    /// Scratch of [`partial_len`].
    pub partial: &'a DeviceSlice<f32>,
    /// `[T, 20]`, for `after`.
    pub mix: &'a DeviceSlice<f32>,
    /// bf16 `[T, D]`.
    pub normed: &'a DeviceSlice<u16>,
    /// The same quantised.
    pub codes: &'a Codes,
}

impl Mhc {
    /// Loads them.
    pub fn new(context: &Context, hc_eps: f32, norm_eps: f32, iters: u32) -> Result<Mhc, DriverError> {
        let module = Module::load(context, "mhc")?;
        let kernel = |name| module.kernel(name, 0);
        Ok(Mhc {
            dots: kernel("mhc_dots")?,
            pre: kernel("mhc_pre")?,
            post: kernel("mhc_post")?,
            hc_eps,
            norm_eps,
            iters,
        })
    }

    /// The input of a sublayer for `tokens` tokens of `width` columns; `norm` `[D]` is the sublayer's.
    pub fn before(
        &self,
        stream: &Stream,
        b: &Before,
        mixer: &Mixer,
        norm: &DeviceSlice<f32>,
        width: u32,
        tokens: u32,
    ) -> Result<(), DriverError> {
        let blocks = |x: u32, y: u32| Grid { blocks: [x, y, 1], ..Grid::new(1, 256) };
        let arguments: [Argument; 4] = [b.streams.into(), (&mixer.function).into(), b.partial.into(), width.into()];
        stream.launch(&self.dots, blocks(4 * width / COLUMNS as u32, tokens), &arguments)?;
        let arguments: [Argument; 13] = [
            b.streams.into(),
            b.partial.into(),
            (&mixer.base).into(),
            (&mixer.scale).into(),
            norm.into(),
            b.mix.into(),
            b.normed.into(),
            (&b.codes.codes).into(),
            (&b.codes.scales).into(),
            width.into(),
            self.norm_eps.into(),
            self.hc_eps.into(),
            self.iters.into(),
        ];
        stream.launch(&self.pre, blocks(tokens, 1), &arguments)
    }

    /// The streams after the sublayer, whose output `y` is bf16 `[T, D]`.
    pub fn after(
        &self,
        stream: &Stream,
        streams: &DeviceSlice<u16>,
        y: &DeviceSlice<u16>,
        mix: &DeviceSlice<f32>,
        width: u32,
        tokens: u32,
    ) -> Result<(), DriverError> {
        let arguments: [Argument; 4] = [streams.into(), y.into(), mix.into(), width.into()];
        let grid = Grid { blocks: [width.div_ceil(1024), tokens, 1], ..Grid::new(1, 256) };
        stream.launch(&self.post, grid, &arguments)
    }
}
