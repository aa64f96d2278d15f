//! The CPU as a [`Backend`]: checks a step, applies its table changes, computes, samples.
//!
//! A step is computed when it is submitted; `collect` hands the result over. A step that reads or writes an unmapped
//! block, a token out of range or more rows than planned is refused before anything is computed. Drafts are refused at
//! open when the checkpoint has no module that makes them.

use std::collections::VecDeque;

use longwave_engine::attention::LayerKind;
use longwave_engine::constraint::allows;
use longwave_engine::operators::OperatorTime;
use longwave_engine::step::{
    Backend, BackendError, BlockCopy, BlockId, LAST_SAMPLED, Limits, ReturnLogits, SeqResult, SeqStep, Step,
    StepResult, Ticket, Token,
};
use longwave_engine::step_check;
use longwave_engine::tables::SeatTables;
use longwave_model::geometry::{CacheLayout, MAX_DRAFTS};
use thiserror::Error;

use crate::cache::{Cache, SeqTables};
use crate::drafts::{Drafter, Turn};
use crate::fingerprint;
use crate::forward::{Model, Rows};
use crate::ops::penalties::Counts;
use crate::ops::sample;
use crate::plan;
use crate::reads::Told;
use crate::timers::Timers;

/// Sizes of a CPU backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    /// Sequences at once.
    pub seats: u32,
    /// Tokens per step.
    pub step_tokens: u32,
    /// Largest context.
    pub context: u32,
    /// Bytes for all cache pools.
    pub cache_bytes: u64,
    /// Most drafts per sequence and step; 0 leaves the MTP module out.
    pub drafts: u32,
}

/// Why a backend cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OpenError {
    /// Drafts without a drafter.
    #[error(
        "{drafts} draft tokens need an MTP module, and this checkpoint has none (num_nextn_predict_layers is 0); ask for 0"
    )]
    NoDrafter {
        /// Asked for.
        drafts: u32,
    },
    /// More than a rejection can take back.
    #[error("{drafts} draft tokens are more than {MAX_DRAFTS}, which is what the cache can take back")]
    TooManyDrafts {
        /// Asked for.
        drafts: u32,
    },
}

/// A model on the CPU.
pub struct CpuBackend {
    model: Model,
    cache: Cache,
    tables: SeatTables,
    limits: Limits,
    last_sampled: Vec<Token>,
    /// Tokens so far at each seat that chooses with penalties.
    counts: Vec<Counts>,
    drafter: Option<Drafter>,
    done: VecDeque<StepResult>,
}

impl CpuBackend {
    /// Opens a backend. The pools take memory only as they are used.
    pub fn new(model: Model, options: CpuOptions) -> Result<CpuBackend, OpenError> {
        let drafts = options.drafts;
        if drafts > MAX_DRAFTS {
            return Err(OpenError::TooManyDrafts { drafts });
        }
        if drafts > 0 && !model.has_mtp() {
            return Err(OpenError::NoDrafter { drafts });
        }
        let layout = CacheLayout::new(&model.config, model.formats);
        let units = layout.plan_units(options.seats, drafts, options.cache_bytes);
        let limits = Limits {
            seats: options.seats,
            step_tokens: options.step_tokens,
            context: options.context.min(model.config.max_position_embeddings),
            units,
            drafts,
            in_flight: 1,
            vocab: model.config.vocab_size as u32,
        };
        Ok(CpuBackend {
            drafter: (drafts > 0).then(|| Drafter::new(&model, options.seats, drafts)),
            tables: SeatTables::new(&layout, options.seats),
            cache: Cache::new(layout, units),
            last_sampled: vec![0; options.seats as usize],
            counts: vec![Counts::default(); options.seats as usize],
            done: VecDeque::new(),
            model,
            limits,
        })
    }

    /// The model, for pictures and proofs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Bytes of scratch: planned when it was opened, and taken at most so far.
    pub fn scratch_bytes(&self) -> (u64, u64) {
        let planned = plan::scratch_bytes(&self.model.config, self.limits.step_tokens, self.limits.seats);
        (planned, self.model.scratch.peak_bytes())
    }

    fn compute(&mut self, step: &Step) -> StepResult {
        let resolve =
            |seq: &SeqStep, t: Token| if t == LAST_SAMPLED { self.last_sampled[seq.seat.0 as usize] } else { t };
        let tokens: Vec<Token> =
            step.seqs.iter().flat_map(|s| step.tokens_of(s).iter().map(move |&t| resolve(s, t))).collect();
        let told: Vec<Option<Told>> = step.seqs.iter().map(|s| s.attention.map(Told::new)).collect();
        let mut rows = Vec::with_capacity(step.seqs.len());
        let mut from = 0;
        for (s, told) in step.seqs.iter().zip(&told) {
            let range = from..from + s.tokens.len();
            from = range.end;
            rows.push(Rows {
                replay: s.replay,
                tell: told.as_ref(),
                ..Rows::new(range, s.start, s.drafts, SeqTables::new(&self.tables, s.seat))
            });
        }
        let streams = self.model.trunk(&tokens, &rows, &mut self.cache, None);

        // Logits of the rows that are sampled or asked for, of all sequences in one product.
        let wanted = |s: &SeqStep, r: &Rows| match (s.logits, &s.sample) {
            (ReturnLogits::All, _) => r.rows.clone(),
            (_, Some(_)) => r.rows.end - 1 - s.drafts as usize..r.rows.end,
            _ => r.rows.end..r.rows.end,
        };
        let need: Vec<usize> = step.seqs.iter().zip(&rows).flat_map(|(s, r)| wanted(s, r)).collect();
        let logits = if need.is_empty() { Vec::new() } else { self.model.logits(&self.model.top(&streams, &need)) };
        let vocab = self.limits.vocab as usize;
        let mut result = StepResult { number: step.number, seqs: Vec::with_capacity(step.seqs.len()) };
        let mut at = 0;
        for (s, r) in step.seqs.iter().zip(&rows) {
            let n = wanted(s, r).len();
            let own = &logits[at * vocab..(at + n) * vocab];
            at += n;
            let own_tokens = &tokens[r.rows.clone()];
            let mut counts = None;
            if let Some(how) = s.sample.as_ref().filter(|how| how.has_penalties()) {
                let seen = &mut self.counts[s.seat.0 as usize];
                if let Some(history) = step.history_of(s) {
                    seen.clear();
                    seen.add(history, 0, how.answer_from);
                }
                seen.add(&own_tokens[..own_tokens.len() - s.drafts as usize], s.start, how.answer_from);
                counts = Some(seen);
            }
            let mut out = sampled(step, s, own_tokens, own, vocab, counts);
            if let Some(&t) = out.tokens.last() {
                self.last_sampled[s.seat.0 as usize] = t;
            }
            match s.logits {
                ReturnLogits::No => {}
                ReturnLogits::All => out.logits = own.to_vec(),
                ReturnLogits::Sampled => out.logits = own[..out.tokens.len() * vocab].to_vec(),
            }
            result.seqs.push(out);
        }
        if !need.is_empty() {
            self.model.mark("sampling");
        }
        if let Some(drafter) = &mut self.drafter {
            let turns: Vec<Turn> =
                step.seqs.iter().zip(rows).zip(&result.seqs).map(|((s, r), out)| turn(s, r, &tokens, out)).collect();
            let drafts = drafter.advance(&self.model, &mut self.cache, &turns, &streams);
            for (out, drafts) in result.seqs.iter_mut().zip(drafts) {
                out.drafts = drafts;
            }
            self.model.mark("sampling of drafts");
        }
        for (out, told) in result.seqs.iter_mut().zip(told) {
            out.reads = told.map(Told::into_reads).unwrap_or_default();
        }
        result
    }
}

/// What the drafter needs to know of a sequence whose drafts were verified; `tokens` are those of the batch.
fn turn<'a>(s: &'a SeqStep, rows: Rows<'a>, tokens: &'a [Token], out: &SeqResult) -> Turn<'a> {
    let accepted = out.tokens.len().saturating_sub(1) as u32;
    Turn {
        seat: s.seat,
        fresh: s.fresh,
        tokens: &tokens[rows.rows.clone()],
        committed: rows.end() - s.drafts + accepted,
        rows,
        sampled: out.tokens.last().copied().zip(s.sample.as_ref()),
        want: s.want_drafts,
    }
}

/// Accepts drafts as long as they are what would have been chosen, then adds one token; `logits` end with the rows of
/// the last `1 + drafts` positions. Accepted drafts are added to `counts`.
fn sampled(
    step: &Step,
    s: &SeqStep,
    tokens: &[Token],
    logits: &[f32],
    vocab: usize,
    mut counts: Option<&mut Counts>,
) -> SeqResult {
    let mut out = SeqResult::default();
    let Some(how) = &s.sample else { return out };
    let drafts = s.drafts as usize;
    let rows: Vec<&[f32]> = logits.chunks(vocab).collect();
    let rows = &rows[rows.len() - 1 - drafts..];
    for (i, row) in rows.iter().enumerate() {
        // The position that the new token will take.
        let position = s.start + (tokens.len() - drafts + i) as u32;
        if let Some(bad) = row.iter().position(|v| !v.is_finite()) {
            // Weights or activations that are not finite: no token of this row means anything.
            let what = format!("the logit of token {bad} at position {position} is {}", row[bad]);
            return SeqResult { failed: Some(what), ..SeqResult::default() };
        }
        let mask = step.mask_of(s, i as u32);
        let token = sample::sample(row, how, position, counts.as_deref(), mask);
        if position < how.forbidden_before && how.forbidden.contains(&token) || !allows(mask, token) {
            // Chosen only when nothing else is left.
            let what = format!("every token is forbidden at position {position}");
            return SeqResult { failed: Some(what), ..SeqResult::default() };
        }
        out.tokens.push(token);
        if let Some(top) = how.top_logprobs {
            out.logprobs.push(sample::logprobs(row, token, top));
        }
        if i < drafts {
            let draft = &tokens[tokens.len() - drafts + i..][..1];
            if token != draft[0] {
                break;
            }
            if let Some(counts) = &mut counts {
                counts.add(draft, position, how.answer_from);
            }
        }
    }
    out
}

impl Backend for CpuBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn layout(&self) -> &CacheLayout {
        self.cache.layout()
    }

    fn fingerprint(&self) -> [u8; 32] {
        fingerprint::model(&self.model, self.drafter.is_some())
    }

    fn attention_layers(&self) -> &[LayerKind] {
        &self.model.config.layers
    }

    fn time_operators(&mut self, on: bool) -> Result<Vec<OperatorTime>, BackendError> {
        let before = std::mem::replace(&mut self.model.timers, on.then(Timers::new));
        Ok(before.map(|timers| timers.table()).unwrap_or_default())
    }

    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        step_check::apply(step, self.cache.layout(), &self.limits, &mut self.tables)?;
        // On a worker of the pool: from outside, every parallel op would cost a hand-over and a wake-up.
        let result = rayon::scope(|_| self.compute(step));
        self.done.push_back(result);
        Ok(Ticket(step.number))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        match self.done.pop_front() {
            Some(r) if r.number == ticket.0 => Ok(r),
            _ => Err(BackendError::BadStep { step: ticket.0, what: "it was not submitted, or out of order".into() }),
        }
    }

    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError> {
        for c in copies {
            self.cache.copy_unit(c.bucket as usize, c.from, c.to);
        }
        Ok(())
    }

    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError> {
        out.copy_from_slice(self.cache.unit(bucket as usize, block));
        Ok(())
    }

    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.cache.unit_mut(bucket as usize, block).copy_from_slice(bytes);
        Ok(())
    }
}
