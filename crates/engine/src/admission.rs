//! Exact admission: how many units of each pool a request holds at its worst moment, and whether they are still promised
//! to nobody.
//!
//! A request that is admitted never fails for lack of blocks: the promises of all running requests sum to at most the
//! pools, units that several of them share counted once; what only the prefix cache holds can be evicted at any time and
//! counts for nothing. Nothing is reserved for the middle of a prefill, because it is never mapped (ARCHITECTURE.md, "Cache design"). Refuses at
//! once, with the numbers, what can never run. Assumes chunks of at most `chunk` tokens and at most `drafts` drafts.

use longwave_model::CacheLayout;
use longwave_model::geometry::{Bucket, GroupSpec, LOGICAL_BLOCK, Retention};

use crate::pool::Units;
use crate::request::{Refusal, Request};
use crate::step::Limits;

/// Periods are taken away from the start of a sequence, where windows are full.
const FAR: u32 = 1024;

/// Units that a request holds at most: until its prompt is computed, and afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// While prompt chunks are in flight: rows that a chunk reads and rows that it leaves.
    pub prefill: Units,
    /// While tokens are generated, drafts included.
    pub decode: Units,
}

impl Need {
    /// The worst moment.
    pub fn most(&self) -> Units {
        [0, 1, 2].map(|i| self.prefill[i].max(self.decode[i]))
    }
}

/// Worst case of one sliding group, in blocks.
#[derive(Debug, Clone, Copy)]
struct SlidingNeed {
    bucket: Bucket,
    block_tokens: u32,
    prefill: u32,
    decode: u32,
}

/// What requests need, and what has been promised to the running ones.
#[derive(Debug, Clone)]
pub(crate) struct Admission {
    long_lived: Units,
    sliding: Vec<SlidingNeed>,
    total: Units,
    promised: Units,
}

impl Admission {
    /// Nothing promised yet.
    pub fn new(layout: &CacheLayout, total: Units, chunk: u32, drafts: u32) -> Admission {
        let sliding = layout.sliding().map(|id| SlidingNeed::new(&layout.groups[id], chunk, drafts)).collect();
        Admission { long_lived: layout.long_lived_units(), sliding, total, promised: [0; 3] }
    }

    /// Need of a request of `prompt` tokens that generates at most `outputs`. The last token is delivered, not cached.
    pub fn need(&self, prompt: u32, outputs: u32) -> Need {
        let positions = prompt + outputs.saturating_sub(1);
        let mut need = Need { prefill: self.long_lived.map(|u| u * positions.div_ceil(LOGICAL_BLOCK)), decode: [0; 3] };
        need.decode = need.prefill;
        for s in &self.sliding {
            need.prefill[s.bucket as usize] += s.prefill.min(prompt.div_ceil(s.block_tokens));
            need.decode[s.bucket as usize] += s.decode.min(positions.div_ceil(s.block_tokens));
        }
        need
    }

    /// Most outputs, up to `most`, with which a prompt fits into the pools when it is alone.
    pub fn most_outputs(&self, prompt: u32, most: u32) -> u32 {
        let fits = |outputs: u32| {
            let need = self.need(prompt, outputs).most();
            (0..3).all(|i| need[i] <= self.total[i])
        };
        // The need grows with the outputs: the first number that does not fit is one past the answer.
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Whether the request can run at all; with the most tokens that it may generate and its need.
    pub fn check(&self, request: &Request, limits: &Limits) -> Result<(u32, Need), Refusal> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if prompt + request.max_tokens.min(1) as usize > limits.context as usize {
            return Err(Refusal::TooLong { prompt, max_tokens: request.max_tokens, context: limits.context });
        }
        if let Some(position) = request.prompt.iter().position(|&t| t >= limits.vocab) {
            return Err(Refusal::BadToken { token: request.prompt[position], position, vocab: limits.vocab });
        }
        let outputs = request.max_tokens.min(limits.context - prompt as u32);
        let need = self.need(prompt as u32, outputs);
        let most = need.most();
        match Bucket::ALL.into_iter().find(|&b| most[b as usize] > self.total[b as usize]) {
            None => Ok((outputs, need)),
            Some(b) => Err(Refusal::NeverFits {
                tokens: prompt as u64 + u64::from(outputs),
                pool: b.name(),
                need: u64::from(most[b as usize]),
                have: u64::from(self.total[b as usize]),
            }),
        }
    }

    /// Whether `units` are promised to nobody now. `duplicates` are references that running sequences, this one
    /// included, have for life to units of each other: promised more than once, they exist once.
    pub fn fits(&self, units: Units, duplicates: Units) -> bool {
        let sum = |i: usize| u64::from(self.promised[i]) + u64::from(units[i]);
        (0..3).all(|i| sum(i) <= u64::from(self.total[i]) + u64::from(duplicates[i]))
    }

    /// Promises `units` to a request.
    pub fn promise(&mut self, units: Units, duplicates: Units) {
        let (promised, total) = (self.promised, self.total);
        assert!(self.fits(units, duplicates), "{promised:?} of {total:?} promised, {units:?} more do not fit");
        for i in 0..3 {
            self.promised[i] += units[i];
        }
    }

    /// Takes a promise back, when a request ended or needs less from now on.
    pub fn withdraw(&mut self, units: Units) {
        for i in 0..3 {
            assert!(units[i] <= self.promised[i], "withdrew {units:?}, only {:?} were promised", self.promised);
            self.promised[i] -= units[i];
        }
    }

    /// Units promised to running requests.
    pub fn promised(&self) -> Units {
        self.promised
    }
}

impl SlidingNeed {
    /// Tries every alignment of a step to blocks and windows.
    fn new(spec: &GroupSpec, chunk: u32, drafts: u32) -> SlidingNeed {
        let Retention::SlidingWindow { window, stride } = spec.retention else { unreachable!("sliding groups only") };
        let period = spec.block_tokens.max(stride);
        let repeats =
            [spec.block_tokens, stride].iter().all(|&n| period.is_multiple_of(n)) && FAR.is_multiple_of(period);
        assert!(repeats, "alignments repeat: {spec:?}");
        let decode = (FAR..FAR + period)
            .map(|start| spec.blocks_between(spec.retention.first_needed(start), start + drafts))
            .max()
            .expect("a period has at least one position");
        // Chunks longer than window and block leave old and new rows apart: only where they end still matters.
        let lengths = 1..=chunk.min(window + spec.block_tokens + period);
        let prefill = (FAR..FAR + period)
            .flat_map(|start| lengths.clone().map(move |n| blocks_of_chunk(spec, start, start + n)))
            .max()
            .expect("a chunk has at least one token");
        SlidingNeed { bucket: spec.bucket, block_tokens: spec.block_tokens, prefill, decode }
    }
}

/// Blocks mapped while a prefill chunk is in flight: those which it reads and those which it leaves.
fn blocks_of_chunk(spec: &GroupSpec, start: u32, end: u32) -> u32 {
    let touched = |next: u32| {
        let first = spec.retention.first_needed(next);
        if first < next { first / spec.block_tokens..(next - 1) / spec.block_tokens + 1 } else { 0..0 }
    };
    let (old, new) = (touched(start), touched(end));
    let shared = old.end.min(new.end).saturating_sub(old.start.max(new.start));
    (old.end - old.start) + (new.end - new.start) - shared
}

#[cfg(test)]
mod tests {
    use longwave_model::presets;

    use super::*;
    use crate::testing::{FP8, request, tiny_layout};

    #[test]
    fn flash_needs_what_the_geometry_says() {
        let layout = CacheLayout::new(&presets::flash(), FP8);
        for drafts in 0..=7 {
            let admission = Admission::new(&layout, [100_000; 3], 8192, drafts);
            let need = admission.need(100_000, 1000);
            let long = layout.long_lived_units().map(|u| u * 100_999u32.div_ceil(256));
            assert_eq!(need.decode, [0, 1, 2].map(|i| long[i] + layout.sliding_units(drafts)[i]));
        }
    }

    #[test]
    fn prefill_costs_at_most_two_tails_whatever_the_chunk() {
        let layout = CacheLayout::new(&presets::flash(), FP8);
        let of = |chunk| Admission::new(&layout, [100_000; 3], chunk, 0).need(100_000, 1).prefill;
        let long = layout.long_lived_units().map(|u| u * 100_000u32.div_ceil(256));
        assert_eq!(of(8192), of(1024), "the need is bounded by windows, not by the chunk");
        let sliding = [0, 1, 2].map(|i| of(8192)[i] - long[i]);
        // Two window groups of 3 + 3 blocks, c4 state 2 + 2, c128 state 1 + 1; index state 2 + 2 or its halves.
        assert_eq!(sliding[0], 2 * 6 + 4 + 2);
        assert!(layout.bytes(sliding) < 20_000_000, "a peer reserves 6.2 GiB here");
    }

    #[test]
    fn a_short_request_needs_no_full_windows() {
        let admission = Admission::new(&tiny_layout(), [100; 3], 512, 0);
        let (one, many) = (admission.need(1, 1).most(), admission.need(1000, 1000).most());
        // One position: c4 main, window, c4 state, c128 state; index keys and state; c128 main.
        assert_eq!(one, [1 + tiny_windows() + 2, 2, 1]);
        assert!((0..3).all(|i| one[i] < many[i]));
    }

    fn tiny_windows() -> u32 {
        tiny_layout().groups.iter().filter(|g| g.kind == longwave_model::geometry::CacheKind::Window).count() as u32
    }

    #[test]
    fn refusals_name_their_numbers() {
        let limits =
            Limits { seats: 1, step_tokens: 64, context: 1000, units: [99, 99, 2], drafts: 0, in_flight: 1, vocab: 50 };
        let admission = Admission::new(&tiny_layout(), limits.units, 64, 0);
        let check = |prompt: Vec<u32>, max_tokens| admission.check(&request(prompt, max_tokens), &limits).map(|c| c.0);
        assert_eq!(check(vec![], 1), Err(Refusal::EmptyPrompt));
        assert_eq!(check(vec![1; 1000], 1), Err(Refusal::TooLong { prompt: 1000, max_tokens: 1, context: 1000 }));
        assert_eq!(check(vec![1, 50], 1), Err(Refusal::BadToken { token: 50, position: 1, vocab: 50 }));
        assert_eq!(check(vec![1; 600], 1), Err(Refusal::NeverFits { tokens: 601, pool: "small", need: 3, have: 2 }));
        assert_eq!(check(vec![1; 512], 1), Ok(1), "the last token is not cached");
        assert!(check(vec![1; 512], 2).is_err());
        assert_eq!(check(vec![1; 3], 9), Ok(9));
    }

    #[test]
    fn the_longest_answer_is_the_longest_that_fits() {
        let limits =
            Limits { seats: 1, step_tokens: 64, context: 9000, units: [40, 30, 9], drafts: 0, in_flight: 1, vocab: 50 };
        let admission = Admission::new(&tiny_layout(), limits.units, 64, 0);
        let check = |prompt: u32, max_tokens| admission.check(&request(vec![1; prompt as usize], max_tokens), &limits);
        for prompt in [1, 255, 256, 1000, 2000] {
            let most = admission.most_outputs(prompt, limits.context - prompt);
            assert!(most > 0 && check(prompt, most).is_ok(), "{prompt} {most}");
            assert!(matches!(check(prompt, most + 1), Err(Refusal::NeverFits { .. })), "{prompt} {most}");
        }
        assert_eq!(admission.most_outputs(10, 7), 7);
        assert_eq!(admission.most_outputs(8000, 500), 0);
    }

    #[test]
    fn the_context_cuts_what_is_generated() {
        let limits =
            Limits { seats: 1, step_tokens: 64, context: 100, units: [99; 3], drafts: 0, in_flight: 1, vocab: 50 };
        let admission = Admission::new(&tiny_layout(), limits.units, 64, 0);
        let check = |prompt: Vec<u32>, max_tokens| admission.check(&request(prompt, max_tokens), &limits).map(|c| c.0);
        assert_eq!(check(vec![1; 99], 50), Ok(1));
        assert_eq!(check(vec![1; 100], 0), Ok(0), "a prompt alone may fill the context");
    }

    #[test]
    fn promises_add_up() {
        let mut admission = Admission::new(&tiny_layout(), [4, 2, 1], 64, 0);
        assert!(admission.fits([4, 2, 1], [0; 3]));
        admission.promise([3, 1, 1], [0; 3]);
        assert!(!admission.fits([1, 1, 1], [0; 3]));
        assert!(admission.fits([1, 1, 1], [0, 0, 1]), "shared units are promised twice and exist once");
        assert!(admission.fits([1, 1, 0], [0; 3]));
        admission.withdraw([3, 1, 1]);
        assert_eq!(admission.promised(), [0; 3]);
    }
}
