//! What an operator chooses about an engine, as plain data.
//!
//! Refuses nothing: drafts are cut to what the backend can and intervals to whole blocks when the engine opens.

use crate::tier::TierOptions;

/// What an operator chooses; the rest follows from the backend's [`Limits`](crate::step::Limits).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// Requests that may wait for a seat; more are turned away.
    pub max_waiting: usize,
    /// When a client that was turned away should come back, seconds.
    pub retry_after_s: u32,
    /// Most prompt tokens of one sequence in one step; `None` leaves it to the token budget.
    pub max_chunk_tokens: Option<u32>,
    /// Drafts per sequence and step, cut to what the backend can; 0 is no speculation.
    pub drafts: u32,
    /// Keep computed blocks for later prompts that begin alike.
    pub prefix_cache: bool,
    /// Tokens between checkpoints inside prompts, rounded down to 256; 0 keeps those at their ends only.
    pub checkpoint_interval: u32,
    /// Keep a checkpoint in every answer as well, so that the next turn of a conversation need not compute it again.
    pub checkpoint_answers: bool,
    /// Host memory for the small state of requests that give up their seats to more urgent ones. What does not fit is
    /// computed again.
    pub spill_bytes: u64,
    /// Without a completed step for this long, health is bad and waiting requests fail; 0 s waits for ever.
    pub stall_after: std::time::Duration,
    /// Rebuild windows where the blocks of a prefix are cached and its checkpoint is gone, when that costs less than to
    /// compute the prefix again.
    pub replay: bool,
    /// Where cached blocks go on living when they are evicted or the process ends.
    pub tiers: TierOptions,
    /// Time the operators of the backend while somebody looks ([`crate::view`]); steps take longer meanwhile.
    pub operator_times: bool,
    /// Check all invariants after every step, not only when idle.
    pub paranoid: bool,
}

impl Default for EngineOptions {
    /// 1,024 waiting requests, chunks as large as the budget, no speculation, prefixes kept.
    fn default() -> Self {
        EngineOptions {
            max_waiting: 1024,
            retry_after_s: 1,
            max_chunk_tokens: None,
            drafts: 0,
            prefix_cache: true,
            checkpoint_interval: 8192,
            checkpoint_answers: true,
            spill_bytes: 1 << 30,
            stall_after: std::time::Duration::from_secs(300),
            replay: true,
            tiers: TierOptions::default(),
            operator_times: false,
            paranoid: false,
        }
    }
}
