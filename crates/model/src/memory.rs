//! The memory calculator: where the bytes of a cache go, as plain data. `longwave kv` prints it; other views of the
//! same numbers must use it too, so that there is one implementation.
//!
//! Two views of one request. *Payload* is what the published figures count (model.md 11.3, 11.4): compressed entries,
//! index keys and the windows of the main layers; no MTP window, no compressor rows, no rounding to blocks. *Allocated*
//! is what the pools of [`CacheLayout`] really hand out, everything included. Nothing here looks at a machine.

use serde::Serialize;

use crate::config::ModelConfig;
use crate::geometry::{Bucket, CacheFormats, CacheLayout, LOGICAL_BLOCK, MAX_DRAFTS};
use crate::payload::{LayerLine, Payload, V32Stack, layers, payload, v32};
use crate::tensors;

/// Units that one request takes from one pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BucketLine {
    /// Which pool.
    pub bucket: Bucket,
    /// Bytes of one layer's page.
    pub page_bytes: u32,
    /// Pages in a unit.
    pub layers_per_unit: u32,
    /// Bytes of one unit.
    pub unit_bytes: u64,
    /// Units kept for the life of the request: one per logical block and long-lived group.
    pub long_lived_units: u64,
    /// Units of windows and compressor states while the request decodes, no drafts in flight.
    pub sliding_units: u64,
    /// The same with [`MAX_DRAFTS`] drafts in flight.
    pub sliding_units_with_drafts: u64,
    /// Bytes of `long_lived_units + sliding_units`.
    pub total_bytes: u64,
    /// Bytes of `long_lived_units + sliding_units_with_drafts`.
    pub total_bytes_with_drafts: u64,
}

/// What the pools hand out for one request that decodes at this context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Allocated {
    /// Blocks of 256 positions.
    pub logical_blocks: u32,
    /// Draft layers whose windows are counted: 1 with an MTP module. DSpark's blocks are not laid out yet.
    pub draft_window_layers: u32,
    /// Large, middle, small.
    pub buckets: [BucketLine; 3],
    /// Bytes that grow with the context.
    pub long_lived_bytes: u64,
    /// Bytes that every running request takes whatever its context.
    pub sliding_bytes: u64,
    /// The same with [`MAX_DRAFTS`] drafts in flight.
    pub sliding_bytes_with_drafts: u64,
    /// Bytes kept back for the tokens of a prefill chunk: always 0, the chunk's rows live in one scratch buffer that
    /// all layers and requests share.
    pub prefill_reserve_bytes: u64,
    /// Sum without drafts.
    pub total_bytes: u64,
    /// Sum with [`MAX_DRAFTS`] drafts.
    pub total_bytes_with_drafts: u64,
    /// One prefix checkpoint (windows and overlap rows at a 256 boundary), in bytes.
    pub prefix_checkpoint_bytes: u64,
}

/// How many requests of one context equal GPUs hold that share a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// GPUs.
    pub gpus: u32,
    /// Bytes of one GPU.
    pub gpu_bytes: u64,
    /// Bytes of one GPU that are left to scratch and the driver.
    pub kept_bytes: u64,
    /// Bytes of weights on one GPU: an even share.
    pub weights_bytes: u64,
    /// Bytes of one GPU for the cache; 0 when the weights do not fit.
    pub cache_bytes: u64,
    /// Requests: each GPU has the whole cache of all of them.
    pub requests: u64,
}

/// The weights that go with the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Weights {
    /// Bytes of all tensors in their released types.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
}

/// Everything the calculator knows about one request at one context.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Memory {
    /// Positions of the request.
    pub context: u32,
    /// Entry formats.
    pub formats: CacheFormats,
    /// As published.
    pub payload: Payload,
    /// The same by main layer, first to last.
    pub layers: Vec<LayerLine>,
    /// As the pools count.
    pub allocated: Allocated,
    /// For comparison.
    pub v32: V32Stack,
    /// The checkpoint.
    pub weights: Weights,
}

impl Memory {
    /// Counts a request of `context` positions. Any context is counted, also one above the model's own limit.
    pub fn of(config: &ModelConfig, formats: CacheFormats, context: u32) -> Memory {
        let payload = payload(config, formats, context);
        let v32 = v32(config, context, payload.total_bytes);
        let (bytes, tensors) = tensors::totals(config);
        Memory {
            context,
            formats,
            allocated: allocated(config, &CacheLayout::new(config, formats), context),
            layers: layers(config, &payload),
            payload,
            v32,
            weights: Weights { bytes, tensors },
        }
    }

    /// How many requests of this context fit: weights are spread evenly over the GPUs, each has the whole cache of every
    /// request (the cache has one head, which cannot be split), and `kept_percent` of each GPU (at most 100) is kept for scratch and the driver.
    pub fn fit(&self, gpus: u32, gpu_bytes: u64, kept_percent: u32) -> Fit {
        let kept_bytes = (u128::from(gpu_bytes) * u128::from(kept_percent.min(100)) / 100) as u64;
        let weights_bytes = self.weights.bytes.div_ceil(u64::from(gpus.max(1)));
        let cache_bytes = gpu_bytes.saturating_sub(kept_bytes).saturating_sub(weights_bytes);
        let requests = cache_bytes / self.allocated.total_bytes_with_drafts.max(1);
        Fit { gpus, gpu_bytes, kept_bytes, weights_bytes, cache_bytes, requests }
    }
}

fn allocated(config: &ModelConfig, layout: &CacheLayout, context: u32) -> Allocated {
    let logical_blocks = context.div_ceil(LOGICAL_BLOCK);
    let (long, slide, drafts) = (layout.long_lived_units(), layout.sliding_units(0), layout.sliding_units(MAX_DRAFTS));
    let buckets = Bucket::ALL.map(|bucket| {
        let (spec, i) = (layout.bucket(bucket), bucket as usize);
        let long_lived_units = u64::from(long[i]) * u64::from(logical_blocks);
        let (sliding_units, sliding_units_with_drafts) = (u64::from(slide[i]), u64::from(drafts[i]));
        BucketLine {
            bucket,
            page_bytes: spec.page_bytes,
            layers_per_unit: spec.layers_per_unit,
            unit_bytes: spec.unit_bytes(),
            long_lived_units,
            sliding_units,
            sliding_units_with_drafts,
            total_bytes: (long_lived_units + sliding_units) * spec.unit_bytes(),
            total_bytes_with_drafts: (long_lived_units + sliding_units_with_drafts) * spec.unit_bytes(),
        }
    });
    let long_lived_bytes = buckets.iter().map(|b| b.long_lived_units * b.unit_bytes).sum();
    Allocated {
        logical_blocks,
        draft_window_layers: config.num_nextn_predict_layers as u32,
        long_lived_bytes,
        sliding_bytes: layout.bytes(slide),
        sliding_bytes_with_drafts: layout.bytes(drafts),
        prefill_reserve_bytes: 0,
        total_bytes: buckets.iter().map(|b| b.total_bytes).sum(),
        total_bytes_with_drafts: buckets.iter().map(|b| b.total_bytes_with_drafts).sum(),
        prefix_checkpoint_bytes: layout.bytes(layout.checkpoint_units()),
        buckets,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{IndexFormat, MainFormat};
    use crate::presets;

    const BF16: CacheFormats = CacheFormats { main: MainFormat::Bf16, index: IndexFormat::Bf16 };
    const FP8: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp8 };
    const FP4: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };
    const K128: u32 = 131_072;
    const M1: u32 = 1_048_576;

    /// Rows of model.md 11.4: model, context, format, c4 main, c4 index, c128 main in GiB, window in MiB, sum in GiB.
    type Row = (fn() -> ModelConfig, u32, CacheFormats, [f64; 3], f64, f64, u64);
    const TABLE: [Row; 12] = [
        (presets::flash, K128, BF16, [0.6562, 0.1641, 0.0195], 5.375, 0.8451, 907_411_456),
        (presets::flash, K128, FP8, [0.3743, 0.0846, 0.0111], 3.065, 0.4730, 507_874_304),
        (presets::flash, K128, FP4, [0.3743, 0.0436, 0.0111], 3.065, 0.4320, 463_834_112),
        (presets::flash, M1, BF16, [5.2500, 1.3125, 0.1562], 5.375, 6.7240, 7_219_838_976),
        (presets::flash, M1, FP8, [2.9941, 0.6768, 0.0891], 3.065, 3.7630, 4_040_494_080),
        (presets::flash, M1, FP4, [2.9941, 0.3486, 0.0891], 3.065, 3.4349, 3_688_172_544),
        (presets::pro, K128, BF16, [0.9375, 0.2344, 0.0303], 7.625, 1.2096, 1_298_792_448),
        (presets::pro, K128, FP8, [0.5347, 0.1208, 0.0173], 4.349, 0.6770, 726_955_008),
        (presets::pro, K128, FP4, [0.5347, 0.0623, 0.0173], 4.349, 0.6184, 664_040_448),
        (presets::pro, M1, BF16, [7.5000, 1.8750, 0.2422], 7.625, 9.6246, 10_334_371_840),
        (presets::pro, M1, FP8, [4.2773, 0.9668, 0.1381], 4.349, 5.3865, 5_783_720_960),
        (presets::pro, M1, FP4, [4.2773, 0.4980, 0.1381], 4.349, 4.9178, 5_280_404_480),
    ];

    #[test]
    fn every_row_of_the_published_arithmetic_comes_out() {
        let near = |bytes: u64, unit: u64, expected: f64| {
            let got = bytes as f64 / unit as f64;
            assert!((got - expected).abs() <= 0.0005 * expected.max(0.1), "{got} against {expected}");
        };
        for (config, context, formats, gib, window_mib, sum_gib, bytes) in TABLE {
            let p = Memory::of(&config(), formats, context).payload;
            assert_eq!(p.total_bytes, bytes);
            for (line, expected) in p.caches.iter().zip(gib) {
                near(line.total_bytes, 1 << 30, expected);
            }
            near(p.caches[3].total_bytes, 1 << 20, window_mib);
            near(p.total_bytes, 1 << 30, sum_gib);
        }
    }

    #[test]
    fn the_launch_figures_come_out_with_their_steps() {
        let m = Memory::of(&presets::pro(), BF16, M1);
        let [main, index, c128, window] = &m.payload.caches;
        assert_eq!((main.layers, main.entries, main.entry_bytes), (30, 262_144, 1024));
        assert_eq!((index.layers, index.entries, index.entry_bytes), (30, 262_144, 256));
        assert_eq!((c128.layers, c128.entries, c128.entry_bytes), (31, 8192, 1024));
        assert_eq!((window.layers, window.entries, window.entry_bytes), (61, 128, 1024));
        let mib = |b: u64| b as f64 / f64::from(1 << 20);
        assert_eq!(mib(main.layer_bytes + index.layer_bytes + window.layer_bytes), 320.125);
        assert_eq!(mib(c128.layer_bytes + window.layer_bytes), 8.125);
        assert_eq!((m.v32.bytes_per_token_and_layer, m.v32.layers), (1408, 61));
        assert_eq!(mib(m.v32.total_bytes) / 1024.0, 83.875);
        assert_eq!(format!("{:.1}", m.v32.times_larger), "8.7");
        assert_eq!(m.weights, Weights { bytes: 864_704_792_696, tensors: 145_116 });
    }

    #[test]
    fn layers_add_up_to_the_payload() {
        for (config, context, formats, ..) in TABLE {
            let m = Memory::of(&config(), formats, context);
            assert_eq!(m.layers.len(), config().num_hidden_layers);
            for (cache, line) in m.payload.caches.iter().enumerate() {
                assert_eq!(m.layers.iter().map(|layer| layer.bytes[cache]).sum::<u64>(), line.total_bytes);
            }
        }
    }

    #[test]
    fn gpus_hold_what_weights_leave() {
        let m = Memory::of(&presets::flash(), FP4, M1);
        let fit = m.fit(2, 141 << 30, 10);
        assert_eq!(fit.weights_bytes, m.weights.bytes.div_ceil(2));
        assert_eq!(fit.cache_bytes, (141 << 30) - fit.kept_bytes - fit.weights_bytes);
        // Another GPU adds what it takes off the weights of each, and no second room for caches.
        assert!(fit.requests * m.allocated.total_bytes_with_drafts <= fit.cache_bytes);
        assert!((fit.requests + 1) * m.allocated.total_bytes_with_drafts > fit.cache_bytes);
        // Weights that do not fit leave nothing.
        assert_eq!((m.fit(1, 141 << 30, 10).cache_bytes, m.fit(1, 141 << 30, 10).requests), (0, 0));
    }

    #[test]
    fn bytes_per_token_are_the_published_ones() {
        for (config, formats, expected) in [
            (presets::flash(), BF16, 6880.0),
            (presets::flash(), FP8, 3850.25),
            (presets::flash(), FP4, 3514.25),
            (presets::pro(), BF16, 9848.0),
            (presets::pro(), FP8, 5511.4375),
            (presets::pro(), FP4, 5031.4375),
        ] {
            assert_eq!(Memory::of(&config, formats, 1).payload.bytes_per_token, expected);
        }
    }

    #[test]
    fn the_pools_hand_out_little_more_than_the_payload() {
        for (config, context, formats, ..) in TABLE {
            let m = Memory::of(&config(), formats, context);
            let a = &m.allocated;
            assert!(a.total_bytes >= m.payload.total_bytes);
            // What a running request takes beside its long-lived blocks, and the units that a smaller group fills
            // only in part (Flash: 21 of 22 layers).
            let long_lived: u64 = m.payload.caches[..3].iter().map(|c| c.total_bytes).sum();
            assert!(a.long_lived_bytes as f64 <= long_lived as f64 * 1.05, "{a:?}");
            assert_eq!(a.total_bytes, a.long_lived_bytes + a.sliding_bytes + a.prefill_reserve_bytes);
            assert_eq!(a.total_bytes_with_drafts, a.long_lived_bytes + a.sliding_bytes_with_drafts);
            assert!(a.sliding_bytes_with_drafts >= a.sliding_bytes && a.prefix_checkpoint_bytes < a.sliding_bytes);
            assert_eq!(a.logical_blocks, context / 256);
        }
    }

    #[test]
    fn short_contexts_round_down_in_the_payload_and_up_in_the_pools() {
        let m = Memory::of(&presets::flash(), FP4, 3);
        let entries: Vec<u64> = m.payload.caches.iter().map(|c| c.entries).collect();
        assert_eq!((entries, m.allocated.logical_blocks), (vec![0, 0, 0, 3], 1));
        assert_eq!(Memory::of(&presets::flash(), FP4, 0).payload.total_bytes, 0);
    }

    #[test]
    fn a_drafter_changes_the_weights_and_not_the_payload() {
        let (april, july) = (presets::flash(), presets::flash_0731());
        let (a, b) = (Memory::of(&april, FP8, M1), Memory::of(&july, FP8, M1));
        assert_eq!(a.payload, b.payload);
        assert_eq!((a.allocated.draft_window_layers, b.allocated.draft_window_layers), (1, 0));
        assert_eq!(b.weights, Weights { bytes: 166_878_536_440, tensors: 72_317 });
    }
}
