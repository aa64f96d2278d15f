//! Small layouts for the unit tests of this crate.

use longwave_model::config::LayerKind;
use longwave_model::geometry::{CacheFormats, CacheLayout, IndexFormat, MainFormat};
use longwave_model::presets;

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
