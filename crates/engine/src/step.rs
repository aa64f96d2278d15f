//! The seam between scheduling and computing: a step is data.
//!
//! The engine plans a [`Step`], hands it to a [`Backend`] and gets a [`StepResult`]. A step can be logged, replayed on
//! another backend and compared. Block tables travel as differences ([`TableWrite`]): a step over 256 sequences of a
//! million tokens costs what changed, not what exists; the first step of a seat carries its whole table, so a log of
//! steps is complete. [`crate::tables::SeatTables`] applies the differences for every backend.

use std::ops::Range;

use longwave_model::CacheLayout;
use thiserror::Error;

use crate::attention::{LayerKind, Reads};
use crate::operators::OperatorTime;

/// A token id.
pub type Token = u32;

/// In a step's tokens: the last token sampled at this seat, which the host does not know yet.
pub const LAST_SAMPLED: Token = u32::MAX;

/// Where the state of a running sequence lives on a backend: graph inputs, last sampled token, block tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seat(pub u32);

/// A unit of one of the three pools; which pool follows from the group it is used in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// No block: a freed window position.
    pub const NONE: BlockId = BlockId(u32::MAX);
}

/// One change of a seat's block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableWrite {
    /// Group id in [`CacheLayout::groups`].
    pub group: u8,
    /// Block index: position / the group's `block_tokens`.
    pub index: u32,
    /// The block, or [`BlockId::NONE`] to take it out.
    pub block: BlockId,
}

/// How the next token of a sequence is chosen. Plain data; the same numbers give the same token whatever the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 means greedy: the largest logit, lowest token id first among equals.
    pub temperature: f32,
    /// Nucleus mass in (0, 1]; 1 is off.
    pub top_p: f32,
    /// Candidates kept; 0 is off.
    pub top_k: u32,
    /// Least probability relative to the best; 0 is off.
    pub min_p: f32,
    /// Seed of the request. The noise of a token is a hash of (seed, position, token): no state to carry.
    pub seed: u64,
    /// How many of the best log-probabilities to report with the chosen token's own; `None` reports nothing.
    pub top_logprobs: Option<u32>,
    /// Added to the logits of single tokens before everything else.
    pub bias: Vec<(Token, f32)>,
    /// Tokens that are not chosen at positions before `forbidden_before`: stop tokens of an answer that has a least length.
    pub forbidden: Vec<Token>,
    /// See `forbidden`.
    pub forbidden_before: u32,
    /// Subtracted from the logits of tokens that the answer contains; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from them once per occurrence; 0 is off.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens that prompt or answer contain; 1 is off.
    pub repetition_penalty: f32,
    /// Position of the answer's first token, for the penalties; the engine sets it.
    pub answer_from: u32,
}

impl Sampling {
    /// Whether tokens depend on which ones came before, beyond the model: then a backend is told the history.
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

impl Default for Sampling {
    /// Greedy, nothing reported.
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            top_logprobs: None,
            bias: Vec::new(),
            forbidden: Vec::new(),
            forbidden_before: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            answer_from: 0,
        }
    }
}

/// Which logits to return, for proofs and prompt log-probabilities. Costs `positions * vocab * 4` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReturnLogits {
    /// None.
    #[default]
    No,
    /// Of the positions that are sampled.
    Sampled,
    /// Of every position of the step.
    All,
}

/// The origin of a replay: positions that are run again only to rebuild windows and compressor state.
///
/// A window row needs the input of its layer at its own position and no more; a layer's output needs the window rows of
/// the `reach = window - 1` positions before it as well. So without any window row before the origin, the inputs of layer
/// `j` are exact from `origin + reach * j` on, and no layer needs to look at earlier positions: a triangle. The inputs of
/// "layer" `L` of `L` main layers are the final streams; the MTP module's row is exact one position behind these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replay {
    /// First position of layer 0; before 0 when the triangle is cut off by the start of the text.
    pub origin: i64,
}

impl Replay {
    /// First position whose input of `layer` is exact.
    pub fn first(self, layer: u32, reach: u32) -> u32 {
        (self.origin + i64::from(reach) * i64::from(layer)).clamp(0, i64::from(u32::MAX)) as u32
    }
}

/// One sequence's part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct SeqStep {
    /// Its seat.
    pub seat: Seat,
    /// The seat is new or was given to another sequence: forget its tables before applying `writes`.
    pub fresh: bool,
    /// Position of the first token; everything before it is in the cache and committed.
    pub start: u32,
    /// Tokens, a range of [`Step::tokens`]; position `start + i`.
    pub tokens: Range<u32>,
    /// How many of them, at the end, are unverified drafts (at most `longwave_model::geometry::MAX_DRAFTS`).
    pub drafts: u32,
    /// Changes of its block tables, a range of [`Step::writes`]; applied before computing.
    ///
    /// A row is stored when its block is in the table, else it lives in the chunk's scratch only: this is how windows
    /// and states of a long prefill cost nothing (ARCHITECTURE.md, "Cache design").
    pub writes: Range<u32>,
    /// All tokens before `start`, a range of [`Step::history`]: in the first step at a seat that chooses with penalties.
    /// From there a backend counts what it computes and accepts itself.
    pub history: Option<Range<u32>>,
    /// Choose tokens after the last `1 + drafts` positions; `None` in the middle of a chunked prefill.
    pub sample: Option<Sampling>,
    /// Which tokens may be chosen, a range of [`Step::masks`]: empty when all may; else equally long parts, one for each
    /// of the `1 + drafts` positions. Tokens that are not allowed have no probability, whatever else [`Sampling`] says;
    /// reported log-probabilities are the model's own.
    pub masks: Range<u32>,
    /// Draft tokens wanted for the next step (0: no drafting).
    pub want_drafts: u32,
    /// Logits to hand back.
    pub logits: ReturnLogits,
    /// A layer of [`Backend::attention_layers`] whose attention is told for every position of the step; never with `replay`.
    pub attention: Option<u32>,
    /// These tokens rebuild windows and compressor state of positions whose long-lived blocks are all mapped already.
    ///
    /// Layer `j` looks at positions from [`Replay::first`] on and skips the others; of window and state rows before that
    /// it reads none, whether they are mapped or not. Long-lived blocks are read and never written. Nothing is sampled or
    /// drafted and no logits come back. The steps of one replay carry the same origin and end exactly where the next step
    /// without one begins, with all rows that it reads. A fresh seat may start a replay at any position.
    pub replay: Option<Replay>,
}

impl SeqStep {
    /// Tokens at a seat from position `start` on, and nothing else: no changes of tables, nothing sampled.
    pub fn new(seat: Seat, start: u32, tokens: Range<u32>) -> SeqStep {
        SeqStep {
            seat,
            fresh: false,
            start,
            tokens,
            drafts: 0,
            writes: 0..0,
            history: None,
            sample: None,
            masks: 0..0,
            want_drafts: 0,
            logits: ReturnLogits::No,
            attention: None,
            replay: None,
        }
    }
}

/// What a backend computes at once: decodes and prefill chunks together.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// Rises by one from step to step.
    pub number: u64,
    /// The sequences, each at most once.
    pub seqs: Vec<SeqStep>,
    /// Tokens of all sequences.
    pub tokens: Vec<Token>,
    /// Table changes of all sequences.
    pub writes: Vec<TableWrite>,
    /// Earlier tokens of sequences that begin to choose with penalties.
    pub history: Vec<Token>,
    /// Allowed tokens of sequences whose answer must follow a constraint: bit `t % 32` of word `t / 32` of a part of
    /// `vocab.div_ceil(32)` words.
    pub masks: Vec<u32>,
}

impl Step {
    /// Empties the lists and keeps their memory.
    pub fn clear(&mut self) {
        self.seqs.clear();
        self.tokens.clear();
        self.writes.clear();
        self.history.clear();
        self.masks.clear();
    }

    /// Tokens of `seq`.
    pub fn tokens_of(&self, seq: &SeqStep) -> &[Token] {
        &self.tokens[seq.tokens.start as usize..seq.tokens.end as usize]
    }

    /// Earlier tokens of `seq`, if they come with this step.
    pub fn history_of(&self, seq: &SeqStep) -> Option<&[Token]> {
        seq.history.as_ref().map(|range| &self.history[range.start as usize..range.end as usize])
    }

    /// Tokens that may be chosen at sampled position `row` of `seq`, from 0; `None` when all may.
    pub fn mask_of(&self, seq: &SeqStep, row: u32) -> Option<&[u32]> {
        let words = seq.masks.len() / (1 + seq.drafts as usize);
        let from = seq.masks.start as usize + row as usize * words;
        (words > 0).then(|| &self.masks[from..from + words])
    }

    /// Table changes of `seq`.
    pub fn writes_of(&self, seq: &SeqStep) -> &[TableWrite] {
        &self.writes[seq.writes.start as usize..seq.writes.end as usize]
    }
}

/// Log-probabilities of one sampled token, natural logarithm, from the model's distribution before temperature and cuts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(Token, f32)>,
}

/// What became of one sequence.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SeqResult {
    /// Accepted drafts and then one new token; empty when nothing was sampled.
    pub tokens: Vec<Token>,
    /// One entry per token when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Drafts for the next step.
    pub drafts: Vec<Token>,
    /// Logits as asked for, row-major `[positions, vocab]`, f32.
    pub logits: Vec<f32>,
    /// What each position read, in order, when a layer was asked for.
    pub reads: Vec<Reads>,
    /// Why nothing could be chosen for this sequence, for example logits that are not finite; the others are not concerned.
    pub failed: Option<String>,
}

/// Result of a step, in the order of [`Step::seqs`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepResult {
    /// [`Step::number`].
    pub number: u64,
    /// One per sequence.
    pub seqs: Vec<SeqResult>,
}

/// Everything that is bounded, fixed when a backend is opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Sequences that can run at once.
    pub seats: u32,
    /// Tokens of one step, prefill and decode together. Scratch is sized by it.
    pub step_tokens: u32,
    /// Largest context of one sequence, prompt and output.
    pub context: u32,
    /// Units of each pool: large, middle, small.
    pub units: [u32; 3],
    /// Most drafts per sequence and step; 0 when the model has no drafter.
    pub drafts: u32,
    /// Steps that may be submitted and not yet collected.
    pub in_flight: u32,
    /// Vocabulary rows; a valid token is below.
    pub vocab: u32,
}

/// A copy of one unit, ordered with the steps around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Pool (index into [`CacheLayout::buckets`]).
    pub bucket: u8,
    /// Source.
    pub from: BlockId,
    /// Destination.
    pub to: BlockId,
}

/// A submitted step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// A backend that failed. The engine fails the requests of the step and, when it is fatal, all of them.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BackendError {
    /// The step itself is wrong: a bug of the engine, named.
    #[error("step {step}: {what}")]
    BadStep {
        /// Step number.
        step: u64,
        /// What is wrong.
        what: String,
    },
    /// The device is gone or the model cannot go on.
    #[error("the backend stopped: {0}")]
    Fatal(String),
}

/// What computes steps. Several GPUs live inside a backend; the engine never learns of ranks.
pub trait Backend: Send {
    /// Sizes that bound every step.
    fn limits(&self) -> &Limits;
    /// How the cache is cut; block ids in steps refer to it.
    fn layout(&self) -> &CacheLayout;
    /// Equal for two backends only if equal steps give equal bytes: model, weights, rounding, formats and what else
    /// changes rows. Names the cache blocks that outlive a process; asked for only when there are such.
    fn fingerprint(&self) -> [u8; 32];
    /// Kinds of the layers whose attention it can tell, by number; none when it cannot, which is the default.
    fn attention_layers(&self) -> &[LayerKind] {
        &[]
    }
    /// Switches timers of operators on or off, between steps; what they took since they were last switched on, the longest
    /// first. While they are on, steps take longer. A backend without timers reports nothing, which is the default.
    fn time_operators(&mut self, _on: bool) -> Result<Vec<OperatorTime>, BackendError> {
        Ok(Vec::new())
    }
    /// Starts a step; what is needed of it later is copied. At most [`Limits::in_flight`] are open.
    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError>;
    /// Waits for a step; in order of submission.
    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError>;
    /// Copies units, after the steps submitted so far and before later ones.
    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError>;
    /// Reads the bytes of one unit, for tiers and transfer. `out` has the bucket's unit size.
    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError>;
    /// Overwrites one unit.
    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError>;
}
