//! What planning and committing cost without any computing: 256 sequences with long block tables.

use std::time::Instant;

use longwave_engine::step::Limits;
use longwave_engine::{Engine, EngineOptions};

use crate::allocations::counted;
use crate::null::NullBackend;
use crate::world::{flash_layout, request};

/// Microseconds of a request of 257 tokens while `blocks` blocks are cached and each request has to evict some.
fn evicting_request_us(blocks: u32) -> f64 {
    let layout = flash_layout();
    let one = [0, 1, 2].map(|i| layout.long_lived_units()[i] + layout.checkpoint_units()[i]);
    let units = one.map(|u| u * blocks + 64);
    let limits =
        Limits { seats: 1, step_tokens: 1 << 10, context: 1 << 10, units, drafts: 0, in_flight: 1, vocab: 999_999 };
    let mut engine = Engine::new(NullBackend::new(limits, layout), EngineOptions::default());
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

/// Decode steps of many sequences behind one cached prompt.
struct StepCost {
    seats: u32,
    context: u32,
    step_us: f64,
    /// Of all steps in which no block fills up.
    allocations: u64,
    /// Steps in which some do, and their allocations.
    filling: (u64, u64),
}

fn decode_steps(seats: u32, context: u32) -> StepCost {
    let layout = flash_layout();
    let blocks = context.div_ceil(256);
    let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * (blocks + 16 * seats) + 64 * seats);
    let limits = Limits { seats, step_tokens: 1 << 20, context, units, drafts: 0, in_flight: 1, vocab: 9 };
    let mut engine = Engine::new(NullBackend::new(limits, layout), EngineOptions::default());
    for _ in 0..seats {
        engine.submit(request(vec![1; context as usize - 2000], 2000), Box::new(|_| ())).unwrap();
    }
    while engine.status().output_tokens < 100 * u64::from(seats) {
        assert!(engine.step());
    }
    assert_eq!(engine.status().running, seats);
    let mut cost = StepCost { seats, context, step_us: 0.0, allocations: 0, filling: (0, 0) };
    let started = Instant::now();
    for _ in 0..600 {
        let filled = |e: &Engine<NullBackend>| e.status().prefix.nodes;
        let before = filled(&engine);
        let allocations = counted(|| assert!(engine.step()));
        if filled(&engine) == before {
            cost.allocations += allocations;
        } else {
            cost.filling = (cost.filling.0 + 1, cost.filling.1 + allocations);
        }
    }
    cost.step_us = started.elapsed().as_secs_f64() * 1e6 / 600.0;
    assert_eq!(engine.status().running, seats);
    cost
}

#[test]
fn a_step_costs_what_changed_and_not_what_exists() {
    let sizes = [(64, 1 << 17), (128, 1 << 17), (256, 1 << 14), (256, 1 << 17), (256, 1 << 19), (256, 1 << 20)];
    let costs = sizes.map(|(seats, context)| decode_steps(seats, context));
    println!("sequences, context: us per step; allocations of 600 steps where no block fills up, and where one does");
    for c in &costs {
        let (seats, context, (steps, allocations)) = (c.seats, c.context, c.filling);
        println!("{seats:4} {context:8}: {:8.1}; {} and {allocations} in {steps} steps", c.step_us, c.allocations);
        assert!(steps > 1 && steps < 300, "blocks fill up every 256 steps");
    }
    // Appending to a list of hashes at a block edge is the one that is left when another sequence fills the same block.
    assert!(costs.iter().all(|c| c.allocations == 0), "a step allocates though no block fills up");
    let of = |i: usize| costs[i].step_us;
    assert!(of(5) < 10.0 * of(2), "the cost of a step grows with the context: {} to {} us", of(2), of(5));
    assert!(of(3) < 20.0 * of(0), "four times the sequences: {} to {} us", of(0), of(3));
}
