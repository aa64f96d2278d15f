//! The forward pass of a step (model.md 4) on one stream: lists, embedding, blocks, head.
//!
//! Assumes a step that was checked and whose lists are on the GPU. Launches depend on the numbers of tokens, sequences and
//! rows alone. Every row has the same bits whatever else is in the step.

use longwave_model::ModelConfig;
use longwave_model::config::LayerKind;
use longwave_model::geometry::CacheKind;

use crate::driver::{Context, DeviceSlice, DriverError, Stream};
use crate::loader::{Plain, Scaled};
use crate::ops::Pages;
use crate::ops::attend::{Attend, Attention as Core, Entries};
use crate::ops::compress::{Compress, Compressor as Closing};
use crate::ops::ends::{Ends, HeadMix};
use crate::ops::experts::{ExpertBatch, ExpertWeights, Experts};
use crate::ops::index::{Index, Queries, Selection};
use crate::ops::keys::{Gather, Heads, Keys, Projected};
use crate::ops::linear_bf16::{Bf16Product, LinearBf16};
use crate::ops::linear_fp8::{Fp8Product, LinearFp8};
use crate::ops::mhc::{Mhc, MhcBatch, MhcSite};
use crate::ops::quantise::Quantise;
use crate::ops::rope::{Angles, Rope};
use crate::ops::router::{Choosing, Router, Routing};
use crate::pools::Pools;
use crate::scratch::{Codes, Scratch, expert_shape, mhc_shape};
use crate::timers::{START, Timers};
use crate::weights::{Attention, Block, Mixer, Route, Weights};

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
    ops: Ops,
    /// Set while somebody wants to know where the time goes.
    pub timers: Option<Timers>,
    /// Frequencies of window layers and of compressed ones.
    frequencies: [DeviceSlice<f32>; 2],
}

/// All kernels.
struct Ops {
    fp8: LinearFp8,
    bf16: LinearBf16,
    quantise: Quantise,
    mhc: Mhc,
    ends: Ends,
    rope: Rope,
    keys: Keys,
    compress: Compress,
    index: Index,
    attend: Attend,
    router: Router,
    experts: Experts,
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
    /// Rows of a replay are among them: state is stored for them and no entry.
    pub replays: bool,
}

impl Model {
    /// Loads the kernels and arranges the experts.
    pub fn new(
        context: &Context,
        stream: &Stream,
        config: ModelConfig,
        weights: Weights,
        pools: Pools,
        scratch: Scratch,
        frequencies: [DeviceSlice<f32>; 2],
    ) -> Result<Model, DriverError> {
        let (formats, c) = (pools.layout().formats, &config);
        let ops = Ops {
            fp8: LinearFp8::new(context)?,
            bf16: LinearBf16::new(context)?,
            quantise: Quantise::new(context)?,
            mhc: Mhc::new(context)?,
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
        for codes in weights.layers.iter().flat_map(|b| [&b.moe.gate_up.codes, &b.moe.down.codes]) {
            ops.experts.repack(stream, codes.address(), codes.len() as u64)?;
        }
        Ok(Model { config, weights, pools, scratch, ops, timers: None, frequencies })
    }

    /// Runs the main layers over the rows of `lists`; the streams are in the scratch afterwards.
    pub fn trunk(&self, stream: &Stream, lists: &Lists) -> Result<(), DriverError> {
        let (s, d) = (&self.scratch, self.config.hidden_size as u32);
        self.mark(stream, START)?;
        for (table, frequencies, ratio) in [(0, 0, 1), (1, 1, 1), (2, 1, 4), (3, 1, 128)] {
            let angles = Angles {
                rows: lists.rows,
                frequencies: self.frequencies[frequencies].address(),
                out: s.angles[table].address(),
                tokens: lists.tokens,
                ratio,
            };
            self.ops.rope.fill(stream, &angles)?;
        }
        let table = self.weights.embed.values.address();
        self.ops.ends.embed(stream, lists.ids, table, s.streams.address(), d, lists.tokens)?;
        self.mark(stream, "angles and embedding")?;
        for (layer, block) in self.weights.layers.iter().enumerate() {
            self.block(stream, layer, block, lists)?;
        }
        Ok(())
    }

    /// Ends an operator, for the timers.
    pub fn mark(&self, stream: &Stream, name: &'static str) -> Result<(), DriverError> {
        self.timers.as_ref().map_or(Ok(()), |timers| timers.mark(stream, name))
    }

    /// Logits float `[count, V]` of rows (address of `u32 [count]`) of the streams.
    pub fn logits(&self, stream: &Stream, rows: u64, count: u32) -> Result<(), DriverError> {
        let (s, w, c) = (&self.scratch, &self.weights, &self.config);
        let mix = HeadMix {
            streams: s.streams.address(),
            rows,
            function: w.hc_head.function.address(),
            base: w.hc_head.base.address(),
            scale: w.hc_head.scale.address(),
            weight: w.norm.address(),
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
    fn fp8(
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
    fn bf16(
        &self,
        stream: &Stream,
        w: &Plain,
        x: &DeviceSlice<u16>,
        y: &DeviceSlice<f32>,
        t: u32,
    ) -> Result<(), DriverError> {
        let (rows, cols) = (w.rows, w.cols);
        let product = Bf16Product { w: w.values.address(), x: x.address(), y: y.address(), rows, cols, tokens: t };
        self.ops.bf16.launch(stream, &product)
    }

    fn block(&self, stream: &Stream, layer: usize, b: &Block, lists: &Lists) -> Result<(), DriverError> {
        let (t, shape, y) = (lists.tokens, mhc_shape(&self.config), self.scratch.output.address());
        self.before(stream, &b.hc_attn, &b.attn_norm, t)?;
        self.attention(stream, layer, &b.attn, lists)?;
        self.ops.mhc.after(stream, &shape, &self.mixing(t), y)?;
        self.mark(stream, "mHC after")?;
        self.before(stream, &b.hc_ffn, &b.ffn_norm, t)?;
        self.experts(stream, b, lists)?;
        self.ops.mhc.after(stream, &shape, &self.mixing(t), y)?;
        self.mark(stream, "mHC after")
    }

    /// Buffers of a mixing site.
    fn mixing(&self, tokens: u32) -> MhcBatch {
        let s = &self.scratch;
        MhcBatch {
            streams: s.streams.address(),
            partial: s.partial.address(),
            mix: s.mix.address(),
            normed: s.normed.address(),
            codes: s.input.codes.address(),
            scales: s.input.scales.address(),
            tokens,
        }
    }

    /// A sublayer's input: `normed` and, quantised, `input`.
    fn before(&self, stream: &Stream, mixer: &Mixer, norm: &DeviceSlice<f32>, t: u32) -> Result<(), DriverError> {
        let site = MhcSite {
            function: mixer.function.address(),
            base: mixer.base.address(),
            scale: mixer.scale.address(),
            weight: norm.address(),
        };
        self.ops.mhc.before(stream, &mhc_shape(&self.config), &site, &self.mixing(t))?;
        self.mark(stream, "mHC before")
    }

    fn pages(&self, kind: CacheKind, layer: usize) -> Pages {
        self.pools.pages(kind, layer).expect("a layer of this kind has this cache")
    }

    /// Attention (model.md 6), from `normed` and `input` to `output`.
    fn attention(&self, stream: &Stream, layer: usize, a: &Attention, lists: &Lists) -> Result<(), DriverError> {
        let (s, c, t, eps) = (&self.scratch, &self.config, lists.tokens, self.config.rms_norm_eps);
        let (low, heads) = (c.q_lora_rank as u32, c.num_attention_heads as u32);
        let angles = s.angles[usize::from(a.kind != LayerKind::Window)].address();
        let window = self.pages(CacheKind::Window, layer);
        let local = self.pools.local();
        self.fp8(stream, &a.wq_a_wkv, 1, &s.input, &s.q_kv, t)?;
        self.mark(stream, "wq_a + wkv")?;
        let projected = Projected {
            products: s.q_kv.address(),
            rows: lists.rows,
            angles,
            q_norm: a.q_norm.address(),
            kv_norm: a.kv_norm.address(),
            codes: s.q_low.codes.address(),
            scales: s.q_low.scales.address(),
            window,
            local: if lists.local { local } else { Pages { table: 0, ..local } },
            tokens: t,
            q_width: low,
            eps,
        };
        if lists.local {
            let gather = Gather { sequences: lists.starts, count: lists.sequence_count, window, local };
            self.ops.keys.gather(stream, &gather)?;
        }
        self.ops.keys.project(stream, &projected)?;
        self.mark(stream, "q/kv norm and insert")?;
        self.compress(stream, layer, a, lists)?;

        self.fp8(stream, &a.wq_b, 1, &s.q_low, &s.q_wide, t)?;
        self.mark(stream, "wq_b")?;
        let queries =
            Heads { products: s.q_wide.address(), rows: lists.rows, angles, out: s.q.address(), tokens: t, heads, eps };
        self.ops.keys.queries(stream, &queries)?;
        self.mark(stream, "q norm and rotation")?;
        let entries = match a.kind {
            LayerKind::Window => Entries::Window,
            LayerKind::C128 => Entries::All { pages: self.pages(CacheKind::C128Main, layer), ratio: 128 },
            LayerKind::C4 => {
                self.select(stream, layer, a, lists)?;
                Entries::Picked {
                    pages: self.pages(CacheKind::C4Main, layer),
                    picks: s.picks.address(),
                    len: c.index_topk as u32,
                    counts: s.pick_counts.address(),
                }
            }
        };
        let single = a.kind == LayerKind::C4 || lists.long_job_count == 0;
        let core = Core {
            queries: s.q.address(),
            sinks: a.sink.address(),
            angles,
            jobs: if single { lists.jobs + lists.job_stride * layer as u64 } else { lists.long_jobs },
            job_count: if single { t } else { lists.long_job_count },
            job_tokens: if single { 1 } else { lists.long_job_tokens },
            window: if lists.local { local } else { window },
            reach: c.sliding_window - 1,
            entries,
            heads,
            out: 0,
            codes: s.o.codes.address(),
            scales: s.o.scales.address(),
        };
        self.ops.attend.attend(stream, &core)?;
        let name = match a.kind {
            LayerKind::Window => "attention window",
            LayerKind::C4 => "attention c4a",
            LayerKind::C128 => "attention c128a",
        };
        self.mark(stream, name)?;
        let wide = (c.o_groups * c.o_lora_rank) as u32;
        self.fp8(stream, &a.wo_a, c.o_groups as u32, &s.o, &s.o_low_wide, t)?;
        self.mark(stream, "wo_a")?;
        let (codes, scales) = (s.o_low.codes.address(), s.o_low.scales.address());
        self.ops.quantise.quantise(stream, s.o_low_wide.address(), codes, scales, u64::from(t * wide))?;
        self.mark(stream, "quantise")?;
        self.fp8(stream, &a.wo_b, 1, &s.o_low, &s.product, t)?;
        self.mark(stream, "wo_b")?;
        self.ops.quantise.round(
            stream,
            s.product.address(),
            s.output.address(),
            u64::from(t) * c.hidden_size as u64,
        )?;
        self.mark(stream, "quantise")
    }

    /// Entries of groups that end, and the state of open ones (model.md 6.4).
    fn compress(&self, stream: &Stream, layer: usize, a: &Attention, lists: &Lists) -> Result<(), DriverError> {
        let (s, t, eps) = (&self.scratch, lists.tokens, self.config.rms_norm_eps);
        let Some(compressor) = &a.compressor else { return Ok(()) };
        self.bf16(stream, &compressor.projection, &s.normed, &s.compressed, t)?;
        self.mark(stream, "compressor projection")?;
        let closing =
            |products: &DeviceSlice<f32>, c: &crate::weights::Compressor, table: usize, state, entries| Closing {
                products: products.address(),
                ape: c.ape.address(),
                angles: s.angles[table].address(),
                norm: c.norm.address(),
                state: self.pages(state, layer),
                entries: self.pages(entries, layer),
                eps,
            };
        let Some(indexer) = &a.indexer else {
            let c = closing(&s.compressed, compressor, 3, CacheKind::C128State, CacheKind::C128Main);
            self.ops.compress.main128(stream, &c, lists.sequences, lists.sequence_count, lists.most_rows)?;
            return self.mark(stream, "c128 compress");
        };
        let keys = &indexer.compressor;
        self.bf16(stream, &keys.projection, &s.normed, &s.index_compressed, t)?;
        self.mark(stream, "index compressor projection")?;
        let main = closing(&s.compressed, compressor, 2, CacheKind::C4State, CacheKind::C4Main);
        let index = closing(&s.index_compressed, keys, 2, CacheKind::IndexState, CacheKind::C4Index);
        self.ops.compress.main4(stream, &main, lists.closing, t)?;
        self.ops.compress.index4(stream, &index, lists.closing, t)?;
        if lists.replays {
            // The rows of a replay store their state; all entries are there, and a table without blocks hides them.
            let hidden = self.pools.hidden();
            self.ops.compress.main4(stream, &Closing { entries: hidden, ..main }, lists.rows, t)?;
            self.ops.compress.index4(stream, &Closing { entries: hidden, ..index }, lists.rows, t)?;
        }
        self.mark(stream, "c4 compress")
    }

    /// Entries that every row picks in a c4 layer (model.md 6.5).
    fn select(&self, stream: &Stream, layer: usize, a: &Attention, lists: &Lists) -> Result<(), DriverError> {
        let (s, c, t) = (&self.scratch, &self.config, lists.tokens);
        let Some(indexer) = &a.indexer else { return Ok(()) };
        let heads = c.index_n_heads as u32;
        self.fp8(stream, &indexer.wq_b, 1, &s.q_low, &s.index_wide, t)?;
        self.mark(stream, "index wq_b")?;
        self.bf16(stream, &indexer.weights_proj, &s.normed, &s.index_gates, t)?;
        self.mark(stream, "index weights")?;
        let queries = Queries {
            products: s.index_wide.address(),
            gates: s.index_gates.address(),
            rows: lists.rows,
            angles: s.angles[1].address(),
            out: s.index_queries.address(),
            weights: s.index_weights.address(),
            tokens: t,
            heads,
        };
        self.ops.index.queries(stream, &queries)?;
        self.mark(stream, "index queries")?;
        let selection = Selection {
            queries: s.index_queries.address(),
            weights: s.index_weights.address(),
            rows: lists.rows,
            keys: self.pages(CacheKind::C4Index, layer),
            scratch: s.candidates.address(),
            picks: s.picks.address(),
            counts: s.pick_counts.address(),
            tokens: t,
            heads,
            k: c.index_topk as u32,
        };
        self.ops.index.select(stream, &selection)?;
        self.mark(stream, "index select")
    }

    /// Experts (model.md 7), from `normed` and `input` to `output`.
    fn experts(&self, stream: &Stream, b: &Block, lists: &Lists) -> Result<(), DriverError> {
        let (s, c, t, moe) = (&self.scratch, &self.config, lists.tokens, &b.moe);
        self.bf16(stream, &moe.gate, &s.normed, &s.router, t)?;
        self.mark(stream, "router")?;
        let how = match &moe.route {
            Route::Hash(table) => Choosing::Hashed(table.address()),
            Route::Scored(bias) => Choosing::Scored(bias.address()),
        };
        let (experts, chosen) = (c.n_routed_experts as u32, c.num_experts_per_tok as u32);
        let (routing, _) = Routing::at(s.routing.address(), t, experts, chosen);
        let (logits, scale) = (s.router.address(), c.routed_scaling_factor);
        self.ops.router.route(stream, logits, lists.ids, how, scale, &routing)?;
        self.mark(stream, "router choice")?;
        let weights = ExpertWeights {
            gate_up: moe.gate_up.codes.address(),
            gate_up_scales: moe.gate_up.scales.address(),
            down: moe.down.codes.address(),
            down_scales: moe.down.scales.address(),
            shared_gate_up: moe.shared_gate_up.codes.address(),
            shared_gate_up_scales: moe.shared_gate_up.scales.address(),
            shared_down: moe.shared_down.codes.address(),
            shared_down_scales: moe.shared_down.scales.address(),
        };
        let batch = ExpertBatch {
            x: s.input.codes.address(),
            x_scales: s.input.scales.address(),
            out: s.output.address(),
            scratch: s.experts.address(),
        };
        self.ops.experts.forward(stream, &self.ops.fp8, &expert_shape(c), &weights, &routing, &batch)?;
        self.mark(stream, "experts")
    }
}
