//! Who gets a seat, who waits, and who has to give one up.
//!
//! Requests are seated in the order of their rank while their worst case fits. The first that does not fit holds the
//! others back, so it cannot starve; a more urgent one takes seats and units of less urgent ones that run. A request
//! whose prefix is just being computed by another waits for that and holds nobody back. Assumes that no step is in
//! flight. What a request reuses is mapped before anything is allocated, so no eviction can take it away.

use longwave_model::geometry::LOGICAL_BLOCK;

use crate::blocks::SequenceBlocks;
use crate::engine::Engine;
use crate::hash::{self, BlockHash};
use crate::lookup::Found;
use crate::pool::Units;
use crate::prefix::PrefixCache;
use crate::request::{Event, RequestId};
use crate::sequence::{Awaited, Progress, Sequence, Waiting};
use crate::spill::{self, Spill};
use crate::step::{Backend, BackendError, Seat};
use crate::tier::{self, Reach, Staged};

/// One level of priority is worth this many steps of waiting: traffic that is more urgent delays others, not for ever.
pub(crate) const PRIORITY_STEPS: i64 = 1024;

/// Place in the queue.
pub(crate) type Place = (i64, RequestId);

/// What became of a request that wants a seat.
enum Seating {
    Seated,
    /// It waits for something that another request is computing.
    Deferred,
    /// There is no seat or no room.
    Blocked,
    /// The same, and nothing has changed since it was looked at.
    StillBlocked,
    /// What it was to reuse turned out to be no good: to be looked at again.
    Again,
}

impl<B: Backend> Engine<B> {
    /// Gives seats to waiting requests.
    pub(crate) fn admit(&mut self) -> Result<(), BackendError> {
        let mut next = self.waiting.first_key_value().map(|(&place, _)| place);
        while let Some(place) = next {
            match self.seat(place)? {
                Seating::Blocked if self.make_way(place) => continue,
                Seating::Again => continue,
                Seating::Blocked | Seating::StillBlocked => break,
                Seating::Seated | Seating::Deferred => {}
            }
            let behind = (std::ops::Bound::Excluded(place), std::ops::Bound::Unbounded);
            next = self.waiting.range(behind).next().map(|(&place, _)| place);
        }
        Ok(())
    }

    fn seat(&mut self, place: Place) -> Result<Seating, BackendError> {
        if self.tiers.is_parked(place.1) {
            // Records that were read for a request behind this one wait for its seat, perhaps for long: they go.
            let owner = self.tiers.over_for();
            let behind = owner.and_then(|id| self.waiting.keys().find(|k| k.1 == id)).is_some_and(|k| *k > place);
            if !behind {
                return Ok(Seating::Deferred);
            }
            self.tiers.end_load();
        }
        let waiting = self.waiting.get_mut(&place).expect("only waiting requests are seated");
        let state = self.returns + self.prefix.version;
        if waiting.blocked_at == Some(state) {
            return Ok(Seating::StillBlocked);
        }
        if let Some(awaited) = waiting.awaits.take()
            && self.seats[awaited.seat].as_ref().is_some_and(|s| s.id == awaited.id && s.reuse.junction > s.committed)
        {
            waiting.awaits = Some(awaited);
            return Ok(Seating::Deferred);
        }
        hash_prompt(waiting, &self.prefix);
        let (request, hashes) = (&waiting.request, waiting.hashes.as_deref().unwrap_or_default());
        let mut found = self.prefix.lookup(request, hashes);
        let device_hit = found.hit;
        let spill = waiting.progress.as_ref().and_then(|p| p.spill.as_ref());
        let resumes = spill.filter(|s| found.matched() >= s.published);
        let most = (request.prompt.len() as u32 - 1) / LOGICAL_BLOCK;
        let plan = if resumes.is_some() {
            None
        } else {
            match self.tiers.reach(waiting.id, request, hashes, &found) {
                Reach::Device => None,
                Reach::Tiers(plan) => Some(plan).filter(|plan| found.is_worse_than(plan)),
                Reach::Wait => return Ok(Seating::Deferred),
            }
        };
        if let Some(plan) = &plan {
            found.reach(plan, most);
        }
        let ready = plan.as_ref().map_or(found.hit, |plan| plan.end);
        let useful = if request.wants_every_position() { 0 } else { most };
        if resumes.is_none() {
            let awaited = await_prefix(&mut self.seats, place, request.salt, hashes, useful, ready);
            if awaited.is_some() {
                waiting.awaits = awaited;
                return Ok(Seating::Deferred);
            }
        }
        let reused = resumes.map_or(found.reused, |s| s.published);
        let (shared, doubled) = (self.prefix.shared_units(&found, reused, &self.pools), self.pools.duplicates());
        let fits = self.admission.fits(waiting.need.most(), [0, 1, 2].map(|i| shared[i] + doubled[i]));
        let Some(&seat) = self.free_seats.last().filter(|_| fits) else {
            waiting.blocked_at = Some(state);
            return Ok(Seating::Blocked);
        };
        let resumes = resumes.is_some();
        let staged = match plan {
            None => None,
            Some(plan) => match self.tiers.take_records(waiting.id, request, hashes, plan) {
                // A record was not what it should be.
                None => return Ok(Seating::Again),
                staged => staged,
            },
        };
        if let Some(staged) = &staged {
            (found.report.host_tokens, found.report.disk_tokens) = staged.tokens(device_hit);
        }
        self.tiers.touch(&hashes[..(found.report.cached_tokens / LOGICAL_BLOCK) as usize]);
        self.tiers.forget(waiting.id);
        let waiting = self.waiting.remove(&place).expect("it was there");
        self.displaced -= usize::from(waiting.progress.is_some());
        self.free_seats.pop();
        self.occupy(seat, waiting, &found, staged.as_ref(), resumes)?;
        Ok(Seating::Seated)
    }

    /// Maps what was found and, behind it, what the tiers bring or, if it `resumes`, what it had spilled.
    fn occupy(
        &mut self,
        seat: Seat,
        mut waiting: Waiting,
        found: &Found,
        staged: Option<&Staged>,
        resumes: bool,
    ) -> Result<(), BackendError> {
        let spill = waiting.progress.as_mut().and_then(|p| p.spill.take());
        self.spilled_bytes -= spill.as_ref().map_or(0, Spill::bytes);
        let again = waiting.progress.is_some();
        if !again {
            self.prefix.count(found, waiting.request.prompt.len());
        }
        let positions = waiting.request.prompt.len() as u32 + waiting.max_outputs;
        let mut blocks = SequenceBlocks::new(&self.layout, positions);
        let hashes = waiting.hashes.take().unwrap_or_default();
        let now = self.counters.steps;
        let most = waiting.need.most();
        let spill = spill.filter(|_| resumes);
        let (reuse, committed) = match &spill {
            Some(spill) => {
                (self.prefix.resume(found, spill.published, hashes, &mut blocks, &mut self.pools, now), spill.committed)
            }
            None => {
                let reuse = self.prefix.adopt(found, hashes, &mut blocks, &mut self.pools, now);
                (reuse, found.report.cached_tokens)
            }
        };
        self.admission.promise(most, self.pools.duplicates());
        let mut sequence = Sequence::new(waiting, blocks, committed);
        if sequence.promised != most {
            self.admission.withdraw(most);
            self.admission.promise(sequence.promised, self.pools.duplicates());
        }
        sequence.reuse = reuse;
        let (layout, pools, backend) = (&self.layout, &mut self.pools, &mut self.backend);
        let restored = match (&spill, staged) {
            (Some(spill), _) => {
                self.counters.resumed += 1;
                self.prefix.make_room(pools, spill.units(layout));
                spill.restore(layout, &mut sequence.blocks, pools, backend)
            }
            (None, Some(staged)) => {
                tier::restore(&mut self.tiers, staged, &mut sequence, &mut self.prefix, pools, backend, now)
            }
            (None, None) => Ok(()),
        };
        if !again {
            let (cached_tokens, prefix) = (sequence.cached_tokens, found.report);
            (sequence.sink)(Event::Scheduled { cached_tokens, prefix });
        }
        self.seats[seat.0 as usize] = Some(sequence);
        restored
    }

    /// Takes a seat and units from a less urgent request for the one at `place`. `false` when that would not help.
    fn make_way(&mut self, place: Place) -> bool {
        let Some(waiting) = self.waiting.get(&place) else { return false };
        let (priority, most) = (waiting.request.priority, waiting.need.most());
        let victims: Vec<usize> = (0..self.seats.len()).filter(|&s| self.may_go(s, place, priority)).collect();
        if victims.is_empty() {
            return false;
        }
        // All of them together must be enough: of what is shared, no more can be saved than is saved now.
        let given: Units = victims.iter().fold([0; 3], |sum, &s| {
            let promised = self.seats[s].as_ref().expect("a victim has a seat").promised;
            [0, 1, 2].map(|i| sum[i] + promised[i])
        });
        let waiting = self.waiting.get_mut(&place).expect("it was there");
        hash_prompt(waiting, &self.prefix);
        let found = self.prefix.lookup(&waiting.request, waiting.hashes.as_deref().unwrap_or_default());
        let shared = self.prefix.shared_units(&found, found.matched(), &self.pools);
        let doubled = self.pools.duplicates();
        if !self.admission.fits(most, [0, 1, 2].map(|i| shared[i] + doubled[i] + given[i])) {
            return false;
        }
        let cost = |s: &usize| {
            let sequence = self.seats[*s].as_ref().expect("a victim has a seat");
            let redo = u64::from(self.prefix.redo_tokens(sequence)) << 32;
            let per_byte = redo / self.layout.bytes(sequence.promised).max(1);
            (std::cmp::Reverse(sequence.priority), per_byte, std::cmp::Reverse(sequence.id))
        };
        let victim = victims.into_iter().min_by_key(cost).expect("there is at least one");
        self.preempt(Seat(victim as u32));
        true
    }

    /// Whether the request at a seat may be made to wait for the one at `place`, and then stands behind it.
    fn may_go(&self, seat: usize, place: Place, priority: i32) -> bool {
        let total = self.pools.total();
        self.seats[seat].as_ref().is_some_and(|s| {
            // What it will need then must fit; its earlier positions must not be told of twice.
            let most = self.need_again(s).most();
            let behind = s.priority > priority && (s.rank, s.id) > place;
            behind && !s.wants_every_position() && (0..3).all(|i| most[i] <= total[i])
        })
    }

    fn need_again(&self, s: &Sequence) -> crate::admission::Need {
        self.admission.need(s.tokens.len() as u32, s.outputs_left())
    }

    /// Sends a running request back to the queue. Its small state is copied to host memory when that is cheaper than
    /// to compute it again and there is room.
    pub(crate) fn preempt(&mut self, seat: Seat) {
        let mut sequence = self.seats[seat.0 as usize].take().expect("only occupied seats are given up");
        let bytes = Spill::bytes_of(&self.layout, &sequence);
        // A replay under way begins again: its windows are half there.
        let wanted = sequence.reuse.replaying(sequence.committed).is_none()
            && self.prefix.redo_tokens(&sequence) >= spill::WORTH_TOKENS
            && self.spilled_bytes + bytes <= self.options.spill_bytes;
        // A backend that cannot hand its rows over costs time, not the request.
        let spill = if wanted { Spill::take(&self.layout, &sequence, &mut self.backend).ok() } else { None };
        self.spilled_bytes += spill.as_ref().map_or(0, Spill::bytes);
        self.counters.preempted += 1;
        self.counters.spilled += u64::from(spill.is_some());
        self.prefix.leave(&sequence.reuse, self.counters.steps);
        sequence.blocks.release(&self.layout, &mut self.pools);
        self.admission.withdraw(sequence.promised);
        self.returns += 1;
        self.free_seats.push(seat);
        let need = self.need_again(&sequence);
        let waiting = sequence.into_waiting(need, spill);
        self.displaced += 1;
        self.waiting.insert((waiting.rank, waiting.id), waiting);
    }

    /// Takes a request out of the queue.
    pub(crate) fn forget(&mut self, place: Place) -> Option<Waiting> {
        let waiting = self.waiting.remove(&place)?;
        self.tiers.forget(waiting.id);
        self.displaced -= usize::from(waiting.progress.is_some());
        let spill = waiting.progress.as_ref().and_then(|Progress { spill, .. }| spill.as_ref());
        self.spilled_bytes -= spill.map_or(0, Spill::bytes);
        Some(waiting)
    }
}

/// Hashes the known text of a request, once.
fn hash_prompt(waiting: &mut Waiting, prefix: &PrefixCache) {
    let request = &waiting.request;
    let chain = || if prefix.is_on() { hash::chain(request.salt, &request.prompt) } else { Vec::new() };
    waiting.hashes.get_or_insert_with(chain);
}

/// The running request that is about to compute or replay more of a prompt than its first `ready` blocks, which end at a
/// checkpoint; at most `most` blocks are of use. It is asked to leave a checkpoint where the texts part. Only one that
/// stands before `place` is waited for: the others may get no part of a step for long.
fn await_prefix(
    seats: &mut [Option<Sequence>],
    place: Place,
    salt: u64,
    hashes: &[BlockHash],
    most: u32,
    ready: u32,
) -> Option<Awaited> {
    let mut best = None;
    for (seat, s) in seats.iter_mut().enumerate().filter_map(|(i, s)| Some((i, s.as_mut()?))) {
        let computed = s.committed / LOGICAL_BLOCK;
        let most = most.min(s.prefill_tokens / LOGICAL_BLOCK);
        if s.salt != salt || !s.reuse.active || (s.rank, s.id) > place || most <= ready.max(computed) {
            continue;
        }
        let common = s.reuse.hashes.iter().zip(hashes).take_while(|(a, b)| a == b).count() as u32;
        let common = common.min(most);
        if common > ready.max(computed) {
            let until = common * LOGICAL_BLOCK;
            // The earliest one first: those behind it ask again when it is passed.
            if s.reuse.junction <= s.committed || until < s.reuse.junction {
                s.reuse.junction = until;
            }
            // Looked at again when the checkpoint that comes next is passed.
            best = best.or(Some(Awaited { seat, id: s.id }));
        }
    }
    best
}
