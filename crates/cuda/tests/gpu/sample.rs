//! Tokens and log-probabilities, against the CPU's.

use longwave_cpu::ops::penalties::Counts;
use longwave_cpu::ops::sample::{logprobs, sample};
use longwave_cuda::driver::Graph;
use longwave_cuda::ops::UNMAPPED;
use longwave_cuda::ops::sample::{MOST_TOP, Sample, SampleBatch, SampleRow};
use longwave_engine::step::Sampling;

use crate::rig::{Fresh, Rig, rig};

/// One row: its logits, how it is chosen, and the token that the CPU chooses.
struct Case {
    logits: Vec<f32>,
    how: Sampling,
    position: u32,
    counts: Option<(Counts, Vec<u32>)>,
    mask: Option<Vec<u32>>,
}

impl Case {
    /// Anything that a request can ask for, by the number of the case.
    fn fresh(fresh: &mut Fresh, number: usize, vocab: usize) -> Case {
        let r = fresh.floats(16);
        let pick = |i: usize, n: usize| ((r[i] * 0.5 + 0.5) * n as f32) as usize % n;
        let spread = [1.0, 4.0, 12.0][pick(0, 3)];
        let mut logits: Vec<f32> = fresh.floats(vocab).iter().map(|v| spread * (v + v * v * v)).collect();
        match pick(1, 6) {
            // Many equals; some that cannot be chosen; one clear winner.
            0 => logits.iter_mut().for_each(|v| *v = v.round()),
            1 => logits.iter_mut().step_by(3).for_each(|v| *v = f32::NEG_INFINITY),
            2 => logits[number * 131 % vocab] += 15.0,
            _ => {}
        }
        let words = |fresh: &mut Fresh, share: f32| -> Vec<u32> {
            let bits = fresh.floats(vocab.div_ceil(32) * 32);
            let word = |b: &[f32]| b.iter().enumerate().map(|(i, &v)| u32::from(v < share) << i).sum();
            bits.chunks(32).map(word).collect()
        };
        let mask = (number % 5 == 4).then(|| words(fresh, [0.0, -0.9, -0.997][pick(2, 3)]));
        let tokens = |fresh: &mut Fresh, n: usize| -> Vec<u32> {
            let mut all: Vec<u32> =
                fresh.floats(n).iter().map(|v| (v.abs() * vocab as f32) as u32 % vocab as u32).collect();
            all.sort_unstable();
            all.dedup();
            all
        };
        let bias = if number % 4 == 1 { tokens(fresh, 40) } else { vec![] };
        let values = fresh.floats(bias.len());
        let forbidden = if number % 6 == 1 { tokens(fresh, 10) } else { vec![] };
        let counts = (number % 3 == 2).then(|| {
            let (mut counts, history) = (Counts::default(), tokens(fresh, 200));
            counts.add(&history, 0, history.len() as u32 / 2);
            // Some occur twice in the answer.
            counts.add(&history[history.len() / 3..], history.len() as u32, history.len() as u32 / 2);
            (counts, history)
        });
        let how = Sampling {
            temperature: if number.is_multiple_of(8) { 0.0 } else { [1.0, 0.7, 0.1, 2.5][pick(3, 4)] },
            top_p: [1.0, 0.95, 0.5, 0.999, 0.05][pick(4, 5)],
            top_k: [0, 0, 1, 7, 50, 1000, vocab as u32][pick(5, 7)],
            min_p: [0.0, 0.0, 0.01, 0.2, 1.0][pick(6, 5)],
            seed: (r[7] * 1e9) as i64 as u64,
            top_logprobs: [None, Some(0), Some(5), Some(20)][pick(8, 4)],
            bias: bias.into_iter().zip(values.iter().map(|v| 10.0 * v)).collect(),
            forbidden,
            forbidden_before: u32::MAX,
            presence_penalty: [0.0, 1.5, -0.7][pick(9, 3)],
            frequency_penalty: [0.0, 0.3, -0.1][pick(10, 3)],
            repetition_penalty: [1.0, 1.3, 0.8][pick(11, 3)],
            ..Sampling::default()
        };
        Case { logits, how, position: pick(12, 100_000) as u32, counts, mask }
    }

    /// As the kernel takes it; lists go behind `lists`.
    fn row(&self, lists: &mut Vec<u32>) -> SampleRow {
        let mut list = |words: Vec<u32>, each: usize| {
            let place = lists.len() as u32;
            let count = (words.len() / each) as u32;
            lists.extend(words);
            (place, count)
        };
        let how = &self.how;
        let counted = self.counts.iter().flat_map(|(_, history)| {
            let n = history.len();
            // What `Counts::add` above counts.
            (0..n).flat_map(move |i| [history[i], u32::from(i >= n / 2) + u32::from(i >= n / 3)])
        });
        SampleRow {
            active: true,
            seed: how.seed,
            position: self.position,
            temperature: how.temperature,
            top_p: how.top_p,
            min_p: how.min_p,
            top_k: how.top_k,
            logprobs: how.top_logprobs,
            presence_penalty: how.presence_penalty,
            frequency_penalty: how.frequency_penalty,
            repetition_penalty: how.repetition_penalty,
            bias: list(how.bias.iter().flat_map(|b| [b.0, b.1.to_bits()]).collect(), 2),
            forbidden: list(how.forbidden.clone(), 1),
            counts: list(counted.collect(), 2),
            mask: self.mask.as_ref().map(|mask| list(mask.clone(), 1).0),
        }
    }
}

struct Results {
    tokens: Vec<u32>,
    bad: Vec<u32>,
    chosen: Vec<f32>,
    top_tokens: Vec<u32>,
    top: Vec<f32>,
}

fn run(rig: &mut Rig, kernel: &Sample, logits: &[f32], rows: &[SampleRow], lists: &[u32], vocab: usize) -> Results {
    let n = rows.len();
    let words: Vec<u32> = rows.iter().flat_map(SampleRow::words).collect();
    let (dl, dr) = (rig.put(logits), rig.put(&words));
    let lists = rig.put(&[lists, &[0]].concat());
    let changed = rig.poisoned::<f32>(n * vocab);
    let (tokens, bad) = (rig.poisoned::<u32>(n), rig.poisoned::<u32>(n));
    let (chosen, top_tokens) = (rig.poisoned::<f32>(n), rig.poisoned::<u32>(n * MOST_TOP as usize));
    let top = rig.poisoned::<f32>(n * MOST_TOP as usize);
    let batch = SampleBatch {
        logits: dl.address(),
        changed: changed.address(),
        rows: dr.address(),
        lists: lists.address(),
        tokens: tokens.address(),
        bad: bad.address(),
        chosen: chosen.address(),
        top_tokens: top_tokens.address(),
        top: top.address(),
        count: n as u32,
        vocab: vocab as u32,
    };
    kernel.launch(&rig.stream, &batch).unwrap();
    let results = Results {
        tokens: tokens.read(&rig.stream).unwrap(),
        bad: bad.read(&rig.stream).unwrap(),
        chosen: chosen.read(&rig.stream).unwrap(),
        top_tokens: top_tokens.read(&rig.stream).unwrap(),
        top: top.read(&rig.stream).unwrap(),
    };
    let unchanged = dl.read(&rig.stream).unwrap();
    assert!(unchanged.iter().zip(logits).all(|(a, b)| a.to_bits() == b.to_bits()), "logits were changed");
    rig.arena.reset();
    results
}

#[test]
fn tokens_are_those_of_the_cpu() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let kernel = Sample::new(&rig.context).unwrap();
    let (mut seen, mut other, mut worst) = (0, 0, 0.0f64);
    for (vocab, rows, rounds) in [(2432usize, 400usize, 8usize), (129_280, 48, 2), (1001, 200, 2)] {
        for _ in 0..rounds {
            let cases: Vec<Case> = (0..rows).map(|i| Case::fresh(&mut fresh, i, vocab)).collect();
            let logits: Vec<f32> = cases.iter().flat_map(|c| c.logits.iter().copied()).collect();
            let mut lists = Vec::new();
            let params: Vec<SampleRow> = cases.iter().map(|c| c.row(&mut lists)).collect();
            let ours = run(&mut rig, &kernel, &logits, &params, &lists, vocab);
            for (i, case) in cases.iter().enumerate() {
                let counts = case.counts.as_ref().map(|c| &c.0);
                let want = sample(&case.logits, &case.how, case.position, counts, case.mask.as_deref());
                seen += 1;
                if ours.tokens[i] != want {
                    other += 1;
                    println!(
                        "case {i} of {vocab}: {} and not {want}, {:?}",
                        ours.tokens[i],
                        Sampling { bias: vec![], forbidden: vec![], ..case.how.clone() }
                    );
                }
                let infinite = case.logits.iter().position(|v| !v.is_finite()).map_or(UNMAPPED, |p| p as u32);
                assert_eq!(ours.bad[i], infinite, "case {i}");
                let Some(n) = case.how.top_logprobs else { continue };
                let want = logprobs(&case.logits, ours.tokens[i], n);
                let mut close = |a: f32, b: f32| {
                    let error = f64::from((a - b).abs()) / f64::from(b.abs().max(1.0));
                    worst = worst.max(if a == b { 0.0 } else { error });
                };
                close(ours.chosen[i], want.chosen);
                for (s, &(token, value)) in want.top.iter().enumerate() {
                    let at = i * MOST_TOP as usize + s;
                    assert_eq!(ours.top_tokens[at], token, "case {i}, place {s} of {n}");
                    close(ours.top[at], value);
                }
            }
        }
    }
    println!("sample: {other} of {seen} tokens differ; log-probabilities within {worst:.1e}");
    assert!(other == 0 && worst < 1e-6);
}

#[test]
fn broken_and_padded_rows_harm_nobody() {
    let Some(mut rig) = rig(64 << 20) else { return };
    let kernel = Sample::new(&rig.context).unwrap();
    let vocab = 2432;
    let mut logits = vec![0.5f32; 7 * vocab];
    logits[vocab - 1] = 3.0;
    logits[vocab..2 * vocab].fill(f32::NAN);
    logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
    (logits[3 * vocab + 70], logits[3 * vocab + 90]) = (f32::NAN, f32::INFINITY);
    logits[4 * vocab..5 * vocab].fill(f32::NAN);
    let cuts = SampleRow {
        temperature: 0.8,
        top_p: 0.9,
        top_k: 5,
        min_p: 0.1,
        seed: 3,
        logprobs: Some(20),
        ..SampleRow::default()
    };
    let greedy = SampleRow { logprobs: Some(3), ..SampleRow::default() };
    let rows = [greedy, cuts, cuts, greedy, SampleRow::padded(), cuts, SampleRow { logprobs: None, ..greedy }];
    let ours = run(&mut rig, &kernel, &logits, &rows, &[], vocab);
    assert_eq!(ours.tokens[..5], [vocab as u32 - 1, 0, 0, 90, UNMAPPED]);
    assert_eq!(ours.bad, [UNMAPPED, 0, 0, 70, UNMAPPED, UNMAPPED, UNMAPPED]);
    // Among equals the cuts keep the lowest ids.
    assert!(ours.tokens[5] < 5 && ours.tokens[6] == 0, "{:?}", ours.tokens);
    assert_eq!(ours.top_tokens[..3], [vocab as u32 - 1, 0, 1]);
    assert!(ours.chosen[6].is_nan() && ours.top[6 * 20..].iter().all(|v| v.is_nan()), "nothing was asked for");
    // Rows alone.
    for (i, row) in rows.iter().enumerate() {
        let alone = run(&mut rig, &kernel, &logits[i * vocab..(i + 1) * vocab], &[*row], &[], vocab);
        assert_eq!((alone.tokens[0], alone.bad[0]), (ours.tokens[i], ours.bad[i]));
    }
}

#[test]
fn sampling_is_measured() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let kernel = Sample::new(&rig.context).unwrap();
    let (vocab, n) = (129_280usize, 32usize);
    let logits: Vec<f32> = fresh.floats(n * vocab).iter().map(|v| 6.0 * (v + v * v * v)).collect();
    let plain = SampleRow { temperature: 1.0, seed: 5, ..SampleRow::default() };
    for (name, row) in [
        ("greedy", SampleRow::default()),
        ("greedy, 20 log-probabilities", SampleRow { logprobs: Some(20), ..SampleRow::default() }),
        ("temperature", plain),
        ("top-k 50", SampleRow { top_k: 50, ..plain }),
        ("top-p 0.95", SampleRow { top_p: 0.95, ..plain }),
        ("min-p 0.05", SampleRow { min_p: 0.05, ..plain }),
        ("top-k 50, top-p 0.95, min-p 0.05", SampleRow { top_k: 50, top_p: 0.95, min_p: 0.05, ..plain }),
    ] {
        let words: Vec<u32> = (0..n).flat_map(|_| row.words()).collect();
        let (dl, dr, lists) = (rig.put(&logits), rig.put(&words), rig.put(&[0u32]));
        let changed = rig.poisoned::<f32>(n * vocab);
        let out = rig.poisoned::<u32>(n * 64);
        let batch = |count: usize| SampleBatch {
            logits: dl.address(),
            changed: changed.address(),
            rows: dr.address(),
            lists: lists.address(),
            tokens: out.address(),
            bad: out.address() + 4 * n as u64,
            chosen: out.address() + 8 * n as u64,
            top_tokens: out.address() + 12 * n as u64,
            top: out.address() + (12 + 80) * n as u64,
            count: count as u32,
            vocab: vocab as u32,
        };
        let times = [1, n].map(|count| {
            let graph = Graph::capture(&rig.stream, |s| (0..10).try_for_each(|_| kernel.launch(s, &batch(count))));
            rig.median_us(&graph.unwrap()) / 10.0
        });
        println!("sample, {name}: {:.1} us for one row, {:.1} us for {n}", times[0], times[1]);
        assert!(times[0] > 0.0);
        rig.arena.reset();
    }
}
