//! The tiny model on the GPU: golden continuations, logits beside the CPU's, the same bits however it is served.

use std::collections::HashMap;
use std::path::PathBuf;

use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_cuda::backend::{CudaBackend, CudaOptions, Load};
use longwave_engine::proof::{self, Answer};
use longwave_engine::request::Request;
use longwave_engine::step::{Backend, Token};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::{CacheFormats, Checkpoint, IndexFormat, MainFormat};
use safetensors::SafeTensors;

use crate::rig::relative_error;

const CONFIG: &str = include_str!("../../../../testdata/tiny/config.json");
static SHARD: &[u8] = include_bytes!("../../../../testdata/tiny/model.safetensors");
const FORMATS: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };

fn tiny() -> Checkpoint {
    Checkpoint::embedded("tiny", CONFIG, SHARD).unwrap()
}

/// The repository's test data: where this was built, or where it runs.
fn testdata() -> PathBuf {
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    if built.exists() { built } else { PathBuf::from("testdata") }
}

/// The tiny model on the first GPU; `None`, with the reason printed, where there is none.
fn on_gpu(seats: u32, step_tokens: u32, formats: CacheFormats) -> Option<CudaBackend> {
    let options = CudaOptions { gpu: 0, seats, step_tokens, context: 8192, cache_bytes: Some(1 << 30), formats };
    match CudaBackend::open(Load::Checkpoint(tiny()), options, |_| ()) {
        Ok(backend) => Some(backend),
        Err(error) if longwave_cuda::driver::probe().is_err() || longwave_cuda::cubins::CUBINS.is_empty() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn on_cpu(formats: CacheFormats) -> CpuBackend {
    let model = Model::new(&tiny(), Profile::Serving, formats);
    let options = CpuOptions { seats: 4, step_tokens: 512, context: 8192, cache_bytes: 1 << 30, drafts: 0 };
    CpuBackend::new(model, options).unwrap()
}

fn plain() -> EngineOptions {
    EngineOptions { prefix_cache: false, ..EngineOptions::default() }
}

/// One request after the other.
fn alone<B: Backend>(backend: B, requests: &[Request]) -> Vec<Answer> {
    let mut engine = Engine::new(backend, plain());
    requests.iter().map(|r| proof::serve(&mut engine, std::slice::from_ref(r), 1).remove(0)).collect()
}

#[test]
fn greedy_continuations_are_the_golden_ones() {
    let Some(backend) = on_gpu(1, 512, FORMATS) else { return };
    let mut engine = Engine::new(backend, plain());
    for name in ["short", "text300", "tool", "needle2000"] {
        let bytes = std::fs::read(testdata().join(format!("golden/{name}.cache.safetensors"))).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let longs = |key: &str| -> Vec<Token> {
            let data = tensors.tensor(key).unwrap().data().to_vec();
            data.chunks(8).map(|c| i64::from_le_bytes(c.try_into().unwrap()) as Token).collect()
        };
        let (ids, golden) = (longs("ids"), longs("greedy"));
        let gaps: Vec<f32> = {
            let data = tensors.tensor("greedy_gap").unwrap().data().to_vec();
            data.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
        };
        let request = Request::greedy(ids, golden.len() as u32);
        let ours = proof::serve(&mut engine, &[request], 1).remove(0);
        assert_eq!(ours.failure, None, "{name}");
        let same = ours.tokens.iter().zip(&golden).take_while(|(a, b)| a == b).count();
        println!("{name}: {same} of {} greedy tokens are the golden ones", golden.len());
        // Where two tokens are closer than roundings the others after them mean nothing.
        assert!(same == golden.len() || gaps[same] < 0.05, "{name}: token {same}, gap {}", gaps[same]);
    }
}

#[test]
fn logits_are_close_to_the_cpus() {
    for (main, index) in [
        (MainFormat::Fp8, IndexFormat::Fp4),
        (MainFormat::Fp8, IndexFormat::Fp8),
        (MainFormat::Bf16, IndexFormat::Bf16),
    ] {
        let formats = CacheFormats { main, index };
        let Some(backend) = on_gpu(4, 512, formats) else { return };
        let requests = proof::workload(5, 8, 700, 8, 16, 2432);
        let (ours, reference) = (alone(backend, &requests), alone(on_cpu(formats), &requests));
        let (mut worst, mut same, mut all) = (0f64, 0, 0);
        for ((a, b), request) in ours.iter().zip(&reference).zip(&requests) {
            assert_eq!(a.failure, None);
            // The first token's logits come after the same text.
            let n = 2432.min(a.logits.len());
            worst = worst.max(relative_error(&a.logits[..n], &b.logits[..n]));
            all += b.tokens.len();
            same += a.tokens.iter().zip(&b.tokens).take_while(|(a, b)| a == b).count();
            println!("{} tokens of prompt: error so far {worst:.1e}", request.prompt.len());
        }
        println!("{} and {}: logits {worst:.1e}, {same} of {all} tokens equal the CPU's", main.name(), index.name());
        assert!(worst < 3e-2, "{worst}");
    }
}

#[test]
fn the_same_bits_however_it_is_served() {
    let requests = proof::workload(9, 16, 700, 24, 16, 2432);
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
        let backend = on_gpu(seats, step_tokens, FORMATS).unwrap();
        let mut engine = Engine::new(backend, EngineOptions { max_chunk_tokens: chunk, ..plain() });
        let served = proof::serve(&mut engine, &requests, 2);
        let comparison = proof::compare(&reference, &served);
        println!(
            "{way}: {} tokens, {} differences, {} logits differ, most by {}",
            comparison.tokens,
            comparison.differences,
            comparison.logit_differences,
            comparison.max_logit_difference
        );
        differences.insert(way, comparison.differences + comparison.logit_differences);
    }
    assert!(differences.values().all(|&n| n == 0), "{differences:?}");
}
