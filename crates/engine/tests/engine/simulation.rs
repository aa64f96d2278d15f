//! Seeded workloads on pools of a few blocks: arrivals, cancellations at random moments, random chunk sizes, drafts of
//! every quality, injected failures. Every request must give the tokens and logits of its solo run, every invariant is
//! checked after every step, and all blocks must come home.
//!
//! `SIM_SEED=n` runs one seed, `SIM_SEEDS=n` that many.

use longwave_engine::engine::{Engine, EngineOptions};
use longwave_engine::request::{FinishReason, Refusal, Request, RequestId};
use longwave_engine::sim::{DraftQuality, Failure, SimBackend, SimOptions};
use longwave_engine::step::{Limits, ReturnLogits, Sampling};
use longwave_model::CacheLayout;

use crate::world::{Record, Rng, VOCAB, flash_layout, prompt, solo, tiny_layout};

const LENGTHS: &[u32] = &[1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513];
const OUTPUTS: &[u32] = &[0, 1, 2, 3, 5, 8, 17, 64, 65, 130, 257];

/// Prints the seed when a test dies.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failing seed: SIM_SEED={} cargo test -p longwave-engine --test engine simulation", self.0);
        }
    }
}

struct Case {
    id: RequestId,
    request: Request,
    record: Record,
}

#[derive(Default, Debug)]
struct Totals {
    requests: u64,
    compared: u64,
    tokens: u64,
    steps: u64,
    refused: u64,
    cancelled: u64,
    failed: u64,
    drafts: u64,
    accepted: u64,
}

#[test]
fn every_request_gives_the_tokens_of_its_solo_run() {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let seeds = match number("SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SIM_SEEDS").unwrap_or(400),
    };
    let mut totals = Totals::default();
    for seed in seeds.clone() {
        let _printed = Seed(seed);
        run_seed(seed, &mut totals);
    }
    println!("{seeds:?}: {totals:?}");
    if seeds.end - seeds.start >= 100 {
        let t = &totals;
        assert!(t.compared > 0 && t.refused > 0 && t.cancelled > 0 && t.failed > 0, "a phase is not covered: {t:?}");
        assert!(t.accepted > 0 && t.accepted < t.drafts, "drafts are not covered: {t:?}");
    }
}

fn run_seed(seed: u64, totals: &mut Totals) {
    let rng = &mut Rng(seed);
    let layout = if rng.one_in(4) { flash_layout() } else { tiny_layout() };
    let limits = random_limits(rng, &layout);
    let options = EngineOptions {
        max_waiting: 64,
        max_chunk_tokens: rng.pick(&[
            None,
            Some(1),
            Some(2),
            Some(3),
            Some(5),
            Some(64),
            Some(127),
            Some(129),
            Some(300),
        ]),
        drafts: rng.below(limits.drafts + 1),
        paranoid: true,
        ..EngineOptions::default()
    };
    use DraftQuality::{Off, Random, Right, Wrong};
    let sim = SimOptions {
        draft_quality: rng.pick(&[Off, Right, Wrong, Random]),
        fail_at_step: rng.one_in(5).then(|| u64::from(1 + rng.below(60))),
        failure: rng.pick(&[Failure::BadStep, Failure::BadStep, Failure::Fatal]),
        poison: !rng.one_in(4),
        ..SimOptions::default()
    };
    let may_fail = sim.fail_at_step.is_some();
    let context = limits.context;
    let mut engine = Engine::new(SimBackend::new(layout.clone(), limits, sim), options);
    let cases = drive(rng, &mut engine);

    let status = engine.status();
    assert_eq!((status.running, status.waiting), (0, 0), "idle with work left");
    assert_eq!(status.units_used, [0; 3], "blocks did not come home");
    assert_eq!(status.units_promised, [0; 3]);
    engine.check_integrity().unwrap();
    totals.steps += status.steps;
    totals.drafts += status.drafts_proposed;
    totals.accepted += status.drafts_accepted;
    for case in &cases {
        check_case(case, &layout, context, may_fail, totals);
    }
}

/// Pools between barely enough for one short request and enough for a few long ones.
fn random_limits(rng: &mut Rng, layout: &CacheLayout) -> Limits {
    let drafts = rng.below(8);
    let (blocks, running) = (1 + rng.below(9), 2 + rng.below(5));
    let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * blocks + layout.sliding_units(drafts)[i] * running);
    Limits {
        seats: 1 + rng.below(6),
        step_tokens: rng.pick(&[1, 2, 3, 7, 16, 64, 100, 256, 300, 1024]),
        context: rng.pick(&[200, 513, 1000]),
        units,
        drafts,
        in_flight: 1,
        vocab: VOCAB,
    }
}

fn random_request(rng: &mut Rng) -> Request {
    // Few prompt seeds, so that some prompts share a prefix.
    let (family, len) = (u64::from(rng.below(3)), rng.pick(LENGTHS) + if rng.one_in(4) { rng.below(90) } else { 0 });
    let sampled = rng.one_in(3);
    Request {
        prompt: prompt(family, len),
        max_tokens: rng.pick(OUTPUTS),
        min_tokens: if rng.one_in(3) { rng.below(40) } else { 0 },
        stop_tokens: if rng.one_in(3) { vec![rng.below(VOCAB)] } else { Vec::new() },
        sampling: Sampling { temperature: if sampled { 1.0 } else { 0.0 }, seed: rng.next(), ..Sampling::default() },
        priority: rng.pick(&[0, 0, 0, -1, 1]),
        salt: 0,
        logits: rng.pick(&[ReturnLogits::No, ReturnLogits::No, ReturnLogits::Sampled, ReturnLogits::All]),
    }
}

/// Submits, cancels and steps until nothing is left to do.
fn drive(rng: &mut Rng, engine: &mut Engine<SimBackend>) -> Vec<Case> {
    let total = 2 + rng.below(9) as usize;
    let burst = rng.one_in(2);
    let cancel_every = rng.pick(&[0, 0, 6, 20]);
    let mut cases: Vec<Case> = Vec::new();
    let mut idle = false;
    for _ in 0..200_000 {
        let dead = engine.stopped().is_some();
        if cases.len() == total || dead {
            if idle {
                return cases;
            }
        } else if burst || idle || rng.one_in(5) {
            let (request, record) = (random_request(rng), Record::default());
            let id = engine.submit(request.clone(), record.sink()).unwrap();
            cases.push(Case { id, request, record });
        }
        if cancel_every > 0 && !cases.is_empty() && rng.one_in(cancel_every) {
            engine.cancel(cases[rng.below(cases.len() as u32) as usize].id);
            engine.check_integrity().unwrap();
        }
        idle = !engine.step();
    }
    panic!("no end after 200,000 steps: {:?}", engine.status());
}

fn check_case(case: &Case, layout: &CacheLayout, context: u32, may_fail: bool, totals: &mut Totals) {
    let reason = case.record.assert_complete();
    totals.requests += 1;
    if let FinishReason::Refused(refusal) = &reason {
        assert!(
            matches!(refusal, Refusal::NeverFits { need, have, .. } if need > have)
                || case.request.prompt.len() as u32 + 1 > context
        );
        totals.refused += 1;
        return;
    }
    let alone = solo(layout, context, &case.request);
    let (tokens, logits) = (case.record.tokens(), case.record.logits());
    totals.tokens += tokens.len() as u64;
    match &reason {
        FinishReason::Cancelled => totals.cancelled += 1,
        FinishReason::Failed(why) => {
            assert!(may_fail && why.contains("injected failure"), "{why}");
            totals.failed += 1;
        }
        _ => {
            assert_eq!(Some(&reason), alone.finished().as_ref());
            assert_eq!(tokens, alone.tokens());
            assert_eq!(logits, alone.logits());
            totals.compared += 1;
        }
    }
    assert_eq!(tokens, alone.tokens()[..tokens.len()]);
    assert_eq!(logits, alone.logits()[..logits.len()]);
}
