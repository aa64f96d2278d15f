//! Urgent requests take seats and units from less urgent ones; nothing is lost or said twice.

use longwave_engine::request::{FinishReason, Request, RequestId};
use longwave_engine::sim::{SimBackend, SimOptions};
use longwave_engine::step::{Limits, ReturnLogits, Sampling};
use longwave_engine::{Engine, EngineOptions, Status};

use crate::world::{Record, assert_home, paranoid, prompt, request, solo, tiny_layout, wide_limits};

fn engine(limits: Limits, options: EngineOptions) -> Engine<SimBackend> {
    Engine::new(SimBackend::new(tiny_layout(), limits, SimOptions::default()), options)
}

fn one_seat() -> Limits {
    Limits { seats: 1, step_tokens: 64, ..wide_limits() }
}

fn submit(engine: &mut Engine<SimBackend>, request: &Request) -> (RequestId, Record) {
    let record = Record::default();
    (engine.submit(request.clone(), record.sink()).unwrap(), record)
}

fn steps(engine: &mut Engine<SimBackend>, n: u32) {
    (0..n).for_each(|_| assert!(engine.step()));
}

/// Runs a patient request for some steps, then an urgent one on the same seat. Both must give what they give alone.
fn interrupted(patient: Request, after: u32, options: EngineOptions) -> (Status, u32) {
    let urgent = Request { priority: -1, ..request(prompt(2, 70), 9) };
    let mut engine = engine(one_seat(), options);
    let (_, first) = submit(&mut engine, &patient);
    steps(&mut engine, after);
    let (_, second) = submit(&mut engine, &urgent);
    while engine.step() {
        assert!(first.finished().is_none() || second.finished().is_some(), "the urgent one did not go first");
    }
    for (record, request) in [(&first, &patient), (&second, &urgent)] {
        assert_eq!(record.assert_complete(), FinishReason::Length);
        let alone = solo(&tiny_layout(), 4096, request);
        assert_eq!(record.tokens(), alone.tokens());
        assert_eq!(record.logits(), alone.logits());
    }
    assert_home(&engine.status());
    let redone = engine.status().prompt_tokens as u32 - (patient.prompt.len() + urgent.prompt.len()) as u32;
    (engine.status(), redone)
}

#[test]
fn a_preempted_request_goes_on_where_it_was() {
    for (length, after) in [(300, 3), (300, 5), (300, 40), (256, 30), (513, 100), (60, 20)] {
        let patient = Request {
            logits: ReturnLogits::Sampled,
            sampling: Sampling { temperature: 1.0, seed: 5, frequency_penalty: 0.3, ..Sampling::default() },
            min_tokens: 90,
            ..request(prompt(1, length), 300)
        };
        for prefix_cache in [true, false] {
            let (status, redone) = interrupted(patient.clone(), after, EngineOptions { prefix_cache, ..paranoid() });
            assert_eq!((status.preempted, status.spilled, status.resumed), (1, 1, 1), "{length} {after}");
            assert_eq!(redone, 0, "its state was kept: {length} {after} {prefix_cache}");
        }
    }
}

#[test]
fn without_host_memory_it_is_computed_again_from_its_last_checkpoint() {
    let options = EngineOptions { spill_bytes: 0, ..paranoid() };
    let (status, redone) = interrupted(request(prompt(1, 300), 300), 40, options.clone());
    assert_eq!((status.preempted, status.spilled, status.resumed), (1, 0, 0));
    // 44 prompt tokens behind the checkpoint at 256 and 36 of the answer, the pending one included.
    assert_eq!(redone, 44 + 36);
    let off = EngineOptions { prefix_cache: false, ..options };
    assert_eq!(interrupted(request(prompt(1, 300), 300), 40, off).1, 300 + 36);
}

#[test]
fn little_is_computed_again_sooner_than_copied() {
    // 8 positions behind the checkpoint at 256.
    let (status, redone) = interrupted(request(prompt(1, 256), 300), 4 + 8, paranoid());
    assert_eq!((status.preempted, status.spilled), (1, 0));
    assert!(redone < 16, "{redone}");
}

#[test]
fn state_whose_blocks_were_evicted_is_dropped() {
    let patient = request(prompt(1, 600), 200);
    let urgent = Request { priority: -1, ..request(prompt(2, 1500), 30) };
    let layout = tiny_layout();
    // Room for the urgent one alone.
    let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * 6 + 2 * layout.sliding_units(7)[i]);
    let mut engine = engine(Limits { seats: 2, step_tokens: 64, units, ..wide_limits() }, paranoid());
    let (_, first) = submit(&mut engine, &patient);
    steps(&mut engine, 30);
    let (_, second) = submit(&mut engine, &urgent);
    while engine.step() {}
    for (record, request) in [(&first, &patient), (&second, &urgent)] {
        record.assert_complete();
        assert_eq!(record.tokens(), solo(&layout, 4096, request).tokens());
    }
    let status = engine.status();
    assert_eq!((status.preempted, status.spilled, status.resumed, status.spilled_bytes), (1, 1, 0, 0));
    assert_home(&status);
}

#[test]
fn equals_and_those_who_want_every_logit_keep_their_seats() {
    let urgent = Request { priority: -1, ..request(prompt(2, 70), 9) };
    for (patient, arrives) in [
        (request(prompt(1, 300), 50), Request { priority: 0, ..urgent.clone() }),
        (Request { logits: ReturnLogits::All, ..request(prompt(1, 300), 50) }, urgent.clone()),
        (Request { priority: -1, ..request(prompt(1, 300), 50) }, urgent),
    ] {
        let mut engine = engine(one_seat(), paranoid());
        submit(&mut engine, &patient);
        steps(&mut engine, 10);
        submit(&mut engine, &arrives);
        while engine.step() {}
        assert_eq!(engine.status().preempted, 0);
    }
}

#[test]
fn the_victim_is_the_least_urgent_and_then_the_one_that_loses_least() {
    let mut engine = engine(Limits { seats: 3, ..one_seat() }, EngineOptions { spill_bytes: 0, ..paranoid() });
    let old = submit(&mut engine, &Request { priority: 1, ..request(prompt(1, 700), 90) }).1;
    let young = submit(&mut engine, &Request { priority: 1, ..request(prompt(2, 40), 90) }).1;
    let normal = submit(&mut engine, &request(prompt(3, 40), 90)).1;
    steps(&mut engine, 30);
    submit(&mut engine, &Request { priority: -1, ..request(prompt(4, 10), 5) });
    steps(&mut engine, 4);
    assert_eq!(engine.status().preempted, 1);
    while engine.step() {}
    let order = [&normal, &old, &young].map(Record::assert_complete);
    assert_eq!(order, [FinishReason::Length, FinishReason::Length, FinishReason::Length]);
    // Only the young one was computed twice.
    let redone = engine.status().prompt_tokens - (700 + 40 + 40 + 10);
    assert!(redone > 40 && redone < 40 + 40, "{redone}");
}

#[test]
fn a_displaced_request_can_be_cancelled_and_takes_no_place_in_the_queue() {
    let mut engine = engine(one_seat(), EngineOptions { max_waiting: 1, ..paranoid() });
    let (id, patient) = submit(&mut engine, &request(prompt(1, 300), 200));
    steps(&mut engine, 20);
    submit(&mut engine, &Request { priority: -1, ..request(prompt(2, 70), 90) });
    steps(&mut engine, 1);
    let status = engine.status();
    assert!(status.preempted == 1 && status.waiting == 1 && status.spilled_bytes > 0);
    submit(&mut engine, &request(prompt(3, 70), 5));
    assert!(engine.submit(request(prompt(4, 70), 5), Record::default().sink()).is_err(), "the queue holds one");
    engine.cancel(id);
    assert_eq!(patient.assert_complete(), FinishReason::Cancelled);
    assert_eq!(engine.status().spilled_bytes, 0);
    while engine.step() {}
    assert_home(&engine.status());
}

#[test]
fn a_stop_ends_displaced_requests_too() {
    let mut engine = engine(one_seat(), paranoid());
    let (_, patient) = submit(&mut engine, &request(prompt(1, 300), 200));
    steps(&mut engine, 20);
    submit(&mut engine, &Request { priority: -1, ..request(prompt(2, 70), 90) });
    steps(&mut engine, 1);
    engine.stop("it was told to");
    assert_eq!(patient.assert_complete(), FinishReason::Failed("it was told to".into()));
    assert_home(&engine.status());
    assert_eq!(engine.status().spilled_bytes, 0);
}

#[test]
fn urgent_traffic_delays_others_and_starves_nobody() {
    let mut engine = engine(one_seat(), EngineOptions { prefix_cache: false, ..EngineOptions::default() });
    let (_, patient) = submit(&mut engine, &request(prompt(1, 60), 40));
    for seed in 0..3000 {
        if engine.status().waiting < 3 {
            submit(&mut engine, &Request { priority: -1, ..request(prompt(seed, 5), 5) });
        }
        engine.step();
    }
    assert!(patient.finished().is_some(), "one level is worth 1,024 steps");
    assert!(engine.status().preempted <= 2, "{:?}", engine.status());
}

#[test]
fn prompts_that_begin_alike_are_computed_once_though_they_come_together() {
    let mut engine = engine(Limits { seats: 8, step_tokens: 64, ..wide_limits() }, paranoid());
    let common = prompt(1, 1000);
    let tails = [vec![], prompt(2, 300), prompt(3, 10), vec![]];
    let requests = tails.map(|tail| request([common.clone(), tail].concat(), 20));
    let records = requests.each_ref().map(|r| submit(&mut engine, r).1);
    let (_, other) = submit(&mut engine, &request(prompt(9, 50), 5));
    steps(&mut engine, 6);
    assert!(other.finished().is_some(), "nobody waits for them");
    while engine.step() {}
    for (record, request) in records.iter().zip(&requests) {
        record.assert_complete();
        assert_eq!(record.tokens(), solo(&tiny_layout(), 4096, request).tokens());
    }
    // 768 of the common tokens once; behind that boundary each its own.
    let own = [232, 532, 242, 232];
    assert_eq!(engine.status().prompt_tokens, 768 + own.iter().sum::<u64>() + 50);
    assert_eq!(records.map(|r| r.report().unwrap().cached_tokens), [0, 768, 768, 768]);
}

#[test]
fn an_urgent_request_waits_for_nobody_less_urgent() {
    let mut engine = engine(Limits { seats: 4, step_tokens: 8, ..wide_limits() }, paranoid());
    let common = prompt(1, 1500);
    let (_, slow) = submit(&mut engine, &Request { priority: 5, ..request(common.clone(), 5) });
    steps(&mut engine, 3);
    let urgent = Request { priority: -1, ..request([common, prompt(2, 10)].concat(), 5) };
    let (_, first) = submit(&mut engine, &urgent);
    steps(&mut engine, 1);
    assert!(first.report().is_some(), "it has a seat");
    while engine.step() {}
    slow.assert_complete();
    assert_eq!(first.tokens(), solo(&tiny_layout(), 4096, &urgent).tokens());
}

#[test]
fn every_request_that_waits_for_a_prompt_finds_a_checkpoint_where_it_parts() {
    let mut engine =
        engine(Limits { seats: 8, step_tokens: 64, ..wide_limits() }, EngineOptions { replay: false, ..paranoid() });
    let common = prompt(1, 2000);
    submit(&mut engine, &request(common.clone(), 5));
    steps(&mut engine, 1);
    // The first one that waits shares more than the second.
    let tails = [1600, 700].map(|at| request([&common[..at], &prompt(at as u64, 50)].concat(), 5));
    let records = tails.each_ref().map(|r| submit(&mut engine, r).1);
    while engine.step() {}
    assert_eq!(records.map(|r| r.report().unwrap().cached_tokens), [1536, 512]);
}
