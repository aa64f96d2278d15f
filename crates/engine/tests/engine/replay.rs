//! Rebuilding windows by replay: the tokens of a cold run, exactly the promised blocks, and true reports.

use longwave_engine::replay::Triangle;
use longwave_engine::report::{PrefixEnd, PrefixReport};
use longwave_engine::request::{FinishReason, Refusal, Request};
use longwave_engine::sim::{DraftQuality, Failure, SimBackend, SimOptions};
use longwave_engine::step::{
    Backend, BackendError, BlockCopy, BlockId, Limits, ReturnLogits, Step, StepResult, Ticket,
};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::CacheLayout;

use crate::world::{Record, Rng, assert_home, paranoid, prompt, request, solo, tiny_layout, wide_limits};

/// Positions that a full triangle of the tiny layout spans: five layers, 127 rows each; with drafts the module as well.
fn depth(drafts: bool) -> u32 {
    5 * 127 + if drafts { 128 } else { 0 }
}

fn engine_with(limits: Limits, sim: SimOptions, options: EngineOptions) -> Engine<SimBackend> {
    Engine::new(SimBackend::new(tiny_layout(), limits, sim), options)
}

fn submit<B: Backend>(engine: &mut Engine<B>, request: &Request) -> Record {
    let record = Record::default();
    engine.submit(request.clone(), record.sink()).unwrap();
    record
}

fn sampled(text: Vec<u32>, max_tokens: u32) -> Request {
    Request { logits: ReturnLogits::Sampled, ..request(text, max_tokens) }
}

/// Runs a request to its end; its tokens and logits must be those of its solo run.
fn ask(engine: &mut Engine<SimBackend>, wanted: &Request) -> PrefixReport {
    let record = submit(engine, wanted);
    while engine.step() {}
    assert_solo(&record, wanted);
    record.report().unwrap()
}

fn assert_solo(record: &Record, wanted: &Request) {
    record.assert_complete();
    let alone = solo(&tiny_layout(), 4096, wanted);
    assert!(record.tokens() == alone.tokens() && record.logits() == alone.logits(), "{:?}", record.report());
}

/// What a replay up to `boundary` must report when nothing but blocks is left before it.
fn cold_start(boundary: u32, drafts: bool) -> (u32, u32) {
    let cached = boundary.saturating_sub(depth(drafts));
    (cached, boundary - cached)
}

#[test]
fn m1_a_replay_at_any_boundary_gives_the_tokens_of_a_cold_run() {
    for (drafts, draft_quality) in [(0, DraftQuality::Off), (3, DraftQuality::Right), (7, DraftQuality::Random)] {
        let sim = SimOptions { draft_quality, ..SimOptions::default() };
        for chunk in [1, 3, 64, 129, 1000] {
            let options = EngineOptions { max_chunk_tokens: Some(chunk), drafts, ..paranoid() };
            for (boundary, more) in [(256, 1), (512, 2), (512, 128), (768, 1), (1024, 255), (1536, 2)] {
                let mut engine = engine_with(wide_limits(), sim.clone(), options.clone());
                let wanted = sampled(prompt(u64::from(boundary), boundary + more), 12);
                ask(&mut engine, &wanted);
                let computed = engine.status().prompt_tokens;
                engine.drop_checkpoints();
                let report = ask(&mut engine, &wanted);
                let (cached, replayed) = cold_start(boundary, drafts > 0);
                // One block alone is no cheaper with the module's rows: every layer but one needs all of it.
                let plain = boundary == 256 && drafts > 0;
                let expected = if plain { (0, 0) } else { (cached, replayed) };
                assert_eq!((report.cached_tokens, report.replayed_tokens), expected, "{boundary} {chunk} {report}");
                assert_eq!(report.matched_tokens, boundary);
                let end = if plain { PrefixEnd::CheckpointMissing } else { PrefixEnd::PromptEnd };
                assert_eq!(report.ended_by, end, "{report}");
                let status = engine.status();
                assert_eq!(
                    (status.prefix.replays, status.prefix.replayed_tokens),
                    (u64::from(!plain), expected.1.into())
                );
                assert_eq!(status.prompt_tokens - computed, u64::from(if plain { boundary + more } else { more }));
                // It left a checkpoint, and nothing more has to be rebuilt.
                assert_eq!(ask(&mut engine, &wanted).cached_tokens, boundary);
                assert_home(&engine.status());
            }
        }
    }
}

#[test]
fn a_checkpoint_inside_the_triangle_cuts_it_off() {
    let text = prompt(4, 1100);
    for (drafts, at, replayed) in
        [(0, 768, 256), (7, 768, 0), (0, 512, 512), (7, 512, 512), (0, 256, 635), (7, 256, 763)]
    {
        let sim = SimOptions { draft_quality: DraftQuality::Random, ..SimOptions::default() };
        for chunk in [None, Some(5), Some(100)] {
            let options = EngineOptions { max_chunk_tokens: chunk, drafts, ..paranoid() };
            let mut engine = engine_with(wide_limits(), sim.clone(), options);
            ask(&mut engine, &sampled(text.clone(), 1));
            engine.drop_checkpoints();
            // Leaves the only checkpoint, at `at`.
            ask(&mut engine, &sampled(text[..at as usize + 9].to_vec(), 1));
            let report = ask(&mut engine, &sampled(text.clone(), 9));
            let cached = if replayed == 0 { at } else { 1024 - replayed };
            assert_eq!((report.cached_tokens, report.replayed_tokens), (cached, replayed), "{drafts} {at}: {report}");
            let triangle = Triangle::new(&tiny_layout(), drafts > 0).unwrap();
            assert_eq!(triangle.tokens(1024 - at) < 1024 - at, replayed > 0, "the cheaper one is chosen");
            let end = if replayed > 0 { PrefixEnd::PromptEnd } else { PrefixEnd::CheckpointMissing };
            assert_eq!(report.ended_by, end);
        }
    }
}

#[test]
fn without_the_option_a_prompt_starts_at_its_checkpoint() {
    let mut engine = engine_with(wide_limits(), SimOptions::default(), EngineOptions { replay: false, ..paranoid() });
    let wanted = sampled(prompt(1, 1100), 5);
    ask(&mut engine, &wanted);
    engine.drop_checkpoints();
    let report = ask(&mut engine, &wanted);
    assert_eq!((report.cached_tokens, report.replayed_tokens, report.matched_tokens), (0, 0, 1024));
    assert_eq!((report.ended_by, engine.status().prefix.replays), (PrefixEnd::CheckpointMissing, 0));
}

#[test]
fn batch_mates_do_not_notice_a_replay() {
    for (budget, drafts) in [(40, 0), (333, 0), (64, 5), (1000, 5)] {
        let sim = SimOptions { draft_quality: DraftQuality::Random, ..SimOptions::default() };
        let options = EngineOptions { drafts, ..paranoid() };
        let mut engine = engine_with(Limits { step_tokens: budget, ..wide_limits() }, sim, options);
        let texts: Vec<Request> = (0..6).map(|i| sampled(prompt(70 + i, 700 + 150 * i as u32), 30)).collect();
        let all = |engine: &mut Engine<SimBackend>, others: &[Request]| {
            let records: Vec<Record> = texts.iter().chain(others).map(|r| submit(engine, r)).collect();
            while engine.step() {}
            records.iter().zip(texts.iter().chain(others)).for_each(|(record, wanted)| assert_solo(record, wanted));
        };
        all(&mut engine, &[]);
        engine.drop_checkpoints();
        // The same texts, texts that share all but their ends with them, and new ones.
        let alike = texts.iter().map(|r| sampled([&r.prompt[..640], &prompt(9, 50)].concat(), 7));
        let new = (0..3).map(|i| sampled(prompt(90 + i, 300), 40));
        all(&mut engine, &alike.chain(new).collect::<Vec<_>>());
        assert!(engine.status().prefix.replays >= 6, "{:?}", engine.status().prefix);
        assert_home(&engine.status());
    }
}

/// Units of each pool that a request is refused for having less of.
fn least_pools(wanted: &Request, options: &EngineOptions) -> [u32; 3] {
    let mut units = [0; 3];
    loop {
        let mut engine = engine_with(Limits { units, ..wide_limits() }, SimOptions::default(), options.clone());
        match submit(&mut engine, wanted).finished() {
            Some(FinishReason::Refused(Refusal::NeverFits { pool, need, .. })) => {
                let bucket = ["large", "middle", "small"].iter().position(|&name| name == pool).unwrap();
                units[bucket] = need as u32;
            }
            _ => return units,
        }
    }
}

#[test]
fn a_replay_needs_no_block_more_than_was_promised() {
    for (chunk, drafts) in [(None, 0), (Some(1), 0), (Some(7), 7), (Some(129), 7), (Some(300), 0)] {
        let options = EngineOptions { max_chunk_tokens: chunk, drafts, ..paranoid() };
        let wanted = sampled(prompt(5, 1300), 40);
        let units = least_pools(&wanted, &options);
        let mut engine = engine_with(Limits { units, ..wide_limits() }, SimOptions::default(), options);
        ask(&mut engine, &wanted);
        for _ in 0..3 {
            engine.drop_checkpoints();
            ask(&mut engine, &wanted);
        }
        assert!(engine.status().prefix.replays > 0, "{:?}", engine.status().prefix);
        assert_home(&engine.status());
    }
}

#[test]
fn a_replay_that_is_cancelled_or_fails_leaves_nothing_behind() {
    let wanted = sampled(prompt(6, 1300), 9);
    for at in 1..14 {
        let options = EngineOptions { max_chunk_tokens: Some(64), drafts: at as u32 % 2, ..paranoid() };
        let mut engine = engine_with(wide_limits(), SimOptions::default(), options.clone());
        ask(&mut engine, &wanted);
        engine.drop_checkpoints();
        let (nodes, steps) = (engine.status().prefix.nodes, engine.status().steps);
        let record = Record::default();
        let id = engine.submit(wanted.clone(), record.sink()).unwrap();
        (0..at).for_each(|_| assert!(engine.step()));
        engine.cancel(id);
        assert_eq!(record.assert_complete(), FinishReason::Cancelled);
        assert_home(&engine.status());
        assert_eq!(engine.status().prefix.nodes, nodes);
        ask(&mut engine, &wanted);
        // The same when the backend refuses a step.
        let sim = SimOptions { fail_at_step: Some(steps + at), failure: Failure::BadStep, ..SimOptions::default() };
        let mut engine = engine_with(wide_limits(), sim, options);
        ask(&mut engine, &wanted);
        engine.drop_checkpoints();
        let record = submit(&mut engine, &wanted);
        while engine.step() {}
        assert!(matches!(record.assert_complete(), FinishReason::Failed(_)), "{at}");
        assert_home(&engine.status());
        ask(&mut engine, &wanted);
    }
}

/// It keeps no state of a replay, which costs little, and begins again.
#[test]
fn a_replay_that_loses_its_seat_begins_again() {
    for at in [1, 3, 9] {
        let options = EngineOptions { max_chunk_tokens: Some(64), ..paranoid() };
        let mut engine = engine_with(Limits { seats: 1, ..wide_limits() }, SimOptions::default(), options);
        let (slow, urgent) = (sampled(prompt(6, 1300), 9), Request { priority: -5, ..sampled(prompt(7, 300), 5) });
        ask(&mut engine, &slow);
        engine.drop_checkpoints();
        let first = submit(&mut engine, &slow);
        (0..at).for_each(|_| assert!(engine.step()));
        let second = submit(&mut engine, &urgent);
        engine.step();
        assert_eq!((engine.status().preempted, engine.status().spilled), (1, 0), "after {at} steps");
        while engine.step() {}
        [(&first, &slow), (&second, &urgent)].iter().for_each(|(record, wanted)| assert_solo(record, wanted));
        assert_home(&engine.status());
    }
}

/// Moves the origin of every replay.
struct Shifted {
    inner: SimBackend,
    by: i64,
}

impl Backend for Shifted {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }
    fn layout(&self) -> &CacheLayout {
        self.inner.layout()
    }
    fn fingerprint(&self) -> [u8; 32] {
        self.inner.fingerprint()
    }
    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        let mut step = step.clone();
        step.seqs.iter_mut().filter_map(|s| s.replay.as_mut()).for_each(|r| r.origin += self.by);
        self.inner.submit(&step)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        self.inner.collect(ticket)
    }
    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError> {
        self.inner.copy(copies)
    }
    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError> {
        self.inner.read_unit(bucket, block, out)
    }
    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.inner.write_unit(bucket, block, bytes)
    }
}

/// The simulated model has all layers of the layout: one position too late leaves a row unwritten, one too early reads a
/// row that nobody rebuilt. Both must show.
#[test]
fn an_origin_that_is_off_by_one_is_noticed() {
    for drafts in [0, 3] {
        for (by, fails) in [(0, false), (1, true), (127, true), (-1, true)] {
            let sim = SimOptions { draft_quality: DraftQuality::Right, ..SimOptions::default() };
            let backend = Shifted { inner: SimBackend::new(tiny_layout(), wide_limits(), sim), by };
            let mut engine = Engine::new(backend, EngineOptions { drafts, ..paranoid() });
            let wanted = sampled(prompt(8, 1300), 9);
            let first = submit(&mut engine, &wanted);
            while engine.step() {}
            engine.drop_checkpoints();
            let second = submit(&mut engine, &wanted);
            while engine.step() {}
            let same = first.tokens() == second.tokens();
            let failed = matches!(second.assert_complete(), FinishReason::Failed(why) if why.contains("poison") || why.contains("never written") || why.contains("not mapped"));
            assert_eq!((same, failed), (!fails, fails), "{drafts} drafts, origin {by}: {:?}", second.finished());
            assert!(engine.status().prefix.replays == 1);
        }
    }
}

/// Texts that share beginnings come back while checkpoints are dropped all the time, on roomy and on tight pools.
#[test]
fn checkpoints_that_always_go_change_no_token() {
    let (mut replays, mut full, mut requests, mut finished) = (0, 0, 0, 0);
    for seed in 0..60 {
        let rng = &mut Rng(1000 + seed);
        let layout = tiny_layout();
        let blocks = rng.pick(&[8, 12, 60]);
        let drafts = rng.pick(&[0, 0, 3, 7]);
        let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * blocks + layout.sliding_units(drafts)[i] * 5);
        let limits =
            Limits { units, seats: 1 + rng.below(5), step_tokens: rng.pick(&[16, 100, 700, 2048]), ..wide_limits() };
        let options = EngineOptions {
            max_chunk_tokens: rng.pick(&[None, Some(1), Some(3), Some(64), Some(129), Some(300)]),
            drafts,
            checkpoint_interval: rng.pick(&[256, 512, 8192]),
            ..paranoid()
        };
        let sim = SimOptions { draft_quality: DraftQuality::Random, poison: rng.one_in(2), ..SimOptions::default() };
        let mut engine = engine_with(limits, sim, options);
        let mut cases: Vec<(Request, Record)> = Vec::new();
        for _ in 0..8 {
            let family = prompt(u64::from(rng.below(2)), 1600);
            let cut = 256 + rng.below(1200) as usize;
            let tail = prompt(rng.next(), 1 + rng.below(200));
            let mut wanted = sampled([&family[..cut], &tail[..]].concat(), 1 + rng.below(40));
            wanted.salt = u64::from(rng.one_in(6));
            cases.push((wanted.clone(), submit(&mut engine, &wanted)));
            let cancelled = rng.one_in(5).then(|| engine.submit(wanted, Record::default().sink()).unwrap());
            for _ in 0..rng.below(20) {
                engine.step();
                if rng.one_in(3) {
                    engine.drop_checkpoints();
                }
            }
            if let Some(id) = cancelled {
                engine.cancel(id);
            }
        }
        while engine.step() {
            if rng.one_in(3) {
                engine.drop_checkpoints();
            }
        }
        for (wanted, record) in &cases {
            requests += 1;
            if record.assert_complete() == FinishReason::Length {
                finished += 1;
                assert_solo(record, wanted);
                let report = record.report().unwrap();
                full += u32::from(report.replayed_tokens == depth(drafts > 0));
            }
        }
        replays += engine.status().prefix.replays;
        assert_home(&engine.status());
    }
    println!("{requests} requests, {finished} finished, {replays} replays, {full} full triangles");
    assert!(replays > 100 && full > 20, "{replays} {full}");
}
