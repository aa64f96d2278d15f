//! What a checkpoint holds, added up: bytes, tensors and parameters by storage type, by part and by layer.
//!
//! Works from a configuration alone (`tensors::all`), or from an opened checkpoint, whose real storage types count
//! (Base checkpoints keep block scales in f32). Reads no weights.

use std::collections::BTreeMap;

use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::tensors::{self, DType, Place, TensorSpec};

/// Part of the model that a tensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// `embed` and `head`.
    EmbeddingHead,
    /// Projections, norms of query and latent, sinks.
    Attention,
    /// Compressors of the main entries.
    Compressors,
    /// Indexers, their compressors included.
    Indexers,
    /// Routed experts.
    RoutedExperts,
    /// Shared experts.
    SharedExperts,
    /// Router weights, selection biases and hash tables.
    Router,
    /// Hyper-connections.
    Mhc,
    /// Norms between the parts.
    Norms,
    /// The MTP module or the DSpark drafter, whole.
    Draft,
}

impl Part {
    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Part::EmbeddingHead => "embedding and head",
            Part::Attention => "attention",
            Part::Compressors => "compressors",
            Part::Indexers => "indexers",
            Part::RoutedExperts => "routed experts",
            Part::SharedExperts => "shared experts",
            Part::Router => "router",
            Part::Mhc => "mHC",
            Part::Norms => "norms",
            Part::Draft => "MTP/DSpark",
        }
    }

    /// Part of the tensor `name` at `place`.
    pub fn of(place: Place, name: &str) -> Part {
        let has = |text: &str| name.contains(text);
        match () {
            _ if matches!(place, Place::Draft(_)) => Part::Draft,
            _ if name == "embed.weight" || name == "head.weight" => Part::EmbeddingHead,
            _ if has("hc_") => Part::Mhc,
            _ if has(".attn.indexer.") => Part::Indexers,
            _ if has(".attn.compressor.") => Part::Compressors,
            _ if has(".attn.") => Part::Attention,
            _ if has(".ffn.experts.") => Part::RoutedExperts,
            _ if has(".ffn.shared_experts.") => Part::SharedExperts,
            _ if has(".ffn.gate.") => Part::Router,
            _ => Part::Norms,
        }
    }
}

/// A sum over tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    /// Bytes.
    pub bytes: u64,
    /// Tensors.
    pub tensors: usize,
    /// Weights: packed codes count two each, block scales and hash tables nothing.
    pub parameters: u64,
}

impl Amount {
    fn add(&mut self, other: Amount) {
        self.bytes += other.bytes;
        self.tensors += other.tensors;
        self.parameters += other.parameters;
    }
}

/// The sums of one checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Everything.
    pub total: Amount,
    /// By storage type.
    pub by_dtype: BTreeMap<DType, Amount>,
    /// By part of the model.
    pub by_part: BTreeMap<Part, Amount>,
    /// By layer; draft blocks come last.
    pub by_place: BTreeMap<Place, Amount>,
    /// Parameters that one token uses: main layers and head, of the routed experts only the picked ones.
    pub active_parameters: u64,
}

impl Inventory {
    /// Sums of the released storage types.
    pub fn of_config(config: &ModelConfig) -> Inventory {
        Inventory::count(config, |spec| spec.dtypes[0])
    }

    /// Sums of the storage types that the checkpoint has.
    pub fn of_checkpoint(checkpoint: &Checkpoint) -> Inventory {
        Inventory::count(&checkpoint.config, |spec| checkpoint.tensor(&spec.name).dtype)
    }

    fn count(config: &ModelConfig, dtype_of: impl Fn(&TensorSpec) -> DType) -> Inventory {
        let mut out = Inventory {
            total: Amount::default(),
            by_dtype: BTreeMap::new(),
            by_part: BTreeMap::new(),
            by_place: BTreeMap::new(),
            active_parameters: 0,
        };
        for (place, spec) in tensors::all(config) {
            let dtype = dtype_of(&spec);
            let elements = spec.shape.iter().product::<usize>() as u64;
            let parameters = match dtype {
                _ if spec.name.ends_with(".scale") => 0,
                DType::I64 => 0,
                DType::I8 => 2 * elements,
                _ => elements,
            };
            let amount = Amount { bytes: elements * dtype.size() as u64, tensors: 1, parameters };
            out.total.add(amount);
            out.by_dtype.entry(dtype).or_default().add(amount);
            out.by_part.entry(Part::of(place, &spec.name)).or_default().add(amount);
            out.by_place.entry(place).or_default().add(amount);
        }
        let part = |p| out.by_part.get(&p).map_or(0, |a: &Amount| a.parameters);
        let routed = part(Part::RoutedExperts);
        let picked = routed / config.n_routed_experts as u64 * config.num_experts_per_tok as u64;
        // A token reads one row of the embedding, and the head whole.
        let embedding = (config.vocab_size * config.hidden_size) as u64;
        out.active_parameters = out.total.parameters - part(Part::Draft) - routed + picked - embedding;
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn published_bytes_by_dtype_come_out() {
        let bytes = |c: &ModelConfig| {
            let by = Inventory::of_config(c).by_dtype;
            [DType::I8, DType::F8E8M0, DType::F8E4M3, DType::BF16, DType::F32, DType::I64].map(|d| by[&d].bytes)
        };
        assert_eq!(
            bytes(&presets::flash()),
            [141_733_920_768, 8_858_737_664, 6_023_020_544, 2_830_518_528, 144_672_072, 18_616_320]
        );
        assert_eq!(
            bytes(&presets::pro()),
            [786_381_668_352, 49_150_268_416, 23_169_335_296, 5_633_798_656, 351_105_656, 18_616_320]
        );
    }

    #[test]
    fn published_parameter_counts_come_out() {
        let billions = |n: u64| (n as f64 / 1e8).round() / 10.0;
        for (config, with_mtp, main, active) in
            [(presets::flash(), 290.9, 284.3, 13.0), (presets::pro(), 1598.8, 1573.0, 49.0)]
        {
            let i = Inventory::of_config(&config);
            assert_eq!(billions(i.total.parameters), with_mtp);
            assert!((billions(i.total.parameters - i.by_part[&Part::Draft].parameters) - main).abs() < 1.0);
            assert_eq!((i.active_parameters as f64 / 1e9).round(), active);
        }
    }

    #[test]
    fn parts_and_places_add_up_to_the_total() {
        for config in [presets::flash(), presets::pro(), presets::flash_0731(), presets::pro_0813()] {
            let i = Inventory::of_config(&config);
            assert_eq!((i.total.bytes, i.total.tensors), tensors::totals(&config));
            for sums in [i.by_part.values().copied().collect::<Vec<_>>(), i.by_place.values().copied().collect()] {
                let mut all = Amount::default();
                sums.into_iter().for_each(|a| all.add(a));
                assert_eq!(all, i.total);
            }
            assert_eq!(i.by_part.len(), 10);
        }
    }
}
