//! What queries read, as the attention core tells it: it explains the core's own output, and nobody's asking changes a bit.

use std::sync::mpsc;

use longwave_cpu::forward::Seen;
use longwave_cpu::numerics::Profile;
use longwave_cpu::ops::rows;
use longwave_engine::attention::{LayerKind, Reads};
use longwave_engine::request::{Event, FinishReason, Refusal, Request};
use longwave_engine::step::{Backend, Token};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::geometry::CacheKind;

use crate::invariance::prompt;
use crate::rig::{CACHE, EXACT, Rig};
use crate::served;

const TOKENS: usize = 400;

/// Reads of a layer with the core's outputs, its window rows and the entries that were picked.
struct Run {
    reads: Vec<Reads>,
    outputs: Vec<f32>,
    window: Vec<f32>,
    picked: Vec<Vec<u32>>,
}

fn run(rig: &mut Rig, layer: u32, tokens: &[Token]) -> Run {
    let mut run = Run { reads: Vec::new(), outputs: Vec::new(), window: Vec::new(), picked: Vec::new() };
    let mut tap = |l: usize, seen: Seen| match seen {
        _ if l != layer as usize => {}
        Seen::Attn(o) => run.outputs.extend_from_slice(o),
        Seen::Kv(kv) => run.window.extend_from_slice(kv),
        Seen::Selected(picked) => run.picked.extend_from_slice(picked),
        _ => {}
    };
    let reads = rig.told(layer, tokens, &mut tap);
    Run { reads, ..run }
}

/// The compressed entry `j` of a layer as it is stored.
fn entry(rig: &Rig, layer: usize, kind: LayerKind, j: u32) -> Vec<f32> {
    let cache = if kind == LayerKind::C4 { CacheKind::C4Main } else { CacheKind::C128Main };
    let place = rig.cache.place(cache, layer).unwrap();
    let page = rig.cache.page(place, rig.tables(0).must(place, j * kind.ratio()));
    let mut row = vec![0.0; 512];
    rows::load_main(rig.model.formats.main, page, j as usize % place.rows, place.rows, &mut row);
    row
}

#[test]
fn the_weights_that_are_told_give_the_output_of_the_attention_core() {
    for (profile, formats, slack) in [(Profile::Exact, EXACT, 2e-5), (Profile::Serving, CACHE, 2e-2)] {
        let mut rig = Rig::new(profile, formats, 1, 512);
        let tokens = prompt(TOKENS, 11);
        for (layer, kind) in rig.model.config.layers.clone().into_iter().enumerate() {
            let run = run(&mut rig, layer as u32, &tokens);
            assert_eq!(run.reads.len(), TOKENS);
            let heads = rig.model.config.num_attention_heads;
            for (i, reads) in run.reads.iter().enumerate() {
                assert_eq!(reads.position as usize, i);
                assert_eq!(reads.window_from as usize, (i + 1).saturating_sub(128));
                assert_eq!(reads.window.len(), i + 1 - reads.window_from as usize);
                let whole = match kind {
                    LayerKind::Window => 0,
                    kind => (i as u32 + 1) / kind.ratio(),
                };
                let wanted = if kind == LayerKind::C4 { run.picked[i].clone() } else { (0..whole).collect() };
                assert_eq!(reads.entries, wanted, "layer {layer}, query {i}");
                let all = || reads.window.iter().chain(&reads.entry_weights).chain([&reads.sink]);
                assert!(all().all(|&weight| (0.0..=1.01).contains(&weight)));
                let sum: f32 = all().sum();
                assert!((sum - 1.0).abs() < slack, "layer {layer}, query {i}: {sum}");
            }
            // Some queries in full: their rows, weighted, are the mean of the heads' outputs.
            for i in [0, 1, 3, 64, 127, 128, 255, 300, TOKENS - 1] {
                let reads = &run.reads[i];
                let mut mean = vec![0.0f64; 512];
                let mut add = |row: &[f32], weight: f32| {
                    mean.iter_mut().zip(row).for_each(|(m, v)| *m += f64::from(*v) * f64::from(weight));
                };
                for (p, &weight) in (reads.window_from as usize..).zip(&reads.window) {
                    add(&run.window[p * 512..][..512], weight);
                }
                for (&j, &weight) in reads.entries.iter().zip(&reads.entry_weights) {
                    add(&entry(&rig, layer, kind, j), weight);
                }
                let outputs = &run.outputs[i * heads * 512..][..heads * 512];
                for (c, got) in mean.iter().enumerate() {
                    let want = outputs.iter().skip(c).step_by(512).map(|&v| f64::from(v)).sum::<f64>() / heads as f64;
                    assert!((got - want).abs() < 1e-4, "layer {layer}, query {i}, channel {c}: {got} {want}");
                }
            }
        }
    }
}

/// A request's tokens, and what it was told.
fn serve(options: EngineOptions, drafts: u32, requests: &[Request]) -> Vec<(Vec<Token>, Vec<Reads>)> {
    let backend = served::drafting(96, 4, 64 << 20, drafts);
    let mut engine = Engine::new(backend, EngineOptions { paranoid: true, drafts, ..options });
    let (sender, events) = mpsc::channel();
    for (i, request) in requests.iter().enumerate() {
        let sender = sender.clone();
        engine.submit(request.clone(), Box::new(move |e| sender.send((i, e)).unwrap())).unwrap();
    }
    while engine.step() {}
    let mut out = vec![(Vec::new(), Vec::new()); requests.len()];
    for (i, event) in events.try_iter() {
        match event {
            Event::Tokens { tokens, .. } => out[i].0.extend(tokens),
            Event::Attention(reads) => out[i].1.extend(reads),
            Event::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
            Event::Scheduled { cached_tokens, .. } => {
                assert!(requests[i].attention.is_none() || cached_tokens == 0, "every position is told of");
            }
            Event::Logits { .. } => {}
        }
    }
    out
}

#[test]
fn chunks_batches_and_drafts_change_no_bit_of_what_is_told_and_asking_changes_no_token() {
    let plain: Vec<Request> = (0..4).map(|i| Request::greedy(prompt(150 + 60 * i, i as u64), 9)).collect();
    let asking = |layer: u32| -> Vec<Request> {
        plain.iter().map(|r| Request { attention: Some(layer), ..r.clone() }).collect()
    };
    let silent = serve(EngineOptions::default(), 0, &plain);
    assert!(silent.iter().all(|(tokens, reads)| tokens.len() == 9 && reads.is_empty()));
    for layer in [0, 1, 2] {
        let told = serve(EngineOptions::default(), 0, &asking(layer));
        for ((request, silent), told) in plain.iter().zip(&silent).zip(&told) {
            assert_eq!(silent.0, told.0);
            // Of each position that was computed once: the last token was not.
            let positions: Vec<u32> = told.1.iter().map(|reads| reads.position).collect();
            assert_eq!(positions, (0..request.prompt.len() as u32 + 8).collect::<Vec<_>>());
        }
        let pieces = EngineOptions { max_chunk_tokens: Some(7), ..EngineOptions::default() };
        assert!(told == serve(pieces, 0, &asking(layer)), "chunks of 7");
        assert!(told == serve(EngineOptions::default(), 3, &asking(layer)), "drafts");
        // Beside others that do not ask.
        let mut mixed = plain.clone();
        mixed[2] = asking(layer).remove(2);
        let mixed = serve(EngineOptions::default(), 0, &mixed);
        assert!(mixed[2] == told[2] && mixed[0] == silent[0] && mixed[3] == silent[3]);
    }
}

#[test]
fn a_layer_that_is_not_there_is_refused_with_those_that_are() {
    let backend = served::drafting(96, 4, 64 << 20, 0);
    let layers = backend.attention_layers().len() as u32;
    let mut engine = Engine::new(backend, EngineOptions::default());
    let (sender, events) = mpsc::channel();
    let request = Request { attention: Some(layers), ..Request::greedy(prompt(9, 1), 1) };
    engine.submit(request, Box::new(move |e| sender.send(e).unwrap())).unwrap();
    let Event::Finished { reason: FinishReason::Refused(refusal), .. } = events.recv().unwrap() else { panic!() };
    assert_eq!(refusal, Refusal::NoAttention { layer: layers, layers });
    assert!(refusal.to_string().contains("expected a layer from 0 to 4"), "{refusal}");
}
