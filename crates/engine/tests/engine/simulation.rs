//! Seeded workloads on pools of a few blocks: arrivals, cancellations at random moments, random chunk sizes, drafts of
//! every quality, injected failures, tiers of a few records, restarts and damaged files. Every request must give the tokens and logits of its solo run, every invariant is
//! checked after every step, and all blocks must come home.
//!
//! `SIM_SEED=n` runs one seed, `SIM_SEEDS=n` that many.

use longwave_engine::request::{FinishReason, Refusal, Request, RequestId};
use longwave_engine::sim::{DraftQuality, Failure, SimBackend, SimOptions};
use longwave_engine::step::{Limits, ReturnLogits, Sampling, Token};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::CacheLayout;

use longwave_engine::tier::TierOptions;

use crate::constraint::Script;
use crate::world::{Folder, Record, Rng, VOCAB, assert_home, flash_layout, prompt, solo, tiny_layout};

const LENGTHS: &[u32] = &[1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513];
/// Of prompts that have something to reuse.
const LONG: &[u32] = &[255, 256, 257, 258, 300, 511, 512, 513, 514, 640, 767, 768, 769, 1000, 1025];
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
    constrained: u64,
    complete: u64,
    given_up: u64,
    hits: u64,
    cached: u64,
    evicted_nodes: u64,
    evicted_checkpoints: u64,
    replaced_checkpoints: u64,
    preempted: u64,
    spilled: u64,
    resumed: u64,
    replays: u64,
    replayed: u64,
    host_tokens: u64,
    disk_tokens: u64,
    bad_records: u64,
    restarts: u64,
}

#[test]
fn every_request_gives_the_tokens_of_its_solo_run() {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let seeds = match number("SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SIM_SEEDS").unwrap_or(1000),
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
        assert!(t.constrained.min(t.complete).min(t.given_up) > 0, "constraints are not covered: {t:?}");
        let lost = t.preempted - t.spilled;
        assert!(lost.min(t.resumed).min(t.spilled - t.resumed) > 0, "preemption is not covered: {t:?}");
        let evicted = t.evicted_nodes.min(t.evicted_checkpoints);
        assert!(
            t.hits.min(evicted).min(t.replaced_checkpoints).min(t.replays) > (seeds.end - seeds.start) / 20,
            "reuse is not covered: {t:?}"
        );
        assert!(
            t.host_tokens.min(t.disk_tokens) > 5000 && t.bad_records.min(t.restarts) > 10,
            "tiers are not covered: {t:?}"
        );
    }
}

fn run_seed(seed: u64, totals: &mut Totals) {
    let rng = &mut Rng(seed);
    let layout = if rng.one_in(4) { flash_layout() } else { tiny_layout() };
    // Sessions: longer texts that come back while there is room to keep them.
    let sessions = rng.one_in(2);
    let limits = random_limits(rng, &layout, sessions);
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
        prefix_cache: !rng.one_in(8),
        checkpoint_interval: rng.pick(&[0, 1, 256, 512, 8192]),
        checkpoint_answers: !rng.one_in(4),
        spill_bytes: rng.pick(&[0, 40 << 20, 1 << 40]),
        replay: !rng.one_in(4),
        paranoid: true,
        ..EngineOptions::default()
    };
    // Numbers of their own, so that seeds from before there were tiers mean what they did.
    let tier_rng = &mut Rng(seed ^ 0x7133);
    let (tiers, folder) = random_tiers(tier_rng, &layout);
    let options = EngineOptions { tiers, ..options };
    use DraftQuality::{Off, Random, Right, Wrong};
    let sim = SimOptions {
        draft_quality: rng.pick(&[Off, Right, Wrong, Random]),
        fail_at_step: rng.one_in(5).then(|| u64::from(1 + rng.below(90))),
        failure: rng.pick(&[Failure::BadStep, Failure::BadStep, Failure::Fatal]),
        poison: !rng.one_in(4),
        ..SimOptions::default()
    };
    // Again numbers of their own: late failures, and reads and writes of units that fail.
    let fault_rng = &mut Rng(seed ^ 0xfa17);
    let fail_at_unit = fault_rng.one_in(6).then(|| u64::from(1 + fault_rng.below(120)));
    let sim = SimOptions { fail_late: fault_rng.one_in(2), fail_at_unit, ..sim };
    let may_fail = sim.fail_at_step.is_some() || sim.fail_at_unit.is_some();
    let context = limits.context;
    let mut cases = Vec::new();
    for life in 0..if folder.is_some() { 2 } else { 1 } {
        let mut engine = Engine::new(SimBackend::new(layout.clone(), limits.clone(), sim.clone()), options.clone());
        // Numbers of their own once more: answers that must follow a constraint.
        let mut rules = seed.is_multiple_of(2).then_some(Rng(seed ^ 0xc057 ^ life));
        let mut vandal = folder.as_ref().filter(|_| tier_rng.one_in(2)).map(|f| (Rng(tier_rng.next()), f));
        cases.extend(drive(rng, &mut engine, sessions, &mut vandal, &mut rules));
        add_up(&engine, totals);
        totals.restarts += life;
        engine.stop("the seed is over");
    }
    for case in &cases {
        check_reuse(case, &cases);
        check_case(case, &layout, context, may_fail, totals);
    }
}

/// An idle engine: everything is home, and what it did is counted.
fn add_up(engine: &Engine<SimBackend>, totals: &mut Totals) {
    let status = engine.status();
    assert_home(&status);
    engine.check_integrity().unwrap();
    totals.steps += status.steps;
    totals.drafts += status.drafts_proposed;
    totals.accepted += status.drafts_accepted;
    totals.hits += status.prefix.hits;
    totals.cached += status.prefix.hit_tokens;
    totals.evicted_nodes += status.prefix.evicted_nodes;
    totals.evicted_checkpoints += status.prefix.evicted_checkpoints;
    totals.replaced_checkpoints += status.prefix.replaced_checkpoints;
    totals.preempted += status.preempted;
    totals.spilled += status.spilled;
    totals.resumed += status.resumed;
    assert_eq!(status.spilled_bytes, 0);
    totals.replays += status.prefix.replays;
    totals.replayed += status.prefix.replayed_tokens;
    let (prefix, tiers) = (status.prefix, status.tiers);
    totals.host_tokens += prefix.host_tokens;
    totals.disk_tokens += prefix.disk_tokens;
    totals.bad_records += tiers.disk.failed + tiers.discarded_files;
    assert!(tiers.host.bytes <= tiers.host.limit_bytes && tiers.disk.bytes <= tiers.disk.limit_bytes, "{tiers:?}");
    assert_eq!((tiers.loading, tiers.host.failed), (0, 0), "{tiers:?}");
}

/// Host memory in a third of the seeds, a disk in a fifth; both from a few records to all.
fn random_tiers(rng: &mut Rng, layout: &CacheLayout) -> (TierOptions, Option<Folder>) {
    let block = layout.bytes(layout.long_lived_units()) + layout.bytes(layout.checkpoint_units());
    let bytes = |rng: &mut Rng| block * u64::from(rng.pick(&[1u32, 3, 8, 8, 400]));
    let host_bytes = if rng.one_in(3) { bytes(rng) } else { 0 };
    let folder = rng.one_in(5).then(Folder::new);
    let directory = folder.as_ref().map(|f| f.path().to_owned());
    (TierOptions { host_bytes, directory, disk_bytes: bytes(rng), inline: true }, folder)
}

/// Cuts, changes, renames or removes a record file under a running engine.
fn damage(rng: &mut Rng, folder: &Folder) {
    let files = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path());
    let mut files: Vec<_> = files.filter(|f| f.extension().is_some_and(|e| e == "lwrecord")).collect();
    if files.is_empty() {
        return;
    }
    files.sort();
    let file = rng.pick(&(0..files.len()).collect::<Vec<_>>());
    let mut bytes = std::fs::read(&files[file]).unwrap();
    if bytes.is_empty() {
        return;
    }
    match rng.below(4) {
        0 => std::fs::remove_file(&files[file]).unwrap(),
        1 => std::fs::rename(&files[file], &files[(file + 1) % files.len()]).unwrap(),
        2 => std::fs::write(&files[file], &bytes[..rng.below(bytes.len() as u32) as usize]).unwrap(),
        _ => {
            let at = rng.below(bytes.len() as u32) as usize;
            bytes[at] ^= 1 << rng.below(8);
            std::fs::write(&files[file], bytes).unwrap();
        }
    }
}

/// Pools between barely enough for one short request and enough for a few long ones.
fn random_limits(rng: &mut Rng, layout: &CacheLayout, sessions: bool) -> Limits {
    let drafts = rng.below(8);
    let (blocks, running) = (1 + rng.below(9) + if sessions { 6 } else { 0 }, 2 + rng.below(5));
    let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * blocks + layout.sliding_units(drafts)[i] * running);
    Limits {
        seats: 1 + rng.below(6),
        step_tokens: rng.pick(&[1, 2, 3, 7, 16, 64, 100, 256, 300, 1024]),
        context: if sessions { 1400 } else { rng.pick(&[200, 513, 1000]) },
        units,
        drafts,
        in_flight: 1,
        vocab: VOCAB,
    }
}

/// A text of a few, one that leaves it somewhere, or the next turn of an earlier request.
fn random_prompt(rng: &mut Rng, earlier: &[Case], sessions: bool) -> Vec<Token> {
    let tail = |rng: &mut Rng| {
        let (seed, len) = (rng.next(), 1 + rng.below(90));
        prompt(seed, len)
    };
    if let Some(last) = earlier.len().checked_sub(1)
        && rng.one_in(3)
    {
        let case = &earlier[rng.below(last as u32 + 1) as usize];
        return [case.request.prompt.clone(), case.record.tokens(), tail(rng)].concat();
    }
    let len = rng.pick(if sessions { LONG } else { LENGTHS }) + if rng.one_in(4) { rng.below(90) } else { 0 };
    let family = u64::from(rng.below(3));
    let mut text = prompt(family, len);
    if rng.one_in(3) {
        let at = rng.pick(if sessions { LONG } else { LENGTHS }).min(len);
        text.truncate(at as usize);
        text.extend(tail(rng));
    }
    text
}

fn random_request(rng: &mut Rng, earlier: &[Case], sessions: bool) -> Request {
    let sampled = rng.one_in(3);
    Request {
        prompt: random_prompt(rng, earlier, sessions),
        max_tokens: if sessions && rng.one_in(8) { 530 } else { rng.pick(OUTPUTS) },
        min_tokens: if rng.one_in(3) { rng.below(40) } else { 0 },
        stop_tokens: if rng.one_in(3) { vec![rng.below(VOCAB)] } else { Vec::new() },
        sampling: Sampling {
            temperature: if sampled { 1.0 } else { 0.0 },
            seed: rng.next(),
            presence_penalty: rng.pick(&[0.0, 0.0, 0.5]),
            ..Sampling::default()
        },
        priority: rng.pick(&[0, 0, 0, -1, 1]),
        salt: rng.pick(&[0, 0, 0, 7]),
        attention: None,
        constraint: None,
        logits: rng.pick(&[ReturnLogits::No, ReturnLogits::No, ReturnLogits::Sampled, ReturnLogits::All]),
    }
}

/// Submits, cancels and steps until nothing is left to do.
fn drive(
    rng: &mut Rng,
    engine: &mut Engine<SimBackend>,
    sessions: bool,
    vandal: &mut Option<(Rng, &Folder)>,
    rules: &mut Option<Rng>,
) -> Vec<Case> {
    let total = 2 + rng.below(14) as usize;
    let (burst, pace) = (!sessions && rng.one_in(2), rng.pick(&[5, 30]));
    let cancel_every = rng.pick(&[0, 0, 6, 20]);
    // Checkpoints go on their own, as if windows alone were evicted: what follows rebuilds them.
    let forget_every = rng.pick(&[0, 0, 0, 0, 5, 50]);
    let mut cases: Vec<Case> = Vec::new();
    let mut idle = false;
    for _ in 0..200_000 {
        let dead = engine.stopped().is_some();
        if cases.len() == total || dead {
            if idle {
                return cases;
            }
        } else if burst || idle || rng.one_in(pace) {
            let (mut request, record) = (random_request(rng, &cases, sessions), Record::default());
            if let Some(rng) = rules
                && rng.one_in(2)
            {
                request.constraint = Some(Script::random(rng).source());
            }
            let id = engine.submit(request.clone(), record.sink()).unwrap();
            cases.push(Case { id, request, record });
        }
        if cancel_every > 0 && !cases.is_empty() && rng.one_in(cancel_every) {
            engine.cancel(cases[rng.below(cases.len() as u32) as usize].id);
            engine.check_integrity().unwrap();
        }
        if forget_every > 0 && rng.one_in(forget_every) {
            engine.drop_checkpoints();
            engine.check_integrity().unwrap();
        }
        if let Some((rng, folder)) = vandal
            && rng.one_in(8)
        {
            damage(rng, folder);
        }
        idle = !engine.step();
    }
    panic!("no end after 200,000 steps: {:?}", engine.status());
}

/// No more is found than another request with the same salt can have left.
fn check_reuse(case: &Case, all: &[Case]) {
    let Some(report) = case.record.report() else { return };
    let common = |other: &Case| {
        let tokens = other.record.tokens();
        let text = other.request.prompt.iter().chain(&tokens);
        case.request.prompt.iter().zip(text).take_while(|(a, b)| a == b).count()
    };
    let others = all.iter().filter(|&c| !std::ptr::eq(c, case) && c.request.salt == case.request.salt);
    let longest = others.map(common).max().unwrap_or(0);
    assert!(report.matched_tokens as usize <= longest, "{report}, {longest} in common");
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
    totals.constrained += u64::from(case.request.constraint.is_some());
    match &reason {
        FinishReason::Cancelled => totals.cancelled += 1,
        FinishReason::Failed(why) => {
            assert!(may_fail && why.contains("injected failure"), "{why}");
            totals.failed += 1;
        }
        _ => {
            assert_eq!(Some(&reason), alone.finished().as_ref());
            assert_eq!(tokens, alone.tokens());
            assert!(logits == alone.logits(), "other logits");
            totals.compared += 1;
            totals.complete += u64::from(reason == FinishReason::Complete);
            totals.given_up += u64::from(matches!(reason, FinishReason::Constraint(_)));
        }
    }
    assert_eq!(tokens, alone.tokens()[..tokens.len()]);
    assert!(logits == alone.logits()[..logits.len()], "other logits");
}
