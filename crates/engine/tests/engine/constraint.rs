//! Answers that must follow a constraint: masks for every verified position, drafts cut and taken back, preemption, ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use longwave_engine::constraint::{Constraint, ConstraintSource};
use longwave_engine::forced::{Forced, ForcedDrafts};
use longwave_engine::proof::{compare, serve};
use longwave_engine::request::{FinishReason, Request};
use longwave_engine::sim::{DraftQuality, SimBackend, SimOptions};
use longwave_engine::step::{Limits, Sampling, Token};
use longwave_engine::{Engine, EngineOptions};

use crate::world::{Record, Rng, VOCAB, assert_home, paranoid, prompt, request, solo, tiny_layout, wide_limits};

/// Rules that depend on every token so far, in order. They check how the engine asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Script {
    pub seed: u64,
    /// All tokens may follow while fewer than this many came: a thought.
    pub free: u32,
    /// Of the tokens, one in so many may follow, and always at least one.
    pub sparse: u32,
    /// The answer is whole after so many tokens.
    pub length: u32,
    /// It gives up after so many.
    pub gives_up: u32,
}

impl Script {
    pub fn random(rng: &mut Rng) -> Script {
        Script {
            seed: rng.next(),
            free: rng.pick(&[0, 0, 1, 2, 5, 30]),
            sparse: rng.pick(&[1, 2, 2, 3, 60]),
            length: rng.pick(&[1, 2, 9, 40, 100, 1000]),
            gives_up: rng.pick(&[1000, 1000, 1000, 3, 12]),
        }
    }

    pub fn source(self) -> ConstraintSource {
        ConstraintSource::new(move || Box::new(State { script: self, tokens: Vec::new(), told: None }))
    }

    fn allows(&self, before: &[Token], token: Token) -> bool {
        let hash = |salt: u32| {
            let step = |h: u64, &t: &Token| (h ^ u64::from(t)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
            before.iter().chain(&[salt]).fold(self.seed, step)
        };
        let always = (hash(VOCAB) >> 7) % u64::from(VOCAB);
        (before.len() as u32) < self.free
            || u64::from(token) == always
            || (hash(token) >> 9).is_multiple_of(u64::from(self.sparse))
    }

    /// Panics unless the tokens are an answer that keeps the rules.
    fn check(&self, tokens: &[Token]) {
        for (i, &token) in tokens.iter().enumerate() {
            assert!(self.allows(&tokens[..i], token), "token {i} of {tokens:?} breaks {self:?}");
        }
        assert!(tokens.len() <= self.length.min(self.gives_up) as usize, "{} tokens of {self:?}", tokens.len());
    }
}

struct State {
    script: Script,
    tokens: Vec<Token>,
    /// What the engine is told, for tests that look.
    told: Option<Arc<Mutex<Vec<Token>>>>,
}

impl Constraint for State {
    fn mask(&mut self, words: &mut [u32]) -> Result<bool, String> {
        assert!(words.len() == VOCAB.div_ceil(32) as usize && words.iter().all(|&w| w == 0));
        assert!(!self.is_complete(), "asked what may follow a whole answer");
        let before = self.tokens.len() as u32;
        if before >= self.script.gives_up {
            return Err(format!("it gives up after {before} tokens"));
        }
        if before < self.script.free {
            return Ok(false);
        }
        for token in (0..VOCAB).filter(|&t| self.script.allows(&self.tokens, t)) {
            words[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(true)
    }

    fn accept(&mut self, token: Token) -> Result<(), String> {
        assert!(!self.is_complete(), "told of a token after a whole answer");
        assert!(self.script.allows(&self.tokens, token), "told of a token that its mask forbids");
        self.tokens.push(token);
        if let Some(told) = &self.told {
            told.lock().unwrap().clone_from(&self.tokens);
        }
        Ok(())
    }

    fn roll_back(&mut self, tokens: u32) -> Result<(), String> {
        assert!(tokens <= 7);
        self.tokens.truncate(self.tokens.len() - tokens as usize);
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.tokens.len() as u32 >= self.script.length
    }
}

const RULES: Script = Script { seed: 11, free: 3, sparse: 2, length: 60, gives_up: 1000 };

fn constrained(script: Script, seed: u64, max_tokens: u32) -> Request {
    Request { constraint: Some(script.source()), ..request(prompt(seed, 90), max_tokens) }
}

fn run(request: &Request, sim: SimOptions, options: EngineOptions) -> (Record, longwave_engine::Status) {
    let mut engine = Engine::new(SimBackend::new(tiny_layout(), wide_limits(), sim), options);
    let record = Record::default();
    engine.submit(request.clone(), record.sink()).unwrap();
    while engine.step() {}
    record.assert_complete();
    assert_home(&engine.status());
    (record, engine.status())
}

#[test]
fn m11_constrained_answers_are_the_same_with_and_without_drafts() {
    for (temperature, sparse) in [(0.0, 1), (0.0, 2), (1.0, 2), (1.0, 60)] {
        let script = Script { sparse, ..RULES };
        let sampling = Sampling { temperature, seed: 9, presence_penalty: temperature, ..Sampling::default() };
        let wanted = Request { sampling, ..constrained(script, 4, 200) };
        let alone = solo(&tiny_layout(), 4096, &wanted);
        assert_eq!((alone.finished(), alone.tokens().len()), (Some(FinishReason::Complete), 60));
        script.check(&alone.tokens());
        for quality in [DraftQuality::Right, DraftQuality::Wrong, DraftQuality::Random] {
            let sim = SimOptions { draft_quality: quality, ..SimOptions::default() };
            let (record, status) = run(&wanted, sim, EngineOptions { drafts: 5, ..paranoid() });
            assert_eq!(record.tokens(), alone.tokens(), "{quality:?} {temperature} {sparse}");
            assert_eq!(record.finished(), Some(FinishReason::Complete));
            if quality == DraftQuality::Right && sparse == 1 {
                assert!(status.steps < 20, "drafts that are allowed count: {}", status.steps);
            }
        }
    }
}

#[test]
fn m11_forced_drafts_cross_into_the_constraint_and_right_ones_are_all_accepted() {
    let scripts = [RULES, Script { free: 0, sparse: 60, length: 25, ..RULES }, Script { free: 7, length: 8, ..RULES }];
    let requests: Vec<Request> = (0..24)
        .map(|i| {
            let sampling = Sampling { temperature: (i % 2) as f32, seed: 100 + i, ..Sampling::default() };
            Request { sampling, ..constrained(scripts[i as usize % 3], i, 70) }
        })
        .collect();
    let limits = Limits { vocab: VOCAB, ..wide_limits() };
    let inner = || SimBackend::new(tiny_layout(), limits.clone(), SimOptions::default());
    let plain = serve(&mut Engine::new(inner(), paranoid()), &requests, 1);
    for (forced, all) in [(Forced::Right, true), (Forced::Wrong, false), (Forced::Random(3), false)] {
        let backend = ForcedDrafts::new(inner(), forced, 5, &requests, &plain);
        let mut engine = Engine::new(backend, EngineOptions { drafts: 5, ..paranoid() });
        let comparison = compare(&plain, &serve(&mut engine, &requests, 4));
        assert!(comparison.is_equal() && comparison.tokens > 500, "{comparison:?}");
        let status = engine.status();
        assert_eq!(status.drafts_accepted == status.drafts_proposed, all, "{status:?}");
    }
}

#[test]
fn a_constraint_ends_the_answer_before_its_limits_do() {
    let finished = |request: Request| {
        let (record, _) = run(&request, SimOptions::default(), paranoid());
        (record.finished().unwrap(), record.tokens().len())
    };
    let base = constrained(RULES, 1, 200);
    assert_eq!(finished(base.clone()), (FinishReason::Complete, 60));
    assert_eq!(finished(Request { min_tokens: 150, ..base.clone() }), (FinishReason::Complete, 60));
    assert_eq!(finished(Request { max_tokens: 60, ..base.clone() }), (FinishReason::Complete, 60));
    assert_eq!(finished(Request { max_tokens: 59, ..base.clone() }), (FinishReason::Length, 59));
    assert_eq!(finished(Request { max_tokens: 0, ..base.clone() }), (FinishReason::Length, 0));
    let stop = solo(&tiny_layout(), 4096, &base).tokens()[20];
    let (reason, length) = finished(Request { stop_tokens: vec![stop], ..base });
    assert!(reason == FinishReason::Stop(stop) && length <= 21);
}

#[test]
fn a_constraint_that_gives_up_fails_its_request_alone_and_frees_the_seat() {
    for gives_up in [0, 1, 10] {
        let limits = Limits { seats: 1, ..wide_limits() };
        let mut engine = Engine::new(SimBackend::new(tiny_layout(), limits, SimOptions::default()), paranoid());
        let records: Vec<Record> = (0..4).map(|_| Record::default()).collect();
        for (i, record) in records.iter().enumerate() {
            let gives_up = if i % 2 == 0 { gives_up } else { 1000 };
            engine.submit(constrained(Script { gives_up, ..RULES }, i as u64, 200), record.sink()).unwrap();
        }
        while engine.step() {}
        for (i, record) in records.iter().enumerate() {
            let reason = record.assert_complete();
            if i % 2 == 0 {
                assert_eq!(reason, FinishReason::Constraint(format!("it gives up after {gives_up} tokens")));
                assert_eq!(record.tokens().len(), gives_up as usize);
            } else {
                assert_eq!(reason, FinishReason::Complete);
            }
        }
        assert_home(&engine.status());
    }
}

#[test]
fn a_preempted_answer_goes_on_in_the_state_that_it_had() {
    for (spill_bytes, after) in [(0, 5), (0, 30), (1 << 40, 30), (1 << 40, 4)] {
        let patient = Request { priority: 1, ..constrained(RULES, 1, 200) };
        let urgent = Request { priority: -1, ..constrained(Script { seed: 5, ..RULES }, 2, 9) };
        let limits = Limits { seats: 1, step_tokens: 64, ..wide_limits() };
        let sim = SimOptions { draft_quality: DraftQuality::Random, ..SimOptions::default() };
        let options = EngineOptions { spill_bytes, drafts: 3, ..paranoid() };
        let mut engine = Engine::new(SimBackend::new(tiny_layout(), limits, sim), options);
        let (first, second) = (Record::default(), Record::default());
        let told = Arc::new(Mutex::new(Vec::new()));
        let looked = Arc::clone(&told);
        let starts = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&starts);
        let source = ConstraintSource::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Box::new(State { script: RULES, tokens: Vec::new(), told: Some(Arc::clone(&looked)) })
        });
        engine.submit(Request { constraint: Some(source), ..patient.clone() }, first.sink()).unwrap();
        (0..after).for_each(|_| assert!(engine.step()));
        engine.submit(urgent.clone(), second.sink()).unwrap();
        while engine.step() {}
        assert_eq!(engine.status().preempted, 1);
        for (record, request) in [(&first, &patient), (&second, &urgent)] {
            record.assert_complete();
            assert_eq!(record.tokens(), solo(&tiny_layout(), 4096, request).tokens());
        }
        assert_eq!(*told.lock().unwrap(), first.tokens(), "each token was told once, in order");
        assert_eq!(starts.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn tokens_that_a_mask_forbids_are_noticed() {
    let options = SimOptions { ignore_masks: true, ..SimOptions::default() };
    let backend = SimBackend::new(tiny_layout(), wide_limits(), options);
    let mut engine = Engine::new(backend, paranoid());
    let record = Record::default();
    engine.submit(constrained(RULES, 1, 50), record.sink()).unwrap();
    while engine.step() {}
    let FinishReason::Failed(why) = record.assert_complete() else { panic!("{:?}", record.finished()) };
    assert!(why.contains("which its masks do not allow"), "{why}");
}
