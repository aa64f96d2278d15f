//! Windows rebuilt by replay under the real engine: tokens, logits and drafts of a cold run, bit for bit.

use std::sync::mpsc;

use longwave_cpu::backend::CpuBackend;
use longwave_engine::report::PrefixReport;
use longwave_engine::request::{Event, FinishReason, Request};
use longwave_engine::step::*;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::CacheLayout;

use crate::invariance::prompt;
use crate::served::{Answer, drafting, request};

const LARGE: u64 = 64 << 20;

/// Window and state blocks that a replay newly maps are filled with NaN; the origin of every replay can be moved.
struct Rough {
    inner: CpuBackend,
    by: i64,
}

impl Backend for Rough {
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
        let layout = self.inner.layout().clone();
        for seq in step.seqs.iter().filter(|s| s.replay.is_some()) {
            for w in step.writes_of(seq).iter().filter(|w| w.block != BlockId::NONE) {
                let spec = &layout.groups[w.group as usize];
                if spec.is_sliding() && (w.index + 1) * spec.block_tokens > seq.start {
                    let bytes = vec![0xff; layout.bucket(spec.bucket).unit_bytes() as usize];
                    self.inner.write_unit(spec.bucket as u8, w.block, &bytes)?;
                }
            }
        }
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

fn engine(step_tokens: u32, chunk: Option<u32>, drafts: u32, by: i64) -> Engine<Rough> {
    let options = EngineOptions { max_chunk_tokens: chunk, drafts, paranoid: true, ..EngineOptions::default() };
    Engine::new(Rough { inner: drafting(step_tokens, 6, LARGE, drafts), by }, options)
}

fn sampled(tokens: Vec<Token>, outputs: u32, seed: u64) -> Request {
    Request { logits: ReturnLogits::Sampled, stop_tokens: Vec::new(), ..request(tokens, outputs, seed) }
}

/// Serves requests together; each with its report and how it ended.
fn serve(engine: &mut Engine<Rough>, requests: &[Request]) -> Vec<(Answer, PrefixReport, Option<FinishReason>)> {
    let (sender, events) = mpsc::channel();
    for (i, request) in requests.iter().enumerate() {
        let sender = sender.clone();
        engine.submit(request.clone(), Box::new(move |e| sender.send((i, e)).unwrap())).unwrap();
    }
    while engine.step() {}
    let mut out = vec![(Answer::default(), PrefixReport::default(), None); requests.len()];
    for (i, event) in events.try_iter() {
        match event {
            Event::Tokens { tokens, .. } => out[i].0.tokens.extend(tokens),
            Event::Logits { logits, .. } => out[i].0.logits.extend(logits.iter().map(|v| v.to_bits())),
            Event::Scheduled { prefix, .. } => out[i].1 = prefix,
            Event::Finished { reason, .. } => out[i].2 = Some(reason),
            Event::Attention(_) => {}
        }
    }
    assert_eq!(engine.status().units_used, engine.status().units_cached, "all blocks are home");
    out
}

/// Serves requests cold and again after all checkpoints went: the same bits, and windows were rebuilt.
fn assert_rebuilt(engine: &mut Engine<Rough>, requests: &[Request], what: &str) -> Vec<PrefixReport> {
    let cold = serve(engine, requests);
    engine.drop_checkpoints();
    let again = serve(engine, requests);
    for (i, (a, b)) in cold.iter().zip(&again).enumerate() {
        assert!(!a.0.tokens.is_empty() && !a.0.logits.is_empty());
        assert!(a.0 == b.0, "{what}, request {i}: {}, {:?}", b.1, b.2);
        assert!(b.1.replayed_tokens > 0, "{what}, request {i}: {}", b.1);
    }
    again.into_iter().map(|a| a.1).collect()
}

#[test]
fn m1_a_replay_at_any_boundary_gives_the_bits_of_a_cold_run() {
    // Boundaries before and behind the depth of the triangle, 5 * 127; chunks of 1 are dear and come once.
    let cases: [(u32, usize, usize, u32); 9] = [
        (1000, 256, 1, 0),
        (64, 256, 2, 0),
        (3, 512, 128, 0),
        (129, 512, 1, 3),
        (1000, 768, 2, 0),
        (1, 768, 1, 1),
        (64, 1024, 255, 3),
        (129, 1024, 1, 0),
        (1000, 1280, 2, 7),
    ];
    for (chunk, boundary, more, drafts) in cases {
        let mut engine = engine(4096, Some(chunk), drafts, 0);
        let wanted = sampled(prompt(boundary + more, boundary as u64), 9, u64::from(chunk));
        let what = format!("{boundary} + {more} tokens, chunks of {chunk}, {drafts} drafts");
        let report = assert_rebuilt(&mut engine, &[wanted], &what)[0];
        let depth = 5 * 127 + if drafts > 0 { 128 } else { 0 };
        assert_eq!(report.cached_tokens as usize, boundary.saturating_sub(depth), "{what}");
        assert_eq!(engine.status().prefix.replays, 1);
    }
}

#[test]
fn mates_in_a_batch_and_their_replays_do_not_concern_each_other() {
    for (budget, drafts) in [(96, 0), (4096, 3)] {
        let mut engine = engine(budget, None, drafts, 0);
        let requests: Vec<Request> =
            [600, 850, 1100].iter().zip(0..).map(|(&n, i)| sampled(prompt(n, 40 + i), 12, i)).collect();
        assert_rebuilt(&mut engine, &requests, &format!("budget {budget}, {drafts} drafts"));
        // One rebuilds while others are new, decode, or start at a checkpoint.
        engine.drop_checkpoints();
        serve(&mut engine, &requests[..1]);
        let new = [sampled(prompt(300, 77), 20, 5), sampled(prompt(5, 78), 20, 6)];
        let mixed: Vec<Request> = requests.iter().chain(&new).cloned().collect();
        let alone: Vec<Answer> = mixed
            .iter()
            .map(|r| serve(&mut self::engine(4096, None, 0, 0), std::slice::from_ref(r)).remove(0).0)
            .collect();
        let together = serve(&mut engine, &mixed);
        assert!(together.iter().zip(&alone).all(|(a, b)| a.0 == *b), "budget {budget}, {drafts} drafts");
        let replayed: Vec<bool> = together.iter().map(|a| a.1.replayed_tokens > 0).collect();
        assert_eq!(replayed, [false, true, true, false, false]);
    }
}

/// A checkpoint between the origin and the boundary: its rows stand for those that the triangle leaves out.
#[test]
fn a_checkpoint_inside_the_triangle_gives_the_same_bits() {
    for (at, chunk, drafts) in [(512, 100, 0), (512, 1000, 3), (768, 64, 0)] {
        let mut engine = engine(4096, Some(chunk), drafts, 0);
        let text = prompt(1030, 11);
        let wanted = sampled(text.clone(), 8, 1);
        let cold = serve(&mut engine, std::slice::from_ref(&wanted)).remove(0);
        engine.drop_checkpoints();
        serve(&mut engine, &[sampled(text[..at + 9].to_vec(), 1, 0)]);
        let (answer, report, _) = serve(&mut engine, &[wanted]).remove(0);
        assert_eq!((report.cached_tokens as usize, report.replayed_tokens as usize), (at, 1024 - at));
        assert!(answer == cold.0, "checkpoint at {at}, chunks of {chunk}, {drafts} drafts");
    }
}

/// Also the window of the MTP module is that of a cold run: the same drafts at the same positions.
#[test]
fn drafts_behind_a_replay_are_those_of_a_cold_run() {
    for (len, chunk) in [(769, 1000), (1030, 100), (1500, 64)] {
        let wanted = sampled(prompt(len, 3), 30, 0);
        let mut engine = engine(4096, Some(chunk), 4, 0);
        let runs = [(); 2].map(|()| {
            engine.drop_checkpoints();
            let (before, answer) = (engine.status(), serve(&mut engine, std::slice::from_ref(&wanted)));
            let after = engine.status();
            let drafts =
                (after.drafts_proposed - before.drafts_proposed, after.drafts_accepted - before.drafts_accepted);
            (answer[0].0.clone(), drafts)
        });
        assert_eq!(engine.status().prefix.replays, 1);
        assert!(runs[0] == runs[1], "{len} tokens, chunks of {chunk}: {:?} {:?}", runs[0].1, runs[1].1);
    }
}

/// A row too few is read from a block that was never written, or missed: it must show, or the tests above prove nothing.
#[test]
fn an_origin_that_is_off_by_one_is_noticed() {
    for by in [1, 127, -1] {
        let mut engine = engine(4096, None, 0, by);
        // The logits of the first position behind the boundary: of the last layer, nothing else reads its earliest row.
        let wanted = sampled(prompt(1025, 6), 5, 0);
        let cold = serve(&mut engine, std::slice::from_ref(&wanted)).remove(0);
        engine.drop_checkpoints();
        let (answer, report, reason) = serve(&mut engine, std::slice::from_ref(&wanted)).remove(0);
        assert!(report.replayed_tokens > 0);
        assert!(answer != cold.0, "origin {by}: {reason:?}");
    }
}

#[test]
fn a_replay_that_reads_an_unmapped_block_or_gives_tokens_is_refused() {
    let mut b = drafting(64, 1, LARGE, 0);
    let groups = b.layout().groups.clone();
    let mut step = Step { number: 1, tokens: vec![20; 4], ..Step::default() };
    let long = groups.iter().enumerate().filter(|(_, g)| !g.is_sliding());
    step.writes = long
        .flat_map(|(g, _)| {
            (0..4).map(move |index| TableWrite { group: g as u8, index, block: BlockId(4 * g as u32 + index) })
        })
        .collect();
    step.seqs.push(SeqStep {
        fresh: true,
        writes: 0..step.writes.len() as u32,
        replay: Some(Replay { origin: 389 }),
        ..SeqStep::new(Seat(0), 389, 0..4)
    });
    let refused = |b: &mut CpuBackend, step: &Step, why: &str| {
        let error = b.submit(step).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    // Rows before the origin need not be there; earlier rows of layer 0 are needed when the origin is earlier.
    let mut early = step.clone();
    early.seqs[0].replay = Some(Replay { origin: 388 });
    refused(&mut b, &early, "of Window is not mapped");
    let mut sampled = step.clone();
    sampled.seqs[0].sample = Some(Sampling::default());
    refused(&mut b, &sampled, "a replay gives no tokens");
    let mut told = step.clone();
    told.seqs[0].attention = Some(0);
    refused(&mut b, &told, "tells of no attention");
    let mut short = step.clone();
    short.seqs[0].start = 1022;
    short.seqs[0].replay = Some(Replay { origin: 1022 });
    refused(&mut b, &short, "is not mapped");
    assert!(b.submit(&step).is_ok());
}
