//! A backend that computes hashes in place of a model, to test everything around it without one.
//!
//! Every row of every layer is a hash of all rows that its position may read, so of the history (`sim/layers.rs`); the next
//! token is a hash of what a query reads at that position: all long-lived entries and all rows of the windows. A wrong,
//! doubled, missing, stale or too early freed block changes tokens or is an error. Chunks, batches, drafts and replays
//! change nothing. Rows live in blocks only when a block is mapped; the rest of a chunk is scratch, as on a real backend.
//! Refuses, as `BadStep`, whatever breaks the contract of [`crate::step`].

mod choices;
mod contract;
mod layers;
mod rows;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use longwave_model::CacheLayout;

use crate::operators::{OperatorSums, OperatorTime};
use crate::step::{
    Backend, BackendError, BlockCopy, BlockId, LAST_SAMPLED, Limits, Replay, Sampling, SeqResult, SeqStep, Step,
    StepResult, Ticket, Token,
};
use crate::tables::SeatTables;
use choices::{count, logprobs};
use layers::{Layers, Scratch};
use rows::{Row, Unit};

/// How good the drafts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftQuality {
    /// No drafts.
    Off,
    /// All are accepted.
    Right,
    /// All are rejected.
    Wrong,
    /// Each is right or wrong by the hash of its position.
    Random,
}

/// How an injected failure shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The step fails, the backend lives.
    BadStep,
    /// The backend is gone.
    Fatal,
    /// The backend panics.
    Panic,
}

/// What a simulated backend does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimOptions {
    /// The "weights": other seeds give other tokens.
    pub seed: u64,
    /// How good the drafts are.
    pub draft_quality: DraftQuality,
    /// The step number that fails.
    pub fail_at_step: Option<u64>,
    /// How it fails.
    pub failure: Failure,
    /// It fails when its result is collected, after it was computed.
    pub fail_late: bool,
    /// Of all reads and writes of units, the one that fails, and with it the backend.
    pub fail_at_unit: Option<u64>,
    /// Make rows of newly mapped blocks unreadable until they are written.
    pub poison: bool,
    /// Choose tokens as if there were no masks.
    pub ignore_masks: bool,
    /// Time that each step takes, for tests that need requests to be under way.
    pub step_time: Duration,
}

impl Default for SimOptions {
    /// No drafts, no failure, poison on, no waiting.
    fn default() -> Self {
        SimOptions {
            seed: 0,
            draft_quality: DraftQuality::Off,
            fail_at_step: None,
            failure: Failure::BadStep,
            fail_late: false,
            fail_at_unit: None,
            poison: true,
            ignore_masks: false,
            step_time: Duration::ZERO,
        }
    }
}

/// What the backend remembers of a seat: where its next step starts and which token comes first.
#[derive(Debug, Clone, Copy)]
struct SeatState {
    next: u32,
    last_sampled: Option<Token>,
    /// Hash of all tokens before `next`, in any order, once the seat was told its history.
    history: Option<u64>,
    /// The replay that its last step was part of.
    replay: Option<Replay>,
}

/// See the [module](self).
pub struct SimBackend {
    layout: CacheLayout,
    layers: Layers,
    limits: Limits,
    options: SimOptions,
    tables: SeatTables,
    pools: [Vec<Unit>; 3],
    seats: Vec<Option<SeatState>>,
    last_step: u64,
    done: VecDeque<StepResult>,
    /// Reads and writes of units so far.
    touched: u64,
    /// Its one operator: a call for every sequence, which is said to take a microsecond a token.
    timers: Option<OperatorSums>,
}

impl SimBackend {
    /// A backend with empty seats and unwritten units.
    pub fn new(layout: CacheLayout, limits: Limits, options: SimOptions) -> SimBackend {
        SimBackend {
            tables: SeatTables::new(&layout, limits.seats),
            pools: limits.units.map(|units| vec![Unit::default(); units as usize]),
            seats: vec![None; limits.seats as usize],
            last_step: 0,
            done: VecDeque::new(),
            touched: 0,
            timers: None,
            layers: Layers::new(&layout),
            layout,
            limits,
            options,
        }
    }

    /// Whether operators are timed now.
    pub fn times_operators(&self) -> bool {
        self.timers.is_some()
    }

    fn touch_unit(&mut self) -> Result<(), BackendError> {
        self.touched += 1;
        match self.options.fail_at_unit {
            Some(n) if n == self.touched => Err(BackendError::Fatal("injected failure".into())),
            _ => Ok(()),
        }
    }

    fn run(&mut self, step: &Step) -> Result<StepResult, String> {
        self.check(step)?;
        // All changes first: a block that one sequence gave up may be another's in the same step.
        for seq in &step.seqs {
            self.check_writes(step, seq)?;
            self.tables.apply(step, seq)?;
            self.check_past(seq)?;
        }
        let shared = self.check_shared(step)?;
        if self.options.poison {
            step.seqs.iter().for_each(|seq| self.poison(step, seq));
        }
        let seqs = step.seqs.iter().map(|seq| self.run_sequence(step, seq, &shared)).collect::<Result<_, _>>()?;
        Ok(StepResult { number: step.number, seqs })
    }

    fn run_sequence(
        &mut self,
        step: &Step,
        seq: &SeqStep,
        shared: &BTreeSet<(u8, BlockId)>,
    ) -> Result<SeqResult, String> {
        let tokens = step.tokens_of(seq);
        let state = self.seats[seq.seat.0 as usize].filter(|_| !seq.fresh);
        let mut read = |(group, page, p)| self.row(seq.seat, group, page, p);
        let at = (seq.seat, seq.start);
        let mut scratch = self.layers.scratch(&self.layout, at, seq.replay, seq.want_drafts > 0, &mut read)?;
        let mut result = SeqResult::default();
        let sampled_from = tokens.len() - 1 - seq.drafts as usize;
        let counts = |tokens: &[Token], from: u32| (from..).zip(tokens).fold(0, |h, (p, &t)| h ^ count(seq, p, t));
        let mut history = step.history_of(seq).map(|h| counts(h, 0)).or(state.and_then(|s| s.history));
        if seq.sample.as_ref().is_some_and(Sampling::has_penalties) && history.is_none() {
            return Err(format!("seat {}: penalties without a history", seq.seat.0));
        }
        history = history.map(|h| h ^ counts(&tokens[..=sampled_from], seq.start));
        for (i, &token) in tokens.iter().enumerate() {
            let last = state.and_then(|s| s.last_sampled);
            let token = if token == LAST_SAMPLED { last.expect("checked with the tokens") } else { token };
            self.extend(&mut scratch, token)?;
            self.add_logits(seq, &scratch, i >= sampled_from, &mut result)?;
            let accepted = result.tokens.len();
            if let Some(sampling) = &seq.sample
                && i >= sampled_from
                && accepted == i - sampled_from
                && result.tokens.iter().eq(&tokens[sampled_from + 1..=i])
            {
                if i > sampled_from {
                    history = history.map(|h| h ^ count(seq, seq.start + i as u32, tokens[i]));
                }
                let mask = step.mask_of(seq, (i - sampled_from) as u32).filter(|_| !self.options.ignore_masks);
                let token = self.masked(self.pick(&scratch, sampling, history)?, mask)?;
                result.logprobs.extend(logprobs(sampling, token, self.limits.vocab));
                result.tokens.push(token);
            }
        }
        self.store(step, &scratch, shared)?;
        let next = seq.start + (sampled_from + result.tokens.len().max(1)) as u32;
        let last_sampled = result.tokens.last().copied();
        self.seats[seq.seat.0 as usize] = Some(SeatState { next, last_sampled, history, replay: seq.replay });
        scratch.truncate(&self.layout, next);
        if let (Some(sampling), Some(&last)) = (&seq.sample, result.tokens.last()) {
            result.drafts = self.draft(scratch, sampling, last, seq.want_drafts)?;
        }
        Ok(result)
    }

    /// Computes the next position of the scratch.
    fn extend(&self, scratch: &mut Scratch, token: Token) -> Result<(), String> {
        let (seat, start) = (scratch.seat, scratch.start);
        let mut stored = |group, n| self.entry(seat, group, n).map_err(|e| format!("{e}, read from {start} on"));
        self.layers.extend(&self.layout, scratch, (self.options.seed, token), &mut stored)
    }
}

impl Backend for SimBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    fn fingerprint(&self) -> [u8; 32] {
        // Drafts, failures and time change no row.
        let mut fingerprint = [0; 32];
        fingerprint[..8].copy_from_slice(&self.options.seed.to_le_bytes());
        fingerprint[8..12].copy_from_slice(&self.limits.vocab.to_le_bytes());
        fingerprint
    }

    fn time_operators(&mut self, on: bool) -> Result<Vec<OperatorTime>, BackendError> {
        let before = std::mem::replace(&mut self.timers, on.then(OperatorSums::default));
        Ok(before.map(|timers| timers.table()).unwrap_or_default())
    }

    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        let bad = |what: String| BackendError::BadStep { step: step.number, what };
        if step.number != self.last_step + 1 || self.done.len() >= self.limits.in_flight as usize {
            return Err(bad(format!("it follows step {} with {} open", self.last_step, self.done.len())));
        }
        self.last_step = step.number;
        std::thread::sleep(self.options.step_time);
        if self.options.fail_at_step == Some(step.number) && !self.options.fail_late {
            match self.options.failure {
                Failure::BadStep => return Err(bad("injected failure".into())),
                Failure::Fatal => return Err(BackendError::Fatal("injected failure".into())),
                Failure::Panic => panic!("injected failure"),
            }
        }
        let result = self.run(step).map_err(bad)?;
        if let Some(timers) = &mut self.timers {
            step.seqs.iter().for_each(|seq| timers.add("hashes", f64::from(seq.tokens.end - seq.tokens.start)));
        }
        self.done.push_back(result);
        Ok(Ticket(step.number))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        let done = self.done.pop_front();
        if self.options.fail_at_step == Some(ticket.0) && self.options.fail_late {
            return Err(match self.options.failure {
                Failure::BadStep => BackendError::BadStep { step: ticket.0, what: "injected failure".into() },
                Failure::Fatal => BackendError::Fatal("injected failure".into()),
                Failure::Panic => panic!("injected failure"),
            });
        }
        match done {
            Some(result) if result.number == ticket.0 => Ok(result),
            _ => Err(BackendError::BadStep { step: ticket.0, what: "it is not the oldest open step".into() }),
        }
    }

    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError> {
        for c in copies {
            let pool = &mut self.pools[c.bucket as usize];
            pool[c.to.0 as usize] = pool[c.from.0 as usize].clone();
        }
        Ok(())
    }

    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError> {
        self.touch_unit()?;
        out.fill(0);
        for (row, bytes) in self.pools[bucket as usize][block.0 as usize].rows.iter().zip(out.chunks_exact_mut(16)) {
            bytes[..8].copy_from_slice(&row.tag.to_le_bytes());
            bytes[8..].copy_from_slice(&row.value.to_le_bytes());
        }
        Ok(())
    }

    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.touch_unit()?;
        let word = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes"));
        let rows = bytes.chunks_exact(16).take(self.layers.most_rows(&self.layout, bucket));
        let rows = rows.map(|b| Row { tag: word(&b[..8]), value: word(&b[8..]) }).collect();
        self.pools[bucket as usize][block.0 as usize].rows = rows;
        Ok(())
    }
}

/// A hash of two words that depends on their order.
fn mix(a: u64, b: u64) -> u64 {
    let x = (a.rotate_left(23) ^ b).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 29)
}
