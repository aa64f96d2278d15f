//! What queries read in one layer, for people who look: plain data from a backend that can tell it.
//!
//! A request may ask for one layer ([`crate::request::Request::attention`]). It is an ordinary request in all else, so it
//! waits, runs beside others and ends as they do. Like one that wants the logits of every position it reuses no prefix and
//! keeps its seat. Refused where the backend has no such layer to tell of.

pub use longwave_model::config::LayerKind;

/// What one query read in one layer. Weights are those with which rows entered the output, averaged over the heads;
/// together with `sink` they make 1, but for rounding.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reads {
    /// Its position.
    pub position: u32,
    /// Position of the first window row that it read.
    pub window_from: u32,
    /// Weights of the positions `window_from..=position`.
    pub window: Vec<f32>,
    /// Compressed entries that it read, ascending.
    pub entries: Vec<u32>,
    /// Their weights.
    pub entry_weights: Vec<f32>,
    /// What went to the sink, and so to no row.
    pub sink: f32,
}
