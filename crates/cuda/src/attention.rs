//! Attention of a block (model.md 6): projections, window rows, compressed entries, index selection, the core, output.
//!
//! In layers with compressed entries a second stream works beside the step's own (`beside.rs`): the indexer with its keys in c4
//! layers, the compressor in c128 layers.

use longwave_model::config::LayerKind;
use longwave_model::geometry::CacheKind;

use crate::driver::{DeviceSlice, DriverError, Stream};
use crate::forward::{Lists, Model, bf16_product};
use crate::ops::Pages;
use crate::ops::attend::{Attention as Core, Entries};
use crate::ops::compress::Compressor as Closing;
use crate::ops::index::{Queries, Selection};
use crate::ops::keys::{Gather, Heads, Projected};
use crate::ops::mhc::Output;
use crate::scratch::most_entries;
use crate::weights::{Attention, Compressor, Indexer};

/// Whether norms and both compressors of a c4 layer are one launch (`kernels/c4_rows.cu`), of up to so many rows. Not measured yet.
const ROWS_AT_ONCE: bool = false;
const MOST_ROWS_AT_ONCE: u32 = 64;

impl Model {
    /// Products with `wq_a` and `wkv` of `input`; query latents to `q_low`, window rows to the cache and to the step's own
    /// pages.
    pub(crate) fn keys(&self, stream: &Stream, layer: usize, a: &Attention, lists: &Lists) -> Result<(), DriverError> {
        let (s, t) = (&self.scratch, lists.tokens);
        self.fp8(stream, &a.wq_a_wkv, 1, &s.input, &s.q_kv, t)?;
        self.mark(stream, "wq_a + wkv")?;
        if lists.local && lists.sequence_count > 0 {
            let (window, local) = (self.pages(CacheKind::Window, layer), self.pools.local());
            let gather = Gather { sequences: lists.starts, count: lists.sequence_count, window, local };
            self.ops.keys.gather(stream, &gather)?;
        }
        self.ops.keys.project(stream, &self.projected(layer, a, lists))?;
        self.mark(stream, "q/kv norm and insert")
    }

    /// What follows the product with `wq_a` and `wkv`.
    fn projected(&self, layer: usize, a: &Attention, lists: &Lists) -> Projected {
        let (s, c) = (&self.scratch, &self.config);
        let (window, local) = (self.pages(CacheKind::Window, layer), self.pools.local());
        Projected {
            products: s.q_kv.address(),
            rows: lists.rows,
            angles: s.angles[usize::from(a.kind != LayerKind::Window)].address(),
            q_norm: a.q_norm.address(),
            kv_norm: a.kv_norm.address(),
            codes: s.q_low.codes.address(),
            scales: s.q_low.scales.address(),
            window: if lists.unstored { Pages { shift: window.shift, ..self.pools.hidden() } } else { window },
            local: if lists.local { local } else { Pages { table: 0, ..local } },
            tokens: lists.tokens,
            q_width: c.q_lora_rank as u32,
            eps: c.rms_norm_eps,
        }
    }

    /// Whether the rows of a c4 layer take `rows4`: not those of a prefill, which have windows of their own and are many, nor those of a
    /// replay, which are compressed twice; by themselves while kernels are timed.
    fn rows_at_once(&self, lists: &Lists) -> bool {
        ROWS_AT_ONCE && lists.tokens <= MOST_ROWS_AT_ONCE && !lists.local && !lists.replays && self.timers.is_none()
    }

    /// `keys`, `project`, `compress` and `index_keys` of a c4 layer, of which all that is no product is one launch.
    fn rows4(&self, stream: &Stream, layer: usize, a: &Attention, lists: &Lists) -> Result<(), DriverError> {
        let (s, t) = (&self.scratch, lists.tokens);
        let (Some(main), Some(indexer)) = (&a.compressor, &a.indexer) else { return Ok(()) };
        self.fp8(stream, &a.wq_a_wkv, 1, &s.input, &s.q_kv, t)?;
        self.project(stream, main, indexer, t)?;
        let projected = self.projected(layer, a, lists);
        let main = self.closing(layer, &s.compressed, main, [CacheKind::C4State, CacheKind::C4Main]);
        let kinds = [CacheKind::IndexState, CacheKind::C4Index];
        let index = self.closing(layer, &s.index_compressed, &indexer.compressor, kinds);
        self.ops.compress.rows4(stream, &projected, &main, &index, lists.closing)
    }

    /// Attention (model.md 6), from `normed` and `input` to what it returns.
    pub(crate) fn attention(
        &self,
        stream: &Stream,
        layer: usize,
        a: &Attention,
        lists: &Lists,
    ) -> Result<Output, DriverError> {
        let (s, c, t, eps) = (&self.scratch, &self.config, lists.tokens, self.config.rms_norm_eps);
        let heads = self.weights.share.heads(c).len() as u32;
        let angles = s.angles[usize::from(a.kind != LayerKind::Window)].address();
        let window = self.pages(CacheKind::Window, layer);
        let local = self.pools.local();
        let at_once = a.indexer.is_some() && self.rows_at_once(lists);
        if at_once {
            self.rows4(stream, layer, a, lists)?;
        } else {
            self.keys(stream, layer, a, lists)?;
            if let (Some(compressor), Some(indexer)) = (&a.compressor, &a.indexer) {
                self.project(stream, compressor, indexer, t)?;
            }
        }
        let compresses = a.compressor.is_some();
        self.part(stream, compresses, |beside| match &a.indexer {
            Some(indexer) => {
                if !at_once {
                    self.index_keys(beside, layer, indexer, lists)?;
                }
                self.select(beside, layer, indexer, lists)
            }
            None => self.compress(beside, layer, a, lists),
        })?;
        if a.indexer.is_some() && !at_once {
            self.compress(stream, layer, a, lists)?;
        }
        self.fp8(stream, &a.wq_b, 1, &s.q_low, &s.q_wide, t)?;
        self.mark(stream, "wq_b")?;
        let queries =
            Heads { products: s.q_wide.address(), rows: lists.rows, angles, out: s.q.address(), tokens: t, heads, eps };
        self.ops.keys.queries(stream, &queries)?;
        self.mark(stream, "q norm and rotation")?;
        self.meet(stream, compresses)?;
        let entries = match a.kind {
            LayerKind::Window => Entries::Window,
            LayerKind::C128 => Entries::All { pages: self.pages(CacheKind::C128Main, layer), ratio: 128 },
            LayerKind::C4 => Entries::Picked {
                pages: self.pages(CacheKind::C4Main, layer),
                picks: s.picks.address(),
                len: c.index_topk as u32,
                counts: s.pick_counts.address(),
            },
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
        let groups = self.weights.share.groups(c).len() as u32;
        let wide = groups * c.o_lora_rank as u32;
        self.fp8(stream, &a.wo_a, groups, &s.o, &s.o_low_wide, t)?;
        self.mark(stream, "wo_a")?;
        let (codes, scales) = (s.o_low.codes.address(), s.o_low.scales.address());
        self.ops.quantise.quantise(stream, s.o_low_wide.address(), codes, scales, u64::from(t * wide))?;
        self.mark(stream, "quantise")?;
        self.fp8(stream, &a.wo_b, 1, &s.o_low, &s.product, t)?;
        self.mark(stream, "wo_b")?;
        match &self.reduce {
            Some(reduce) => {
                self.sum(stream, reduce, t)?;
                Ok(Output::Rounded(s.output.address()))
            }
            None => Ok(Output::Wide(s.product.address())),
        }
    }

    /// Where a compressor puts the entries of groups that end, and the state of open ones (model.md 6.4).
    fn closing(
        &self,
        layer: usize,
        products: &DeviceSlice<f32>,
        c: &Compressor,
        [state, entries]: [CacheKind; 2],
    ) -> Closing {
        let table = if entries == CacheKind::C128Main { 3 } else { 2 };
        Closing {
            products: products.address(),
            ape: c.ape.address(),
            angles: self.scratch.angles[table].address(),
            norm: c.norm.address(),
            state: self.pages(state, layer),
            entries: self.pages(entries, layer),
            eps: self.config.rms_norm_eps,
        }
    }

    /// Main entries of a layer, if it has any; behind `project` in a c4 layer.
    fn compress(&self, stream: &Stream, layer: usize, a: &Attention, lists: &Lists) -> Result<(), DriverError> {
        let (s, t) = (&self.scratch, lists.tokens);
        let Some(compressor) = &a.compressor else { return Ok(()) };
        if a.indexer.is_none() {
            self.bf16(stream, &compressor.projection, &s.normed, &s.compressed, t)?;
            self.mark(stream, "compressor projection")?;
            let c = self.closing(layer, &s.compressed, compressor, [CacheKind::C128State, CacheKind::C128Main]);
            self.ops.compress.main128(stream, &c, lists.sequences, lists.sequence_count, lists.most_rows)?;
            return self.mark(stream, "c128 compress");
        }
        let main = self.closing(layer, &s.compressed, compressor, [CacheKind::C4State, CacheKind::C4Main]);
        self.ops.compress.main4(stream, &main, lists.closing, t)?;
        if lists.replays {
            // The rows of a replay store their state; all entries are there, and a table without blocks hides them.
            let hidden = Closing { entries: self.pools.hidden(), ..main };
            self.ops.compress.main4(stream, &hidden, lists.rows, t)?;
        }
        self.mark(stream, "c4 compress")
    }

    /// Index keys of a c4 layer, behind `project`.
    fn index_keys(&self, stream: &Stream, layer: usize, indexer: &Indexer, lists: &Lists) -> Result<(), DriverError> {
        let (s, t) = (&self.scratch, lists.tokens);
        let kinds = [CacheKind::IndexState, CacheKind::C4Index];
        let index = self.closing(layer, &s.index_compressed, &indexer.compressor, kinds);
        self.ops.compress.index4(stream, &index, lists.closing, t)?;
        if lists.replays {
            let hidden = Closing { entries: self.pools.hidden(), ..index };
            self.ops.compress.index4(stream, &hidden, lists.rows, t)?;
        }
        self.mark(stream, "index compress")
    }

    /// Products of `normed` with both compressors of a c4 layer and with the indexer's gates; each by itself while they are timed.
    fn project(&self, stream: &Stream, main: &Compressor, indexer: &Indexer, t: u32) -> Result<(), DriverError> {
        let s = &self.scratch;
        let product = |w, y| bf16_product(w, &s.normed, y, t);
        let products = [
            product(&main.projection, &s.compressed),
            product(&indexer.compressor.projection, &s.index_compressed),
            product(&indexer.weights_proj, &s.index_gates),
        ];
        if self.timers.is_none() {
            return self.ops.bf16.launch_three(stream, products);
        }
        let names = ["compressor projection", "index compressor projection", "index weights"];
        products.iter().zip(names).try_for_each(|(product, name)| {
            self.ops.bf16.launch(stream, product)?;
            self.mark(stream, name)
        })
    }

    /// Entries that every row picks in a c4 layer (model.md 6.5).
    fn select(&self, stream: &Stream, layer: usize, indexer: &Indexer, lists: &Lists) -> Result<(), DriverError> {
        let (s, c, t) = (&self.scratch, &self.config, lists.tokens);
        let heads = c.index_n_heads as u32;
        self.fp8(stream, &indexer.wq_b, 1, &s.q_low, &s.index_wide, t)?;
        self.mark(stream, "index wq_b")?;
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
            seats: self.pools.seats(),
            scratch: s.candidates.address(),
            picks: s.picks.address(),
            counts: s.pick_counts.address(),
            tokens: t,
            heads,
            k: c.index_topk as u32,
            most: most_entries(c),
            seen: lists.most_seen,
        };
        self.ops.index.select(stream, &selection)?;
        self.mark(stream, "index select")
    }
}
