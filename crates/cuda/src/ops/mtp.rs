//! What surrounds the block of the MTP module (model.md 8): its inputs as e4m3, the streams that enter it, and the streams
//! that are kept between steps.
//!
//! Assumes a width that is a multiple of 128, up to 8192. A row has the same bits whatever else is in the batch.

use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Set in a source that is a seat and not a row of the streams.
pub const KEPT: u32 = 1 << 31;

/// The kernels.
pub struct Mtp {
    input: Kernel,
    streams: Kernel,
    keep: Kernel,
}

/// Inputs of rows; addresses.
#[derive(Debug, Clone, Copy)]
pub struct MtpInput {
    /// `u32 [rows]`: row of `streams`, or [`KEPT`] and a seat; UNMAPPED gives zeros.
    pub sources: u64,
    /// `u32 [rows]`: the token after each source; one beyond the vocabulary gives zeros.
    pub ids: u64,
    /// bf16 `[_, 4, width]`.
    pub streams: u64,
    /// bf16 `[seats, 4, width]`.
    pub kept: u64,
    /// Embedding, bf16 `[vocab, width]`.
    pub table: u64,
    /// `hnorm`, float `[width]`.
    pub stream_norm: u64,
    /// `enorm`, float `[width]`.
    pub embed_norm: u64,
    /// e4m3 `[rows, 4, width]`.
    pub stream_codes: u64,
    /// float `[rows, 4, width / 128]`.
    pub stream_scales: u64,
    /// e4m3 `[rows, width]`.
    pub embed_codes: u64,
    /// float `[rows, width / 128]`.
    pub embed_scales: u64,
    /// Rows.
    pub rows: u32,
    /// Model width.
    pub width: u32,
    /// Vocabulary.
    pub vocab: u32,
    /// `rms_norm_eps`.
    pub eps: f32,
}

impl Mtp {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Mtp, DriverError> {
        let module = Module::load(context, "mtp")?;
        let kernel = |name| module.kernel(name, 0);
        Ok(Mtp { input: kernel("mtp_input")?, streams: kernel("mtp_streams")?, keep: kernel("keep_streams")? })
    }

    /// Norms and quantises the inputs of both projections.
    pub fn input(&self, stream: &Stream, i: &MtpInput) -> Result<(), DriverError> {
        assert!(i.width.is_multiple_of(128) && i.width <= 8192, "a module of width {}", i.width);
        if i.rows == 0 {
            return Ok(());
        }
        let pointers = [
            i.sources,
            i.ids,
            i.streams,
            i.kept,
            i.table,
            i.stream_norm,
            i.embed_norm,
            i.stream_codes,
            i.stream_scales,
            i.embed_codes,
            i.embed_scales,
        ];
        let mut arguments: Vec<Argument> = pointers.map(Argument::Pointer).into();
        arguments.extend([Argument::U32(i.width), Argument::U32(i.vocab), Argument::F32(i.eps)]);
        stream.launch(&self.input, Grid { blocks: [i.rows, 5, 1], ..Grid::new(1, 256) }, &arguments)
    }

    /// Streams bf16 `[rows, 4, width]` at `out` from `h_proj`'s products float `[rows, 4, width]` and `e_proj`'s `[rows,
    /// width]`.
    pub fn streams(
        &self,
        stream: &Stream,
        projected: u64,
        embedded: u64,
        out: u64,
        width: u32,
        rows: u32,
    ) -> Result<(), DriverError> {
        let [projected, embedded, out] = [projected, embedded, out].map(Argument::Pointer);
        let grid = Grid { blocks: [width.div_ceil(1024), rows, 1], ..Grid::new(1, 256) };
        stream.launch(&self.streams, grid, &[projected, embedded, out, width.into()])
    }

    /// Copies rows of `streams` to seats of `kept`: `pairs` are `u32 [n, 2]`, a row of UNMAPPED is none.
    pub fn keep(
        &self,
        stream: &Stream,
        pairs: u64,
        streams: u64,
        kept: u64,
        width: u32,
        n: u32,
    ) -> Result<(), DriverError> {
        if n == 0 {
            return Ok(());
        }
        let [pairs, streams, kept] = [pairs, streams, kept].map(Argument::Pointer);
        let grid = Grid { blocks: [width.div_ceil(512), n, 1], ..Grid::new(1, 256) };
        stream.launch(&self.keep, grid, &[pairs, streams, kept, width.into()])
    }
}
