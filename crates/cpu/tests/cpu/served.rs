//! The CPU backend under the real engine: scheduling, block tables and tail-only windows change no bit (M8, M9 of CONTRIBUTING.md).

use std::sync::mpsc;

use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_engine::report::PrefixReport;
use longwave_engine::request::{Event, FinishReason, Request};
use longwave_engine::step::{Backend, ReturnLogits, Sampling, Token};
use longwave_engine::{Engine, EngineOptions};

use crate::invariance::prompt;
use crate::rig::{CACHE, tiny};

fn backend(step_tokens: u32, seats: u32, cache_bytes: u64) -> CpuBackend {
    drafting(step_tokens, seats, cache_bytes, 0)
}

pub fn drafting(step_tokens: u32, seats: u32, cache_bytes: u64, drafts: u32) -> CpuBackend {
    with_context(step_tokens, seats, cache_bytes, drafts, 4096)
}

pub fn with_context(step_tokens: u32, seats: u32, cache_bytes: u64, drafts: u32, context: u32) -> CpuBackend {
    let model = Model::new(&tiny(), Profile::Serving, CACHE);
    CpuBackend::new(model, CpuOptions { seats, step_tokens, context, cache_bytes, drafts }).unwrap()
}

pub fn request(prompt: Vec<Token>, max_tokens: u32, seed: u64) -> Request {
    // Half of the requests sample: their tokens must not depend on the batch either.
    let sampling =
        Sampling { temperature: if seed.is_multiple_of(2) { 0.0 } else { 0.8 }, seed, ..Sampling::default() };
    Request { stop_tokens: vec![1], sampling, logits: ReturnLogits::All, ..Request::greedy(prompt, max_tokens) }
}

/// What a request gave.
#[derive(Default, Clone, PartialEq, Debug)]
pub struct Answer {
    pub tokens: Vec<Token>,
    /// Bits of all logits, in order of positions.
    pub logits: Vec<u32>,
}

/// Runs requests to their end; arrivals are spread over the steps.
pub fn serve<B: Backend>(backend: B, options: EngineOptions, requests: &[Request]) -> Vec<Answer> {
    let mut engine = Engine::new(backend, EngineOptions { paranoid: true, ..options });
    let (sender, events) = mpsc::channel();
    let mut queue = requests.iter().enumerate();
    let mut busy = true;
    while busy || queue.len() > 0 {
        for (i, r) in queue.by_ref().take(2) {
            let sender = sender.clone();
            engine.submit(r.clone(), Box::new(move |e| sender.send((i, e)).unwrap())).unwrap();
        }
        busy = engine.step();
    }
    engine.check_integrity().unwrap();
    let status = engine.status();
    assert_eq!(status.units_used, status.units_cached, "all blocks are home");
    let mut answers = vec![Answer::default(); requests.len()];
    let mut finished = 0;
    for (i, event) in events.try_iter() {
        match event {
            Event::Tokens { tokens, .. } => answers[i].tokens.extend(tokens),
            Event::Logits { logits, .. } => answers[i].logits.extend(logits.iter().map(|v| v.to_bits())),
            Event::Finished { reason, .. } => {
                assert!(matches!(reason, FinishReason::Stop(_) | FinishReason::Length), "{reason:?}");
                finished += 1;
            }
            Event::Scheduled { .. } | Event::Attention(_) => {}
        }
    }
    assert_eq!(finished, requests.len());
    answers
}

#[test]
fn seventeen_mixed_requests_equal_their_solo_runs() {
    let lengths = [1, 2, 3, 4, 5, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 513, 700];
    let requests: Vec<Request> =
        lengths.iter().enumerate().map(|(i, &n)| request(prompt(n, 50 + i as u64), 12 + i as u32, i as u64)).collect();
    let alone: Vec<Answer> = requests
        .iter()
        .map(|r| serve(backend(4096, 1, 64 << 20), EngineOptions::default(), std::slice::from_ref(r)).remove(0))
        .collect();
    assert!(alone.iter().all(|a| !a.tokens.is_empty() && !a.logits.is_empty()));
    // A small token budget mixes decodes with prefill chunks; a pool that is too small for all makes some wait.
    for (budget, seats, bytes) in [(96, 17, 256 << 20), (33, 5, 24 << 20), (512, 17, 48 << 20)] {
        let together = serve(backend(budget, seats, bytes), EngineOptions::default(), &requests);
        for (i, (a, b)) in alone.iter().zip(&together).enumerate() {
            assert!(a == b, "request {i} of {} tokens, budget {budget}", lengths[i]);
        }
    }
}

#[test]
fn chunk_limits_of_the_engine_change_nothing() {
    let r = request(prompt(600, 3), 20, 7);
    let whole = serve(backend(4096, 1, 64 << 20), EngineOptions::default(), std::slice::from_ref(&r));
    for chunk in [1, 5, 64, 129, 256] {
        let options = EngineOptions { max_chunk_tokens: Some(chunk), ..EngineOptions::default() };
        assert!(whole == serve(backend(4096, 1, 64 << 20), options, std::slice::from_ref(&r)), "chunks of {chunk}");
    }
}

/// Runs a request on an idle engine; with what was reused for it.
pub fn serve_in_turn(engine: &mut Engine<CpuBackend>, request: Request) -> (Answer, PrefixReport) {
    let (sender, events) = mpsc::channel();
    engine.submit(request, Box::new(move |e| sender.send(e).unwrap())).unwrap();
    while engine.step() {}
    let (mut answer, mut report) = (Answer::default(), PrefixReport::default());
    for event in events.try_iter() {
        match event {
            Event::Tokens { tokens, .. } => answer.tokens.extend(tokens),
            Event::Logits { logits, .. } => answer.logits.extend(logits.iter().map(|v| v.to_bits())),
            Event::Scheduled { cached_tokens, prefix } => {
                assert_eq!(cached_tokens, prefix.cached_tokens);
                report = prefix;
            }
            Event::Attention(_) | Event::Finished { .. } => {}
        }
    }
    (answer, report)
}

#[test]
fn m1_a_reused_prefix_changes_no_bit() {
    let options = EngineOptions { paranoid: true, ..EngineOptions::default() };
    let cold = EngineOptions { prefix_cache: false, ..options.clone() };
    let mut warm = Engine::new(backend(4096, 2, 64 << 20), options);
    let sampled = |tokens: Vec<Token>, outputs, seed| Request {
        logits: ReturnLogits::Sampled,
        stop_tokens: Vec::new(),
        ..request(tokens, outputs, seed)
    };
    let mut reused = 0;
    for (i, len) in [256, 511].into_iter().enumerate() {
        let seed = i as u64;
        let mut text = prompt(len, 90 + seed);
        for turn in 0..3 {
            let wanted = sampled(text.clone(), 24, seed);
            let (alone, _) = serve_in_turn(&mut Engine::new(backend(4096, 1, 64 << 20), cold.clone()), wanted.clone());
            let (first, report) = serve_in_turn(&mut warm, wanted.clone());
            let (again, report_again) = serve_in_turn(&mut warm, wanted);
            let (cached, cached_again) = (report.cached_tokens, report_again.cached_tokens);
            assert!(first == alone && again == alone, "{len} tokens, turn {turn}: {cached} and {cached_again} cached");
            assert_eq!(cached_again as usize, (text.len() - 1) / 256 * 256);
            reused += cached;
            text.extend(&alone.tokens);
            text.extend(prompt(30, 500 + seed));
        }
    }
    // The second text passes 512 in its first answer.
    assert_eq!(reused, 2 * 256 + 2 * 512);
    assert_eq!(warm.status().units_used, warm.status().units_cached);
}

#[test]
fn a_step_with_an_unmapped_block_is_refused_before_anything_is_computed() {
    use longwave_engine::step::{BackendError, Seat, SeqStep, Step};
    let mut b = backend(64, 2, 64 << 20);
    let seq = SeqStep { fresh: true, ..SeqStep::new(Seat(0), 0, 0..4) };
    let step = Step { number: 1, tokens: vec![20; 4], seqs: vec![seq.clone()], ..Step::default() };
    let error = b.submit(&step).unwrap_err();
    assert!(matches!(&error, BackendError::BadStep { what, .. } if what.contains("not mapped")), "{error}");
    let twice = Step { seqs: vec![seq.clone(), seq], ..step.clone() };
    assert!(b.submit(&twice).unwrap_err().to_string().contains("twice"));
    let mut wrong = step;
    wrong.tokens[2] = 2432;
    assert!(b.submit(&wrong).is_err());
}

/// One weight that is not a number must fail the requests that meet it, not the engine.
#[test]
fn logits_that_are_not_finite_fail_the_request_and_not_the_engine() {
    let folder = crate::rig::testdata().join("tiny");
    let mut shard = std::fs::read(folder.join("model.safetensors")).unwrap();
    let (header, meta) = safetensors::SafeTensors::read_metadata(&shard).unwrap();
    let at = 8 + header + meta.info("norm.weight").unwrap().data_offsets.0;
    shard[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let ckpt = longwave_model::Checkpoint::embedded("broken", &config, shard.leak()).unwrap();
    let options = CpuOptions { seats: 2, step_tokens: 64, context: 512, cache_bytes: 32 << 20, drafts: 2 };
    let broken = CpuBackend::new(Model::new(&ckpt, Profile::Serving, CACHE), options).unwrap();
    let mut engine = Engine::new(broken, EngineOptions { drafts: 2, paranoid: true, ..EngineOptions::default() });
    let (sender, events) = mpsc::channel();
    for temperature in [0.0, 1.0] {
        for seed in 0..2 {
            let mut r = request(prompt(9, seed), 5, seed);
            r.sampling.temperature = temperature;
            let sender = sender.clone();
            engine.submit(r, Box::new(move |e| drop(sender.send(e)))).unwrap();
        }
    }
    while engine.step() {}
    let finished = |e| if let Event::Finished { reason, .. } = e { Some(reason) } else { None };
    let reasons: Vec<FinishReason> = events.try_iter().filter_map(finished).collect();
    assert_eq!(reasons.len(), 4);
    assert!(reasons.iter().all(|r| matches!(r, FinishReason::Failed(why) if why.contains("NaN"))), "{reasons:?}");
    assert_eq!(engine.stopped(), None);
    engine.check_integrity().unwrap();
}

/// Before `min_tokens` a stop token is not chosen: the text goes on instead of starting a new turn.
#[test]
fn a_least_length_keeps_stop_tokens_out_of_the_answer() {
    let ids: Vec<Token> = vec![0, 3, 20, 30, 40, 4, 6];
    let ask = |min_tokens| {
        let mut r = request(ids.clone(), 40, 0);
        r.min_tokens = min_tokens;
        serve(backend(64, 1, 64 << 20), EngineOptions::default(), &[r]).remove(0).tokens
    };
    let free = ask(0);
    let stop = free.iter().position(|&t| t == 1).expect("the answer ends by itself");
    let longer = ask(stop as u32 + 5);
    assert_eq!(free[..stop], longer[..stop]);
    assert!(longer.len() >= stop + 5 && !longer[..stop + 4].contains(&1), "{free:?} {longer:?}");
}
