//! The loop: admit, plan, submit, collect, commit. One call of [`Engine::step`] is one iteration.
//!
//! Assumes a backend that keeps the contract of [`crate::step`]; a result that breaks it fails the requests of the step.
//! Every request that is taken in gets exactly one `Finished`, whatever happens, and its blocks come home before it.
//! Knows no clock: whoever drives the loop measures time.

mod iteration;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use longwave_model::CacheLayout;
use longwave_model::geometry::{Bucket, MAX_DRAFTS};

use crate::admission::Admission;
use crate::attention::LayerKind;
use crate::options::EngineOptions;
use crate::pool::{PoolCount, Pools};
use crate::prefix::{PrefixCache, PrefixOptions};
use crate::request::{Event, EventSink, FinishReason, Refusal, Request, RequestId, SubmitError};
use crate::scheduler::Scheduler;
use crate::seating::{PRIORITY_STEPS, Place};
use crate::sequence::{Sequence, Waiting};
use crate::status::Status;
use crate::step::{Backend, BackendError, Limits, Seat, Step};
use crate::tier::{DirectoryError, TierOptions, Tiers};

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
