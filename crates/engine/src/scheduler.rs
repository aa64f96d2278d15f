//! Who computes how many tokens in the next step.
//!
//! Decodes come first, then prompt chunks, up to the token budget. When the budget is short, decodes that waited longest
//! go first and drafts are cut before tokens. Of what is left for prompts, half belongs to the request that is first by
//! rank (priority and arrival) and half to the shortest remaining prompts: so a prompt of a million tokens delays nobody for
//! long, and a stream of short prompts cannot stop it either. With fewer budget tokens than seats, prompts wait until enough
//! decodes have ended. Plain functions of the running sequences; no clock.

use crate::sequence::Sequence;
use crate::step::{Limits, Seat};

/// A sequence's share of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grant {
    /// Whose.
    pub seat: Seat,
    /// Known tokens to compute: pending prompt tokens, or the last generated one.
    pub tokens: u32,
    /// Drafts to verify after them.
    pub drafts: u32,
}

/// Plans steps; keeps its lists between steps so that planning allocates nothing.
#[derive(Debug)]
pub(crate) struct Scheduler {
    step_tokens: u32,
    max_chunk: u32,
    order: Vec<usize>,
    grants: Vec<Grant>,
}

impl Scheduler {
    /// A scheduler for at most `limits.seats` sequences and chunks of at most `max_chunk` tokens.
    pub fn new(limits: &Limits, max_chunk: u32) -> Scheduler {
        assert!(limits.step_tokens > 0 && max_chunk > 0, "a step without tokens never ends");
        let seats = limits.seats as usize;
        Scheduler {
            step_tokens: limits.step_tokens,
            max_chunk,
            order: Vec::with_capacity(seats),
            grants: Vec::with_capacity(seats),
        }
    }

    /// Shares out one step. Every sequence is in it at most once; empty when nothing runs.
    pub fn plan(&mut self, seats: &[Option<Sequence>]) -> &[Grant] {
        self.grants.clear();
        let left = self.grant_decodes(seats, self.step_tokens);
        self.grant_prompts(seats, left);
        &self.grants
    }

    /// The grants of the step that was planned last.
    pub fn grants(&self) -> &[Grant] {
        &self.grants
    }

    fn grant_decodes(&mut self, seats: &[Option<Sequence>], budget: u32) -> u32 {
        self.choose(seats, Sequence::is_decoding);
        self.order.sort_unstable_by_key(|&s| (at(seats, s).last_step, at(seats, s).id));
        self.order.truncate(budget as usize);
        let left = budget - self.order.len() as u32;
        // While a prompt waits, drafts leave at least half of the rest to it.
        let prompt_waits = seats.iter().flatten().any(|s| !s.is_decoding());
        let spare = if prompt_waits { left / 2 } else { left };
        let mut drafts_left = spare;
        for &s in &self.order {
            let drafts = at(seats, s).usable_drafts().min(drafts_left);
            drafts_left -= drafts;
            self.grants.push(Grant { seat: Seat(s as u32), tokens: 1, drafts });
        }
        left - (spare - drafts_left)
    }

    fn grant_prompts(&mut self, seats: &[Option<Sequence>], mut budget: u32) {
        self.choose(seats, |s| !s.is_decoding());
        self.order.sort_unstable_by_key(|&s| (at(seats, s).pending(), at(seats, s).id));
        let Some(first) = (0..self.order.len()).min_by_key(|&i| rank(at(seats, self.order[i]))) else { return };
        let first = self.order.remove(first);
        let chunk = |s: usize, share: u32| at(seats, s).chunk_limit().min(self.max_chunk).min(share);
        let half = chunk(first, budget.div_ceil(2));
        budget -= half;
        let index = self.grants.len();
        self.grants.push(Grant { seat: Seat(first as u32), tokens: half, drafts: 0 });
        for &s in &self.order {
            let tokens = chunk(s, budget);
            budget -= tokens;
            self.grants.push(Grant { seat: Seat(s as u32), tokens, drafts: 0 });
        }
        // What nobody else can use goes back to the first.
        self.grants[index].tokens = chunk(first, half + budget);
        self.grants.retain(|g| g.tokens > 0);
    }

    fn choose(&mut self, seats: &[Option<Sequence>], wanted: impl Fn(&Sequence) -> bool) {
        self.order.clear();
        self.order.extend((0..seats.len()).filter(|&s| seats[s].as_ref().is_some_and(&wanted)));
    }
}

/// Order of service: priority and arrival.
fn rank(sequence: &Sequence) -> (i64, crate::request::RequestId) {
    (sequence.rank, sequence.id)
}

fn at(seats: &[Option<Sequence>], seat: usize) -> &Sequence {
    seats[seat].as_ref().expect("chosen from occupied seats")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Admission;
    use crate::blocks::SequenceBlocks;
    use crate::request::RequestId;
    use crate::sequence::Waiting;
    use crate::testing::{request, tiny_layout};

    /// A sequence of `prompt` tokens of which `committed` are computed, and `outputs` generated.
    fn sequence(id: u64, prompt: u32, committed: u32, outputs: u32) -> Option<Sequence> {
        let layout = tiny_layout();
        let need = Admission::new(&layout, [9999; 3], 64, 0).need(prompt, 100);
        let request = request(vec![1; prompt as usize], 100);
        let waiting = Waiting::new(RequestId(id), request, Box::new(|_| ()), 0, 100, need);
        let mut s = Sequence::new(waiting, SequenceBlocks::new(&layout, prompt + 100), committed);
        s.tokens.extend(vec![1; outputs as usize]);
        Some(s)
    }

    fn scheduler(step_tokens: u32, max_chunk: u32) -> Scheduler {
        let limits = Limits { seats: 8, step_tokens, context: 9999, units: [99; 3], drafts: 7, in_flight: 1, vocab: 9 };
        Scheduler::new(&limits, max_chunk)
    }

    fn plan(scheduler: &mut Scheduler, seats: &[Option<Sequence>]) -> Vec<(u32, u32, u32)> {
        scheduler.plan(seats).iter().map(|g| (g.seat.0, g.tokens, g.drafts)).collect()
    }

    #[test]
    fn decodes_first_then_the_oldest_half_then_the_shortest() {
        let seats =
            [sequence(1, 5000, 0, 0), None, sequence(2, 10, 10, 1), sequence(3, 40, 0, 0), sequence(4, 30, 0, 0)];
        assert_eq!(plan(&mut scheduler(101, 999), &seats), [(2, 1, 0), (0, 50, 0), (4, 30, 0), (3, 20, 0)]);
        assert_eq!(plan(&mut scheduler(201, 999), &seats), [(2, 1, 0), (0, 130, 0), (4, 30, 0), (3, 40, 0)]);
        assert_eq!(plan(&mut scheduler(201, 8), &seats), [(2, 1, 0), (0, 8, 0), (4, 8, 0), (3, 8, 0)]);
    }

    #[test]
    fn priority_decides_who_is_first() {
        let mut seats = [sequence(1, 500, 0, 0), sequence(2, 600, 0, 0)];
        seats[1].as_mut().unwrap().rank = -1;
        assert_eq!(plan(&mut scheduler(10, 99), &seats), [(1, 5, 0), (0, 5, 0)]);
        assert_eq!(plan(&mut scheduler(1, 99), &seats), [(1, 1, 0)]);
    }

    #[test]
    fn a_short_budget_cuts_drafts_and_then_turns() {
        let mut seats = [sequence(1, 5, 5, 1), sequence(2, 5, 5, 1), sequence(3, 5, 5, 1)];
        for s in seats.iter_mut().flatten() {
            s.drafts = vec![0; 3];
        }
        assert_eq!(plan(&mut scheduler(20, 9), &seats), [(0, 1, 3), (1, 1, 3), (2, 1, 3)]);
        assert_eq!(plan(&mut scheduler(7, 9), &seats), [(0, 1, 3), (1, 1, 1), (2, 1, 0)]);
        assert_eq!(plan(&mut scheduler(2, 9), &seats), [(0, 1, 0), (1, 1, 0)]);
        seats[0].as_mut().unwrap().last_step = 1;
        seats[1].as_mut().unwrap().last_step = 1;
        assert_eq!(plan(&mut scheduler(2, 9), &seats), [(2, 1, 0), (0, 1, 0)]);
    }

    #[test]
    fn drafts_leave_room_for_a_waiting_prompt_and_for_max_tokens() {
        let mut seats = [sequence(1, 5, 5, 1), sequence(2, 50, 0, 0)];
        seats[0].as_mut().unwrap().drafts = vec![0; 7];
        assert_eq!(plan(&mut scheduler(9, 99), &seats), [(0, 1, 4), (1, 4, 0)]);
        seats[0].as_mut().unwrap().max_outputs = 3;
        assert_eq!(plan(&mut scheduler(9, 99), &seats), [(0, 1, 1), (1, 7, 0)]);
    }
}
