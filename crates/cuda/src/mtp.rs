//! The MTP module on the GPU (model.md 8): one more block that predicts one token further.
//!
//! A row combines the streams of a position with the embedding of the token after it; its window row depends on these two
//! alone. Assumes a model whose weights have the module. The buffers of the main layers serve here as well: a step is done
//! with them when the module begins.

use crate::driver::{DeviceSlice, DriverError, Stream};
use crate::forward::{Lists, Model};
use crate::ops::mtp::MtpInput;
use crate::weights::Mtp;

/// Rows of the module; addresses.
#[derive(Clone, Copy)]
pub struct MtpRows<'a> {
    /// `u32 [n]`, see [`MtpInput::sources`].
    pub sources: u64,
    /// Streams that they mean, bf16 `[_, 4, D]`.
    pub streams: &'a DeviceSlice<u16>,
    /// Streams of seats, bf16 `[seats, 4, D]`.
    pub kept: &'a DeviceSlice<u16>,
    /// The module's own streams, bf16 `[n, 4, D]`; may be `streams`.
    pub out: &'a DeviceSlice<u16>,
}

impl Model {
    fn module(&self) -> &Mtp {
        self.weights.mtp.as_ref().expect("drafts need the MTP module, which was loaded for them")
    }

    /// The module over the rows of `lists`, whose ids are the tokens after each row; its streams are in `rows.out`.
    pub fn mtp(&self, stream: &Stream, rows: &MtpRows, lists: &Lists) -> Result<(), DriverError> {
        self.angles(stream, lists, 0, 0, 1)?;
        self.mtp_input(stream, rows, lists)?;
        let (block, streams) = (&self.module().block, rows.out.address());
        self.first(stream, block, &self.mixing(streams, lists.tokens))?;
        self.block(stream, self.config.num_hidden_layers, block, None, streams, lists)
    }

    /// Stores the window rows that [`Model::mtp`] would store, bit for bit, and computes little else.
    pub fn mtp_keys(&self, stream: &Stream, rows: &MtpRows, lists: &Lists) -> Result<(), DriverError> {
        let block = &self.module().block;
        self.angles(stream, lists, 0, 0, 1)?;
        self.mtp_input(stream, rows, lists)?;
        let mixing = self.mixing(rows.out.address(), lists.tokens);
        self.first(stream, block, &mixing)?;
        self.keys(stream, self.config.num_hidden_layers, &block.attn, lists)
    }

    /// Logits of rows (address of `u32 [count]`) of the module's streams.
    pub fn mtp_logits(
        &self,
        stream: &Stream,
        streams: &DeviceSlice<u16>,
        rows: u64,
        count: u32,
    ) -> Result<(), DriverError> {
        let mtp = self.module();
        self.logits_of(stream, streams.address(), rows, count, &mtp.hc_head, &mtp.norm)
    }

    /// What enters the block: projections of the token's embedding and of each stream, added.
    fn mtp_input(&self, stream: &Stream, rows: &MtpRows, lists: &Lists) -> Result<(), DriverError> {
        let (s, c, mtp, n) = (&self.scratch, &self.config, self.module(), lists.tokens);
        let width = c.hidden_size as u32;
        let input = MtpInput {
            sources: rows.sources,
            ids: lists.ids,
            streams: rows.streams.address(),
            kept: rows.kept.address(),
            table: self.weights.embed.values.address(),
            stream_norm: mtp.hnorm.address(),
            embed_norm: mtp.enorm.address(),
            stream_codes: s.o.codes.address(),
            stream_scales: s.o.scales.address(),
            embed_codes: s.input.codes.address(),
            embed_scales: s.input.scales.address(),
            rows: n,
            width,
            vocab: c.vocab_size as u32,
            eps: c.rms_norm_eps,
        };
        self.ops.mtp.input(stream, &input)?;
        self.fp8(stream, &mtp.h_proj, 1, &s.o, &s.q_wide, 4 * n)?;
        self.fp8(stream, &mtp.e_proj, 1, &s.input, &s.product, n)?;
        let (projected, embedded) = (s.q_wide.address(), s.product.address());
        self.ops.mtp.streams(stream, projected, embedded, rows.out.address(), width, n)?;
        self.mark(stream, "MTP input")
    }
}
