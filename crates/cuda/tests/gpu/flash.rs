//! Flash's layers with random weights: they load, give finite logits, and take so long. FLASH_LAYERS says how many layers
//! (12 by default: 44 GiB); the head and the embedding are whole.

use std::sync::mpsc;
use std::time::Instant;

use longwave_cuda::backend::{CudaBackend, CudaOptions, Load};
use longwave_engine::operators::OperatorTime;
use longwave_engine::request::{Event, FinishReason, Request};
use longwave_engine::step::{Backend, Token};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::{CacheFormats, IndexFormat, MainFormat, presets};

use crate::rig;

/// Milliseconds per step of `batch` sequences behind `context` tokens each, and tokens per second of their prefill.
fn decode(engine: &mut Engine<CudaBackend>, batch: usize, context: usize, seed: u32) -> (f64, f64) {
    const STEPS: u32 = 64;
    let (sender, events) = mpsc::channel();
    let began = Instant::now();
    for i in 0..batch {
        let token = |p: usize| ((p as u64 + 1) * (u64::from(seed) + 7919 * (i as u64 + 1)) % 129_000) as u32;
        let prompt: Vec<Token> = (0..context).map(token).collect();
        let sender = sender.clone();
        let request = Request { stop_tokens: Vec::new(), ..Request::greedy(prompt, STEPS) };
        engine.submit(request, Box::new(move |event| sender.send((i, event)).unwrap())).unwrap();
    }
    let (mut tokens, mut first, mut last) = (vec![0; batch], None, None);
    while engine.step() {
        for (i, event) in events.try_iter() {
            match event {
                Event::Tokens { tokens: new, .. } => tokens[i] += new.len(),
                Event::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
                _ => {}
            }
        }
        // From where all sequences decode together until the first one ends.
        let sum: usize = tokens.iter().sum();
        if first.is_none() && tokens.iter().all(|&n| n > 0) {
            first = Some((Instant::now(), sum));
        }
        if tokens.iter().all(|&n| n < STEPS as usize) {
            last = Some((Instant::now(), sum));
        }
    }
    let ((from, before), (to, after)) = (first.unwrap(), last.unwrap());
    let steps = (after - before) as f64 / batch as f64;
    let prefill = (batch * context) as f64 / (from - began).as_secs_f64();
    ((to - from).as_secs_f64() * 1e3 / steps, prefill)
}

/// A number from the environment.
pub fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Prints where the time went.
pub fn print(times: &[OperatorTime]) {
    let sum: f64 = times.iter().map(|time| time.us).sum();
    for time in times {
        let (share, each) = (100.0 * time.us / sum, time.us / f64::from(time.calls));
        println!("    {:<28} {share:5.1} %  {:6} calls of {each:8.2} us", time.name, time.calls);
    }
}

#[test]
fn flash_layers_decode_and_are_measured() {
    if rig::gpus().is_none() {
        return;
    }
    let mut config = presets::flash();
    config.num_hidden_layers = number("FLASH_LAYERS", 12);
    config.layers.truncate(config.num_hidden_layers);
    let drafts = number("FLASH_DRAFTS", 0) as u32;
    config.num_nextn_predict_layers = usize::from(drafts > 0);
    let formats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };
    let options = CudaOptions {
        gpu: 0,
        ranks: number("FLASH_RANKS", 1) as u32,
        seats: 32,
        step_tokens: number("FLASH_STEP", 2048) as u32,
        context: 1 << 20,
        cache_bytes: Some((number("FLASH_CACHE_GIB", 8) as u64) << 30),
        formats,
        drafts,
        streams: number("FLASH_STREAMS", 2) as u32,
    };
    let began = Instant::now();
    let backend = CudaBackend::open(Load::Dummy(config.clone()), options, |_| ()).unwrap();
    println!(
        "{} layers: {}; open after {:.1} s",
        config.num_hidden_layers,
        backend.summary(),
        began.elapsed().as_secs_f64()
    );
    let mut engine = Engine::new(backend, EngineOptions { prefix_cache: false, drafts, ..EngineOptions::default() });
    let _ = decode(&mut engine, 1, 100, 1);
    for (batch, context) in [(1, 1000), (1, 8192), (8, 1000), (32, 1000), (1, number("FLASH_CONTEXT", 65_536))] {
        let (ms, prefill) = decode(&mut engine, batch, context, 3);
        println!("batch {batch}, context {context}: {ms:.2} ms a step, prefill {prefill:.0} tokens/s");
        assert!(ms.is_finite());
        if std::env::var_os("FLASH_OPERATORS").is_some() {
            engine.backend_mut().time_operators(true).unwrap();
            let _ = decode(&mut engine, batch, context.min(64), 3);
            let times = engine.backend_mut().time_operators(false).unwrap();
            print(&times);
        }
    }
    let memory = engine.backend_mut().memory().unwrap();
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    println!("memory: {:.2} GiB planned, {:.2} used", gib(memory.planned_bytes), gib(memory.used_bytes));
    assert!(memory.used_bytes <= memory.planned_bytes, "{memory:?}");
    // Where the time of a long prefill goes, and a decode step behind it.
    let context = number("FLASH_PREFILL", 0);
    if context > 0 {
        engine.backend_mut().time_operators(true).unwrap();
        let (ms, prefill) = decode(&mut engine, 1, context, 5);
        println!("batch 1, context {context} with timers: {ms:.2} ms a step, prefill {prefill:.0} tokens/s");
        print(&engine.backend_mut().time_operators(false).unwrap());
    }
}
