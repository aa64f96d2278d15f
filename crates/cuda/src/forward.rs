//! The forward pass of a step (model.md 4): lists, embedding, blocks, head; attention is in its own file.
//!
//! Assumes a step that was checked and whose lists are on the GPU. Launches depend on the numbers of tokens, sequences and
//! rows alone, and in long steps on how much their rows see. Every row has the same bits whatever else is in the step. Of several ranks each computes with its own query
//! heads and experts; the outputs of attention and experts are added up, so that all have the same streams.

use longwave_engine::operators::START;
use longwave_model::ModelConfig;
use longwave_model::geometry::CacheKind;

use crate::beside::Beside;
use crate::driver::{Context, DeviceSlice, DriverError, Stream};
use crate::loader::{Plain, Scaled};
use crate::ops::Pages;
use crate::ops::attend::Attend;
use crate::ops::compress::Compress;
use crate::ops::ends::{Ends, HeadMix};
use crate::ops::experts::{BESIDE, ExpertBatch, ExpertWeights, Experts, Sum};
use crate::ops::index::Index;
use crate::ops::keys::Keys;
use crate::ops::linear_bf16::{Bf16Product, LinearBf16};
use crate::ops::linear_fp8::{Fp8Product, LinearFp8};
use crate::ops::mhc::{Mhc, MhcBatch, MhcSite, Output};
use crate::ops::mtp::Mtp;
use crate::ops::quantise::Quantise;
use crate::ops::reduce::Reduce;
use crate::ops::rope::{Angles, Rope};
use crate::ops::router::{Router, Routing};
use crate::pools::Pools;
use crate::scratch::{Codes, Scratch, expert_shape, mhc_shape};
use crate::timers::Timers;
use crate::weights::{Block, Mixer, Moe, Weights};

/// A model whose steps can be launched.
pub struct Model {
    /// Its configuration.
    pub config: ModelConfig,
    /// Weights.
    pub weights: Weights,
    /// Cache.
    pub pools: Pools,
    /// Buffers of a step.
    pub scratch: Scratch,
    pub(crate) ops: Ops,
    /// Set while somebody wants to know where the time goes; then all work is in one stream.
    pub timers: Option<Timers>,
    pub(crate) beside: Option<Beside>,
    /// Adds up over ranks; `None` where there is one.
    pub reduce: Option<Reduce>,
    /// Frequencies of window layers and of compressed ones.
    frequencies: [DeviceSlice<f32>; 2],
}

/// All kernels.
pub(crate) struct Ops {
    pub fp8: LinearFp8,
    pub bf16: LinearBf16,
    pub quantise: Quantise,
    pub mhc: Mhc,
    pub mtp: Mtp,
    pub ends: Ends,
    pub rope: Rope,
    pub keys: Keys,
    pub compress: Compress,
    pub index: Index,
    pub attend: Attend,
    pub router: Router,
    pub experts: Experts,
}

/// Addresses and sizes of a step's lists.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lists {
    /// Rows.
    pub tokens: u32,
    /// [`crate::ops::BatchRow`]s.
    pub rows: u64,
    /// Token ids.
    pub ids: u64,
    /// Rows that close groups of four, as `rows`; those of a replay have no seat.
    pub closing: u64,
    /// Sequences as c128 compressors see them; those of a replay have no seat.
    pub sequences: u64,
    /// How many.
    pub sequence_count: u32,
    /// Rows of the longest.
    pub most_rows: u32,
    /// Entries of a c4 layer that a row sees at most; none where launches must not depend on it.
    pub most_seen: Option<u32>,
    /// Seat and first position of each sequence.
    pub starts: u64,
    /// Attention jobs of one token each; of layer `l` at `jobs + l * job_stride`.
    pub jobs: u64,
    /// See `jobs`; 0 when all layers have the same.
    pub job_stride: u64,
    /// Jobs of several tokens, for layers without picks.
    pub long_jobs: u64,
    /// How many.
    pub long_job_count: u32,
    /// Most tokens of one of these.
    pub long_job_tokens: u32,
    /// Windows are read from the step's own pages.
    pub local: bool,
    /// Window rows are written to these alone.
    pub unstored: bool,
    /// Rows of a replay are among them: state is stored for them and no entry.
    pub replays: bool,
}

impl Model {
    /// Loads the kernels and arranges the experts; steps use one or two `streams`.
    pub fn new(
        context: &Context,
        stream: &Stream,
        config: ModelConfig,
        weights: Weights,
        pools: Pools,
        scratch: Scratch,
        frequencies: [DeviceSlice<f32>; 2],
        streams: u32,
    ) -> Result<Model, DriverError> {
        let (formats, c) = (pools.layout().formats, &config);
        let ops = Ops {
            fp8: LinearFp8::new(context)?,
            bf16: LinearBf16::new(context)?,
            quantise: Quantise::new(context)?,
            mhc: Mhc::new(context)?,
            mtp: Mtp::new(context)?,
            ends: Ends::new(context)?,
            rope: Rope::new(context)?,
            keys: Keys::new(context, formats.main)?,
            compress: Compress::new(context, formats.main, formats.index)?,
            index: Index::new(context, formats.index)?,
            attend: Attend::new(context, formats.main)?,
            router: Router::new(context)?,
            experts: Experts::new(context)?,
        };
        frequencies[0].write(stream, &longwave_model::rope::main(c))?;
        frequencies[1].write(stream, &longwave_model::rope::compressed(c))?;
        let blocks = weights.layers.iter().chain(weights.mtp.as_ref().map(|mtp| &mtp.block));
        for packed in blocks.flat_map(|b| [&b.moe.gate_up, &b.moe.down]) {
            let addresses = [packed.codes.address(), packed.scales.address(), packed.factors.address()];
            ops.experts.repack(stream, addresses, packed.factors.len() as u32, packed.cols)?;
        }
        let beside = (streams > 1).then(|| Beside::new(context)).transpose()?;
        Ok(Model { config, weights, pools, scratch, ops, timers: None, beside, reduce: None, frequencies })
    }

    /// Runs the main layers over the rows of `lists`; the streams are in the scratch afterwards.
    pub fn trunk(&self, stream: &Stream, lists: &Lists) -> Result<(), DriverError> {
        let (s, d) = (&self.scratch, self.config.hidden_size as u32);
        self.mark(stream, START)?;
        for (table, frequencies, ratio) in [(0, 0, 1), (1, 1, 1), (2, 1, 4), (3, 1, 128)] {
            self.angles(stream, lists, table, frequencies, ratio)?;
        }
        let table = self.weights.embed.values.address();
        self.ops.ends.embed(stream, lists.ids, table, s.streams.address(), d, lists.tokens)?;
        self.mark(stream, "angles and embedding")?;
        let layers = &self.weights.layers;
        if let Some(first) = layers.first() {
            self.first(stream, first, &self.mixing(s.streams.address(), lists.tokens))?;
        }
        for (layer, block) in layers.iter().enumerate() {
            self.block(stream, layer, block, layers.get(layer + 1), s.streams.address(), lists)?;
        }
        Ok(())
    }

    /// Fills a table of angles for the rows of `lists`: of window layers (0) or of compressed ones (1).
    pub(crate) fn angles(
        &self,
        stream: &Stream,
        lists: &Lists,
        table: usize,
        frequencies: usize,
        ratio: u32,
    ) -> Result<(), DriverError> {
        let angles = Angles {
            rows: lists.rows,
            frequencies: self.frequencies[frequencies].address(),
            out: self.scratch.angles[table].address(),
            tokens: lists.tokens,
            ratio,
        };
        self.ops.rope.fill(stream, &angles)
    }

    /// Ends an operator, for the timers.
    pub fn mark(&self, stream: &Stream, name: &'static str) -> Result<(), DriverError> {
        self.timers.as_ref().map_or(Ok(()), |timers| timers.mark(stream, name))
    }

    /// Logits float `[count, V]` of rows (address of `u32 [count]`) of the streams.
    pub fn logits(&self, stream: &Stream, rows: u64, count: u32) -> Result<(), DriverError> {
        let w = &self.weights;
        self.logits_of(stream, self.scratch.streams.address(), rows, count, &w.hc_head, &w.norm)
    }

    /// The same of any streams, mixed and normed with these weights.
    pub(crate) fn logits_of(
        &self,
        stream: &Stream,
        streams: u64,
        rows: u64,
        count: u32,
        head: &Mixer,
        norm: &DeviceSlice<f32>,
    ) -> Result<(), DriverError> {
        let (s, w, c) = (&self.scratch, &self.weights, &self.config);
        let mix = HeadMix {
            streams,
            rows,
            function: head.function.address(),
            base: head.base.address(),
            scale: head.scale.address(),
            weight: norm.address(),
            out: s.head_input.address(),
            count,
            width: c.hidden_size as u32,
            norm_eps: c.rms_norm_eps,
            hc_eps: c.hc_eps,
        };
        self.ops.ends.head(stream, &mix)?;
        self.mark(stream, "head mixing")?;
        self.bf16(stream, &w.head, &s.head_input, &s.logits, count)?;
        self.mark(stream, "lm_head")
    }

    /// A product with an e4m3 matrix, in `groups` groups with inputs of their own.
    pub(crate) fn fp8(
        &self,
        stream: &Stream,
        w: &Scaled,
        groups: u32,
        x: &Codes,
        y: &DeviceSlice<f32>,
        t: u32,
    ) -> Result<(), DriverError> {
        let product = Fp8Product {
            w: w.codes.address(),
            w_scales: w.scales.address(),
            x: x.codes.address(),
            x_scales: x.scales.address(),
            y: y.address(),
            rows: w.rows / groups,
            cols: w.cols,
            groups,
            tokens: t,
        };
        self.ops.fp8.launch(stream, &product)
    }

    /// A product with a bf16 matrix.
    pub(crate) fn bf16(
        &self,
        stream: &Stream,
        w: &Plain,
        x: &DeviceSlice<u16>,
        y: &DeviceSlice<f32>,
        t: u32,
    ) -> Result<(), DriverError> {
        self.ops.bf16.launch(stream, &bf16_product(w, x, y, t))
    }

    /// Block `layer` over `streams`, in place, whose first sublayer's input is there: behind `first`, or behind a block that was told
    /// this one as its `next`.
    pub(crate) fn block(
        &self,
        stream: &Stream,
        layer: usize,
        b: &Block,
        next: Option<&Block>,
        streams: u64,
        lists: &Lists,
    ) -> Result<(), DriverError> {
        let mixing = self.mixing(streams, lists.tokens);
        let attended = self.attention(stream, layer, &b.attn, lists)?;
        self.boundary(stream, &b.hc_ffn, &b.ffn_norm, &mixing, attended)?;
        self.experts(stream, b, lists)?;
        let y = self.scratch.output.address();
        match next {
            Some(next) => self.boundary(stream, &next.hc_attn, &next.attn_norm, &mixing, Output::Rounded(y)),
            None => {
                self.ops.mhc.after(stream, &mhc_shape(&self.config), &mixing, y)?;
                self.mark(stream, "mHC after")
            }
        }
    }

    /// Buffers of a mixing site.
    pub(crate) fn mixing(&self, streams: u64, tokens: u32) -> MhcBatch {
        let s = &self.scratch;
        MhcBatch {
            streams,
            partial: s.partial.address(),
            mix: s.mix.address(),
            normed: s.normed.address(),
            codes: s.input.codes.address(),
            scales: s.input.scales.address(),
            tokens,
        }
    }

    /// The input of a block's first sublayer, before which no other was.
    pub(crate) fn first(&self, stream: &Stream, b: &Block, mixing: &MhcBatch) -> Result<(), DriverError> {
        let shape = mhc_shape(&self.config);
        self.ops.mhc.start(stream, &shape, b.hc_attn.function.address(), mixing)?;
        self.ops.mhc.before(stream, &shape, &site(&b.hc_attn, &b.attn_norm), mixing)?;
        self.mark(stream, "mHC before")
    }

    /// From a sublayer's output `y` to the next one's input, `normed` and, quantised, `input`. In one launch for few tokens; in two
    /// while they are timed, and otherwise.
    fn boundary(
        &self,
        stream: &Stream,
        mixer: &Mixer,
        norm: &DeviceSlice<f32>,
        mixing: &MhcBatch,
        y: Output,
    ) -> Result<(), DriverError> {
        let (shape, site) = (mhc_shape(&self.config), site(mixer, norm));
        if self.timers.is_none() && self.ops.mhc.takes(&shape, mixing.tokens) {
            return self.ops.mhc.boundary(stream, &shape, &site, mixing, y);
        }
        self.ops.mhc.next(stream, &shape, site.function, mixing, y)?;
        self.mark(stream, "mHC after")?;
        self.ops.mhc.before(stream, &shape, &site, mixing)?;
        self.mark(stream, "mHC before")
    }

    pub(crate) fn pages(&self, kind: CacheKind, layer: usize) -> Pages {
        self.pools.pages(kind, layer).expect("a layer of this kind has this cache")
    }

    /// From `product` to `output`, added up over ranks and rounded.
    pub(crate) fn sum(&self, stream: &Stream, reduce: &Reduce, t: u32) -> Result<(), DriverError> {
        let (part, out) = (self.scratch.product.address(), self.scratch.output.address());
        reduce.sum(stream, part, out, u64::from(t) * self.config.hidden_size as u64)?;
        self.mark(stream, "sum over ranks")
    }

    /// Experts (model.md 7), from `normed` and `input` to `output`.
    fn experts(&self, stream: &Stream, b: &Block, lists: &Lists) -> Result<(), DriverError> {
        let (s, c, t, moe) = (&self.scratch, &self.config, lists.tokens, &b.moe);
        let (share, shape) = (&self.weights.share, expert_shape(c));
        let (experts, chosen) = (c.n_routed_experts as u32, c.num_experts_per_tok as u32);
        let routing = Routing::at(s.routing.address(), t, experts, chosen).0.with(share.experts(c));
        let weights = ExpertWeights {
            gate_up: moe.gate_up.codes.address(),
            gate_up_scales: moe.gate_up.scales.address(),
            gate_up_factors: moe.gate_up.factors.address(),
            down: moe.down.codes.address(),
            down_scales: moe.down.scales.address(),
            down_factors: moe.down.factors.address(),
            shared_gate_up: moe.shared_gate_up.codes.address(),
            shared_gate_up_scales: moe.shared_gate_up.scales.address(),
            shared_down: moe.shared_down.codes.address(),
            shared_down_scales: moe.shared_down.scales.address(),
            shared_inner: share.shared_columns(c).len() as u32,
        };
        let batch = ExpertBatch {
            x: s.input.codes.address(),
            x_scales: s.input.scales.address(),
            out: match self.reduce {
                Some(_) => Sum::Part(s.product.address()),
                None => Sum::Whole(s.output.address()),
            },
            scratch: s.experts.address(),
        };
        let may = t <= BESIDE;
        self.part(stream, may, |beside| {
            self.ops.experts.shared(beside, &self.ops.fp8, &shape, &weights, &routing, &batch)
        })?;
        self.mark(stream, "shared expert")?;
        self.route(stream, moe, lists, &routing)?;
        self.ops.experts.routed(stream, &shape, &weights, &routing, &batch)?;
        self.meet(stream, may)?;
        self.ops.experts.combine(stream, &shape, &weights, &routing, &batch)?;
        self.mark(stream, "routed experts")?;
        self.reduce.as_ref().map_or(Ok(()), |reduce| self.sum(stream, reduce, t))
    }

    /// Which experts the rows of `normed` go to; "router" is the product alone unless one launch does all of it.
    fn route(&self, stream: &Stream, moe: &Moe, lists: &Lists, to: &Routing) -> Result<(), DriverError> {
        let (s, router, scale) = (&self.scratch, &self.ops.router, self.config.routed_scaling_factor);
        let how = moe.route.choosing();
        let gate = bf16_product(&moe.gate, &s.normed, &s.router, lists.tokens);
        if router.takes_product(&gate, to) {
            router.product_and_route(stream, &gate, lists.ids, how, scale, to)?;
            return self.mark(stream, "router");
        }
        self.ops.bf16.launch(stream, &gate)?;
        self.mark(stream, "router")?;
        router.route(stream, gate.y, lists.ids, how, scale, to)?;
        self.mark(stream, "router choice")
    }
}

/// A mixing site and the norm behind it.
fn site(mixer: &Mixer, norm: &DeviceSlice<f32>) -> MhcSite {
    MhcSite {
        function: mixer.function.address(),
        base: mixer.base.address(),
        scale: mixer.scale.address(),
        weight: norm.address(),
    }
}

/// A product with a bf16 matrix.
pub(crate) fn bf16_product(w: &Plain, x: &DeviceSlice<u16>, y: &DeviceSlice<f32>, t: u32) -> Bf16Product {
    let (rows, cols) = (w.rows, w.cols);
    Bf16Product { w: w.values.address(), x: x.address(), y: y.address(), rows, cols, tokens: t }
}
