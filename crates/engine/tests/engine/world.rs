//! What all tests share: layouts, limits, requests, recorded events, a seeded random source.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use longwave_engine::report::PrefixReport;
use longwave_engine::request::{Event, EventSink, FinishReason, Request};
use longwave_engine::sim::{SimBackend, SimOptions};
use longwave_engine::step::{Limits, Token};
use longwave_engine::{Engine, EngineOptions, Status};
use longwave_model::geometry::{CacheFormats, CacheLayout, IndexFormat, MainFormat};
use longwave_model::{LayerKind, ModelConfig, presets};

pub const VOCAB: u32 = 61;

const FP8: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp8 };

pub fn flash_layout() -> CacheLayout {
    CacheLayout::new(&presets::flash(), FP8)
}

/// Ratios 0, 128, 4, 128, 4 and the MTP layer.
pub fn tiny_layout() -> CacheLayout {
    use LayerKind::{C4, C128, Window};
    let layers = vec![Window, C128, C4, C128, C4];
    CacheLayout::new(&ModelConfig { num_hidden_layers: 5, layers, ..presets::flash() }, FP8)
}

/// Room for everything.
pub fn wide_limits() -> Limits {
    Limits { seats: 16, step_tokens: 2048, context: 4096, units: [600; 3], drafts: 7, in_flight: 1, vocab: VOCAB }
}

pub fn paranoid() -> EngineOptions {
    EngineOptions { paranoid: true, ..EngineOptions::default() }
}

/// A greedy request.
pub fn request(prompt: Vec<Token>, max_tokens: u32) -> Request {
    Request::greedy(prompt, max_tokens)
}

/// A prompt that depends on `seed` in every token.
pub fn prompt(seed: u64, len: u32) -> Vec<Token> {
    let mut rng = Rng(seed);
    (0..len).map(|_| rng.below(VOCAB)).collect()
}

/// The events of one request.
#[derive(Clone, Default)]
pub struct Record(Arc<Mutex<Vec<Event>>>);

impl Record {
    pub fn sink(&self) -> EventSink {
        let events = Arc::clone(&self.0);
        Box::new(move |e| events.lock().unwrap().push(e))
    }

    pub fn events(&self) -> Vec<Event> {
        self.0.lock().unwrap().clone()
    }

    pub fn tokens(&self) -> Vec<Token> {
        let tokens = |e: Event| if let Event::Tokens { tokens, .. } = e { tokens } else { Vec::new() };
        self.events().into_iter().flat_map(tokens).collect()
    }

    pub fn logits(&self) -> Vec<f32> {
        let logits = |e: Event| if let Event::Logits { logits, .. } = e { logits } else { Vec::new() };
        self.events().into_iter().flat_map(logits).collect()
    }

    /// What the prefix cache did, once it had a seat.
    pub fn report(&self) -> Option<PrefixReport> {
        self.events()
            .into_iter()
            .find_map(|e| if let Event::Scheduled { prefix, .. } = e { Some(prefix) } else { None })
    }

    pub fn finished(&self) -> Option<FinishReason> {
        self.events().into_iter().find_map(|e| if let Event::Finished { reason, .. } = e { Some(reason) } else { None })
    }

    /// Checks the contract of events: at most one `Scheduled`, first; exactly one `Finished`, last, with true counts.
    pub fn assert_complete(&self) -> FinishReason {
        let events = self.events();
        let count = |wanted: fn(&Event) -> bool| events.iter().filter(|e| wanted(e)).count();
        assert_eq!(count(|e| matches!(e, Event::Finished { .. })), 1, "{events:?}");
        assert!(count(|e| matches!(e, Event::Scheduled { .. })) <= 1);
        if events.len() > 1 {
            let Event::Scheduled { cached_tokens, prefix } = events[0] else { panic!("not scheduled: {events:?}") };
            assert_eq!(cached_tokens, prefix.cached_tokens);
            // Up to the last boundary that was found or, without windows there, to a checkpoint.
            let PrefixReport { cached_tokens, replayed_tokens, matched_tokens, .. } = prefix;
            let reused = cached_tokens + replayed_tokens;
            assert!(reused <= matched_tokens && reused % 256 == 0, "{prefix:?}");
            assert!(replayed_tokens == 0 || reused == matched_tokens, "{prefix:?}");
            assert!(prefix.first_difference.is_none_or(|at| at >= prefix.matched_tokens), "{prefix:?}");
        }
        let Some(Event::Finished { reason, output_tokens, cached_tokens, prompt_tokens }) = events.last() else {
            panic!("not last: {events:?}")
        };
        assert_eq!(*output_tokens as usize, self.tokens().len());
        assert_eq!(*cached_tokens, self.report().map_or(0, |r| r.cached_tokens));
        assert!(*cached_tokens < (*prompt_tokens).max(1), "the last token of a prompt is computed");
        reason.clone()
    }
}

/// Between requests only the prefix cache holds blocks.
pub fn assert_home(status: &Status) {
    assert_eq!((status.running, status.waiting), (0, 0), "idle with work left");
    assert_eq!(status.units_used, status.units_cached, "blocks did not come home");
    assert_eq!(status.units_promised, [0; 3]);
}

/// What a request gives alone, in whole chunks, without drafts, with room for everything and nothing cached.
pub fn solo(layout: &CacheLayout, context: u32, request: &Request) -> Record {
    let limits = Limits { seats: 1, context, ..wide_limits() };
    let options = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
    let mut engine = Engine::new(SimBackend::new(layout.clone(), limits, SimOptions::default()), options);
    let record = Record::default();
    engine.submit(request.clone(), record.sink()).unwrap();
    while engine.step() {}
    record.assert_complete();
    record
}

/// splitmix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }

    pub fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }
}

/// A folder that is removed with everything in it.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("longwave-engine-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
