//! The forward pass over the tokens of a step (model.md 4): embedding, blocks and head.
//!
//! Tokens of all sequences are rows of one batch. Row-wise steps run over the batch; attention and compressors run per
//! sequence. No value depends on which other rows are present.

use std::borrow::Cow;
use std::ops::Range;

use longwave_engine::operators::START;
use longwave_engine::step::{Replay, Token};
use longwave_model::{CacheFormats, Checkpoint, ModelConfig, digest};
use rayon::prelude::*;

use crate::cache::{Cache, SeqTables};
use crate::numerics::Profile;
use crate::ops::linear::{embed, linear};
use crate::ops::mhc::{self, Mix};
use crate::ops::norm::rms_norm;
use crate::ops::rope::Frequencies;
use crate::reads::Told;
use crate::replay::{self, Kept};
use crate::scratch::{Buffer, Scratch};
use crate::timers::Timers;
use crate::weights::{Block, Mixer, Weights};
use crate::{attention, moe};

/// A model ready to compute.
pub struct Model {
    /// Its configuration.
    pub config: ModelConfig,
    /// Rounding.
    pub profile: Profile,
    /// Cache formats.
    pub formats: CacheFormats,
    pub(crate) weights: Weights,
    /// Tells checkpoints apart.
    pub(crate) weights_digest: [u8; 32],
    pub(crate) freq_main: Frequencies,
    pub(crate) freq_compressed: Frequencies,
    pub(crate) scratch: Scratch,
    /// Set while somebody wants to know where the time goes.
    pub(crate) timers: Option<Timers>,
}

/// One sequence's rows in a batch.
#[derive(Clone)]
pub struct Rows<'a> {
    /// Its rows of the batch.
    pub rows: Range<usize>,
    /// Position of the first.
    pub start: u32,
    /// How many of them, at the end, are drafts.
    pub drafts: u32,
    /// Its block tables.
    pub tables: SeqTables<'a>,
    /// First position that has a window row.
    pub oldest: u32,
    /// These positions only rebuild windows and state: each layer has rows from [`Rows::oldest_in`] on.
    pub replay: Option<Replay>,
    /// Told what these rows read in one layer, when somebody wants to know.
    pub tell: Option<&'a Told>,
    /// In a drafting pass: window rows `[n, 512]` of the `n` positions before `start`, which no block holds. The rows of
    /// such a pass are not stored either.
    pub ahead: Option<&'a [f32]>,
}

impl<'a> Rows<'a> {
    /// Rows of a sequence whose positions all have window rows and whose rows are stored where they are mapped.
    pub fn new(rows: Range<usize>, start: u32, drafts: u32, tables: SeqTables<'a>) -> Rows<'a> {
        Rows { rows, start, drafts, tables, oldest: 0, replay: None, tell: None, ahead: None }
    }

    /// First position that has a window row in a layer.
    pub fn oldest_in(&self, layer: usize, config: &ModelConfig) -> u32 {
        self.replay.map_or(self.oldest, |r| r.first(layer as u32, config.sliding_window - 1))
    }

    /// Position after the last row.
    pub fn end(&self) -> u32 {
        self.start + self.rows.len() as u32
    }
}

/// What a [`Tap`] sees of a layer; rows are those of the batch.
pub enum Seen<'a> {
    /// Residual streams after the layer `[T, 4, D]`.
    Streams(&'a [f32]),
    /// Query heads after norm and rotation `[T, H, 512]`.
    Q(&'a [f32]),
    /// Window rows as stored `[T, 512]`.
    Kv(&'a [f32]),
    /// Attention output before the inverse rotation `[T, H, 512]`.
    Attn(&'a [f32]),
    /// Indexer queries as compared `[T, Hi, 128]` and head weights `[T, Hi]`.
    Index(&'a [f32], &'a [f32]),
    /// Entries that each row's query picked, ascending.
    Selected(&'a [Vec<u32>]),
}

/// Receives intermediate values: (layer, value). For golden vectors, pictures and window rows of drafts.
pub type Tap<'a> = &'a mut dyn FnMut(usize, Seen);

/// Rows of a batch per parallel piece of row-wise work.
pub(crate) const PIECE: usize = 16;

impl Model {
    /// Arranges the weights of `ckpt` for computing with `profile` and `formats`.
    pub fn new(ckpt: &Checkpoint, profile: Profile, formats: CacheFormats) -> Model {
        Model {
            config: ckpt.config.clone(),
            profile,
            formats,
            weights: Weights::new(ckpt),
            weights_digest: digest::weights(ckpt),
            freq_main: Frequencies::main(&ckpt.config),
            freq_compressed: Frequencies::compressed(&ckpt.config),
            scratch: Scratch::default(),
            timers: None,
        }
    }

    /// Ends an operator, for the timers.
    pub(crate) fn mark(&self, name: &'static str) {
        if let Some(timers) = &self.timers {
            timers.mark(name);
        }
    }

    /// Runs the main layers over `tokens` and returns the streams `[T, 4, D]`; the cache receives the rows. Streams of
    /// positions that a replay left behind are zeros.
    pub fn trunk(&self, tokens: &[Token], seqs: &[Rows], cache: &mut Cache, tap: Option<Tap>) -> Buffer {
        let d = self.config.hidden_size;
        self.mark(START);
        let mut x = self.scratch.take(tokens.len() * 4 * d);
        x.par_chunks_mut(4 * d).with_min_len(64).zip(tokens).for_each(|(x, &t)| {
            embed(&self.weights.embed, t as usize, &mut x[..d]);
            for s in 1..4 {
                x.copy_within(..d, s * d);
            }
        });
        self.mark("angles and embedding");
        let mut tap = tap;
        // What is left of the batch, once a replay dropped rows.
        let mut left: Option<(Vec<Token>, Vec<Rows>)> = None;
        for (l, block) in self.weights.layers.iter().enumerate() {
            let (tokens, seqs) = left.as_ref().map_or((tokens, seqs), |(t, s)| (t, s));
            let kept = Kept::at_layer(seqs, l + 1, &self.config);
            self.block(l, block, tokens, &mut x, seqs, kept.as_ref(), cache, &mut tap);
            left = match kept {
                Some(kept) => Some((kept.pick(tokens), kept.seqs)),
                None => left,
            };
            if x.is_empty() {
                break;
            }
        }
        match left {
            Some((_, rows)) => replay::spread(&self.scratch, &x, 4 * d, &rows, seqs),
            None => x,
        }
    }

    /// Normalised hidden states `[n, D]` of the given rows of the streams.
    pub fn top(&self, streams: &[f32], rows: &[usize]) -> Vec<f32> {
        let hidden = self.collapse(streams, rows, &self.weights.hc_head, &self.weights.norm);
        self.mark("head mixing");
        hidden
    }

    /// Logits `[n, V]`, f32, of hidden states `[n, D]`.
    pub fn logits(&self, hidden: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; hidden.len() / self.config.hidden_size * self.config.vocab_size];
        linear(hidden, &self.weights.head, &mut out);
        self.mark("lm_head");
        out
    }

    /// Normalised hidden states of rows of streams, mixed by a head.
    pub(crate) fn collapse(&self, streams: &[f32], rows: &[usize], mixer: &Mixer, norm: &[f32]) -> Vec<f32> {
        let d = self.config.hidden_size;
        let x: Vec<f32> = rows.iter().flat_map(|&r| &streams[r * 4 * d..(r + 1) * 4 * d]).copied().collect();
        let mut dots = vec![0.0; rows.len() * 4];
        linear(&x, &mixer.dots, &mut dots);
        let mut out = vec![0.0; rows.len() * d];
        for ((x, dots), out) in x.chunks(4 * d).zip(dots.chunks(4)).zip(out.chunks_mut(d)) {
            let mut h = vec![0.0; d];
            mhc::head(x, dots, &mixer.site, self.profile, &mut h);
            rms_norm(&h, norm, self.config.rms_norm_eps, self.profile, out);
        }
        out
    }

    /// One block, in place on the streams. Of rows that are not among the `kept` only window and state rows are computed,
    /// and their streams go.
    pub(crate) fn block(
        &self,
        l: usize,
        b: &Block,
        tokens: &[Token],
        x: &mut Buffer,
        seqs: &[Rows],
        kept: Option<&Kept>,
        cache: &mut Cache,
        tap: &mut Option<Tap>,
    ) {
        let (a, mixes) = self.hc_in(x, &b.hc_attn, &b.attn_norm);
        let y = attention::forward(self, l, &b.attn, &a, seqs, kept, cache, tap);
        let (mut mixes, mut tokens) = (mixes, Cow::Borrowed(tokens));
        if let Some(kept) = kept {
            *x = kept.gather(&self.scratch, x, 4 * self.config.hidden_size);
            (mixes, tokens) = (kept.pick(&mixes), Cow::Owned(kept.pick(&tokens)));
            if x.is_empty() {
                return;
            }
        }
        self.hc_out(x, &y, &mixes);
        let (f, mixes) = self.hc_in(x, &b.hc_ffn, &b.ffn_norm);
        let y = moe::forward(self, &b.moe, &f, &tokens);
        self.hc_out(x, &y, &mixes);
        if let Some(tap) = tap {
            tap(l, Seen::Streams(x));
        }
    }

    /// `hc_pre` and the sublayer's norm.
    pub(crate) fn hc_in(&self, x: &[f32], mixer: &Mixer, norm: &[f32]) -> (Buffer, Vec<Mix>) {
        let d = self.config.hidden_size;
        let t = x.len() / (4 * d);
        let mut dots = self.scratch.take(t * 24);
        linear(x, &mixer.dots, &mut dots);
        // As on a GPU, where these products come with the streams that the sublayer before left behind.
        self.mark("mHC after");
        let mut a = self.scratch.take(t * d);
        let mut mixes = vec![Mix::default(); t];
        let work = a.par_chunks_mut(d).zip(&mut mixes).zip(x.par_chunks(4 * d)).zip(dots.par_chunks(24));
        work.with_min_len(PIECE).for_each_init(
            || vec![0.0; d],
            |h, (((a, mix), x), dots)| {
                *mix = mhc::pre(x, dots, &mixer.site, self.profile, h);
                rms_norm(h, norm, self.config.rms_norm_eps, self.profile, a);
            },
        );
        self.mark("mHC before");
        (a, mixes)
    }

    fn hc_out(&self, x: &mut [f32], y: &[f32], mixes: &[Mix]) {
        let d = self.config.hidden_size;
        let work = x.par_chunks_mut(4 * d).zip(y.par_chunks(d)).zip(mixes);
        work.with_min_len(PIECE).for_each(|((x, y), mix)| mhc::post(x, y, mix, self.profile));
        self.mark("mHC after");
    }

    /// Quantises the input of an FP8 or FP4 product, unless the profile is exact.
    pub(crate) fn quantise(&self, x: &mut [f32]) {
        if self.profile.rounds() {
            x.par_chunks_mut(128).with_min_len(64).for_each(crate::numerics::fake_fp8_group);
        }
    }
}
