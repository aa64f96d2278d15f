//! Several ranks: sums over them, and the tiny model on two GPUs beside one.
//!
//! Sums also run with all ranks on one GPU, each on a stream of its own; models need two GPUs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use longwave_cuda::driver::{Alarm, Arena, Bell, Context, DeviceSlice, Event, Gpu, Graph, Stream, can_reach};
use longwave_cuda::meeting::{self, Chair};
use longwave_cuda::ops::reduce::{Boxes, Reduce};
use longwave_engine::proof::{self, Answer};
use longwave_engine::request::Request;
use longwave_engine::step::ReturnLogits;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::formats::bf16_value;

use crate::model::{FORMATS, agreement, alone, check_golden, golden, on_gpus, plain};
use crate::rig::{self, Fresh};

const WIDTH: usize = 4096;

/// GPUs by ordinal, as often as they are named; `None`, with the reason printed, where they are not there.
fn gpus(ordinals: &[usize]) -> Option<Vec<Gpu>> {
    let all = rig::gpus()?;
    let own: Option<Vec<Gpu>> = ordinals.iter().map(|&i| all.get(i).cloned()).collect();
    match own {
        Some(own) if own.windows(2).all(|p| p[0].index == p[1].index || can_reach(&p[0], &p[1]).unwrap()) => Some(own),
        Some(_) => {
            println!("skipped: the GPUs do not reach each other");
            None
        }
        None => {
            println!("skipped: this takes {} GPUs, and there are {}", ordinals.iter().max().unwrap() + 1, all.len());
            None
        }
    }
}

/// What a thread adds up with.
struct Adder {
    rank: usize,
    chair: Chair,
    stream: Stream,
    context: Context,
    reduce: Reduce,
    part: DeviceSlice<f32>,
    out: DeviceSlice<u16>,
    alarm: Arc<Alarm>,
}

impl Drop for Adder {
    fn drop(&mut self) {
        // A failed assertion must not leave the others waiting.
        if std::thread::panicking() {
            self.alarm.raise(self.rank as u32);
        }
    }
}

/// Runs `work` for all ranks, for sums of at most `tokens` rows.
fn on_ranks<R: Send + 'static>(
    gpus: &[Gpu],
    alarm: &Arc<Alarm>,
    tokens: usize,
    work: impl Fn(&Adder) -> R + Send + Sync + Clone + 'static,
) -> Vec<R> {
    let start = |(rank, chair): (usize, Chair)| {
        let (gpus, alarm, work) = (gpus.to_vec(), alarm.clone(), work.clone());
        std::thread::spawn(move || {
            let context = Context::open(&gpus[rank]).unwrap();
            let stream = Stream::new(&context).unwrap();
            let mut arena = Arena::new(&context, (128 << 20) + 6 * (tokens * WIDTH) as u64).unwrap();
            arena.clear(&stream).unwrap();
            let boxes = Boxes::new(&mut arena, gpus.len(), tokens * WIDTH).unwrap();
            let (part, out) = (arena.slice(tokens * WIDTH).unwrap(), arena.slice(tokens * WIDTH).unwrap());
            stream.synchronize().unwrap();
            let addresses = chair.meet(boxes.address()).unwrap();
            for other in gpus.iter().filter(|other| other.index != gpus[rank].index) {
                context.reach(other).unwrap();
            }
            let bell = Bell::new(&context, &alarm).unwrap();
            let reduce = Reduce::new(&context, &stream, boxes, rank, &addresses, bell).unwrap();
            chair.meet(0).unwrap();
            let adder = Adder { rank, chair, stream, context, reduce, part, out, alarm };
            let result = work(&adder);
            adder.stream.synchronize().unwrap();
            let _ = adder.chair.meet(0);
            result
        })
    };
    let threads: Vec<_> = meeting::chairs(gpus.len()).into_iter().enumerate().map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Values of a rank for a turn: the same wherever they are computed.
fn values(seed: u64, rank: usize, turn: usize, len: usize) -> Vec<f32> {
    let mut state = seed ^ ((rank as u64 + 1) << 40) ^ ((turn as u64 + 1) << 20);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * f32::from((state >> 33) as u8)
    };
    (0..len).map(|_| next()).collect()
}

/// The sum in the order of the ranks, rounded once.
fn want(seed: u64, ranks: usize, turn: usize, len: usize) -> Vec<f32> {
    let mut sum = values(seed, 0, turn, len);
    for rank in 1..ranks {
        sum.iter_mut().zip(values(seed, rank, turn, len)).for_each(|(sum, v)| *sum += v);
    }
    let narrow = |v: f32| {
        let bits = v.to_bits();
        f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
    };
    sum.into_iter().map(narrow).collect()
}

fn sums_are_right(ordinals: &[usize]) {
    let Some(gpus) = gpus(ordinals) else { return };
    let (ranks, seed) = (gpus.len(), Fresh::new().below(1 << 20) as u64);
    // More rows than go through at once, and many short ones, so that blocks are at different turns.
    let rows = [1usize, 3000, 2, 33, 1, 512, 7, 1, 1, 300, 1];
    on_ranks(&gpus, &Arc::new(Alarm::default()), 3000, move |a| {
        // On one GPU a call that waits for all of it must not find another rank waiting for this one.
        let together = || {
            a.stream.synchronize().unwrap();
            a.chair.meet(0).unwrap();
        };
        let check = |turn: usize, tokens: usize, how: &str| {
            together();
            let len = tokens * WIDTH;
            let got: Vec<f32> = a.out.part(0..len).read(&a.stream).unwrap().into_iter().map(bf16_value).collect();
            let want = want(seed, ranks, turn, len);
            let other = (0..len).find(|&i| got[i].to_bits() != want[i].to_bits());
            assert_eq!(other.map(|i| (i, got[i], want[i])), None, "rank {}, {how}, {tokens} rows", a.rank);
        };
        let put = |turn: usize, tokens: usize| {
            let len = tokens * WIDTH;
            a.part.part(0..len).write(&a.stream, &values(seed, a.rank, turn, len)).unwrap();
            a.out.part(0..len).fill(&a.stream, 0xff).unwrap();
            together();
        };
        let sum = |stream: &Stream, tokens: usize| {
            a.reduce.sum(stream, a.part.address(), a.out.address(), (tokens * WIDTH) as u64)
        };
        // With an odd and an even number of turns.
        let capture = |times| Graph::capture(&a.stream, |s| (0..times).try_for_each(|_| sum(s, 3))).unwrap();
        let graphs = [1, 2, 5].map(capture);
        for (turn, &tokens) in rows.iter().enumerate() {
            put(turn, tokens);
            sum(&a.stream, tokens).unwrap();
            check(turn, tokens, "launched");
        }
        for graph in &graphs {
            for turn in 20..26 {
                put(turn, 3);
                graph.launch(&a.stream).unwrap();
                check(turn, 3, "replayed");
                put(turn, 40);
                sum(&a.stream, 40).unwrap();
                check(turn, 40, "launched between graphs");
            }
        }
    });
    println!("sums over {ranks} ranks on GPUs {ordinals:?}: all bits are those of the sum in the order of ranks");
}

#[test]
fn sums_over_four_ranks_of_one_gpu_have_the_bits_of_their_order() {
    sums_are_right(&[0, 0, 0, 0]);
}

#[test]
fn sums_over_two_gpus_have_the_bits_of_their_order() {
    sums_are_right(&[0, 1]);
}

#[test]
fn a_rank_that_fails_does_not_leave_others_waiting() {
    let Some(gpus) = gpus(&[0, 0]) else { return };
    let alarm = Arc::new(Alarm::default());
    let raised = alarm.clone();
    let waited = on_ranks(&gpus, &alarm, 8, move |a| {
        let began = Instant::now();
        match a.rank {
            0 => {
                a.reduce.sum(&a.stream, a.part.address(), a.out.address(), (8 * WIDTH) as u64).unwrap();
                a.stream.synchronize().unwrap();
            }
            _ => {
                std::thread::sleep(Duration::from_millis(200));
                raised.raise(1);
            }
        }
        began.elapsed()
    });
    assert_eq!(alarm.raised_by(), Some(1));
    assert!(waited[0] >= Duration::from_millis(150), "it waits for the other rank: {waited:?}");
    println!("a rank that waited in vain came back after {:?}", waited[0]);
}

#[test]
fn sums_over_two_gpus_are_measured() {
    let Some(gpus) = gpus(&[0, 1]) else { return };
    let times = on_ranks(&gpus, &Arc::new(Alarm::default()), 4096, |a| {
        let (start, end) = (Event::new(&a.context).unwrap(), Event::new(&a.context).unwrap());
        let of = |tokens: usize| {
            let graph = Graph::capture(&a.stream, |s| {
                (0..20).try_for_each(|_| a.reduce.sum(s, a.part.address(), a.out.address(), (tokens * WIDTH) as u64))
            })
            .unwrap();
            let mut times: Vec<f64> = (0..12)
                .map(|_| {
                    start.record(&a.stream).unwrap();
                    graph.launch(&a.stream).unwrap();
                    end.record(&a.stream).unwrap();
                    end.elapsed_us(&start).unwrap() / 20.0
                })
                .collect();
            times.sort_by(f64::total_cmp);
            (tokens, times[6])
        };
        [1, 2, 4, 8, 32, 128, 512, 2048, 4096].map(of)
    });
    for (tokens, us) in times[0] {
        let gb_s = (4 * tokens * WIDTH) as f64 / us / 1e3;
        println!("sum over two GPUs, {tokens} x {WIDTH}: {us:.1} us, {gb_s:.0} GB/s each way");
    }
}

#[test]
fn the_tiny_model_on_two_gpus_agrees_with_one() {
    if gpus(&[0, 1]).is_none() {
        return;
    }
    let names = ["short", "text300", "tool", "needle2000"];
    let request = |name: &&str| Request { logits: ReturnLogits::All, ..Request::greedy(golden(name).0, 1) };
    let requests: Vec<Request> = names.iter().map(request).collect();
    let logits = |ranks| {
        let answers = alone(on_gpus(ranks, 1, 512, FORMATS, 0).unwrap(), &requests);
        assert!(answers.iter().all(|a: &Answer| a.failure.is_none()));
        answers.into_iter().flat_map(|a| a.logits).collect::<Vec<f32>>()
    };
    let (one, two) = (logits(1), logits(2));
    let (kl, same) = agreement(&one, &two, 2432);
    println!("two GPUs beside one: mean KL {kl:.1e}, {:.2} % of argmaxes equal", 100.0 * same);
    // The tiny model's best tokens are often close together: two roundings of it on the CPU agree in 94 %.
    assert!(kl <= 0.02 && same > 0.92, "model.md 10.2: {kl} {same}");

    let mut engine = Engine::new(on_gpus(2, 1, 512, FORMATS, 0).unwrap(), plain());
    for name in names {
        check_golden(&mut engine, name);
    }
}

#[test]
fn two_gpus_give_the_same_bits_however_it_is_served() {
    if gpus(&[0, 1]).is_none() {
        return;
    }
    let requests = proof::workload(9, 16, 700, 24, 16, 2432);
    let reference = alone(on_gpus(2, 1, 512, FORMATS, 0).unwrap(), &requests);
    assert!(reference.iter().all(|answer| answer.failure.is_none() && answer.logits.iter().all(|v| v.is_finite())));
    for (way, seats, step_tokens, chunk) in [
        ("batch of 4, 33 tokens a step", 4, 33, None),
        ("batch of 16, 256 tokens a step", 16, 256, None),
        ("chunks of 3", 2, 512, Some(3)),
    ] {
        let options = EngineOptions { max_chunk_tokens: chunk, ..plain() };
        let mut engine = Engine::new(on_gpus(2, seats, step_tokens, FORMATS, 0).unwrap(), options);
        let comparison = proof::compare(&reference, &proof::serve(&mut engine, &requests, 2));
        println!(
            "two GPUs, {way}: {} tokens, {} differences, {} logits differ",
            comparison.tokens, comparison.differences, comparison.logit_differences
        );
        assert!(comparison.is_equal(), "{way}");
    }
    let options = EngineOptions { drafts: 3, ..plain() };
    let mut engine = Engine::new(on_gpus(2, 4, 256, FORMATS, 3).unwrap(), options);
    let comparison = proof::compare(&reference, &proof::serve(&mut engine, &requests, 2));
    println!("two GPUs, 3 drafts: {} tokens, {} differences", comparison.tokens, comparison.differences);
    assert!(comparison.is_equal(), "with drafts");
}
