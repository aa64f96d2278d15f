//! What a client asks of the engine, and the events it gets back.
//!
//! One contract per request: at most one `Scheduled`, then tokens, then exactly one `Finished`, whatever happens
//! (refusal, cancellation and failure included). Events are delivered from the engine thread, or from its watchdog when
//! that hangs, through a sink that must not block.

use thiserror::Error;

use crate::attention::Reads;
use crate::constraint::ConstraintSource;
use crate::report::PrefixReport;
use crate::step::{ReturnLogits, Sampling, Token, TokenLogprobs};

/// Identity of a request inside one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A generation request: tokens in, tokens out.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Prompt tokens; at least one, each below the vocabulary size.
    pub prompt: Vec<Token>,
    /// Most tokens to generate; the context limit may end it earlier (finish reason `Length`).
    pub max_tokens: u32,
    /// Stop tokens are neither chosen nor honoured before this many tokens.
    pub min_tokens: u32,
    /// Tokens that end the generation; they are counted and delivered as the last token.
    pub stop_tokens: Vec<Token>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Lower runs earlier; 0 is normal.
    pub priority: i32,
    /// Keeps cached prefixes of tenants apart: equal prompts with different salts share nothing.
    pub salt: u64,
    /// Logits to hand back (proofs and tests).
    pub logits: ReturnLogits,
    /// Tell what every position reads in this layer, where the backend can.
    pub attention: Option<u32>,
    /// What the answer must follow; it ends where nothing may follow (finish reason `Complete`).
    pub constraint: Option<ConstraintSource>,
}

impl Request {
    /// The likeliest tokens, up to so many, and nothing else asked for.
    pub fn greedy(prompt: Vec<Token>, max_tokens: u32) -> Request {
        Request {
            prompt,
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            sampling: Sampling::default(),
            priority: 0,
            salt: 0,
            constraint: None,
            logits: ReturnLogits::No,
            attention: None,
        }
    }

    /// Whether something is wanted of every position, so that none may be left out or told twice.
    pub fn wants_every_position(&self) -> bool {
        self.logits == ReturnLogits::All || self.attention.is_some()
    }
}

/// The salt of a tenant's text: texts that differ have salts that differ, for all that anybody can find.
pub fn salt_of(text: &str) -> u64 {
    let mut salt = [0; 8];
    salt.copy_from_slice(&blake3::hash(text.as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(salt)
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq)]
pub enum FinishReason {
    /// A stop token was generated.
    Stop(Token),
    /// The constraint allows nothing more; no token stands for this end.
    Complete,
    /// The constraint gave up, in its words: a limit was exceeded. Other requests are not concerned.
    Constraint(String),
    /// `max_tokens` or the context limit was reached.
    Length,
    /// The client cancelled.
    Cancelled,
    /// It can never run here; nothing was computed.
    Refused(Refusal),
    /// It waited, and no step of the engine completed for this long; nothing was computed.
    Stalled {
        /// The limit, seconds.
        seconds: u32,
    },
    /// The backend or the server failed while it ran.
    Failed(String),
}

/// Why a request can never run, with the numbers.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Nothing to compute.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token id out of range.
    #[error("prompt token {token} at position {position} is not below the vocabulary size {vocab}")]
    BadToken {
        /// The id.
        token: Token,
        /// Where.
        position: usize,
        /// Vocabulary rows.
        vocab: u32,
    },
    /// Longer than the context.
    #[error(
        "the prompt has {prompt} tokens and max_tokens is {max_tokens}; together they exceed the context of {context} tokens"
    )]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: u32,
        /// Context limit.
        context: u32,
    },
    /// A layer whose attention the backend does not tell.
    #[error("the attention of layer {layer} cannot be told: {}", none_or(*.layers))]
    NoAttention {
        /// Asked for.
        layer: u32,
        /// How many layers it can tell of, from 0 on.
        layers: u32,
    },
    /// More cache than exists.
    #[error("{tokens} tokens need {need} units of the {pool} cache pool, and it has {have} in all")]
    NeverFits {
        /// Prompt and output tokens.
        tokens: u64,
        /// Pool name.
        pool: &'static str,
        /// Units needed at the end.
        need: u64,
        /// Units in the pool.
        have: u64,
    },
}

fn none_or(layers: u32) -> String {
    match layers {
        0 => "this backend tells of none; run the model on the CPU".into(),
        n => format!("expected a layer from 0 to {}", n - 1),
    }
}

/// What happens to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It got a seat and its first blocks.
    Scheduled {
        /// Prompt tokens whose cache was reused.
        cached_tokens: u32,
        /// What the prefix cache did and why it did no more.
        prefix: PrefixReport,
    },
    /// New tokens, in order.
    Tokens {
        /// The tokens, at least one.
        tokens: Vec<Token>,
        /// One entry per token when log-probabilities were asked for.
        logprobs: Vec<TokenLogprobs>,
    },
    /// Logits as asked for, row-major `[positions, vocab]`, for positions `first..`.
    Logits {
        /// Position of the first row.
        first: u32,
        /// Rows.
        logits: Vec<f32>,
    },
    /// What positions read in the layer that was asked for, in order and each once.
    Attention(Vec<Reads>),
    /// The last event.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Prompt tokens.
        prompt_tokens: u32,
        /// Of them, reused from the cache.
        cached_tokens: u32,
        /// Tokens delivered.
        output_tokens: u32,
    },
}

/// Receives the events of one request on the engine thread. Must return quickly and never block.
pub type EventSink = Box<dyn FnMut(Event) + Send>;

/// Why a request was not taken in; it got no event.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// The intake queue is full; the server answers 429.
    #[error("{waiting} requests are waiting already, the queue holds no more; try again in {retry_after_s} s")]
    QueueFull {
        /// Requests waiting.
        waiting: usize,
        /// When to come back, seconds.
        retry_after_s: u32,
    },
    /// The engine does not get on; the server answers 503.
    #[error("no step of the engine has completed for {seconds} s; try again later or restart it")]
    Stalled {
        /// The limit, seconds.
        seconds: u32,
    },
    /// The engine thread is gone.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}
