//! The tiny model on the GPU: golden continuations, logits beside the CPU's, the same bits however it is served.

use std::collections::HashMap;
use std::path::PathBuf;

use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_cuda::backend::{CudaBackend, CudaOptions, Load};
use longwave_engine::proof::{self, Answer};
use longwave_engine::request::Request;
use longwave_engine::step::{Backend, ReturnLogits, Token};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::{CacheFormats, Checkpoint, IndexFormat, MainFormat};
use safetensors::SafeTensors;

use crate::rig::{relative_error, small};

pub const FORMATS: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };

fn tiny() -> Checkpoint {
    Checkpoint::open(&testdata().join("tiny"), &mut |_| ()).unwrap()
}

/// The repository's test data: where this was built, or where it runs.
fn testdata() -> PathBuf {
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    if built.exists() { built } else { PathBuf::from("testdata") }
}

/// The tiny model on the first GPU; `None`, with the reason printed, where there is none.
fn on_gpu(seats: u32, step_tokens: u32, formats: CacheFormats) -> Option<CudaBackend> {
    on_gpus(1, seats, step_tokens, formats, 0)
}

/// The same with so many drafts.
pub fn drafting_on_gpu(seats: u32, step_tokens: u32, formats: CacheFormats, drafts: u32) -> Option<CudaBackend> {
    on_gpus(1, seats, step_tokens, formats, drafts)
}

/// The same on the first `ranks`.
pub fn on_gpus(ranks: u32, seats: u32, step_tokens: u32, formats: CacheFormats, drafts: u32) -> Option<CudaBackend> {
    let (context, cache_bytes) = (8192, Some(1 << 30));
    let options = CudaOptions { gpu: 0, ranks, seats, step_tokens, context, cache_bytes, formats, drafts, streams: 2 };
    match CudaBackend::open(Load::Checkpoint(tiny()), options, |_| ()) {
        Ok(backend) => Some(backend),
        Err(error) if longwave_cuda::driver::probe().is_err() || longwave_cuda::cubins::CUBINS.is_empty() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub fn on_cpu(formats: CacheFormats, profile: Profile, drafts: u32) -> CpuBackend {
    let model = Model::new(&tiny(), profile, formats);
    let options = CpuOptions { seats: 4, step_tokens: 512, context: 8192, cache_bytes: 1 << 30, drafts };
    CpuBackend::new(model, options).unwrap()
}

/// Prompt, greedy continuation and the gap between the best two logits at each of its tokens.
pub fn golden(name: &str) -> (Vec<Token>, Vec<Token>, Vec<f32>) {
    let bytes = std::fs::read(testdata().join(format!("golden/{name}.cache.safetensors"))).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let longs = |key: &str| -> Vec<Token> {
        let data = tensors.tensor(key).unwrap().data().to_vec();
        data.chunks(8).map(|c| i64::from_le_bytes(c.try_into().unwrap()) as Token).collect()
    };
    let gaps = tensors.tensor("greedy_gap").unwrap().data().to_vec();
    let gaps = gaps.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
    (longs("ids"), longs("greedy"), gaps)
}

pub fn plain() -> EngineOptions {
    EngineOptions { prefix_cache: false, ..EngineOptions::default() }
}

/// One request after the other.
pub fn alone<B: Backend>(backend: B, requests: &[Request]) -> Vec<Answer> {
    let mut engine = Engine::new(backend, plain());
    requests.iter().map(|r| proof::serve(&mut engine, std::slice::from_ref(r), 1).remove(0)).collect()
}

#[test]
fn greedy_continuations_are_the_golden_ones() {
    let Some(backend) = on_gpu(1, 512, FORMATS) else { return };
    let mut engine = Engine::new(backend, plain());
    for name in ["short", "text300", "tool", "needle2000"] {
        check_golden(&mut engine, name);
    }
}

/// The golden run rounds the cache alone. Where two tokens are closer than the other roundings of serving move their logits,
/// or where one of the CPU's profiles leaves the golden text no later, the tokens after them mean nothing.
pub fn check_golden(engine: &mut Engine<CudaBackend>, name: &str) {
    let (ids, golden, gaps) = golden(name);
    let request = Request::greedy(ids, golden.len() as u32);
    let same_in = |answer: &Answer| answer.tokens.iter().zip(&golden).take_while(|(a, b)| a == b).count();
    let ours = proof::serve(engine, std::slice::from_ref(&request), 1).remove(0);
    assert_eq!(ours.failure, None, "{name}");
    let same = same_in(&ours);
    println!("{name}: {same} of {} greedy tokens are the golden ones", golden.len());
    let leaves = |profile| same_in(&alone(on_cpu(FORMATS, profile, 0), std::slice::from_ref(&request))[0]) <= same;
    let excused = same == golden.len() || gaps[same] < 0.2;
    assert!(
        excused || leaves(Profile::Serving) || leaves(Profile::Reference),
        "{name}: token {same}, gap {}, and the CPU goes on",
        gaps[same]
    );
}

/// Probabilities of one row of logits.
fn softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|&v| f64::from(v - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// Mean KL and share of equal argmaxes of two lists of logits, by position.
pub fn agreement(reference: &[f32], ours: &[f32], vocab: usize) -> (f64, f64) {
    assert_eq!(reference.len(), ours.len());
    let (mut kl, mut same, rows) = (0.0, 0, reference.len() / vocab);
    for (p, q) in reference.chunks(vocab).zip(ours.chunks(vocab)) {
        same += usize::from(argmax(p) == argmax(q));
        kl +=
            softmax(p).iter().zip(softmax(q)).map(|(p, q)| if *p > 0.0 { p * (p / q).ln() } else { 0.0 }).sum::<f64>();
    }
    (kl / rows as f64, same as f64 / rows as f64)
}

#[test]
fn logits_of_texts_agree_with_the_cpus() {
    for (main, index) in [
        (MainFormat::Fp8, IndexFormat::Fp4),
        (MainFormat::Fp8, IndexFormat::Fp8),
        (MainFormat::Bf16, IndexFormat::Bf16),
    ] {
        let formats = CacheFormats { main, index };
        let Some(backend) = on_gpu(1, 512, formats) else { return };
        let requests: Vec<Request> = ["short", "text300", "tool", "needle2000"]
            .iter()
            .map(|name| Request { logits: ReturnLogits::All, ..Request::greedy(golden(name).0, 1) })
            .collect();
        let ours = alone(backend, &requests);
        let reference = alone(on_cpu(formats, Profile::Serving, 0), &requests);
        let other = alone(on_cpu(formats, Profile::Reference, 0), &requests);
        let all = |answers: &[Answer]| answers.iter().flat_map(|a| a.logits.clone()).collect::<Vec<f32>>();
        let (ours, reference, other) = (all(&ours), all(&reference), all(&other));
        let (kl, same) = agreement(&reference, &ours, 2432);
        let (kl_of_other, same_of_other) = agreement(&reference, &other, 2432);
        let error = relative_error(&ours, &reference);
        println!(
            "{} and {}: {} positions, relative error {error:.1e}, mean KL {kl:.1e}, {:.2} % of argmaxes equal; the \
             reference profile beside the serving one {:.1e}, {kl_of_other:.1e}, {:.2} %",
            main.name(),
            index.name(),
            ours.len() / 2432,
            100.0 * same,
            relative_error(&other, &reference),
            100.0 * same_of_other
        );
        // The tiny model's best tokens are often close together: two roundings of it agree no better.
        assert!(kl <= 0.02 && kl < 1.5 * kl_of_other && same > same_of_other - 0.02, "model.md 10.2: {kl} {same}");
    }
}

#[test]
fn the_same_bits_however_it_is_served() {
    let (count, longest, outputs) = if small() { (2, 140, 3) } else { (16, 700, 24) };
    let requests = proof::workload(9, count, longest, outputs, 16, 2432);
    let Some(backend) = on_gpu(1, 512, FORMATS) else { return };
    let reference = alone(backend, &requests);
    assert!(reference.iter().all(|answer| answer.failure.is_none() && answer.logits.iter().all(|v| v.is_finite())));
    let mut differences = HashMap::new();
    for (way, seats, step_tokens, chunk) in [
        ("batch of 4, 33 tokens a step", 4, 33, None),
        ("batch of 16, 256 tokens a step", 16, 256, None),
        ("chunks of 3", 2, 512, Some(3)),
        ("chunks of 129", 2, 512, Some(129)),
    ] {
        if small() && chunk.is_some() {
            continue;
        }
        let backend = on_gpu(seats, step_tokens, FORMATS).unwrap();
        let mut engine = Engine::new(backend, EngineOptions { max_chunk_tokens: chunk, ..plain() });
        let served = proof::serve(&mut engine, &requests, 2);
        let comparison = proof::compare(&reference, &served);
        println!(
            "{way}: {} tokens, {} differences, {} logits differ, most by {}",
            comparison.tokens, comparison.differences, comparison.logit_differences, comparison.max_logit_difference
        );
        differences.insert(way, comparison.differences + comparison.logit_differences);
    }
    assert!(differences.values().all(|&n| n == 0), "{differences:?}");
}

/// Timers take streams, graphs and what is launched as one apart.
#[test]
fn operators_that_are_timed_have_the_same_bits() {
    let Some(backend) = on_gpu(2, 512, FORMATS) else { return };
    let requests = proof::workload(5, 3, if small() { 140 } else { 700 }, 6, 16, 2432);
    let mut engine = Engine::new(backend, plain());
    let reference = proof::serve(&mut engine, &requests, 2);
    engine.backend_mut().time_operators(true).unwrap();
    let timed = proof::serve(&mut engine, &requests, 2);
    let times = engine.backend_mut().time_operators(false).unwrap();
    assert!(proof::compare(&reference, &timed).is_equal());
    for name in ["compressor projection", "index compressor projection", "index weights", "routed experts", "wo_b"] {
        assert!(times.iter().any(|time| time.name == name && time.us > 0.0), "{name} was not timed: {times:?}");
    }
}
