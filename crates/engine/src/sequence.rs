//! One running request: its tokens, how many of them are in the cache, its blocks and where its events go.
//!
//! Prompt and generated tokens are one list; what is not yet computed of it is pending. So a request that lost its blocks
//! or starts behind a cached prefix differs only in `committed`. Assumes that the request was checked by admission.

use crate::admission::Need;
use crate::blocks::{SequenceBlocks, Span};
use crate::constraint::Constrained;
use crate::hash::BlockHash;
use crate::pool::Units;
use crate::request::{Event, EventSink, FinishReason, Request, RequestId};
use crate::reuse::Reuse;
use crate::scheduler::Grant;
use crate::spill::Spill;
use crate::step::{ReturnLogits, Sampling, SeqResult, Token};

/// A request that waits for a seat, for the first time or again.
pub(crate) struct Waiting {
    pub id: RequestId,
    /// Its prompt is all that is known of its text: also what was generated before it lost its seat.
    pub request: Request,
    pub sink: EventSink,
    /// Place in the queue, and of a running request in prefill.
    pub rank: i64,
    /// Most tokens to generate, the context limit applied, those that exist included.
    pub max_outputs: u32,
    pub need: Need,
    /// Hashes of the full blocks of the prompt, once it was looked at.
    pub hashes: Option<Vec<BlockHash>>,
    /// State of the engine at which it did not fit; it is looked at again when that has changed.
    pub blocked_at: Option<u64>,
    /// The request whose prompt it waits for.
    pub awaits: Option<Awaited>,
    /// What it did before it lost its seat.
    pub progress: Option<Progress>,
}

/// A running request that another one waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Awaited {
    pub seat: usize,
    pub id: RequestId,
}

/// What a request that lost its seat did before.
pub(crate) struct Progress {
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub spill: Option<Spill>,
    pub constraint: Option<Constrained>,
}

/// A request that has a seat.
pub(crate) struct Sequence {
    pub id: RequestId,
    pub sink: EventSink,
    pub sampling: Sampling,
    pub stop_tokens: Vec<Token>,
    pub min_tokens: u32,
    pub priority: i32,
    /// See [`Waiting::rank`].
    pub rank: i64,
    /// Tenant of its cached prefixes.
    pub salt: u64,
    pub logits: ReturnLogits,
    /// Layer whose attention is told.
    pub attention: Option<u32>,
    /// Prompt, then generated tokens.
    pub tokens: Vec<Token>,
    pub prompt_tokens: u32,
    /// Tokens that were known when it got its seat: they are computed like a prompt.
    pub prefill_tokens: u32,
    pub max_outputs: u32,
    /// Positions whose rows are in the cache; the next step starts here.
    pub committed: u32,
    /// Of the prompt, reused from the cache.
    pub cached_tokens: u32,
    /// Proposed by the backend for the positions after the last token.
    pub drafts: Vec<Token>,
    /// What the answer must follow.
    pub constraint: Option<Constrained>,
    pub blocks: SequenceBlocks,
    /// What it shares with the prefix cache.
    pub reuse: Reuse,
    pub need: Need,
    /// Units promised by admission.
    pub promised: Units,
    /// No step yet at this seat.
    pub fresh: bool,
    /// The backend knows the tokens for its penalties.
    pub history_told: bool,
    /// Number of the last step that it was part of.
    pub last_step: u64,
}

impl Sequence {
    /// Takes a waiting request over, with blocks that hold its first `committed` positions. It publishes nothing.
    pub fn new(waiting: Waiting, blocks: SequenceBlocks, committed: u32) -> Sequence {
        let Waiting { id, request, sink, rank, max_outputs, need, progress, .. } = waiting;
        let known = request.prompt.len() as u32;
        let (prompt_tokens, cached_tokens, constraint) = match progress {
            Some(p) => (p.prompt_tokens, p.cached_tokens, p.constraint),
            None => (known, committed, request.constraint.as_ref().map(Constrained::new)),
        };
        let mut tokens = request.prompt;
        tokens.reserve_exact((max_outputs - (known - prompt_tokens)) as usize);
        let mut sequence = Sequence {
            id,
            sink,
            sampling: request.sampling,
            stop_tokens: request.stop_tokens,
            min_tokens: request.min_tokens,
            priority: request.priority,
            rank,
            salt: request.salt,
            logits: request.logits,
            attention: request.attention,
            tokens,
            prompt_tokens,
            prefill_tokens: known,
            max_outputs,
            committed,
            cached_tokens,
            drafts: Vec::new(),
            constraint,
            blocks,
            reuse: Reuse::default(),
            need,
            promised: need.most(),
            fresh: true,
            history_told: false,
            last_step: 0,
        };
        if sequence.is_decoding() {
            sequence.promised = need.decode;
        }
        sequence
    }

    /// Gives up the seat; its blocks must have been given back. `need` is what it takes to go on.
    pub fn into_waiting(self, need: Need, spill: Option<Spill>) -> Waiting {
        // Its state is that of all tokens so far: where it is seated again, nothing must be told to it twice.
        let mut constraint = self.constraint;
        if let Some(constraint) = &mut constraint {
            constraint.forget_masks();
        }
        let (prompt_tokens, cached_tokens) = (self.prompt_tokens, self.cached_tokens);
        let progress = Progress { prompt_tokens, cached_tokens, spill, constraint };
        Waiting {
            id: self.id,
            request: Request {
                prompt: self.tokens,
                max_tokens: self.max_outputs,
                min_tokens: self.min_tokens,
                stop_tokens: self.stop_tokens,
                sampling: self.sampling,
                priority: self.priority,
                salt: self.salt,
                logits: self.logits,
                attention: self.attention,
                constraint: None,
            },
            sink: self.sink,
            rank: self.rank,
            max_outputs: self.max_outputs,
            need,
            hashes: None,
            blocked_at: None,
            awaits: None,
            progress: Some(progress),
        }
    }

    /// Whether something is told of every position.
    pub fn wants_every_position(&self) -> bool {
        self.logits == ReturnLogits::All || self.attention.is_some()
    }

    /// Tokens generated so far.
    pub fn outputs(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_tokens
    }

    /// Tokens that it may still generate.
    pub fn outputs_left(&self) -> u32 {
        self.max_outputs - self.outputs()
    }

    /// Known tokens that are not computed; at least one.
    pub fn pending(&self) -> u32 {
        self.tokens.len() as u32 - self.committed
    }

    /// Most tokens that its next prompt chunk may have: it ends where a checkpoint is to be taken.
    pub fn chunk_limit(&self) -> u32 {
        let cut = self.reuse.next_cut(self.committed, self.prefill_tokens);
        cut.map_or(self.pending(), |cut| cut - self.committed)
    }

    /// Whether only the last generated token is pending.
    pub fn is_decoding(&self) -> bool {
        self.pending() == 1 && self.outputs() > 0
    }

    /// Drafts that can still become output: the step that verifies them also gives one token of its own.
    pub fn usable_drafts(&self) -> u32 {
        (self.drafts.len() as u32).min(self.outputs_left().saturating_sub(1))
    }

    /// Positions that a grant computes.
    pub fn span(&self, grant: &Grant) -> Span {
        Span { start: self.committed, end: self.committed + grant.tokens + grant.drafts, drafts: grant.drafts }
    }

    /// Whether a grant reaches the last known token and something is to be generated after it.
    pub fn samples(&self, grant: &Grant) -> bool {
        grant.tokens == self.pending() && self.max_outputs > 0
    }

    /// Takes over what a step computed and delivers it. Returns why the request is finished, if it is.
    pub fn advance(&mut self, grant: &Grant, mut result: SeqResult, vocab: u32) -> Option<FinishReason> {
        let (start, samples) = (self.committed, self.samples(grant));
        let (kept, reason) = if samples {
            self.keep(&result.tokens)
        } else {
            // A prompt that nothing is generated after ends with its last chunk.
            (0, (grant.tokens == self.pending()).then_some(FinishReason::Length))
        };
        // Of the sampled positions, the first is known and each accepted draft adds one.
        let rows = grant.tokens + kept.saturating_sub(1);
        self.committed += rows;
        self.drafts.clear();
        self.drafts.append(&mut result.drafts);
        self.tokens.extend_from_slice(&result.tokens[..kept as usize]);
        self.deliver_logits(start, rows, result.logits, grant.tokens, vocab);
        if !result.reads.is_empty() {
            result.reads.truncate(rows as usize);
            (self.sink)(Event::Attention(result.reads));
        }
        result.tokens.truncate(kept as usize);
        result.logprobs.truncate(kept as usize);
        if kept > 0 {
            (self.sink)(Event::Tokens { tokens: result.tokens, logprobs: result.logprobs });
        }
        reason
    }

    /// How many of the new tokens count, and why the request ends there.
    fn keep(&mut self, tokens: &[Token]) -> (u32, Option<FinishReason>) {
        let left = self.outputs_left();
        let outputs = self.outputs();
        for (i, &token) in (1..=left).zip(tokens) {
            if outputs + i >= self.min_tokens && self.stop_tokens.contains(&token) {
                return (i, Some(FinishReason::Stop(token)));
            }
            match self.constraint.as_mut().map_or(Ok(false), |c| c.accept(token)) {
                Ok(false) => {}
                Ok(true) => return (i, Some(FinishReason::Complete)),
                Err(why) => return (i - 1, Some(FinishReason::Constraint(why))),
            }
        }
        let kept = left.min(tokens.len() as u32);
        (kept, (kept == left).then_some(FinishReason::Length))
    }

    /// Hands logits of the first `rows` positions of a step on; rows of rejected drafts are dropped.
    fn deliver_logits(&mut self, start: u32, rows: u32, mut logits: Vec<f32>, known: u32, vocab: u32) {
        if logits.is_empty() {
            return;
        }
        let (first, rows) = match self.logits {
            ReturnLogits::No => return,
            ReturnLogits::All => (start, rows),
            ReturnLogits::Sampled => (start + known - 1, rows - (known - 1)),
        };
        logits.truncate(rows as usize * vocab as usize);
        (self.sink)(Event::Logits { first, logits });
    }

    /// Delivers the last event. Its blocks must have been given back.
    pub fn finish(mut self, reason: FinishReason) {
        let output_tokens = self.outputs();
        (self.sink)(Event::Finished {
            reason,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            output_tokens,
        });
    }
}

impl Waiting {
    /// A request that was taken in.
    pub fn new(
        id: RequestId,
        mut request: Request,
        sink: EventSink,
        rank: i64,
        max_outputs: u32,
        need: Need,
    ) -> Waiting {
        if request.min_tokens > 1 {
            // The answer's token number i, from 1, is at position prompt + i - 1; a stop token may be number min_tokens.
            request.sampling.forbidden.extend_from_slice(&request.stop_tokens);
            request.sampling.forbidden_before = (request.prompt.len() as u32).saturating_add(request.min_tokens - 1);
        }
        request.sampling.answer_from = request.prompt.len() as u32;
        Waiting {
            id,
            request,
            sink,
            rank,
            max_outputs,
            need,
            hashes: None,
            blocked_at: None,
            awaits: None,
            progress: None,
        }
    }

    /// Delivers the last event of a request that has no seat.
    pub fn finish(mut self, reason: FinishReason) {
        let known = self.request.prompt.len() as u32;
        let (prompt_tokens, cached_tokens) =
            self.progress.as_ref().map_or((known, 0), |p| (p.prompt_tokens, p.cached_tokens));
        (self.sink)(Event::Finished { reason, prompt_tokens, cached_tokens, output_tokens: known - prompt_tokens });
    }
}
