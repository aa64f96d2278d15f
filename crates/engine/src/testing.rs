//! Small layouts for the unit tests of this crate.

use longwave_model::config::LayerKind;
use longwave_model::geometry::{CacheFormats, CacheLayout, IndexFormat, MainFormat};
use longwave_model::presets;

use crate::admission::Admission;
use crate::blocks::{SequenceBlocks, Span};
use crate::pool::Pools;
use crate::prefix::{PrefixCache, PrefixOptions, Reuse};
use crate::request::RequestId;
use crate::sequence::{Sequence, Waiting};

/// fp8 for both caches.
pub const FP8: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp8 };

/// Five layers (ratios 0, 128, 4, 128, 4) and the MTP layer: every group kind, one group of each but the window.
pub fn tiny_layout() -> CacheLayout {
    use LayerKind::{C4, C128, Window};
    let config = longwave_model::ModelConfig {
        num_hidden_layers: 5,
        layers: vec![Window, C128, C4, C128, C4],
        vocab_size: 1000,
        ..presets::flash()
    };
    CacheLayout::new(&config, FP8)
}

/// A greedy request.
pub fn request(prompt: Vec<u32>, max_tokens: u32) -> crate::request::Request {
    crate::request::Request {
        prompt,
        max_tokens,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        sampling: crate::step::Sampling::default(),
        priority: 0,
        salt: 0,
        logits: crate::step::ReturnLogits::No,
    }
}

/// An empty prefix cache.
pub fn cache(interval: u32) -> PrefixCache {
    PrefixCache::new(&tiny_layout(), PrefixOptions { on: true, interval, answers: false, replay: false, drafts: false })
}

/// A sequence that computed all of its prompt and published nothing.
pub fn computed(pools: &mut Pools, prompt: Vec<u32>, interval: u32) -> Sequence {
    let (layout, len) = (tiny_layout(), prompt.len() as u32);
    let need = Admission::new(&layout, [9999; 3], 64, 0).need(len, 1);
    let waiting = Waiting::new(RequestId(0), request(prompt, 1), Box::new(|_| ()), 0, 1, need);
    let mut blocks = SequenceBlocks::new(&layout, len);
    blocks.extend(&layout, pools, Span { start: 0, end: len, drafts: 0 });
    let mut sequence = Sequence::new(waiting, blocks, len);
    sequence.reuse = Reuse { active: true, interval, ..Reuse::default() };
    sequence
}
