//! Steps of a backend behind long contexts that nobody computed: one text is, and copies of its units fill all contexts.
//!
//! So entries are plausible and every sequence reads memory of its own. Assumes a backend that nobody else uses. What does
//! not fit its cache is refused before it is measured.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use longwave_engine::operators::{OperatorSums, OperatorTime};
use longwave_engine::step::{Backend, BlockCopy, BlockId, Sampling, Seat, SeqStep, Step, TableWrite, Token};
use longwave_model::CacheLayout;
use longwave_model::floors::StepShape;
use longwave_model::geometry::{GroupSpec, LOGICAL_BLOCK};

use crate::units::grouped;

/// Tokens of the text, and of a piece of it, at most.
const TEXT: u32 = 8192;
const PIECE: u32 = 2048;
/// Steps that do not count: buffers grow, and graphs are made.
pub const WARM: u32 = 6;

/// A backend, and what of its cache is taken.
pub struct Depth<B> {
    backend: B,
    layout: CacheLayout,
    number: u64,
    /// First free unit of every pool.
    next: [u32; 3],
    /// Units of the text by group, ascending by block index.
    source: Vec<Vec<BlockId>>,
}

/// How long steps of one shape took.
pub struct Measured {
    /// A step as it is served, ms: the middle one.
    pub step_ms: f64,
    /// The same with timers.
    pub timed_ms: f64,
    /// What the timers showed, of all these steps.
    pub operators: Vec<OperatorTime>,
}

impl<B: Backend> Depth<B> {
    /// Computes the text; contexts are at most so long.
    pub fn new(backend: B, longest: u32) -> Result<Depth<B>> {
        let layout = backend.layout().clone();
        let source = vec![Vec::new(); layout.groups.len()];
        let mut depth = Depth { backend, layout, number: 0, next: [0; 3], source };
        depth.text(longest.clamp(LOGICAL_BLOCK, TEXT))?;
        Ok(depth)
    }

    /// The backend's sizes.
    pub fn limits(&self) -> &longwave_engine::step::Limits {
        self.backend.limits()
    }

    fn take(&mut self, group: usize) -> Result<BlockId> {
        let bucket = self.layout.groups[group].bucket as usize;
        let next = self.next[bucket];
        ensure!(
            next < self.limits().units[bucket],
            "the cache is too small for the text of up to {TEXT} tokens that contexts are copies of; raise --kv-cache-memory-bytes, or lower --depth"
        );
        self.next[bucket] += 1;
        Ok(BlockId(next))
    }

    fn step(&mut self, step: &mut Step) -> Result<f64> {
        self.number += 1;
        step.number = self.number;
        let began = Instant::now();
        let ticket = self.backend.submit(step)?;
        let result = self.backend.collect(ticket)?;
        let seconds = began.elapsed().as_secs_f64();
        match result.seqs.into_iter().find_map(|seq| seq.failed) {
            Some(what) => bail!("a step cannot be measured: {what}"),
            None => Ok(seconds),
        }
    }

    /// Computes a text of `length` tokens at seat 0.
    fn text(&mut self, length: u32) -> Result<()> {
        let piece = PIECE.min(self.limits().step_tokens);
        let mut mapped = vec![0; self.layout.groups.len()];
        for start in (0..length).step_by(piece as usize) {
            let end = length.min(start + piece);
            let mut writes = Vec::new();
            for (group, mapped) in mapped.iter_mut().enumerate() {
                let spec = &self.layout.groups[group];
                let first = if spec.is_sliding() { spec.retention.first_needed(end) } else { start };
                let blocks = (first / spec.block_tokens).max(*mapped)..end.div_ceil(spec.block_tokens);
                *mapped = blocks.end;
                for index in blocks {
                    let block = self.take(group)?;
                    self.source[group].push(block);
                    writes.push(TableWrite { group: group as u8, index, block });
                }
            }
            let tokens = (start..end).map(|p| self.token(p, 0)).collect();
            let seqs = vec![SeqStep {
                fresh: start == 0,
                writes: 0..writes.len() as u32,
                ..SeqStep::new(Seat(0), start, 0..end - start)
            }];
            self.step(&mut Step { seqs, tokens, writes, ..Step::default() })?;
        }
        Ok(())
    }

    /// Any token, another one for every position and seat.
    fn token(&self, position: u32, seat: u32) -> Token {
        let number = u64::from(position) * 104_729 + u64::from(seat) * 7919 + 1;
        (number % u64::from(self.limits().vocab)) as Token
    }

    /// Blocks of a group that a sequence needs for `steps` steps.
    fn blocks(spec: &GroupSpec, shape: &StepShape, steps: u32) -> Vec<u32> {
        let (start, last) = (shape.context, shape.context + positions(shape, steps) - 1);
        let of = |from: u32, to: u32| from / spec.block_tokens..=to / spec.block_tokens;
        if !spec.is_sliding() {
            return of(0, last).collect();
        }
        // Rows that the first step reads, and rows that would be read behind the last one.
        let mut blocks: Vec<u32> = of(spec.retention.first_needed(start), start).collect();
        let from = if shape.rows == 1 { start } else { spec.retention.first_needed(last + 1).max(start).min(last) };
        blocks.extend(of(from, last));
        blocks.dedup();
        blocks
    }

    /// Refuses a shape whose contexts do not fit the cache at once.
    pub fn check(&self, shape: &StepShape, steps: u32) -> Result<()> {
        let mut need = [0u64; 3];
        for spec in &self.layout.groups {
            let blocks = Self::blocks(spec, shape, WARM + 2 * steps).len() as u64;
            need[spec.bucket as usize] += u64::from(shape.sequences) * blocks;
        }
        let limits = self.limits();
        let free = |bucket: usize| u64::from(limits.units[bucket] - self.next[bucket]);
        ensure!(
            (0..3).all(|bucket| need[bucket] <= free(bucket)),
            "{} sequences behind {} tokens do not fit the cache; raise --kv-cache-memory-bytes, or leave this point out",
            shape.sequences,
            grouped(shape.context.into())
        );
        Ok(())
    }

    /// Measures `steps` steps of a shape as they are served, and as many with timers; `done` is called behind each step.
    /// Sequences of one row go on by a token from step to step, chunks are computed again.
    pub fn measure(&mut self, shape: &StepShape, steps: u32, mut done: impl FnMut()) -> Result<Measured> {
        self.check(shape, steps)?;
        let kept = self.next;
        let mut step = self.first(shape, WARM + 2 * steps)?;
        let (mut plain, mut timed, mut operators) = (Vec::new(), Vec::new(), OperatorSums::default());
        for i in 0..WARM + 2 * steps {
            if i == WARM + steps {
                self.backend.time_operators(true)?;
            }
            let seconds = self.step(&mut step)?;
            match i {
                0..WARM => {}
                i if i < WARM + steps => plain.push(seconds),
                _ => {
                    timed.push(seconds);
                    // Read behind each step: a backend keeps what it was not asked for.
                    self.backend.time_operators(true)?.iter().for_each(|time| operators.merge(time));
                }
            }
            step.writes.clear();
            for seq in &mut step.seqs {
                (seq.fresh, seq.writes) = (false, 0..0);
                if shape.rows == 1 {
                    seq.start += 1;
                    step.tokens[seq.tokens.start as usize] = self.token(seq.start, seq.seat.0);
                }
            }
            done();
        }
        self.backend.time_operators(false)?;
        let operators = operators.table();
        self.next = kept;
        Ok(Measured { step_ms: middle(&mut plain) * 1e3, timed_ms: middle(&mut timed) * 1e3, operators })
    }

    /// The first step of a shape: tables of all sequences, over copies of the text's units.
    fn first(&mut self, shape: &StepShape, steps: u32) -> Result<Step> {
        let (mut out, mut copies) = (Step::default(), Vec::new());
        for seat in 0..shape.sequences {
            let from = out.writes.len() as u32;
            for group in 0..self.layout.groups.len() {
                let spec = self.layout.groups[group].clone();
                for index in Self::blocks(&spec, shape, steps) {
                    let (block, source) = (self.take(group)?, &self.source[group]);
                    out.writes.push(TableWrite { group: group as u8, index, block });
                    if let Some(&from) = source.get(index as usize % source.len().max(1)) {
                        copies.push(BlockCopy { bucket: spec.bucket as u8, from, to: block });
                    }
                }
            }
            let tokens = seat * shape.rows..(seat + 1) * shape.rows;
            out.tokens.extend((0..shape.rows).map(|i| self.token(shape.context + i, seat)));
            out.seqs.push(SeqStep {
                fresh: true,
                writes: from..out.writes.len() as u32,
                sample: (shape.logits > 0).then(Sampling::default),
                ..SeqStep::new(Seat(seat), shape.context, tokens)
            });
        }
        self.backend.copy(&copies)?;
        Ok(out)
    }
}

/// Positions that `steps` steps of a shape take.
pub fn positions(shape: &StepShape, steps: u32) -> u32 {
    if shape.rows == 1 { steps } else { shape.rows }
}

fn middle(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}
