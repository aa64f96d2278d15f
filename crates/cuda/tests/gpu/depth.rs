//! Decode steps of Flash's layers behind contexts of up to a million tokens, in batches of up to 128, measured.
//!
//! One text of 8,192 tokens is computed; copies of its units fill the contexts of all sequences. So entries are plausible
//! and every sequence reads memory of its own. DEPTH_LAYERS says how many layers (8 by default), DEPTH_BATCH one batch only,
//! DEPTH_OPERATORS=1 prints where the time goes, and a build with LONGWAVE_TIMELINE=1 when each kernel of the last steps began and
//! when what it waits for had ended. What does not fit the cache is left out and said so.

use std::time::Instant;

use longwave_cuda::backend::{CudaBackend, CudaOptions, Load};
use longwave_cuda::driver::Context;
use longwave_cuda::driver::timeline::{self, Moment};
use longwave_engine::step::{Backend, BlockCopy, BlockId, Sampling, Seat, SeqStep, Step, TableWrite, Token};
use longwave_model::geometry::{CacheLayout, LOGICAL_BLOCK};
use longwave_model::{CacheFormats, IndexFormat, MainFormat, presets};

use crate::flash::number;
use crate::rig;

/// Tokens of the text that is computed, and of one of its chunks.
const TEXT: u32 = 8192;
const CHUNK: u32 = 2048;
/// Steps that are not measured, and those that are.
const WARM: u32 = 6;
const STEPS: u32 = 26;

/// A sequence's part of a step.
fn seq(seat: u32, fresh: bool, start: u32, tokens: std::ops::Range<u32>, writes: std::ops::Range<u32>) -> SeqStep {
    SeqStep { fresh, writes, sample: Some(Sampling::default()), ..SeqStep::new(Seat(seat), start, tokens) }
}

/// The backend, its next step's number and the first free unit of every pool.
struct Depth {
    backend: CudaBackend,
    layout: CacheLayout,
    number: u64,
    next: [u32; 3],
    /// Units of the text by group, ascending by block index.
    source: Vec<Vec<BlockId>>,
}

impl Depth {
    fn take(&mut self, group: usize) -> BlockId {
        let next = &mut self.next[self.layout.groups[group].bucket as usize];
        *next += 1;
        BlockId(*next - 1)
    }

    fn step(&mut self, mut step: Step) -> f64 {
        self.number += 1;
        step.number = self.number;
        let began = Instant::now();
        let ticket = self.backend.submit(&step).unwrap();
        let result = self.backend.collect(ticket).unwrap();
        assert!(result.seqs.iter().all(|seq| seq.failed.is_none() && seq.tokens.len() == 1), "{result:?}");
        began.elapsed().as_secs_f64()
    }

    /// Computes the text at seat 0.
    fn text(&mut self) {
        self.source = vec![Vec::new(); self.layout.groups.len()];
        for start in (0..TEXT).step_by(CHUNK as usize) {
            let end = start + CHUNK;
            let mut writes = Vec::new();
            for group in 0..self.layout.groups.len() {
                let spec = &self.layout.groups[group];
                let first = if spec.is_sliding() { spec.retention.first_needed(end) } else { start };
                for index in first / spec.block_tokens..end.div_ceil(spec.block_tokens) {
                    let block = self.take(group);
                    self.source[group].push(block);
                    writes.push(TableWrite { group: group as u8, index, block });
                }
            }
            let tokens: Vec<Token> = (start..end).map(|p| (p + 1) * 7919 % 129_000).collect();
            let seqs = vec![seq(0, start == 0, start, 0..CHUNK, 0..writes.len() as u32)];
            self.step(Step { seqs, tokens, writes, ..Step::default() });
        }
    }

    /// Units of every pool that `batch` sequences behind `context` tokens take.
    fn need(&self, batch: u32, context: u32) -> [u32; 3] {
        let mut need = [0; 3];
        for spec in &self.layout.groups {
            let first = if spec.is_sliding() { spec.retention.first_needed(context) } else { 0 };
            need[spec.bucket as usize] += batch * spec.blocks_between(first, context + WARM + 2 * STEPS);
        }
        need
    }

    /// Milliseconds of a step, median; `None` where the cache is too small.
    fn decode(&mut self, batch: u32, context: u32, operators: bool) -> Option<f64> {
        let (kept, units) = (self.next, self.backend.limits().units);
        let need = self.need(batch, context);
        if (0..3).any(|b| kept[b] + need[b] > units[b]) {
            return None;
        }
        let (mut writes, mut copies, mut seqs) = (Vec::new(), Vec::new(), Vec::new());
        for seat in 0..batch {
            let from = writes.len() as u32;
            for group in 0..self.layout.groups.len() {
                let spec = self.layout.groups[group].clone();
                let first = if spec.is_sliding() { spec.retention.first_needed(context) } else { 0 };
                let last = context + WARM + 2 * STEPS;
                for index in first / spec.block_tokens..=last / spec.block_tokens {
                    let (block, source) = (self.take(group), &self.source[group]);
                    writes.push(TableWrite { group: group as u8, index, block });
                    if let Some(&from) = source.get(index as usize % source.len().max(1)) {
                        copies.push(BlockCopy { bucket: spec.bucket as u8, from, to: block });
                    }
                }
            }
            seqs.push(seq(seat, true, context, seat..seat + 1, from..writes.len() as u32));
        }
        self.backend.copy(&copies).unwrap();
        let mut step = Step { seqs, writes, ..Step::default() };
        let mut times = Vec::new();
        for i in 0..WARM + STEPS {
            step.tokens = (0..batch).map(|seat| (seat * 7919 + i * 104_729) % 129_000).collect();
            times.push(self.step(step.clone()) * 1e3);
            step.writes.clear();
            for seq in &mut step.seqs {
                (seq.fresh, seq.start, seq.writes) = (false, seq.start + 1, 0..0);
            }
        }
        if operators {
            self.backend.time_operators(true).unwrap();
            for _ in 0..STEPS {
                self.step(step.clone());
                step.seqs.iter_mut().for_each(|seq| seq.start += 1);
            }
            crate::flash::print(&self.backend.time_operators(false).unwrap());
        }
        self.next = kept;
        let measured = &mut times[WARM as usize..];
        measured.sort_by(f64::total_cmp);
        Some(measured[STEPS as usize / 2])
    }
}

/// Notes of the last two steps or so: microseconds, what ("ready": what is before it has ended), the kernel's file and blocks.
fn print_timeline(moments: &[Moment]) {
    let steps: Vec<usize> = (0..moments.len()).filter(|&i| moments[i].module == "sample" && moments[i].ready).collect();
    let last = &moments[steps.len().checked_sub(3).map_or(0, |i| steps[i])..];
    for moment in last {
        let us = (moment.ns - last[0].ns) as f64 / 1e3;
        println!("{us:9.2} {} {} {}", if moment.ready { "ready" } else { "begun" }, moment.module, moment.blocks);
    }
}

#[test]
fn steps_behind_long_contexts_are_measured() {
    let Some(gpus) = rig::gpus() else { return };
    let mut config = presets::flash();
    config.num_hidden_layers = number("DEPTH_LAYERS", 8);
    config.layers.truncate(config.num_hidden_layers);
    config.num_nextn_predict_layers = 0;
    let formats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };
    let options = CudaOptions {
        gpu: 0,
        ranks: 1,
        seats: 128,
        step_tokens: CHUNK,
        context: 1 << 20,
        cache_bytes: None,
        formats,
        drafts: 0,
        streams: number("FLASH_STREAMS", 2) as u32,
    };
    let backend = CudaBackend::open(Load::Dummy(config.clone()), options, |_| ()).unwrap();
    println!("{} layers: {}", config.num_hidden_layers, backend.summary());
    let layout = backend.layout().clone();
    // Made current on this thread, for the timeline.
    let context_here = Context::open(&gpus[0]).unwrap();
    let mut depth = Depth { backend, layout, number: 0, next: [0; 3], source: Vec::new() };
    depth.text();
    for context in [8192, 131_072, (1 << 20) - LOGICAL_BLOCK] {
        for batch in [1, 8, 32, 128].into_iter().filter(|&batch| batch == number("DEPTH_BATCH", batch as usize) as u32)
        {
            match depth.decode(batch, context, std::env::var_os("DEPTH_OPERATORS").is_some()) {
                Some(ms) => println!("batch {batch}, context {context}: {ms:.3} ms a step"),
                None => println!("batch {batch}, context {context}: does not fit the cache"),
            }
            print_timeline(&timeline::take(&context_here).unwrap());
        }
    }
}
