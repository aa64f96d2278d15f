//! What an engine is doing and did so far, at one moment.
//!
//! Plain data for health, metrics and tests. Times are zero where nobody measures; the engine itself knows no clock.

use longwave_model::geometry::MAX_DRAFTS;

use crate::phases::StepTotals;
use crate::pool::Units;
use crate::report::PrefixStatus;
use crate::step::Limits;
use crate::tier::TiersStatus;

/// What the engine is doing. Plain data, cheap to copy.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// Requests that have a seat.
    pub running: u32,
    /// Requests that wait for one, those that had to give one up included.
    pub waiting: u32,
    /// Of them, those that had to give one up.
    pub displaced: u32,
    /// Units of each pool (large, middle, small).
    pub units_total: Units,
    /// Of them, owned by block tables or the prefix cache.
    pub units_used: Units,
    /// Of them, held by the prefix cache; an idle engine uses no others.
    pub units_cached: Units,
    /// Of them, promised to running requests at their worst moment.
    pub units_promised: Units,
    /// Steps that were submitted.
    pub steps: u64,
    /// Prompt tokens computed; replayed ones are not counted here.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Drafts verified.
    pub drafts_proposed: u64,
    /// Of them, how many became output.
    pub drafts_accepted: u64,
    /// Drafts verified, by place: the first behind a token, the second, ...
    pub drafts_proposed_at: [u64; MAX_DRAFTS as usize],
    /// Of them, how many became output.
    pub drafts_accepted_at: [u64; MAX_DRAFTS as usize],
    /// Times that a request gave up its seat to a more urgent one.
    pub preempted: u64,
    /// Of them, with windows and state kept in host memory.
    pub spilled: u64,
    /// Of those, how many went on from there; the others found their blocks evicted.
    pub resumed: u64,
    /// Host memory that spilled state takes now.
    pub spilled_bytes: u64,
    /// What the prefix cache did and holds.
    pub prefix: PrefixStatus,
    /// What host memory and disk did and hold for it.
    pub tiers: TiersStatus,
    /// Wall time of the last step; zero before the first one and when nobody measures.
    pub last_step: std::time::Duration,
    /// Times and sizes of all steps; nothing when nobody measures.
    pub step_totals: StepTotals,
    /// Bounds of the backend.
    pub limits: Limits,
    /// Whether the engine takes requests.
    pub alive: bool,
    /// Whether no step completed for too long although there is work.
    pub stalled: bool,
}

impl Status {
    /// Of an engine that did nothing yet.
    pub fn new(limits: Limits) -> Status {
        Status {
            running: 0,
            waiting: 0,
            displaced: 0,
            units_total: limits.units,
            units_used: [0; 3],
            units_cached: [0; 3],
            units_promised: [0; 3],
            steps: 0,
            prompt_tokens: 0,
            output_tokens: 0,
            drafts_proposed: 0,
            drafts_accepted: 0,
            drafts_proposed_at: Default::default(),
            drafts_accepted_at: Default::default(),
            preempted: 0,
            spilled: 0,
            resumed: 0,
            spilled_bytes: 0,
            prefix: PrefixStatus::default(),
            tiers: TiersStatus::default(),
            last_step: std::time::Duration::ZERO,
            step_totals: StepTotals::default(),
            limits,
            alive: true,
            stalled: false,
        }
    }
}
