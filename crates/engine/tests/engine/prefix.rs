//! Prefix reuse: what is found, what it changes (nothing but the work), what is reported, what is evicted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use longwave_engine::report::{PrefixEnd, PrefixReport};
use longwave_engine::request::{Event, EventSink, FinishReason, Request};
use longwave_engine::sim::{DraftQuality, SimBackend, SimOptions};
use longwave_engine::step::{Limits, ReturnLogits, Token};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::geometry::Bucket;

use crate::world::{Record, Rng, assert_home, flash_layout, paranoid, prompt, request, solo, tiny_layout, wide_limits};

pub const CONTEXT: u32 = 1 << 17;

/// Room for all of a test.
pub fn ample() -> Limits {
    Limits { units: [20_000; 3], context: CONTEXT, ..wide_limits() }
}

pub fn engine_with(limits: Limits, options: EngineOptions) -> Engine<SimBackend> {
    Engine::new(SimBackend::new(tiny_layout(), limits, SimOptions::default()), options)
}

pub fn submit(engine: &mut Engine<SimBackend>, request: &Request) -> Record {
    let record = Record::default();
    engine.submit(request.clone(), record.sink()).unwrap();
    record
}

/// Runs one request on an idle engine. Its tokens must be those of its solo run.
fn ask(engine: &mut Engine<SimBackend>, request: &Request) -> (Vec<Token>, PrefixReport) {
    let record = submit(engine, request);
    while engine.step() {}
    record.assert_complete();
    let alone = solo(&tiny_layout(), CONTEXT, request);
    assert!(record.tokens() == alone.tokens() && record.logits() == alone.logits(), "{:?}", record.report());
    (record.tokens(), record.report().unwrap())
}

/// Asks for the logits of what is sampled, which is what a prefix may change.
fn sampled(prompt: Vec<Token>, max_tokens: u32) -> Request {
    Request { logits: ReturnLogits::Sampled, ..request(prompt, max_tokens) }
}

/// The largest boundary at which a prompt of `len` tokens can start.
pub fn edge(len: usize) -> u32 {
    (len.max(1) as u32 - 1) / 256 * 256
}

#[test]
fn m1_the_same_prompt_twice_gives_the_same_answer() {
    let mut engine = engine_with(ample(), paranoid());
    for len in [1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000] {
        let wanted = sampled(prompt(u64::from(len), len), 20);
        let (first, cold) = ask(&mut engine, &wanted);
        let others: Vec<Record> = (0..50)
            .map(|i| submit(&mut engine, &request(prompt(1000 + i, 1 + 13 * i as u32), 1 + i as u32 % 9)))
            .collect();
        while engine.step() {}
        others.iter().for_each(|o| assert_eq!(o.assert_complete(), FinishReason::Length));
        let (second, warm) = ask(&mut engine, &wanted);
        assert_eq!(first, second);
        assert_eq!((cold.cached_tokens, warm.cached_tokens), (0, edge(len as usize)), "{len} tokens: {warm}");
        let end = if len <= 256 { PrefixEnd::TooShort } else { PrefixEnd::PromptEnd };
        assert_eq!((warm.ended_by, warm.first_difference), (end, None), "{len} tokens");
    }
    assert_home(&engine.status());
}

#[test]
fn m2_a_shared_prefix_is_reused_up_to_its_last_block_edge() {
    // With a checkpoint at every block the second prompt hits; else its junction gets one and the third prompt hits.
    for (interval, hits_from) in [(256, 1), (8192, 2)] {
        let mut engine = engine_with(ample(), EngineOptions { checkpoint_interval: interval, ..paranoid() });
        for len in (256..=4096).step_by(192) {
            let shared = len * 9 / 10;
            for turn in 0..3u64 {
                let tail = prompt(u64::from(len) * 10 + turn + 1, len - shared);
                let text = [&prompt(u64::from(len), shared)[..], &tail].concat();
                let record = submit(&mut engine, &request(text, 1));
                while engine.step() {}
                let report = record.report().unwrap();
                let least = if turn >= hits_from { shared / 256 * 256 } else { 0 };
                assert!(report.cached_tokens >= least, "{len} tokens, prompt {turn}: {report}");
                if turn > 0 {
                    assert_eq!(report.matched_tokens, shared / 256 * 256);
                }
            }
        }
    }
}

#[test]
fn the_first_different_token_is_named() {
    let base = prompt(1, 700);
    for at in [0, 1, 255, 256, 257, 300, 511, 512, 513, 600] {
        // Without replays, so that the checkpoint that is missing at the junction is the reason.
        let mut engine = engine_with(ample(), EngineOptions { replay: false, ..paranoid() });
        ask(&mut engine, &sampled(base.clone(), 3));
        let mut other = base.clone();
        other[at] = (other[at] + 1) % 61;
        let (_, second) = ask(&mut engine, &sampled(other.clone(), 3));
        let matched = at as u32 / 256 * 256;
        assert_eq!(second.matched_tokens, matched.min(512));
        match at {
            0..256 => assert_eq!((second.cached_tokens, second.ended_by), (0, PrefixEnd::NoSuchPrefix)),
            256..512 => assert_eq!((second.cached_tokens, second.ended_by), (0, PrefixEnd::CheckpointMissing)),
            _ => assert_eq!((second.cached_tokens, second.ended_by), (512, PrefixEnd::PromptEnd)),
        }
        // Behind block 2 nothing is cached that could differ.
        assert_eq!(second.first_difference, (at < 512).then_some(at as u32));
        // The junction got its checkpoint when the second prompt passed it.
        other[at] = (other[at] + 1) % 61;
        let (_, third) = ask(&mut engine, &sampled(other, 3));
        assert_eq!(third.cached_tokens, matched.min(512), "{at}: {third}");
        if (256..512).contains(&at) {
            assert_eq!((third.ended_by, third.first_difference), (PrefixEnd::Diverged, Some(at as u32)));
        }
    }
}

#[test]
fn a_prompt_that_goes_on_behind_a_cached_text_is_told_so() {
    let mut engine = engine_with(ample(), paranoid());
    let (_, report) = ask(&mut engine, &sampled(prompt(1, 600), 1));
    assert_eq!((report.ended_by, report.first_difference), (PrefixEnd::Empty, None));
    let longer = [prompt(1, 600), prompt(2, 600)].concat();
    let (_, report) = ask(&mut engine, &sampled(longer, 1));
    assert_eq!((report.cached_tokens, report.ended_by), (512, PrefixEnd::CachedTextEnds));
}

#[test]
fn tenants_share_nothing_and_learn_nothing() {
    let mut engine = engine_with(ample(), paranoid());
    let of = |salt| Request { salt, ..sampled(prompt(1, 600), 3) };
    for salt in [0, 1, u64::MAX] {
        let (_, report) = ask(&mut engine, &of(salt));
        assert_eq!((report.matched_tokens, report.ended_by), (0, PrefixEnd::Empty));
        assert_eq!(report.first_difference, None);
    }
    assert_eq!(engine.status().prefix.nodes, 3 * 2);
    assert_eq!(ask(&mut engine, &of(1)).1.cached_tokens, 512);
}

#[test]
fn logits_of_every_position_are_computed_not_reused() {
    let mut engine = engine_with(ample(), paranoid());
    let all = Request { logits: ReturnLogits::All, ..request(prompt(1, 600), 3) };
    for _ in 0..2 {
        assert_eq!(ask(&mut engine, &all).1.ended_by, PrefixEnd::EveryPositionWanted);
    }
    assert_eq!(engine.status().prefix.nodes, 2, "what it computes is published once");
    assert_eq!(ask(&mut engine, &sampled(prompt(1, 600), 3)).1.cached_tokens, 512);
}

#[test]
fn nothing_is_kept_when_it_is_off() {
    let mut engine = engine_with(ample(), EngineOptions { prefix_cache: false, ..paranoid() });
    for _ in 0..2 {
        assert_eq!(ask(&mut engine, &sampled(prompt(1, 600), 300)).1, PrefixReport::default());
    }
    assert_eq!(engine.status().units_used, [0; 3]);
    assert_eq!(engine.status().prefix, Default::default());
}

#[test]
fn an_answer_keeps_one_checkpoint_and_the_next_turn_starts_there() {
    for (draft_quality, drafts) in [(DraftQuality::Off, 0), (DraftQuality::Right, 7), (DraftQuality::Random, 5)] {
        let sim = SimOptions { draft_quality, ..SimOptions::default() };
        let options = EngineOptions { drafts, ..paranoid() };
        let mut engine = Engine::new(SimBackend::new(tiny_layout(), ample(), sim), options);
        let first = sampled(prompt(1, 300), 1500);
        let (answer, _) = ask(&mut engine, &first);
        let status = engine.status().prefix;
        // One at the end of the prompt; 512 to 1,536 in the answer, each in place of the one before.
        assert_eq!((status.nodes, status.checkpoints, status.replaced_checkpoints), (7, 2, 5));
        let next = [first.prompt, answer, prompt(2, 20)].concat();
        assert_eq!(ask(&mut engine, &sampled(next, 5)).1.cached_tokens, 1792);
    }
}

#[test]
fn equal_prompts_that_run_together_end_up_with_one_copy() {
    let mut engine = engine_with(ample(), paranoid());
    let wanted = sampled(prompt(1, 1100), 8);
    let records: Vec<Record> = (0..6).map(|_| submit(&mut engine, &wanted)).collect();
    while engine.step() {}
    let alone = solo(&tiny_layout(), CONTEXT, &wanted);
    for record in records {
        assert_eq!(record.tokens(), alone.tokens());
    }
    let status = engine.status();
    assert_eq!((status.prefix.nodes, status.prefix.checkpoints), (4, 1));
    assert_home(&status);
}

#[test]
fn shared_blocks_are_promised_once() {
    let wanted = sampled(prompt(1, 4000), 20);
    // Long-lived blocks of one such request and the rest of ten.
    let layout = tiny_layout();
    let long = layout.long_lived_units().map(|u| u * 16);
    let units = [0, 1, 2].map(|i| long[i] + 10 * (layout.long_lived_units()[i] + 2 * layout.sliding_units(0)[i]));
    let mut engine = engine_with(Limits { units, ..ample() }, paranoid());
    ask(&mut engine, &wanted);
    let records: Vec<Record> = (0..8).map(|_| submit(&mut engine, &wanted)).collect();
    engine.step();
    assert_eq!((engine.status().running, engine.status().waiting), (8, 0), "they fit because they share");
    while engine.step() {}
    let alone = solo(&layout, CONTEXT, &wanted);
    assert!(records.iter().all(|r| r.tokens() == alone.tokens() && r.report().unwrap().cached_tokens == 3840));
    // Requests that share nothing do not fit together.
    let records: Vec<Record> = (2..10).map(|i| submit(&mut engine, &sampled(prompt(i, 4000), 20))).collect();
    engine.step();
    assert!(engine.status().running < 8 && engine.status().running > 0);
    while engine.step() {}
    records.iter().for_each(|r| assert_eq!(r.assert_complete(), FinishReason::Length));
    assert_home(&engine.status());
}

#[test]
fn what_is_cached_never_keeps_a_request_waiting() {
    let layout = tiny_layout();
    let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * 5 + 3 * layout.sliding_units(0)[i]);
    let mut engine = engine_with(Limits { units, ..ample() }, paranoid());
    for seed in 0..30 {
        ask(&mut engine, &sampled(prompt(seed, 1000), 30));
    }
    let status = engine.status();
    assert!(status.prefix.evicted_nodes > 50 && status.prefix.evicted_checkpoints > 20, "{status:?}");
    let (_, report) = ask(&mut engine, &sampled(prompt(0, 1000), 30));
    assert!(matches!(report.ended_by, PrefixEnd::Evicted { .. }), "{report}");
    assert_home(&engine.status());
}

#[test]
fn a_long_session_outlives_a_flood_of_short_prompts() {
    let layout = tiny_layout();
    let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * 24 + 16 * layout.sliding_units(0)[i]);
    let mut engine = engine_with(Limits { units, ..ample() }, paranoid());
    let session = sampled(prompt(1, 4000), 10);
    ask(&mut engine, &session);
    for seed in 100..200 {
        let record = submit(&mut engine, &request(prompt(seed, 300), 5));
        while engine.step() {}
        record.assert_complete();
    }
    assert!(engine.status().prefix.evicted_checkpoints > 50);
    assert_eq!(ask(&mut engine, &session).1.cached_tokens, 3840);
}

#[test]
fn a_pool_that_needs_no_checkpoint_units_takes_no_checkpoint_alone() {
    // Only the small pool is short: it holds entries of nodes and nothing of checkpoints.
    let limits = Limits { units: [2000, 2000, 8], ..ample() };
    let mut engine = engine_with(limits, paranoid());
    for seed in 0..6 {
        ask(&mut engine, &sampled(prompt(seed, 1000), 1));
    }
    let status = engine.status().prefix;
    assert!(status.evicted_nodes > 0);
    assert!(status.checkpoints > 0 && status.evicted_checkpoints <= 6, "{status:?}");
    let (_, report) = ask(&mut engine, &sampled(prompt(0, 1000), 1));
    assert_eq!(report.ended_by, PrefixEnd::Evicted { pool: Bucket::Small });
}

/// A sink that counts the last events, per request and in all; it keeps no event.
fn counting(ends: &Arc<AtomicU32>) -> (Arc<AtomicU32>, EventSink) {
    let (own, all) = (Arc::new(AtomicU32::new(0)), Arc::clone(ends));
    let count = Arc::clone(&own);
    let sink = move |event| {
        if matches!(event, Event::Finished { .. }) {
            count.fetch_add(1, Ordering::Relaxed);
            all.fetch_add(1, Ordering::Relaxed);
        }
    };
    (own, Box::new(sink))
}

/// Ten thousand short requests, every third one ended early; the most entries that the cache held.
fn short_requests_with_aborts(engine: &mut Engine<SimBackend>, rng: &mut Rng) -> u64 {
    let ends = Arc::new(AtomicU32::new(0));
    let mut own = Vec::with_capacity(10_000);
    let mut most_entries = 0;
    for i in 0..10_000 {
        let len = if rng.one_in(10) { 257 + rng.below(40) } else { 1 + rng.below(30) };
        let text = prompt(u64::from(rng.below(40)), len);
        let (count, sink) = counting(&ends);
        let id = engine.submit(request(text, 1 + rng.below(6)), sink).unwrap();
        own.push(count);
        if rng.one_in(3) {
            for _ in 0..rng.below(3) {
                engine.step();
            }
            engine.cancel(id);
            assert_eq!(own[i].load(Ordering::Relaxed), 1, "request {i} was cancelled, or had ended before");
        }
        if i % 4 == 0 {
            engine.step();
        }
        if engine.status().waiting > 500 {
            while engine.step() {}
        }
        let prefix = engine.status().prefix;
        most_entries = most_entries.max(prefix.nodes + prefix.checkpoints);
    }
    while engine.step() {}
    assert_eq!(ends.load(Ordering::Relaxed), 10_000);
    let other = own.iter().position(|n| n.load(Ordering::Relaxed) != 1);
    assert_eq!(other, None, "a request without its one last event");
    most_entries
}

#[test]
fn m17_ten_thousand_short_requests_with_aborts_leave_nothing_behind() {
    let limits = Limits { units: [300; 3], ..ample() };
    let mut engine = engine_with(limits, EngineOptions::default());
    let rng = &mut Rng(17);
    let mut most_entries = 0;
    // Once to warm up. After that only the list of what was evicted lately grows, to 8,192 entries at most: three bytes a
    // request here, and one event kept per request would be more than twenty.
    let live = [0; 3].map(|_| {
        most_entries = most_entries.max(short_requests_with_aborts(&mut engine, rng));
        assert_home(&engine.status());
        engine.check_integrity().unwrap();
        crate::allocations::live_bytes()
    });
    println!("bytes live on this thread after 10,000, 20,000 and 30,000 requests: {live:?}");
    assert!(live[0] > 100_000, "nothing was counted: {live:?}");
    assert!(live[2] - live[0] < 65_536, "{live:?}");
    assert!(most_entries <= 80, "40 prompts have one full block each: {most_entries}");
    let wanted = sampled(prompt(77, 513), 9);
    let (first, _) = ask(&mut engine, &wanted);
    let (second, report) = ask(&mut engine, &wanted);
    assert_eq!((first, report.cached_tokens), (second, 512));
}

#[test]
fn flash_reuses_as_well() {
    let layout = flash_layout();
    let mut engine = Engine::new(SimBackend::new(layout.clone(), ample(), SimOptions::default()), paranoid());
    let mut text = prompt(3, 900);
    for turn in 0..4 {
        let wanted = sampled(text.clone(), 200);
        let record = submit(&mut engine, &wanted);
        while engine.step() {}
        assert_eq!(record.tokens(), solo(&layout, CONTEXT, &wanted).tokens());
        assert_eq!(record.report().unwrap().cached_tokens, if turn == 0 { 0 } else { edge(text.len() - 60) });
        text.extend(record.tokens());
        text.extend(prompt(100 + turn, 60));
    }
}
