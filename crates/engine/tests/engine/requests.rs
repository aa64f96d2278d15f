//! Single behaviours of the engine: where requests end, who runs when, what is refused, what a failure takes down.

use longwave_engine::request::{Event, FinishReason, Refusal, Request, RequestId, SubmitError};
use longwave_engine::sim::{DraftQuality, Failure, SimBackend, SimOptions};
use longwave_engine::step::{Limits, ReturnLogits, Sampling};
use longwave_engine::{Engine, EngineOptions};

use crate::world::{
    Record, VOCAB, assert_home, flash_layout, paranoid, prompt, request, solo, tiny_layout, wide_limits,
};

fn engine_with(limits: Limits, sim: SimOptions, options: EngineOptions) -> Engine<SimBackend> {
    Engine::new(SimBackend::new(tiny_layout(), limits, sim), options)
}

fn submit(engine: &mut Engine<SimBackend>, request: Request) -> (RequestId, Record) {
    let record = Record::default();
    (engine.submit(request, record.sink()).unwrap(), record)
}

/// Runs one request to its end under `options`.
fn run(request: Request, sim: SimOptions, options: EngineOptions) -> Record {
    let mut engine = engine_with(wide_limits(), sim, options);
    let (_, record) = submit(&mut engine, request);
    while engine.step() {}
    record.assert_complete();
    record
}

#[test]
fn chunk_sizes_change_nothing() {
    let wanted = Request { logits: ReturnLogits::All, ..request(prompt(7, 1500), 40) };
    let alone = solo(&tiny_layout(), 4096, &wanted);
    assert_eq!(alone.logits().len(), 1539 * VOCAB as usize);
    for chunk in [1, 2, 3, 4, 5, 7, 64, 127, 128, 129, 256, 1000] {
        let options = EngineOptions { max_chunk_tokens: Some(chunk), ..paranoid() };
        let record = run(wanted.clone(), SimOptions::default(), options);
        assert_eq!(record.tokens(), alone.tokens(), "chunks of {chunk}");
        assert_eq!(record.logits(), alone.logits(), "chunks of {chunk}");
    }
}

#[test]
fn seventeen_requests_together_equal_their_solo_runs() {
    let requests: Vec<Request> = (0..17).map(|i| request(prompt(i, 1 + 61 * i as u32), 20 + i as u32)).collect();
    let mut engine = engine_with(wide_limits(), SimOptions::default(), paranoid());
    let records: Vec<Record> = requests.iter().map(|r| submit(&mut engine, r.clone()).1).collect();
    while engine.step() {}
    for (request, record) in requests.iter().zip(&records) {
        assert_eq!(record.tokens(), solo(&tiny_layout(), 4096, request).tokens());
    }
}

#[test]
fn right_drafts_save_steps_and_wrong_ones_cost_only_theirs() {
    let wanted = request(prompt(3, 100), 161);
    let alone = solo(&tiny_layout(), 4096, &wanted).tokens();
    let steps = |draft_quality, drafts| {
        let sim = SimOptions { draft_quality, ..SimOptions::default() };
        let mut engine = engine_with(wide_limits(), sim, EngineOptions { drafts, ..paranoid() });
        let (_, record) = submit(&mut engine, wanted.clone());
        while engine.step() {}
        assert_eq!(record.tokens(), alone, "{draft_quality:?} drafts, {drafts}");
        engine.status()
    };
    assert_eq!(steps(DraftQuality::Off, 7).steps, 161);
    assert_eq!(steps(DraftQuality::Right, 1).steps, 1 + 80);
    assert_eq!(steps(DraftQuality::Right, 7).steps, 1 + 20);
    let wrong = steps(DraftQuality::Wrong, 7);
    assert_eq!((wrong.steps, wrong.drafts_accepted), (161, 0));
    let random = steps(DraftQuality::Random, 3);
    assert!(random.steps > 41 && random.steps < 161, "{random:?}");
    assert_eq!(random.output_tokens, 161);
}

#[test]
fn a_generation_ends_where_it_should() {
    let base = request(prompt(5, 70), 50);
    let alone = solo(&tiny_layout(), 4096, &base).tokens();
    let stop = alone[9];
    let first = alone.iter().position(|&t| t == stop).unwrap();
    for (draft_quality, drafts) in [(DraftQuality::Off, 0), (DraftQuality::Right, 7), (DraftQuality::Random, 4)] {
        let run = |request| {
            let sim = SimOptions { draft_quality, ..SimOptions::default() };
            let record = run(request, sim, EngineOptions { drafts, ..paranoid() });
            (record.tokens(), record.finished().unwrap())
        };
        let stopping = Request { stop_tokens: vec![stop], ..base.clone() };
        assert_eq!(run(stopping.clone()), (alone[..=first].to_vec(), FinishReason::Stop(stop)));
        let late = Request { min_tokens: first as u32 + 2, ..stopping };
        let again = (first + 1..50).find(|&i| alone[i] == stop);
        let end = again.map_or(50, |i| i + 1);
        assert_eq!(run(late).0, alone[..end], "a stop token before min_tokens is only a token");
        assert_eq!(run(base.clone()), (alone.clone(), FinishReason::Length));
        assert_eq!(run(Request { max_tokens: 1, ..base.clone() }), (alone[..1].to_vec(), FinishReason::Length));
        assert_eq!(run(Request { max_tokens: 0, ..base.clone() }), (vec![], FinishReason::Length));
    }
}

#[test]
fn attention_is_refused_at_once_by_a_backend_that_cannot_tell_of_it() {
    let mut engine = engine_with(wide_limits(), SimOptions::default(), paranoid());
    assert!(engine.attention_layers().is_empty());
    let (_, record) = submit(&mut engine, Request { attention: Some(0), ..request(prompt(1, 30), 4) });
    let refusal = Refusal::NoAttention { layer: 0, layers: 0 };
    assert!(refusal.to_string().contains("run the model on the CPU"), "{refusal}");
    assert_eq!(record.assert_complete(), FinishReason::Refused(refusal));
    assert!(!engine.step(), "nothing is left of it");
}

#[test]
fn the_context_ends_a_generation() {
    for drafts in [0, 7] {
        let sim = SimOptions { draft_quality: DraftQuality::Right, ..SimOptions::default() };
        let limits = Limits { context: 100, ..wide_limits() };
        let mut engine = engine_with(limits, sim, EngineOptions { drafts, ..paranoid() });
        let (_, record) = submit(&mut engine, request(prompt(1, 90), 1000));
        let (_, over) = submit(&mut engine, request(prompt(1, 100), 1));
        while engine.step() {}
        assert_eq!((record.tokens().len(), record.assert_complete()), (10, FinishReason::Length));
        let too_long = Refusal::TooLong { prompt: 100, max_tokens: 1, context: 100 };
        assert_eq!(over.assert_complete(), FinishReason::Refused(too_long));
    }
}

/// Grows each pool until the request is taken in: the least that admission asks for.
fn least_pools(wanted: &Request, options: &EngineOptions) -> [u32; 3] {
    let mut units = [0; 3];
    loop {
        let mut engine = engine_with(Limits { units, ..wide_limits() }, SimOptions::default(), options.clone());
        let (_, record) = submit(&mut engine, wanted.clone());
        match record.finished() {
            Some(FinishReason::Refused(Refusal::NeverFits { pool, need, have, .. })) => {
                let bucket = ["large", "middle", "small"].iter().position(|&p| p == pool).unwrap();
                assert_eq!(u64::from(units[bucket]), have);
                units[bucket] = need as u32;
            }
            None => return units,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_pool_of_exactly_the_needed_size_is_enough_and_is_used() {
    for (len, max_tokens) in [(1, 1), (1, 600), (513, 1), (511, 300), (130, 130)] {
        for (chunk, drafts) in [(None, 0), (Some(1), 0), (Some(5), 3), (Some(129), 7), (Some(256), 7)] {
            let options = EngineOptions { max_chunk_tokens: chunk, drafts, ..paranoid() };
            let wanted = request(prompt(2, len), max_tokens);
            let units = least_pools(&wanted, &options);
            let sim = SimOptions { draft_quality: DraftQuality::Random, ..SimOptions::default() };
            let mut engine = engine_with(Limits { units, ..wide_limits() }, sim, options);
            let (_, record) = submit(&mut engine, wanted.clone());
            while engine.step() {}
            assert_eq!(record.tokens(), solo(&tiny_layout(), 4096, &wanted).tokens(), "{len} {chunk:?} {drafts}");
        }
    }
}

#[test]
fn what_fits_later_waits_and_nobody_overtakes_it() {
    let (large, small) = (request(prompt(1, 500), 100), request(prompt(2, 30), 5));
    let mut units = least_pools(&large, &paranoid());
    units[2] += 1;
    let mut engine = engine_with(Limits { units, ..wide_limits() }, SimOptions::default(), paranoid());
    let records = [&large, &large, &small].map(|r| submit(&mut engine, r.clone()).1);
    engine.step();
    assert_eq!((engine.status().running, engine.status().waiting), (1, 2), "the second blocks the third");
    while engine.step() {
        if !records[2].tokens().is_empty() {
            assert!(records[0].finished().is_some());
        }
    }
    for (record, request) in records.iter().zip([&large, &large, &small]) {
        assert_eq!(record.tokens(), solo(&tiny_layout(), 4096, request).tokens());
    }
}

#[test]
fn priority_goes_before_arrival() {
    let mut engine = engine_with(Limits { seats: 1, ..wide_limits() }, SimOptions::default(), paranoid());
    let (_, normal) = submit(&mut engine, request(prompt(1, 30), 5));
    let (_, urgent) = submit(&mut engine, Request { priority: -5, ..request(prompt(2, 30), 5) });
    engine.step();
    assert!(normal.events().is_empty());
    assert_eq!(urgent.tokens().len(), 1);
}

#[test]
fn a_very_long_prompt_and_a_stream_of_short_ones_both_progress() {
    let limits = Limits { step_tokens: 64, ..wide_limits() };
    let mut engine = engine_with(limits, SimOptions::default(), paranoid());
    let (_, long) = submit(&mut engine, request(prompt(1, 3200), 1));
    let mut shorts = Vec::new();
    for step in 0..200 {
        let (_, record) = submit(&mut engine, request(prompt(step, 30), 1));
        shorts.push((step, record));
        engine.step();
        // Half a step for short prompts: one of 30 tokens a step, none ever waits for the long one.
        for (since, record) in &shorts {
            assert!(step - since < 3 || record.finished().is_some(), "{since} still waits at {step}");
        }
    }
    assert!(long.finished().is_some(), "3,200 tokens at half of 64 a step take 100 steps");
}

#[test]
fn cancelling_frees_everything_at_once() {
    let mut engine = engine_with(Limits { seats: 1, ..wide_limits() }, SimOptions::default(), paranoid());
    let (running, first) = submit(&mut engine, request(prompt(1, 300), 50));
    let (waiting, second) = submit(&mut engine, request(prompt(2, 300), 50));
    engine.step();
    engine.cancel(waiting);
    engine.cancel(running);
    engine.cancel(running);
    assert_eq!(first.assert_complete(), FinishReason::Cancelled);
    assert_eq!(second.assert_complete(), FinishReason::Cancelled);
    assert_home(&engine.status());
    assert!(!engine.step());
}

#[test]
fn a_bad_step_fails_its_requests_and_no_others() {
    let limits = Limits { seats: 2, ..wide_limits() };
    let sim = SimOptions { fail_at_step: Some(3), ..SimOptions::default() };
    let mut engine = engine_with(limits, sim, paranoid());
    let records: Vec<Record> = (0..4).map(|i| submit(&mut engine, request(prompt(i, 40), 9)).1).collect();
    while engine.step() {}
    for (i, record) in records.iter().enumerate() {
        match record.assert_complete() {
            FinishReason::Failed(why) => assert!(i < 2 && why == "step 3: injected failure", "{why}"),
            reason => assert!(i >= 2 && reason == FinishReason::Length, "{reason:?}"),
        }
    }
}

#[test]
fn a_fatal_failure_fails_everything_for_good() {
    let sim = SimOptions { fail_at_step: Some(2), failure: Failure::Fatal, ..SimOptions::default() };
    let mut engine = engine_with(Limits { seats: 2, ..wide_limits() }, sim, paranoid());
    let records: Vec<Record> = (0..4).map(|i| submit(&mut engine, request(prompt(i, 40), 9)).1).collect();
    while engine.step() {}
    for record in &records {
        assert_eq!(record.assert_complete(), FinishReason::Failed("injected failure".into()));
    }
    assert!(!engine.status().alive);
    assert_eq!(engine.status().units_used, [0; 3]);
    let refused = engine.submit(request(vec![1], 1), Box::new(|_| panic!("no event")));
    assert_eq!(refused, Err(SubmitError::Stopped("injected failure".into())));
}

#[test]
fn the_waiting_queue_is_bounded() {
    let mut engine = engine_with(wide_limits(), SimOptions::default(), EngineOptions { max_waiting: 2, ..paranoid() });
    submit(&mut engine, request(vec![1], 1));
    submit(&mut engine, request(vec![1], 1));
    let full = engine.submit(request(vec![1], 1), Box::new(|_| panic!("no event")));
    assert_eq!(full, Err(SubmitError::QueueFull { waiting: 2, retry_after_s: 1 }));
}

#[test]
fn sampling_depends_on_the_seed_of_the_request_only() {
    let with = |temperature, seed| {
        let sampling = Sampling { temperature, seed, top_logprobs: Some(3), ..Sampling::default() };
        run(Request { sampling, ..request(prompt(1, 20), 30) }, SimOptions::default(), paranoid())
    };
    assert_eq!(with(1.0, 1).tokens(), with(1.0, 1).tokens());
    assert_ne!(with(1.0, 1).tokens(), with(1.0, 2).tokens());
    assert_eq!(with(0.0, 1).tokens(), with(0.0, 2).tokens());
    for event in with(1.0, 1).events() {
        if let Event::Tokens { tokens, logprobs } = event {
            assert_eq!(tokens.len(), logprobs.len());
        }
    }
}

#[test]
fn a_long_prefill_of_flash_holds_two_tails_besides_its_long_lived_blocks() {
    let layout = flash_layout();
    let limits = Limits { step_tokens: 1024, context: 8192, ..wide_limits() };
    let options = EngineOptions { prefix_cache: false, ..paranoid() };
    let mut engine = Engine::new(SimBackend::new(layout.clone(), limits, SimOptions::default()), options);
    submit(&mut engine, request(prompt(1, 8000), 1));
    let mut most = 0;
    while engine.step() {
        let used = engine.status().units_used;
        let blocks = (engine.status().prompt_tokens as u32).div_ceil(256);
        let sliding = [0, 1, 2].map(|i| used[i].saturating_sub(layout.long_lived_units()[i] * blocks));
        most = most.max(layout.bytes(sliding));
    }
    assert!(most < 8_000_000, "{most} bytes between steps; a peer keeps every row of every chunk");
}
