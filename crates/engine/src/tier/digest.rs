//! The digest of a layout: equal only if bytes of one engine mean the same to another.
//!
//! Covers the record format, every number of the cache layout and what the backend says of itself (model, weights,
//! rounding, drafter). Assumes that a backend's fingerprint covers all that changes its rows. Written out field by field,
//! so that it does not depend on how a type is printed.

use longwave_model::CacheLayout;
use longwave_model::geometry::Retention;

use super::record::VERSION;

/// Digest of records that an engine with this layout over this backend writes.
pub(crate) fn layout_digest(layout: &CacheLayout, fingerprint: &[u8; 32]) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    hash.update(b"longwave tier record");
    let mut number = |n: u32| {
        hash.update(&n.to_le_bytes());
    };
    number(VERSION);
    for bucket in &layout.buckets {
        number(bucket.page_bytes);
        number(bucket.layers_per_unit);
    }
    number(layout.formats.main.row_bytes());
    number(layout.formats.index.row_bytes());
    number(layout.groups.len() as u32);
    for group in &layout.groups {
        number(group.kind as u32);
        number(group.bucket as u32);
        let retention = match group.retention {
            Retention::LongLived { ratio } => [0, ratio, 0],
            Retention::SlidingWindow { window, stride } => [1, window, stride],
        };
        retention.into_iter().for_each(&mut number);
        [group.block_tokens, group.rows_per_block, group.row_bytes].into_iter().for_each(&mut number);
        number(group.layers.len() as u32);
        group.layers.iter().copied().for_each(&mut number);
    }
    hash.update(fingerprint);
    *hash.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use longwave_model::geometry::{CacheFormats, IndexFormat, MainFormat};
    use longwave_model::presets;

    use super::*;
    use crate::testing::{FP8, tiny_layout};

    #[test]
    fn formats_geometry_and_model_change_the_digest() {
        let fp4 = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };
        let mut moved = tiny_layout();
        moved.groups[0].layers[0] += 1;
        let layouts = [
            tiny_layout(),
            moved,
            CacheLayout::new(&presets::flash(), FP8),
            CacheLayout::new(&presets::flash(), fp4),
            CacheLayout::new(&presets::pro(), FP8),
        ];
        let digests = layouts.iter().flat_map(|l| [0, 1].map(|f| layout_digest(l, &[f; 32])));
        assert_eq!(digests.collect::<BTreeSet<_>>().len(), 10);
        assert_eq!(layout_digest(&tiny_layout(), &[1; 32]), layout_digest(&tiny_layout(), &[1; 32]));
    }
}
