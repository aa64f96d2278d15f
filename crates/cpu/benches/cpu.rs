//! Tokens per second of the tiny model on this machine's CPU, beside what the machine can do: read bandwidth over a
//! buffer larger than the caches and fused multiply-adds from registers, measured in the same run. Prints JSON lines.
//!
//! `cargo bench -p longwave-cpu` (all), `-- decode`, `-- prefill 32768`, `-- drafts`, `-- replay 16384`.

use std::time::Instant;

use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_cpu::{roofs, simd};
use longwave_engine::request::{Event, Request};
use longwave_engine::step::*;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::{CacheFormats, CacheLayout, Checkpoint, IndexFormat, MainFormat};

const FORMATS: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };

fn testdata() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata")
}

fn backend(options: CpuOptions) -> CpuBackend {
    let ckpt = Checkpoint::open(&testdata().join("tiny"), &mut |_| {}).expect("the tiny checkpoint");
    CpuBackend::new(Model::new(&ckpt, Profile::Serving, FORMATS), options).expect("the tiny model drafts")
}

/// Prompt ids of a golden vector.
fn golden(name: &str) -> Vec<Token> {
    let bytes = std::fs::read(testdata().join(format!("golden/{name}.cache.safetensors"))).expect("golden vectors");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("a good file");
    let ids = tensors.tensor("ids").expect("golden vectors hold their ids");
    ids.data().chunks(8).map(|c| i64::from_le_bytes(c.try_into().expect("eight bytes")) as Token).collect()
}

/// Generates after a golden prompt, one request at a time, greedily and with 5 seeds at temperature 1. Returns tokens
/// per second, counted after the first token, and what to print beside it.
fn drafts(name: &str, drafts: u32) -> (f64, String) {
    let options = CpuOptions { seats: 1, step_tokens: 4096, context: 4096, cache_bytes: 256 << 20, drafts };
    let mut engine = Engine::new(backend(options), EngineOptions { drafts, ..EngineOptions::default() });
    let prompt = golden(name);
    let (mut seconds, mut tokens) = (0.0, 0);
    for seed in 0..6 {
        let temperature = if seed == 0 { 0.0 } else { 1.0 };
        let sampling = Sampling { temperature, seed, ..Sampling::default() };
        let request = Request { stop_tokens: vec![1], sampling, ..Request::greedy(prompt.clone(), 200) };
        engine.submit(request, Box::new(|_: Event| ())).expect("an empty queue");
        engine.step();
        let (start, before) = (Instant::now(), engine.status().output_tokens);
        while engine.step() {}
        seconds += start.elapsed().as_secs_f64();
        tokens += engine.status().output_tokens - before;
    }
    let s = engine.status();
    let counts = format!(
        "\"tokens\":{tokens},\"steps\":{},\"proposed\":{},\"accepted\":{}",
        s.steps, s.drafts_proposed, s.drafts_accepted
    );
    (tokens as f64 / seconds, counts)
}

/// A backend with one seat whose whole context is mapped.
struct Rig {
    backend: CpuBackend,
    step: u64,
    mapped: bool,
    context: u32,
}

impl Rig {
    fn new(context: u32) -> Rig {
        let options = CpuOptions { seats: 1, step_tokens: 4096, context, cache_bytes: 8 << 30, drafts: 0 };
        Rig { backend: backend(options), step: 0, mapped: false, context }
    }

    fn run(&mut self, start: u32, tokens: Vec<Token>) {
        let mut step = Step { number: self.step, tokens, ..Step::default() };
        self.step += 1;
        if !self.mapped {
            let layout: CacheLayout = self.backend.layout().clone();
            let mut next = [0u32; 3];
            for (g, spec) in layout.groups.iter().enumerate() {
                // Sliding groups wrap around a few blocks, as a window does.
                let first = next[spec.bucket as usize];
                let most = if spec.is_sliding() { 6 } else { u32::MAX };
                for index in 0..self.context.div_ceil(spec.block_tokens) {
                    step.writes.push(TableWrite { group: g as u8, index, block: BlockId(first + index % most) });
                }
                next[spec.bucket as usize] = first + self.context.div_ceil(spec.block_tokens).min(most);
            }
        }
        let n = step.tokens.len() as u32;
        let seq = SeqStep {
            fresh: !self.mapped,
            writes: 0..step.writes.len() as u32,
            sample: Some(Sampling::default()),
            ..SeqStep::new(Seat(0), start, 0..n)
        };
        step.seqs.push(seq);
        self.mapped = true;
        let t = self.backend.submit(&step).expect("a good step");
        self.backend.collect(t).expect("a result");
    }
}

/// Seconds until the first token behind a prefix of `context` tokens whose blocks are cached and whose checkpoints are
/// gone, and how many of the tokens were replayed: best of three.
fn behind_lost_windows(context: u32, replay: bool) -> (f64, u64) {
    let options = CpuOptions { seats: 1, step_tokens: 512, context: context + 9, cache_bytes: 1 << 30, drafts: 0 };
    let mut engine = Engine::new(backend(options), EngineOptions { replay, ..EngineOptions::default() });
    let ask = |engine: &mut Engine<CpuBackend>| {
        let request = Request::greedy(tokens(context as usize + 1), 1);
        let start = Instant::now();
        engine.submit(request, Box::new(|_: Event| ())).expect("an empty queue");
        while engine.step() {}
        start.elapsed().as_secs_f64()
    };
    ask(&mut engine);
    let mut best = f64::MAX;
    for _ in 0..3 {
        engine.drop_checkpoints();
        best = best.min(ask(&mut engine));
    }
    (best, engine.status().prefix.replayed_tokens / 3)
}

fn tokens(n: usize) -> Vec<Token> {
    (0..n as u32).map(|i| 16 + (i * 7919) % 2400).collect()
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let what = args.first().map_or("all", String::as_str);
    // A buffer larger than the caches.
    let (tflops, gbs) = (roofs::flop_per_s(20_000_000) / 1e12, roofs::read_bytes_per_s(1 << 30) / 1e9);
    let threads = rayon::current_num_threads();
    println!(
        "{{\"machine\":{{\"threads\":{threads},\"simd\":\"{}\",\"fma_tflops\":{tflops:.3},\"read_gb_s\":{gbs:.1}}}}}",
        simd::level().name()
    );
    if what == "all" || what == "decode" {
        let contexts: Vec<u32> = args.get(1).and_then(|a| a.parse().ok()).map_or(vec![512, 8192, 32768], |n| vec![n]);
        for context in contexts {
            let mut rig = Rig::new(context + 1100);
            let chunk = 512;
            for start in (0..context).step_by(chunk) {
                rig.run(start, tokens(chunk.min((context - start) as usize)));
            }
            let n = 512;
            let t = Instant::now();
            for i in 0..n {
                rig.run(context + i, tokens(1));
            }
            let s = t.elapsed().as_secs_f64() / f64::from(n);
            let bytes = rig.backend.model().bytes_per_token() as f64;
            println!(
                "{{\"decode\":{{\"context\":{context},\"tokens_s\":{:.1},\"ms\":{:.3},\"weight_mb\":{:.2},\"weights_gb_s\":{:.2},\"share_of_read\":{:.3}}}}}",
                1.0 / s,
                s * 1e3,
                bytes / 1e6,
                bytes / s / 1e9,
                bytes / s / 1e9 / gbs
            );
        }
    }
    if what == "all" || what == "drafts" {
        for name in ["short", "tool"] {
            // The best of some rounds over all depths: a busy machine slows single runs.
            let depths = [0, 1, 2, 3, 5];
            let rounds: Vec<Vec<(f64, String)>> =
                (0..4).map(|_| depths.iter().map(|&depth| drafts(name, depth)).collect()).collect();
            for (i, depth) in depths.iter().enumerate() {
                let best = rounds.iter().map(|r| r[i].0).fold(0.0, f64::max);
                let counts = &rounds[0][i].1;
                println!("{{\"drafts\":{{\"prompt\":\"{name}\",\"depth\":{depth},\"tokens_s\":{best:.1},{counts}}}}}");
            }
        }
    }
    if what == "all" || what == "replay" {
        let context: u32 = args.get(1).and_then(|a| a.parse().ok()).unwrap_or(16384);
        let [(again, _), (replay, replayed)] = [false, true].map(|on| behind_lost_windows(context, on));
        println!(
            "{{\"replay\":{{\"context\":{context},\"replayed\":{replayed},\"seconds\":{replay:.3},\"computed_again_seconds\":{again:.3}}}}}"
        );
    }
    if what == "all" || what == "prefill" {
        let lengths: Vec<u32> = args.get(1).and_then(|a| a.parse().ok()).map_or(vec![2048, 8192, 32768], |n| vec![n]);
        for n in lengths {
            let mut rig = Rig::new(n + 600);
            let t = Instant::now();
            for start in (0..n).step_by(512) {
                rig.run(start, tokens(512.min((n - start) as usize)));
            }
            let s = t.elapsed().as_secs_f64();
            let flop = rig.backend.model().prefill_flop(n as usize);
            println!(
                "{{\"prefill\":{{\"tokens\":{n},\"tokens_s\":{:.1},\"seconds\":{s:.2},\"gflop_per_token\":{:.4},\"tflops\":{:.4},\"share_of_fma\":{:.3}}}}}",
                f64::from(n) / s,
                flop / f64::from(n) / 1e9,
                flop / s / 1e12,
                flop / s / 1e12 / tflops
            );
        }
    }
}
