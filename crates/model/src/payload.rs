//! The published count of one request (model.md 11.3, 11.4): compressed entries, index keys and the windows of the main
//! layers, in all and by layer, beside what V3.2's cache would take.
//!
//! Plain data and arithmetic over a configuration. Leaves out what the published figures leave out: the MTP window,
//! compressor rows, rounding to blocks. `memory.rs` counts what the pools really hand out.

use serde::Serialize;

use crate::config::{LayerKind, ModelConfig};
use crate::geometry::CacheFormats;

/// Values of a V3.2 layer's latent per token: 512 and 64 rotary ones.
const V32_LATENT: u32 = 576;
/// Values of a V3.2 layer's index key per token.
const V32_INDEX: u32 = 128;

/// One kind of cache in the published count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheName {
    /// Compressed entries of ratio 4.
    C4Main,
    /// Index keys of ratio 4.
    C4Index,
    /// Compressed entries of ratio 128.
    C128Main,
    /// Raw entries of the last 128 positions of every main layer.
    Window,
}

impl CacheName {
    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            CacheName::C4Main => "c4 main",
            CacheName::C4Index => "c4 index",
            CacheName::C128Main => "c128 main",
            CacheName::Window => "window",
        }
    }
}

/// Payload of one kind of cache.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CacheLine {
    /// Which.
    pub cache: CacheName,
    /// Main layers that have it.
    pub layers: u32,
    /// Entries per layer at this context.
    pub entries: u64,
    /// Bytes of one entry.
    pub entry_bytes: u32,
    /// Bytes of one layer: `entries * entry_bytes`.
    pub layer_bytes: u64,
    /// Bytes of all layers.
    pub total_bytes: u64,
}

/// The published count of one request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Payload {
    /// c4 main, c4 index, c128 main, window; kinds without layers are listed with 0.
    pub caches: [CacheLine; 4],
    /// Sum in bytes.
    pub total_bytes: u64,
    /// What one more token adds in the long run, in bytes: the windows do not grow.
    pub bytes_per_token: f64,
}

/// Payload of one main layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerLine {
    /// `window`, `c4` or `c128`.
    pub kind: &'static str,
    /// Bytes of each kind of cache, in the order of [`Payload::caches`].
    pub bytes: [u64; 4],
}

/// The same number of layers with V3.2's cache: a latent and an index key for every token, in bf16.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct V32Stack {
    /// Values of a latent.
    pub latent_values: u32,
    /// Values of an index key.
    pub index_values: u32,
    /// Bytes of one value.
    pub value_bytes: u32,
    /// Bytes per token and layer.
    pub bytes_per_token_and_layer: u32,
    /// Layers, as many as the model has.
    pub layers: u32,
    /// Bytes of one request.
    pub total_bytes: u64,
    /// `total_bytes` over the payload of this model.
    pub times_larger: f64,
}

pub(crate) fn payload(config: &ModelConfig, formats: CacheFormats, context: u32) -> Payload {
    let count = |kind| config.layers_of(kind).len() as u32;
    let (c4, c128) = (count(LayerKind::C4), count(LayerKind::C128));
    let (main, index) = (formats.main.row_bytes(), formats.index.row_bytes());
    let line = |cache, layers: u32, entries: u32, entry_bytes: u32| {
        let layer_bytes = u64::from(entries) * u64::from(entry_bytes);
        let total_bytes = layer_bytes * u64::from(layers);
        CacheLine { cache, layers, entries: entries.into(), entry_bytes, layer_bytes, total_bytes }
    };
    let caches = [
        line(CacheName::C4Main, c4, context / 4, main),
        line(CacheName::C4Index, c4, context / 4, index),
        line(CacheName::C128Main, c128, context / 128, main),
        line(CacheName::Window, config.num_hidden_layers as u32, context.min(config.sliding_window), main),
    ];
    let per_token = f64::from(c4) * f64::from(main + index) / 4.0 + f64::from(c128) * f64::from(main) / 128.0;
    Payload { total_bytes: caches.iter().map(|c| c.total_bytes).sum(), caches, bytes_per_token: per_token }
}

pub(crate) fn layers(config: &ModelConfig, payload: &Payload) -> Vec<LayerLine> {
    let [main, index, c128, window] = [0, 1, 2, 3].map(|cache: usize| payload.caches[cache].layer_bytes);
    let line = |layer: usize| match config.layers[layer] {
        LayerKind::Window => LayerLine { kind: "window", bytes: [0, 0, 0, window] },
        LayerKind::C4 => LayerLine { kind: "c4", bytes: [main, index, 0, window] },
        LayerKind::C128 => LayerLine { kind: "c128", bytes: [0, 0, c128, window] },
    };
    (0..config.num_hidden_layers).map(line).collect()
}

pub(crate) fn v32(config: &ModelConfig, context: u32, payload_bytes: u64) -> V32Stack {
    let bytes_per_token_and_layer = (V32_LATENT + V32_INDEX) * 2;
    let layers = config.num_hidden_layers as u32;
    let total_bytes = u64::from(context) * u64::from(bytes_per_token_and_layer) * u64::from(layers);
    V32Stack {
        latent_values: V32_LATENT,
        index_values: V32_INDEX,
        value_bytes: 2,
        bytes_per_token_and_layer,
        layers,
        total_bytes,
        times_larger: total_bytes as f64 / payload_bytes.max(1) as f64,
    }
}
