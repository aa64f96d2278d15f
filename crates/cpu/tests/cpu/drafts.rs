//! Drafting under the real engine: nothing changes but the number of steps, and the drafts are those of a module that
//! read the whole text from the start.

use longwave_cpu::backend::{CpuBackend, CpuOptions, OpenError};
use longwave_cpu::forward::{Model, Seen};
use longwave_cpu::numerics::Profile;
use longwave_cpu::ops::sample;
use longwave_engine::EngineOptions;
use longwave_engine::request::Request;
use longwave_engine::step::*;

use crate::golden;
use crate::invariance::prompt;
use crate::rig::{CACHE, Rig, tiny};
use crate::served::{Answer, drafting, request, serve};
use crate::spy::{Log, Part, Spy, acceptance};

const LARGE: u64 = 64 << 20;

fn options(drafts: u32) -> EngineOptions {
    EngineOptions { drafts, ..EngineOptions::default() }
}

fn golden_request(name: &str, seed: u64, max_tokens: u32) -> Request {
    request(golden::read(&format!("{name}.cache")).ids, max_tokens, seed)
}

/// Requests of all kinds: greedy and sampled, with cuts, real and random prompts, around block boundaries.
fn mixed() -> Vec<Request> {
    let mut out: Vec<Request> =
        ["short", "tool", "text300"].iter().zip(0..).map(|(name, i)| golden_request(name, i, 40)).collect();
    out.extend([1, 3, 64, 126, 128, 253, 256].iter().zip(3..).map(|(&n, i)| request(prompt(n, 70 + i), 14, i)));
    out[1].sampling.temperature = 1.0;
    out[3].sampling.top_p = 0.9;
    out[5].sampling.top_k = 20;
    out[7].sampling.min_p = 0.02;
    out[8].sampling.bias = vec![(77, 4.0), (78, -100.0)];
    out
}

#[test]
fn tokens_and_logits_are_those_without_drafts() {
    let requests = mixed();
    let one = |r: &Request, drafts| -> Answer {
        serve(drafting(4096, 1, LARGE, drafts), options(drafts), std::slice::from_ref(r)).remove(0)
    };
    let plain: Vec<Answer> = requests.iter().map(|r| one(r, 0)).collect();
    assert!(plain.iter().all(|a| !a.tokens.is_empty()));
    // A short budget cuts prompts and drafts; a small pool makes some wait.
    for (depth, budget, seats, bytes) in [
        (1, 64, 4, 24 << 20),
        (2, 33, 10, LARGE),
        (3, 11, 6, LARGE),
        (3, 4096, 10, LARGE),
        (5, 15, 4, 24 << 20),
        (7, 48, 3, 20 << 20),
        (7, 4096, 10, LARGE),
    ] {
        let (spy, log) = Spy::new(drafting(budget, seats, bytes, depth));
        let together = serve(spy, options(depth), &requests);
        for (i, (a, b)) in plain.iter().zip(&together).enumerate() {
            assert!(a.tokens == b.tokens, "request {i}, {depth} drafts, budget {budget}: tokens");
            assert!(a.logits == b.logits, "request {i}, {depth} drafts, budget {budget}: logits");
        }
        let (counts, log) = (acceptance(&log), log.lock().unwrap());
        let mut last: Vec<usize> = vec![0; seats as usize];
        let (mut cut, mut together, mut step) = (0, 0, (0, 0));
        for part in log.iter() {
            let last = &mut last[part.seq.seat.0 as usize];
            cut += u32::from(!part.seq.fresh && (part.seq.drafts as usize) < *last);
            *last = part.result.drafts.len();
            step = if part.step == step.0 { (step.0, step.1 + 1) } else { (part.step, 1) };
            together = together.max(step.1);
        }
        println!("{depth} drafts, budget {budget}: {counts:?}, {cut} grants cut, up to {together} in a step");
        assert!(counts.len() as u32 == depth && counts[0].1 > 0 && counts[0].1 < counts[0].0);
    }
}

#[test]
fn chunks_change_no_draft() {
    let r = golden_request("text300", 1, 24);
    let run = |chunk| {
        let (spy, log) = Spy::new(drafting(4096, 1, LARGE, 3));
        let options = EngineOptions { max_chunk_tokens: chunk, ..options(3) };
        serve(spy, options, std::slice::from_ref(&r));
        drafts_of(&log)
    };
    let whole = run(None);
    assert!(whole.len() > 5);
    for chunk in [1, 3, 64, 127, 128, 129, 250] {
        assert_eq!(whole, run(Some(chunk)), "chunks of {chunk}");
    }
}

/// (position of the sampled token, drafts after it) of every step that drafted.
fn drafts_of(log: &Log) -> Vec<(u32, Vec<Token>)> {
    let log = log.lock().unwrap();
    log.iter().filter(|p| !p.result.drafts.is_empty()).map(|p| (p.position(), p.result.drafts.clone())).collect()
}

/// Drafts after `position` of a module that read the whole `text` before: its rows are in the rig's cache, streams of the
/// main model in `streams`. Overwrites rows from `position` on.
fn from_scratch(rig: &mut Rig, streams: &[f32], text: &[Token], at: u32, depth: usize, how: &Sampling) -> Vec<Token> {
    let width = 4 * rig.model.config.hidden_size;
    let mut x = streams[(at as usize - 1) * width..at as usize * width].to_vec();
    let (mut token, mut out) = (text[at as usize], Vec::new());
    for i in 0..depth as u32 {
        x = rig.mtp_from(1, 0, at + i, &x, &[token], None);
        let logits = rig.model.logits(&rig.model.mtp_top(&x, &[0]));
        token = sample::sample(&logits, how, at + i + 1, None, None);
        out.push(token);
    }
    out
}

#[test]
fn drafts_are_those_of_a_module_that_read_the_whole_text() {
    let (mut all, mut near) = (0, 0);
    for (name, seed, budget) in [("short", 0, 4096), ("tool", 0, 50), ("text300", 1, 130), ("needle2000", 3, 512)] {
        let r = golden_request(name, seed, 60);
        let (spy, log) = Spy::new(drafting(budget, 1, LARGE, 4));
        let answer = serve(spy, options(4), std::slice::from_ref(&r)).remove(0);
        let text: Vec<Token> = r.prompt.iter().chain(&answer.tokens).copied().collect();
        let mut rig = Rig::new(Profile::Serving, CACHE, 1, text.len() as u32 + 8);
        let streams = rig.batch(&[(0, 0, &text, 0)], None);
        let n = text.len() - 1;
        let width = 4 * rig.model.config.hidden_size;
        // As the golden vectors have it, with the row of a token at the position before it: only rounding differs.
        let golden = rig.mtp(0, 0, &streams[..n * width], &text[1..], None);
        let whole = rig.mtp_from(1, 0, 1, &streams[..n * width], &text[1..], None);
        // How often the module foresees what the model would choose after each token of the text.
        let choices = |logits: Vec<f32>| -> Vec<Token> {
            logits.chunks(rig.model.config.vocab_size).map(sample::argmax).collect()
        };
        let all_rows: Vec<usize> = (0..n).collect();
        let foreseen = choices(rig.model.logits(&rig.model.mtp_top(&whole, &all_rows)));
        let chosen = choices(rig.logits(&streams, &(1..=n).collect::<Vec<_>>()));
        let same = foreseen.iter().zip(&chosen).filter(|(a, b)| a == b).count();
        println!("{name}: the module foresees {same} of {n} choices along the text");
        // The last step may have gone on past the end of the answer.
        let steps: Vec<_> = drafts_of(&log).into_iter().filter(|s| (s.0 as usize) < text.len()).collect();
        assert!(!steps.is_empty());
        for (at, drafts) in steps.iter().rev() {
            let row = *at as usize - 1;
            let first = |streams: &[f32]| {
                let logits = rig.model.logits(&rig.model.mtp_top(streams, &[row]));
                sample::sample(&logits, &r.sampling, at + 1, None, None)
            };
            assert_eq!(drafts[0], first(&whole), "{name}: draft after {at}");
            near += u32::from(drafts[0] == first(&golden));
            all += 1;
            let want = from_scratch(&mut rig, &streams, &text, *at, drafts.len(), &r.sampling);
            assert_eq!(drafts, &want, "{name}: drafts after {at}");
        }
    }
    println!("{near} of {all} first drafts are those of rows one position earlier");
    assert!(near * 100 >= all * 97);
}

/// What drafting computes (keys alone in chunks, the last rows in no block, one full row) has the bits of one pass of the
/// module over the whole text.
#[test]
fn keys_alone_and_rows_ahead_give_the_bits_of_a_whole_pass() {
    let text = golden::read("text300.cache").ids;
    let n = text.len() as u32 - 1;
    let mut rig = Rig::new(Profile::Serving, CACHE, 2, 320);
    let width = 4 * rig.model.config.hidden_size;
    let streams = rig.batch(&[(0, 0, &text, 0)], None);
    let part = |from: u32, to: u32| &streams[(from as usize - 1) * width..(to as usize - 1) * width];
    let mut keys = Vec::new();
    let mut tap = |_: usize, seen: Seen| {
        if let Seen::Kv(kv) = seen {
            keys = kv.to_vec();
        }
    };
    let whole = rig.mtp_from(1, 0, 1, part(1, n + 1), &text[1..], Some(&mut tap));
    let mut at = 1;
    for (i, to) in [2, 3, 60, 127, 128, 129, 130, 200, 256, 257, 299].into_iter().enumerate() {
        let to = to.min(n);
        // Seat 1 knows the rows before `from`; up to seven after them are only handed over.
        let from = to.saturating_sub(i as u32 % 8).max(at);
        rig.mtp_keys(1, at, part(at, from), &text[at as usize..from as usize]);
        let ahead = &keys[(from as usize - 1) * 512..(to as usize - 1) * 512];
        let row = rig.mtp_ahead(1, to, part(to, to + 1), text[to as usize], ahead);
        let want = &whole[(to as usize - 1) * width..to as usize * width];
        assert!(row.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "position {to}, {} ahead", to - from);
        let top = |rig: &Rig, x: &[f32]| rig.model.logits(&rig.model.mtp_top(x, &[0]));
        assert_eq!(top(&rig, &row), top(&rig, want));
        at = from;
    }
}

#[test]
fn most_drafts_are_accepted() {
    let mut worst = 1.0f64;
    for (name, temperature) in
        [("short", 0.0), ("tool", 0.0), ("needle2000", 0.0), ("text300", 0.0), ("short", 1.0), ("tool", 1.0)]
    {
        for depth in [1, 7] {
            let mut requests = vec![golden_request(name, 0, 64); if temperature > 0.0 { 8 } else { 1 }];
            for (r, seed) in requests.iter_mut().zip(0..) {
                (r.sampling.temperature, r.sampling.seed) = (temperature, seed);
            }
            let (spy, log) = Spy::new(drafting(4096, 8, 4 * LARGE, depth));
            let answers = serve(spy, options(depth), &requests);
            let counts = acceptance(&log);
            let rates: Vec<String> = counts.iter().map(|c| format!("{:.3}", f64::from(c.1) / f64::from(c.0))).collect();
            let (tokens, steps) = (answers.iter().map(|a| a.tokens.len()).sum::<usize>(), log.lock().unwrap().len());
            println!(
                "{name}, temperature {temperature}, {depth} drafts: {} of {} first ones, by position {}; {tokens} tokens in {steps} turns",
                counts[0].1,
                counts[0].0,
                rates.join(" ")
            );
            if depth == 1 && temperature == 0.0 && name != "text300" {
                worst = worst.min(f64::from(counts[0].1) / f64::from(counts[0].0));
            }
        }
    }
    assert!(worst >= 0.9, "{worst}");
}

/// Bytes that nobody wrote never reach a draft.
#[test]
fn poisoned_memory_changes_no_draft() {
    let requests = [golden_request("short", 0, 20), golden_request("tool", 1, 20), request(prompt(300, 4), 8, 2)];
    let run = |byte| {
        let (spy, log) = Spy::new(drafting(70, 2, 16 << 20, 3));
        let answers = serve(spy.poison(byte), options(3), &requests);
        (answers.iter().map(|a| a.tokens.clone()).collect::<Vec<_>>(), drafts_of(&log))
    };
    let zeros = run(0);
    for byte in [0x7f, 0xff, 0x3c] {
        assert!(zeros == run(byte), "{byte:#x}");
    }
}

/// Steps by hand: the long prefix of one seat becomes the cached prefix of another.
struct Hand {
    spy: Spy,
    log: Log,
    number: u64,
}

const PREFIX: u32 = 256;

impl Hand {
    fn new(byte: u8) -> Hand {
        let (spy, log) = Spy::new(drafting(512, 2, LARGE, 3));
        Hand { spy: spy.poison(byte), log, number: 0 }
    }

    /// Seat 1 shares the blocks of seat 0 before [`PREFIX`] and has its own after it.
    fn run(&mut self, seat: u32, start: u32, tokens: &[Token], fresh: bool, want_drafts: u32) -> Part {
        let mut step = Step { number: self.number, tokens: tokens.to_vec(), ..Step::default() };
        self.number += 1;
        if fresh {
            let mut next = [0u32; 3];
            for (g, spec) in self.spy.layout().clone().groups.iter().enumerate() {
                let (all, shared) = (512 / spec.block_tokens, PREFIX / spec.block_tokens);
                let first = next[spec.bucket as usize];
                for index in 0..all {
                    let own = if index < shared { 0 } else { seat * (all - shared) };
                    step.writes.push(TableWrite { group: g as u8, index, block: BlockId(first + index + own) });
                }
                next[spec.bucket as usize] += 2 * all;
            }
        }
        step.seqs.push(SeqStep {
            fresh,
            writes: 0..step.writes.len() as u32,
            sample: Some(Sampling::default()),
            want_drafts,
            logits: ReturnLogits::All,
            ..SeqStep::new(Seat(seat), start, 0..tokens.len() as u32)
        });
        let ticket = self.spy.submit(&step).unwrap();
        self.spy.collect(ticket).unwrap();
        self.log.lock().unwrap().last().unwrap().clone()
    }
}

#[test]
fn a_seat_behind_a_cached_prefix_gives_the_same_tokens() {
    let text: Vec<Token> = golden::read("text300.cache").ids;
    let (prefix, rest) = text[..280].split_at(PREFIX as usize);
    let mut seen: Option<(Vec<Token>, Vec<Token>)> = None;
    for byte in [0, 0x7f, 0xff, 0x3c] {
        let mut hand = Hand::new(byte);
        hand.run(0, 0, prefix, true, 0);
        let plain = hand.run(0, PREFIX, rest, false, 3);
        let cached = hand.run(1, PREFIX, rest, true, 3);
        assert_eq!(plain.result.tokens, cached.result.tokens);
        assert!(plain.result.logits.iter().zip(&cached.result.logits).all(|(a, b)| a.to_bits() == b.to_bits()));
        assert_eq!(cached.result.drafts.len(), 3);
        let drafts = (plain.result.drafts, cached.result.drafts);
        assert_eq!(*seen.get_or_insert(drafts.clone()), drafts, "poison {byte:#x}");
        // A single token is the hardest case: its own row is the one that is not known.
        let one = hand.run(1, PREFIX, &rest[..1], true, 3);
        assert_eq!(one.result.drafts.len(), 3);
    }
    println!("drafts without and with a cached prefix: {seen:?}");
}

#[test]
fn a_step_that_cannot_draft_is_refused() {
    let mut b = drafting(64, 1, LARGE, 2);
    let mut step = Step { number: 1, tokens: vec![20; 4], ..Step::default() };
    step.seqs.push(SeqStep {
        fresh: true,
        sample: Some(Sampling::default()),
        want_drafts: 3,
        ..SeqStep::new(Seat(0), 0, 0..4)
    });
    assert!(b.submit(&step).unwrap_err().to_string().contains("wants 3 drafts, the limit is 2"));
    step.seqs[0].want_drafts = 2;
    let groups = b.layout().groups.clone();
    let writes = groups.iter().enumerate().filter(|(_, g)| !g.is_sliding());
    step.writes = writes.map(|(g, _)| TableWrite { group: g as u8, index: 0, block: BlockId(g as u32) }).collect();
    step.seqs[0].writes = 0..step.writes.len() as u32;
    assert!(b.submit(&step).unwrap_err().to_string().contains("block 0 of Window is not mapped"));
    step.seqs[0].want_drafts = 0;
    assert!(b.submit(&step).is_ok(), "without drafts nothing reads these rows");
}

#[test]
fn drafts_without_a_module_are_refused_at_open() {
    let open = |drafts: u32, module: bool| {
        let mut ckpt = tiny();
        if !module {
            ckpt.config.num_nextn_predict_layers = 0;
        }
        let options = CpuOptions { seats: 1, step_tokens: 64, context: 256, cache_bytes: LARGE, drafts };
        CpuBackend::new(Model::new(&ckpt, Profile::Serving, CACHE), options).map(|b| b.limits().drafts)
    };
    assert_eq!(open(1, false), Err(OpenError::NoDrafter { drafts: 1 }));
    assert_eq!(open(0, false), Ok(0));
    assert_eq!(open(8, true), Err(OpenError::TooManyDrafts { drafts: 8 }));
    assert_eq!(open(7, true), Ok(7));
}
