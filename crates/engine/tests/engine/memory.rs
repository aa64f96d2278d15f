//! What one request is promised and what it holds, for the released models; the table of docs/memory.md.

use longwave_engine::step::Limits;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::geometry::{CacheFormats, CacheLayout, IndexFormat, MainFormat};
use longwave_model::presets;

use crate::null::NullBackend;
use crate::world::request;

const CHUNK: u32 = 8192;

/// What one request of `context` positions took, bytes.
struct Held {
    promised: u64,
    prefill: u64,
    decode: u64,
    /// Promised while it decodes.
    promised_decode: u64,
    long_lived: u64,
}

fn held(layout: &CacheLayout, context: u32, drafts: u32) -> Held {
    let blocks = context.div_ceil(256);
    let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * blocks + 64);
    let limits = Limits { seats: 1, step_tokens: CHUNK, context, units, drafts, in_flight: 1, vocab: 9 };
    let options = EngineOptions { prefix_cache: false, drafts, paranoid: true, ..EngineOptions::default() };
    let mut engine = Engine::new(NullBackend::new(limits, layout.clone()), options);
    engine.submit(request(vec![1; context as usize - 600], 600), Box::new(|_| ())).unwrap();
    let mut held = Held { promised: 0, prefill: 0, decode: 0, promised_decode: 0, long_lived: 0 };
    while engine.step() {
        let status = engine.status();
        let used = layout.bytes(status.units_used);
        held.promised = held.promised.max(layout.bytes(status.units_promised));
        if status.output_tokens > 0 && status.running > 0 {
            held.promised_decode = layout.bytes(status.units_promised);
        }
        if status.output_tokens == 0 {
            held.prefill = held.prefill.max(used)
        } else {
            held.decode = held.decode.max(used)
        }
    }
    // The last token is delivered and never cached.
    held.long_lived = layout.bytes(layout.long_lived_units().map(|u| u * (context - 1).div_ceil(256)));
    held
}

/// Bytes that vLLM 0.33 asks for to admit a request, and that it holds while it decodes: blocks of one stride, windows of
/// two batches in flight (its `max_num_batched_tokens` is 8,192 on an H200 and scheduling is asynchronous).
fn vllm(stride: u64, context: u64) -> (u64, u64) {
    let in_flight = 2 * 8192;
    let windows = [(128, 64), (128, 64), (8, 4), (128, 8)];
    let admission: u64 =
        windows.iter().map(|&(w, block): &(u64, u64)| (w - 1 + in_flight).min(context).div_ceil(block) + 1).sum();
    let pages = context.div_ceil(256);
    // Section 1.6 of the study of peers: 26 blocks in steady decode.
    ((pages + admission) * stride, (pages + 26) * stride)
}

#[test]
fn a_request_holds_what_was_planned_and_little_beside_its_long_lived_blocks() {
    let fp8 = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp8 };
    println!(
        "model | context | promised | used in prefill | used in decode | of it windows and state | vLLM admits with | vLLM holds"
    );
    for (name, config, stride, most) in
        [("Flash", presets::flash(), 1_002_240, 8_000_000), ("Pro", presets::pro(), 1_435_968, 11_500_000)]
    {
        let layout = CacheLayout::new(&config, fp8);
        for context in [8 << 10, 128 << 10, 1 << 20] {
            let h = held(&layout, context, 0);
            let (admits, holds) = vllm(stride, u64::from(context));
            let small = h.decode - h.long_lived;
            let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
            println!(
                "{name} | {context} | {} | {} | {} | {} | {} | {}",
                mb(h.promised),
                mb(h.prefill),
                mb(h.decode),
                mb(small),
                mb(admits),
                mb(holds)
            );
            assert!(h.prefill.max(h.decode) <= h.promised);
            assert!(h.promised - h.prefill.max(h.decode) < 14_000_000, "planned {} used {}", h.promised, h.decode);
            assert!(small <= most, "{name}: {small} bytes beside the long-lived blocks");
            assert!(h.promised < admits);
            // Long-lived units of the large pool have one page more than there are c4 layers: 4 % of them.
            assert!((h.decode as f64) < 1.02 * holds as f64);
        }
    }
    // With drafts the state of the open c128 group keeps rows that a rejection may take back.
    for drafts in [1, 3, 7] {
        let layout = CacheLayout::new(&presets::flash(), fp8);
        let h = held(&layout, 8 << 10, drafts);
        println!(
            "Flash, {drafts} drafts: {:.1} MB of windows and state at most",
            (h.promised_decode - h.long_lived) as f64 / 1e6
        );
        assert!(h.promised_decode - h.long_lived < 13_000_000);
    }
}
