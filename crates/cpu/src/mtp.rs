//! The MTP module (model.md 8): one more block that predicts one token further.
//!
//! A row combines the streams of a position with the embedding of the token after it. Its window row depends on these
//! two alone, not on other rows: where only later rows will read it, [`Model::mtp_keys`] computes no more than that.
//! Assumes that the checkpoint has the module ([`Model::has_mtp`]); the others panic without it.

use longwave_engine::step::Token;
use rayon::prelude::*;

use crate::attention;
use crate::cache::Cache;
use crate::forward::{Model, Rows, Tap};
use crate::ops::linear::{embed, linear};
use crate::ops::norm::rms_norm;
use crate::scratch::Buffer;
use crate::weights::Mtp;

impl Model {
    /// Whether the checkpoint has an MTP module.
    pub fn has_mtp(&self) -> bool {
        self.weights.mtp.is_some()
    }

    fn module(&self) -> &Mtp {
        self.weights.mtp.as_ref().expect("the checkpoint has an MTP module")
    }

    /// The module over a batch: `streams` of the main model, or its own, `[T, 4, D]` and the token after each row.
    /// Returns its streams `[T, 4, D]`; its window rows go to the cache under layer `num_hidden_layers`.
    pub fn mtp(
        &self,
        streams: &[f32],
        next: &[Token],
        seqs: &[Rows],
        cache: &mut Cache,
        mut tap: Option<Tap>,
    ) -> Buffer {
        let mut x = self.mtp_input(streams, next);
        self.block(self.config.num_hidden_layers, &self.module().block, next, &mut x, seqs, None, cache, &mut tap);
        x
    }

    /// Stores the window rows that [`Model::mtp`] would store, bit for bit, and computes nothing else.
    pub fn mtp_keys(&self, streams: &[f32], next: &[Token], seqs: &[Rows], cache: &mut Cache) {
        let block = &self.module().block;
        let x = self.mtp_input(streams, next);
        let (a, _) = self.hc_in(&x, &block.hc_attn, &block.attn_norm);
        attention::store_keys(self, self.config.num_hidden_layers, &block.attn, &a, seqs, cache);
    }

    /// Normalised hidden states of rows of the module's streams; [`Model::logits`] takes them.
    pub fn mtp_top(&self, streams: &[f32], rows: &[usize]) -> Vec<f32> {
        let mtp = self.module();
        let hidden = self.collapse(streams, rows, &mtp.head, &mtp.norm);
        self.mark("head mixing");
        hidden
    }

    /// What enters the block: projections of the token's embedding and of each stream, added.
    fn mtp_input(&self, streams: &[f32], next: &[Token]) -> Buffer {
        let mtp = self.module();
        let (d, t, eps, profile) = (self.config.hidden_size, next.len(), self.config.rms_norm_eps, self.profile);
        let mut e = self.scratch.take(t * d);
        let mut wide = self.scratch.take(d);
        for (row, &token) in e.chunks_mut(d).zip(next) {
            embed(&self.weights.embed, token as usize, &mut wide);
            rms_norm(&wide, &mtp.enorm, eps, profile, row);
        }
        let mut h = self.scratch.take(t * 4 * d);
        h.par_chunks_mut(d)
            .zip(streams.par_chunks(d))
            .with_min_len(64)
            .for_each(|(h, x)| rms_norm(x, &mtp.hnorm, eps, profile, h));
        let mut pe = self.scratch.take(t * d);
        let mut x = self.scratch.take(t * 4 * d);
        self.quantise(&mut e);
        self.quantise(&mut h);
        linear(&e, &mtp.e_proj, &mut pe);
        linear(&h, &mtp.h_proj, &mut x);
        profile.round(&mut pe);
        profile.round(&mut x);
        for (x, pe) in x.chunks_mut(4 * d).zip(pe.chunks(d)) {
            for s in x.chunks_mut(d) {
                s.iter_mut().zip(pe).for_each(|(a, b)| *a += b);
                profile.round(s);
            }
        }
        self.mark("MTP input");
        x
    }
}
