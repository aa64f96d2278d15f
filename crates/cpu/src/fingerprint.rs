//! The identity of a model on this backend: equal only if equal steps give equal cache bytes.
//!
//! Covers the configuration, rounding, formats, whether a drafter fills its window rows, the arithmetic of this build
//! ([`ROWS`]) and the weights (`longwave_model::digest`). Instruction set and thread count do not enter: they change no bit.

use crate::forward::Model;

/// Digest of the rows that a fixed prompt leaves in the tiny model's cache. A test computes it: whoever changes the order of
/// a sum or a rounding has to change it here, and so every cache that outlived an older build is another model's.
pub const ROWS: &str = "c36196636d854ffca803493338ae8dc4";

/// Digest of a model whose rows a drafter fills or leaves.
pub(crate) fn model(model: &Model, drafter: bool) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    let formats = (model.formats.main.name(), model.formats.index.name());
    // A field that is printed differently one day costs a cache, not a result.
    let text = format!("{} {:?} {:?} {formats:?} {drafter}", ROWS, model.config, model.profile);
    hash.update(text.as_bytes());
    hash.update(&model.weights_digest);
    *hash.finalize().as_bytes()
}
