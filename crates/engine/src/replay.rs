//! What it costs to rebuild all windows at a boundary whose long-lived entries are cached: a triangle of layer tokens.
//!
//! Position `M` reads window rows `M - reach ..= M - 1` of every layer (`reach` = window - 1) and younger compressor rows.
//! Row `p` of layer `j` needs the input of that layer at `p`, which needs rows `p - reach ..= p` of the layer before and
//! long-lived entries. With `L` main layers, layer `j` therefore starts at `M - reach * (L - j)` and layer 0, the origin,
//! at `M - reach * L`. The MTP module's row at `p` needs the final streams of `p - 1`: with drafts everything starts
//! `reach + 1` positions earlier. A checkpoint inside the triangle cuts it off: no layer starts before it, because all
//! window rows before it are there. So a replay never costs more than computing everything from the checkpoint on.
//!
//! Assumes that compressor rows reach back no further than the window; refuses layouts where they do.

use longwave_model::CacheLayout;
use longwave_model::geometry::{CacheKind, LOGICAL_BLOCK, Retention};

use crate::step::Replay;

/// The triangle of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Triangle {
    /// Main layers.
    layers: u32,
    /// Window rows before a position that its query reads.
    reach: u32,
    /// Positions that everything starts earlier, for the MTP module.
    ahead: u32,
}

impl Triangle {
    /// The triangle of a layout; with `drafts`, the MTP module's window is rebuilt as well. `None` without windows.
    pub fn new(layout: &CacheLayout, drafts: bool) -> Option<Triangle> {
        let windows = || layout.groups.iter().filter(|g| g.kind == CacheKind::Window);
        let Retention::SlidingWindow { window, .. } = windows().next()?.retention else { return None };
        let reach = window - 1;
        for spec in layout.groups.iter().filter(|g| g.is_sliding()) {
            let (far, first) = (64 * LOGICAL_BLOCK, spec.retention.first_needed(64 * LOGICAL_BLOCK));
            assert!(far - first <= reach, "rows of {:?} reach back behind the window", spec.kind);
        }
        let module = windows().flat_map(|g| &g.layers).any(|&layer| layer >= layout.layers);
        let ahead = if drafts && module { reach + 1 } else { 0 };
        Some(Triangle { layers: layout.layers, reach, ahead })
    }

    /// Where a replay up to `boundary` begins.
    pub fn replay(&self, boundary: u32) -> Replay {
        let depth = i64::from(self.reach) * i64::from(self.layers) + i64::from(self.ahead);
        Replay { origin: i64::from(boundary) - depth }
    }

    /// Positions times main layers that a replay looks at when the last `distance` positions lack windows: the sum over
    /// all layers `j` of `min(distance, reach * (L - j))`. The last `reach` positions of a layer cost less than a whole
    /// layer token, because only their rows are needed.
    pub fn layer_tokens(&self, distance: u32) -> u64 {
        let [layers, reach, ahead, distance] = [self.layers, self.reach, self.ahead, distance].map(u64::from);
        // How many of the last layers start behind the gap.
        let short = (distance.saturating_sub(ahead + 1) / reach.max(1)).min(layers);
        reach * short * (short + 1) / 2 + ahead * short + (layers - short) * distance
    }

    /// The same as tokens that pass all layers, rounded up: what a plain restart would pay `distance` for.
    pub fn tokens(&self, distance: u32) -> u32 {
        self.layer_tokens(distance).div_ceil(u64::from(self.layers.max(1))) as u32
    }
}

#[cfg(test)]
mod tests {
    use longwave_model::presets;

    use super::*;
    use crate::testing::{FP8, tiny_layout};

    #[test]
    fn flash_and_pro_cost_what_the_arithmetic_says() {
        let of = |config, drafts| Triangle::new(&CacheLayout::new(&config, FP8), drafts).unwrap();
        let far = 1 << 20;
        let (flash, pro) = (of(presets::flash(), false), of(presets::pro(), false));
        // Counted with 128 rows in the last layer instead of the 127 that are read, one more per layer: 120,185 layer
        // tokens or 2,795 tokens for Flash, 3,938 for Pro.
        assert_eq!((flash.layer_tokens(far), flash.tokens(far)), (120_185 - 43, 2_794));
        assert_eq!((pro.layer_tokens(far), pro.tokens(far)), (240_218 - 61, 3_937));
        assert_eq!(flash.replay(far).origin, i64::from(far) - 127 * 43);
        let (flash, pro) = (of(presets::flash(), true), of(presets::pro(), true));
        assert_eq!(
            (flash.tokens(far), pro.tokens(far)),
            (2_794 + 128, 3_937 + 128),
            "the MTP module starts it earlier"
        );
        assert_eq!(flash.replay(far).origin, i64::from(far) - 127 * 43 - 128);
    }

    #[test]
    fn a_triangle_never_costs_more_than_a_restart() {
        for drafts in [false, true] {
            let triangle = Triangle::new(&tiny_layout(), drafts).unwrap();
            let mut last = 0;
            for distance in 0..2000 {
                let tokens = triangle.tokens(distance);
                assert!(tokens <= distance && tokens >= last, "{distance}");
                let one_by_one = (1..=5).map(|j| (127 * j + if drafts { 128 } else { 0 }).min(distance)).sum::<u32>();
                assert_eq!(triangle.layer_tokens(distance), u64::from(one_by_one), "{distance}");
                last = tokens;
            }
            // Five layers: 127 * (1 + 2 + 3 + 4 + 5) / 5.
            assert_eq!(last, if drafts { 381 + 128 } else { 381 });
        }
        let with_drafts = Triangle::new(&tiny_layout(), true).unwrap();
        assert_eq!(with_drafts.tokens(256), 256, "one layer saves one position: that is no token");
        assert!(with_drafts.tokens(512) < 512);
    }

    #[test]
    fn each_layer_starts_one_reach_behind_the_one_before() {
        let triangle = Triangle::new(&tiny_layout(), false).unwrap();
        let starts = |boundary: u32| -> Vec<u32> { (0..=5).map(|j| triangle.replay(boundary).first(j, 127)).collect() };
        assert_eq!(starts(1024), [389, 516, 643, 770, 897, 1024]);
        assert_eq!(starts(256), [0, 0, 0, 2, 129, 256], "the start of the text cuts it off");
    }
}
