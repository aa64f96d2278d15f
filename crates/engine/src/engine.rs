//! The loop: admit, plan, submit, collect, commit. One call of [`Engine::step`] is one iteration.
//!
//! Assumes a backend that keeps the contract of [`crate::step`]; a result that breaks it fails the requests of the step.
//! Every request that is taken in gets exactly one `Finished`, whatever happens, and its blocks come home before it.
//! Knows no clock: whoever drives the loop measures time.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use longwave_model::CacheLayout;
use longwave_model::geometry::{Bucket, MAX_DRAFTS};

use crate::admission::Admission;
use crate::attention::LayerKind;
use crate::constraint::{allows, mask_words};
use crate::phases::StepTotals;
use crate::pool::{PoolCount, Pools, Units};
use crate::prefix::{PrefixCache, PrefixOptions};
use crate::report::PrefixStatus;
use crate::request::{Event, EventSink, FinishReason, Refusal, Request, RequestId, SubmitError};
use crate::scheduler::{Grant, Scheduler};
use crate::seating::{PRIORITY_STEPS, Place};
use crate::sequence::{Sequence, Waiting};
use crate::step::{Backend, BackendError, Limits, ReturnLogits, Seat, SeqStep, Step, StepResult};
use crate::tier::{DirectoryError, TierOptions, Tiers, TiersStatus};

/// What an operator chooses; the rest follows from the backend's [`Limits`].
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

/// Parts of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It is planned, and the backend is about to get it.
    Planned,
    /// The backend's result is there.
    Computed,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counters {
    pub steps: u64,
    prompt_tokens: u64,
    output_tokens: u64,
    drafts_proposed: [u64; MAX_DRAFTS as usize],
    drafts_accepted: [u64; MAX_DRAFTS as usize],
    pub preempted: u64,
    pub spilled: u64,
    pub resumed: u64,
}

/// Requests, cache and backend of one model.
pub struct Engine<B: Backend> {
    pub(crate) backend: B,
    limits: Limits,
    pub(crate) layout: CacheLayout,
    pub(crate) options: EngineOptions,
    pub(crate) pools: Pools,
    pub(crate) prefix: PrefixCache,
    pub(crate) tiers: Tiers,
    pub(crate) admission: Admission,
    scheduler: Scheduler,
    /// By rank; at most `options.max_waiting` and those that lost their seats.
    pub(crate) waiting: BTreeMap<Place, Waiting>,
    pub(crate) seats: Vec<Option<Sequence>>,
    pub(crate) free_seats: Vec<Seat>,
    next_id: u64,
    /// The step that was planned last; its lists are used again.
    step: Step,
    pub(crate) counters: Counters,
    /// How often a running request gave something back.
    pub(crate) returns: u64,
    /// Waiting requests that had a seat before.
    pub(crate) displaced: usize,
    /// Host memory that requests without a seat hold.
    pub(crate) spilled_bytes: u64,
    stopped: Option<String>,
}

impl<B: Backend> Engine<B> {
    /// An idle engine over all of `backend`'s seats and units. Panics where [`Engine::open`] has an error.
    pub fn new(backend: B, options: EngineOptions) -> Engine<B> {
        Engine::open(backend, options).unwrap_or_else(|e| panic!("{e}"))
    }

    /// [`Engine::new`], with an error when the cache directory cannot be used.
    pub fn open(backend: B, mut options: EngineOptions) -> Result<Engine<B>, DirectoryError> {
        let (limits, layout) = (backend.limits().clone(), backend.layout().clone());
        assert!(limits.seats > 0, "a backend without seats runs nothing");
        assert!(limits.drafts <= MAX_DRAFTS, "{} drafts, a c128 state page takes {MAX_DRAFTS} back", limits.drafts);
        options.drafts = options.drafts.min(limits.drafts);
        let prefix = PrefixOptions {
            on: options.prefix_cache,
            interval: options.checkpoint_interval,
            answers: options.checkpoint_answers,
            replay: options.replay,
            drafts: options.drafts > 0,
        };
        let chunk = options.max_chunk_tokens.unwrap_or(u32::MAX).min(limits.step_tokens);
        let mut prefix = PrefixCache::new(&layout, prefix);
        let off = TierOptions::default();
        let tiers = if prefix.is_on() { &options.tiers } else { &off };
        let tiers = Tiers::open(tiers, &layout, || backend.fingerprint())?;
        prefix.announces = tiers.is_on();
        Ok(Engine {
            pools: Pools::new(limits.units),
            prefix,
            tiers,
            admission: Admission::new(&layout, limits.units, chunk, options.drafts),
            scheduler: Scheduler::new(&limits, chunk),
            waiting: BTreeMap::new(),
            seats: (0..limits.seats).map(|_| None).collect(),
            free_seats: (0..limits.seats).rev().map(Seat).collect(),
            next_id: 0,
            step: Step::default(),
            counters: Counters::default(),
            returns: 0,
            displaced: 0,
            spilled_bytes: 0,
            stopped: None,
            backend,
            limits,
            layout,
            options,
        })
    }

    /// Takes a request in. One that can never run is answered by a `Refused` event before this returns; only a full
    /// queue and a stopped engine are errors, and then the sink is dropped without an event.
    pub fn submit(&mut self, request: Request, sink: EventSink) -> Result<RequestId, SubmitError> {
        let id = RequestId(self.next_id);
        self.submit_as(id, request, sink).map(|()| id)
    }

    /// [`Engine::submit`] with an id given out elsewhere; ids must rise.
    pub(crate) fn submit_as(
        &mut self,
        id: RequestId,
        request: Request,
        mut sink: EventSink,
    ) -> Result<(), SubmitError> {
        assert!(id.0 >= self.next_id, "request ids rise: {} after {}", id.0, self.next_id);
        if let Some(why) = &self.stopped {
            return Err(SubmitError::Stopped(why.clone()));
        }
        let waiting = self.waiting.len() - self.displaced;
        if waiting >= self.options.max_waiting {
            return Err(SubmitError::QueueFull { waiting, retry_after_s: self.options.retry_after_s });
        }
        self.next_id = id.0 + 1;
        let layers = self.backend.attention_layers().len() as u32;
        let untold = request.attention.filter(|&layer| layer >= layers);
        let checked = match untold {
            Some(layer) => Err(Refusal::NoAttention { layer, layers }),
            None => self.admission.check(&request, &self.limits),
        };
        match checked {
            Ok((max_outputs, need)) => {
                let rank = i64::from(request.priority) * PRIORITY_STEPS + self.counters.steps as i64;
                self.waiting.insert((rank, id), Waiting::new(id, request, sink, rank, max_outputs, need));
            }
            Err(refusal) => sink(Event::Finished {
                reason: FinishReason::Refused(refusal),
                prompt_tokens: request.prompt.len() as u32,
                cached_tokens: 0,
                output_tokens: 0,
            }),
        }
        Ok(())
    }

    /// Ends a request now; nothing happens when it is unknown or finished.
    pub fn cancel(&mut self, id: RequestId) {
        let seat = self.seats.iter().position(|s| s.as_ref().is_some_and(|s| s.id == id));
        if let Some(seat) = seat {
            self.finish(Seat(seat as u32), FinishReason::Cancelled);
        } else if let Some(&place) = self.waiting.keys().find(|k| k.1 == id)
            && let Some(waiting) = self.forget(place)
        {
            waiting.finish(FinishReason::Cancelled);
        }
    }

    /// Admits, computes and commits one step. `false` when there was nothing to do.
    pub fn step(&mut self) -> bool {
        self.step_in_stages(&mut |_| {})
    }

    /// [`Engine::step`], and tells `passed` which part is over, for those who have a clock.
    pub fn step_in_stages(&mut self, passed: &mut dyn FnMut(Stage)) -> bool {
        if self.stopped.is_some() {
            return false;
        }
        self.tiers.poll();
        if let Err(error) = self.admit() {
            self.stop(&error.to_string());
            return true;
        }
        let ended = self.constrain();
        if !self.plan() {
            self.assert_integrity();
            self.tiers.store(&mut self.prefix, &mut self.backend);
            // A seat that just became free is for those that wait.
            return self.stopped.is_none() && (ended || self.tiers.wait());
        }
        passed(Stage::Planned);
        let computed = self.compute();
        passed(Stage::Computed);
        match computed {
            Ok(result) => self.commit(result),
            Err(BackendError::BadStep { step, what }) => self.fail_step(&format!("step {step}: {what}")),
            Err(BackendError::Fatal(why)) => self.stop(&why),
        }
        self.tiers.store(&mut self.prefix, &mut self.backend);
        if self.options.paranoid {
            self.assert_integrity();
        }
        true
    }

    /// Computes the masks of constrained sequences that chose their last token, and cuts their drafts. One whose
    /// constraint gives up ends here: `true` when there was one. The cost is that of the grammar, per sequence and draft;
    /// it delays the whole step.
    fn constrain(&mut self) -> bool {
        let (words, mut ended) = (mask_words(self.limits.vocab), false);
        for seat in 0..self.seats.len() {
            let Some(sequence) = &mut self.seats[seat] else { continue };
            let Some(constraint) = &mut sequence.constraint else { continue };
            if let Err(why) = constraint.prepare(&mut sequence.drafts, words) {
                self.finish(Seat(seat as u32), FinishReason::Constraint(why));
                ended = true;
            }
        }
        ended
    }

    /// Plans the next step, with the blocks that it stores to; `false` when nothing runs.
    fn plan(&mut self) -> bool {
        let words = mask_words(self.limits.vocab);
        let grants = self.scheduler.plan(&self.seats);
        if grants.is_empty() {
            return false;
        }
        self.counters.steps += 1;
        let step = &mut self.step;
        step.clear();
        step.number = self.counters.steps;
        for grant in grants {
            let sequence = self.seats[grant.seat.0 as usize].as_mut().expect("only occupied seats get grants");
            sequence.last_step = step.number;
            let span = sequence.span(grant);
            self.prefix.make_room(&mut self.pools, sequence.blocks.missing(&self.layout, span));
            sequence.blocks.extend(&self.layout, &mut self.pools, span);
            add_to_step(step, sequence, grant, self.options.drafts, words);
        }
        true
    }

    fn compute(&mut self) -> Result<StepResult, BackendError> {
        let number = self.step.number;
        let ticket = self.backend.submit(&self.step)?;
        let result = self.backend.collect(ticket)?;
        self.check_result(number, &result).map_err(|what| BackendError::BadStep { step: number, what })?;
        Ok(result)
    }

    /// Takes the result over: tokens out, windows advanced, finished requests freed.
    fn commit(&mut self, result: StepResult) {
        for (i, result) in result.seqs.into_iter().enumerate() {
            let grant = self.scheduler.grants()[i];
            if let Some(why) = result.failed {
                self.finish(grant.seat, FinishReason::Failed(why));
                continue;
            }
            let sequence = self.seats[grant.seat.0 as usize].as_mut().expect("a step's sequences keep their seats");
            let (was_decoding, outputs, started) = (sequence.is_decoding(), sequence.outputs(), sequence.committed);
            let replayed = sequence.reuse.replaying(started).is_some();
            let reason = sequence.advance(&grant, result, self.limits.vocab);
            let new = u64::from(sequence.outputs() - outputs);
            self.counters.output_tokens += new;
            self.counters.prompt_tokens += if was_decoding || replayed { 0 } else { u64::from(grant.tokens) };
            for place in 0..grant.drafts as usize {
                self.counters.drafts_proposed[place] += 1;
                self.counters.drafts_accepted[place] += u64::from(place as u64 + 1 < new);
            }
            self.prefix.commit(sequence, &mut self.pools, started, !was_decoding, self.counters.steps);
            sequence.blocks.retire(&self.layout, &mut self.pools, sequence.committed);
            if let Some(reason) = reason {
                self.finish(grant.seat, reason);
            } else if !was_decoding && sequence.is_decoding() {
                // The prompt is computed: give back what only its chunks needed.
                self.admission.withdraw(sequence.promised);
                sequence.promised = sequence.need.decode;
                self.admission.promise(sequence.promised, self.pools.duplicates());
                self.returns += 1;
            }
        }
    }

    /// What a backend must have answered to the step that was planned last.
    fn check_result(&self, number: u64, result: &StepResult) -> Result<(), String> {
        let grants = self.scheduler.grants();
        if result.number != number || result.seqs.len() != grants.len() {
            let (got, len) = (result.number, result.seqs.len());
            return Err(format!(
                "the result is of step {got} with {len} sequences, not of {number} with {}",
                grants.len()
            ));
        }
        let seqs = grants.iter().zip(&self.step.seqs).zip(&result.seqs);
        for ((grant, step), result) in seqs.filter(|(_, result)| result.failed.is_none()) {
            let sequence = self.seats[grant.seat.0 as usize].as_ref().expect("a step's sequences keep their seats");
            let (seat, new) = (grant.seat.0, &result.tokens);
            let expected = if sequence.samples(grant) { 1..=1 + grant.drafts as usize } else { 0..=0 };
            if !expected.contains(&new.len()) {
                return Err(format!("seat {seat} got {} tokens, not {expected:?}", new.len()));
            }
            if new.len().checked_sub(1).is_some_and(|accepted| new[..accepted] != sequence.drafts[..accepted]) {
                return Err(format!("seat {seat} got {new:?} for the drafts {:?}", sequence.drafts));
            }
            if let Some(token) = new.iter().chain(&result.drafts).find(|&&t| t >= self.limits.vocab) {
                return Err(format!("seat {seat} got token {token}, the vocabulary has {}", self.limits.vocab));
            }
            let allowed = |(row, &token): (u32, &u32)| allows(self.step.mask_of(step, row), token);
            if !(0..).zip(new).all(allowed) {
                return Err(format!("seat {seat} got {new:?}, which its masks do not allow"));
            }
            let told = if step.attention.is_some() { step.tokens.len() } else { 0 };
            if result.reads.len() != told {
                return Err(format!("seat {seat} was told of {} positions, not of {told}", result.reads.len()));
            }
            if result.drafts.len() > self.options.drafts as usize {
                return Err(format!("seat {seat} got {} drafts", result.drafts.len()));
            }
        }
        Ok(())
    }

    /// Frees a seat with all its blocks and delivers the last event.
    fn finish(&mut self, seat: Seat, reason: FinishReason) {
        let mut sequence = self.seats[seat.0 as usize].take().expect("only occupied seats finish");
        self.prefix.leave(&sequence.reuse, self.counters.steps);
        sequence.blocks.release(&self.layout, &mut self.pools);
        self.admission.withdraw(sequence.promised);
        self.returns += 1;
        self.free_seats.push(seat);
        sequence.finish(reason);
    }

    fn fail_step(&mut self, why: &str) {
        for i in 0..self.scheduler.grants().len() {
            let seat = self.scheduler.grants()[i].seat;
            self.finish(seat, FinishReason::Failed(why.to_string()));
        }
    }

    /// Fails every request and takes no more. Later calls change nothing.
    pub fn stop(&mut self, why: &str) {
        self.stopped.get_or_insert_with(|| why.to_string());
        for seat in 0..self.seats.len() {
            if self.seats[seat].is_some() {
                self.finish(Seat(seat as u32), FinishReason::Failed(why.to_string()));
            }
        }
        while let Some((&place, _)) = self.waiting.first_key_value()
            && let Some(waiting) = self.forget(place)
        {
            waiting.finish(FinishReason::Failed(why.to_string()));
        }
        self.flush();
    }

    /// Copies what is still to be copied to the tiers and closes them. Waits for the disk, but not for ever.
    fn flush(&mut self) {
        self.tiers.store(&mut self.prefix, &mut self.backend);
        while !self.prefix.fresh.is_empty() && self.tiers.wait() {
            self.tiers.store(&mut self.prefix, &mut self.backend);
        }
        self.tiers.close();
    }

    /// Delivers the last event of every request after a panic, when blocks and promises can no longer be trusted.
    pub(crate) fn abandon(&mut self, why: &str) {
        self.stopped.get_or_insert_with(|| why.to_string());
        let reason = || FinishReason::Failed(why.to_string());
        // It may have been a sink that panicked, and it may do so again: the others still get their event.
        for sequence in self.seats.iter_mut().filter_map(Option::take) {
            let _ = catch_unwind(AssertUnwindSafe(|| sequence.finish(reason())));
        }
        while let Some((_, waiting)) = self.waiting.pop_first() {
            let _ = catch_unwind(AssertUnwindSafe(|| waiting.finish(reason())));
        }
    }

    /// Forgets all checkpoints and keeps the blocks of all prefixes, as if windows alone had been evicted: the prompts that
    /// follow rebuild them. For proofs; what runs is not concerned.
    pub fn drop_checkpoints(&mut self) {
        self.prefix.drop_checkpoints(&mut self.pools);
    }

    /// What the engine is doing.
    pub fn status(&self) -> Status {
        Status {
            running: self.seats.iter().flatten().count() as u32,
            waiting: self.waiting.len() as u32,
            displaced: self.displaced as u32,
            units_total: self.pools.total(),
            units_used: self.pools.used(),
            units_cached: self.pools.cached(),
            units_promised: self.admission.promised(),
            steps: self.counters.steps,
            prompt_tokens: self.counters.prompt_tokens,
            output_tokens: self.counters.output_tokens,
            drafts_proposed: self.counters.drafts_proposed.iter().sum(),
            drafts_accepted: self.counters.drafts_accepted.iter().sum(),
            drafts_proposed_at: self.counters.drafts_proposed,
            drafts_accepted_at: self.counters.drafts_accepted,
            preempted: self.counters.preempted,
            spilled: self.counters.spilled,
            resumed: self.counters.resumed,
            spilled_bytes: self.spilled_bytes,
            prefix: self.prefix.status,
            tiers: self.tiers.status(),
            alive: self.stopped.is_none(),
            ..Status::new(self.limits.clone())
        }
    }

    /// The backend, for measurements between steps.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Kinds of the layers whose attention can be told, by number.
    pub fn attention_layers(&self) -> &[LayerKind] {
        self.backend.attention_layers()
    }

    /// Bounds of the backend.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Why the engine stopped, if it did.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// Checks every invariant: references equal the tables and the cache's entries, each row that will be read is mapped, nobody holds more than
    /// was promised, and the promises fit the pools. The error names the first that is broken.
    pub fn check_integrity(&self) -> Result<(), String> {
        let mut counts = self.pools.total().map(PoolCount::new);
        let mut promised = [0; 3];
        for sequence in self.seats.iter().flatten() {
            let (held, most) = (sequence.blocks.units(&self.layout), sequence.promised);
            if (0..3).any(|i| held[i] > most[i]) {
                return Err(format!("request {} holds {held:?} units, {most:?} were promised", sequence.id.0));
            }
            promised = [0, 1, 2].map(|i| promised[i] + most[i]);
            let blocks = sequence.blocks.check(&self.layout, sequence.committed, &mut counts);
            let path = self.prefix.check_sequence(sequence);
            blocks.and(path).map_err(|e| format!("request {}: {e}", sequence.id.0))?;
        }
        self.prefix.check(&self.pools, &mut counts)?;
        if promised != self.admission.promised() {
            return Err(format!("{:?} units are promised, sequences have {promised:?}", self.admission.promised()));
        }
        let (duplicates, total) = (self.pools.duplicates(), self.pools.total());
        if (0..3).any(|i| promised[i] - duplicates[i] > total[i]) {
            return Err(format!("{promised:?} units are promised, {duplicates:?} of them twice, of {total:?}"));
        }
        for bucket in Bucket::ALL {
            let pool = self.pools.of(bucket);
            pool.check(&counts[bucket as usize]).map_err(|e| format!("{} pool: {e}", bucket.name()))?;
        }
        Ok(())
    }

    fn assert_integrity(&self) {
        if let Err(what) = self.check_integrity() {
            panic!("a cache invariant is broken after step {}: {what}", self.counters.steps);
        }
    }
}

/// Appends one sequence to a step.
fn add_to_step(step: &mut Step, sequence: &mut Sequence, grant: &Grant, drafts: u32, mask_words: usize) {
    let (tokens, writes) = (step.tokens.len() as u32, step.writes.len() as u32);
    let start = sequence.committed as usize;
    step.tokens.extend_from_slice(&sequence.tokens[start..start + grant.tokens as usize]);
    step.tokens.extend_from_slice(&sequence.drafts[..grant.drafts as usize]);
    sequence.blocks.take_writes(&mut step.writes);
    let samples = sequence.samples(grant);
    let tells = samples && !sequence.history_told && sequence.sampling.has_penalties();
    sequence.history_told |= tells;
    let history = tells.then(|| {
        let from = step.history.len() as u32;
        step.history.extend_from_slice(&sequence.tokens[..start]);
        from..step.history.len() as u32
    });
    let masks = step.masks.len() as u32;
    if let Some(constraint) = sequence.constraint.as_ref().filter(|_| samples) {
        step.masks.extend_from_slice(constraint.masks(1 + grant.drafts, mask_words));
    }
    let replay = sequence.reuse.replaying(sequence.committed);
    step.seqs.push(SeqStep {
        seat: grant.seat,
        fresh: std::mem::take(&mut sequence.fresh),
        start: sequence.committed,
        tokens: tokens..step.tokens.len() as u32,
        drafts: grant.drafts,
        writes: writes..step.writes.len() as u32,
        history,
        sample: samples.then(|| sequence.sampling.clone()),
        masks: masks..step.masks.len() as u32,
        // This step gives at least one token, and the last token needs no draft.
        want_drafts: if samples { drafts.min(sequence.outputs_left().saturating_sub(2)) } else { 0 },
        logits: if replay.is_some() { ReturnLogits::No } else { sequence.logits },
        attention: sequence.attention,
        replay,
    });
}
