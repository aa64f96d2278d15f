//! What planning and committing cost without any computing: 256 sequences with long block tables.

use std::time::Instant;

use longwave_engine::engine::{Engine, EngineOptions};
use longwave_engine::step::{Backend, BackendError, BlockCopy, BlockId, Limits, SeqResult, Step, StepResult, Ticket};
use longwave_model::CacheLayout;

use crate::world::{flash_layout, request};

/// Answers token 1 to everything and reads nothing.
struct NullBackend {
    limits: Limits,
    layout: CacheLayout,
    result: Option<StepResult>,
    writes: usize,
}

impl Backend for NullBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }
    fn layout(&self) -> &CacheLayout {
        &self.layout
    }
    fn fingerprint(&self) -> [u8; 32] {
        [0; 32]
    }
    fn submit(&mut self, step: Step) -> Result<Ticket, BackendError> {
        let answer = |sampled| SeqResult { tokens: if sampled { vec![1] } else { vec![] }, ..SeqResult::default() };
        let seqs = step.seqs.iter().map(|s| answer(s.sample.is_some())).collect();
        self.result = Some(StepResult { number: step.number, seqs });
        self.writes += step.writes.len();
        Ok(Ticket(step.number))
    }
    fn collect(&mut self, _: Ticket) -> Result<StepResult, BackendError> {
        Ok(self.result.take().unwrap())
    }
    fn copy(&mut self, _: &[BlockCopy]) -> Result<(), BackendError> {
        Ok(())
    }
    fn read_unit(&mut self, _: u8, _: BlockId, _: &mut [u8]) -> Result<(), BackendError> {
        Ok(())
    }
    fn write_unit(&mut self, _: u8, _: BlockId, _: &[u8]) -> Result<(), BackendError> {
        Ok(())
    }
}

/// Microseconds of a request of 257 tokens while `blocks` blocks are cached and each request has to evict some.
fn evicting_request_us(blocks: u32) -> f64 {
    let layout = flash_layout();
    let one = [0, 1, 2].map(|i| layout.long_lived_units()[i] + layout.checkpoint_units()[i]);
    let units = one.map(|u| u * blocks + 64);
    let limits =
        Limits { seats: 1, step_tokens: 1 << 10, context: 1 << 10, units, drafts: 0, in_flight: 1, vocab: 999_999 };
    let mut engine = Engine::new(NullBackend { limits, layout, result: None, writes: 0 }, EngineOptions::default());
    let mut ask = |seed: u32, requests: u32| {
        for request in (0..requests).map(|i| request(vec![seed + i; 257], 1)) {
            engine.submit(request, Box::new(|_| ())).unwrap();
            while engine.status().running + engine.status().waiting > 0 {
                engine.step();
            }
        }
        engine.status().prefix
    };
    let full = ask(0, blocks + 100);
    assert!(full.nodes >= u64::from(blocks) * 9 / 10 && full.evicted_checkpoints > 0, "{full:?}");
    let started = Instant::now();
    ask(500_000, 2000);
    started.elapsed().as_secs_f64() * 1e6 / 2000.0
}

#[test]
fn eviction_costs_little_however_much_is_cached() {
    let figures = [500, 2000, 8000].map(|blocks| (blocks, evicting_request_us(blocks)));
    println!("(cached blocks, microseconds a request): {figures:?}");
    assert!(figures[2].1 < 5.0 * figures[0].1 + 100.0, "{figures:?}");
}

/// Microseconds of one decode step of `seats` sequences at `context` positions.
fn decode_step_us(seats: u32, context: u32) -> f64 {
    let layout = flash_layout();
    let blocks = context.div_ceil(256);
    let units = [0, 1, 2].map(|i| seats * (layout.long_lived_units()[i] * blocks + 32));
    let limits = Limits { seats, step_tokens: 1 << 20, context, units, drafts: 0, in_flight: 1, vocab: 9 };
    let backend = NullBackend { limits, layout, result: None, writes: 0 };
    let mut engine = Engine::new(backend, EngineOptions::default());
    for _ in 0..seats {
        engine.submit(request(vec![1; context as usize - 2000], 2000), Box::new(|_| ())).unwrap();
    }
    while engine.status().output_tokens < u64::from(seats) {
        assert!(engine.step());
    }
    while engine.status().prompt_tokens < u64::from(seats * (context - 2000)) {
        assert!(engine.step());
    }
    let (started, steps) = (Instant::now(), 500);
    for _ in 0..steps {
        engine.step();
    }
    assert_eq!(engine.status().running, seats);
    started.elapsed().as_secs_f64() * 1e6 / f64::from(steps)
}

#[test]
fn a_step_costs_what_changed_and_not_what_exists() {
    let figures = [(256, 1 << 14), (256, 1 << 17), (128, 1 << 17)].map(|(s, c)| (s, c, decode_step_us(s, c)));
    println!("(sequences, context, microseconds a step): {figures:?}");
    let (short, long) = (figures[0].2, figures[1].2);
    assert!(long < 10.0 * short, "the cost of a step grows with the context: {short} to {long} us");
    assert!(long < 20_000.0, "{long} us");
}
