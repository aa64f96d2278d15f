//! One step of the engine, from masks to committed tokens: constrain, plan, compute, check, commit.
//!
//! Assumes that requests were admitted: every sequence with a seat is promised the units that its grants need. Refuses a
//! result that does not answer the step, before anything of it is taken over.

use super::Engine;
use crate::constraint::{allows, mask_words};
use crate::request::FinishReason;
use crate::scheduler::Grant;
use crate::sequence::Sequence;
use crate::step::{Backend, BackendError, ReturnLogits, Seat, SeqStep, Step, StepResult};

impl<B: Backend> Engine<B> {
    /// Computes the masks of constrained sequences that chose their last token, and cuts their drafts. One whose
    /// constraint gives up ends here: `true` when there was one. The cost is that of the grammar, per sequence and draft;
    /// it delays the whole step.
    pub(super) fn constrain(&mut self) -> bool {
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
    pub(super) fn plan(&mut self) -> bool {
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

    pub(super) fn compute(&mut self) -> Result<StepResult, BackendError> {
        let number = self.step.number;
        let ticket = self.backend.submit(&self.step)?;
        let result = self.backend.collect(ticket)?;
        self.check_result(number, &result).map_err(|what| BackendError::BadStep { step: number, what })?;
        Ok(result)
    }

    /// Takes the result over: tokens out, windows advanced, finished requests freed.
    pub(super) fn commit(&mut self, result: StepResult) {
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

    pub(super) fn fail_step(&mut self, why: &str) {
        for i in 0..self.scheduler.grants().len() {
            let seat = self.scheduler.grants()[i].seat;
            self.finish(seat, FinishReason::Failed(why.to_string()));
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
