//! Every tensor of a checkpoint with its shape and dtype, from the configuration alone (model.md 2.2).
//!
//! This table is the loader's check and the size table of `longwave inspect`. It reproduces the published byte and
//! tensor counts of the released checkpoints.

use crate::config::{ExpertDtype, LayerKind, ModelConfig};

/// Storage type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// Packed e2m1, two codes per byte; the shape counts bytes.
    I8,
    /// ue8m0 scales.
    F8E8M0,
    /// e4m3fn.
    F8E4M3,
    /// bfloat16.
    BF16,
    /// float32.
    F32,
    /// int64.
    I64,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::I8 | DType::F8E8M0 | DType::F8E4M3 => 1,
            DType::BF16 => 2,
            DType::F32 => 4,
            DType::I64 => 8,
        }
    }
    /// Name as safetensors spells it.
    pub fn name(self) -> &'static str {
        match self {
            DType::I8 => "I8",
            DType::F8E8M0 => "F8_E8M0",
            DType::F8E4M3 => "F8_E4M3",
            DType::BF16 => "BF16",
            DType::F32 => "F32",
            DType::I64 => "I64",
        }
    }
}

/// A tensor that a checkpoint must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the original spelling.
    pub name: String,
    /// Shape, rows first.
    pub shape: Vec<usize>,
    /// Accepted storage types, the released one first. Base checkpoints keep block scales in f32 (model.md 1.4), and
    /// packed experts appear as I8 or U8.
    pub dtypes: &'static [DType],
}

impl TensorSpec {
    /// Bytes in the released dtype.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtypes[0].size() as u64
    }
}

const BF16: &[DType] = &[DType::BF16];
const F32: &[DType] = &[DType::F32];
const FP8: &[DType] = &[DType::F8E4M3];
const FP4: &[DType] = &[DType::I8];
const FP4_SCALE: &[DType] = &[DType::F8E8M0];
const SCALE: &[DType] = &[DType::F8E8M0, DType::F32];

/// Where a tensor belongs, for size tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Embedding, head, final norm and mixing.
    Top,
    /// A main layer.
    Layer(usize),
    /// An MTP or draft block.
    Draft(usize),
}

/// All tensors of `config`, in a fixed order.
pub fn all(config: &ModelConfig) -> Vec<(Place, TensorSpec)> {
    let mut out = Vec::new();
    let (v, d) = (config.vocab_size, config.hidden_size);
    let mut top = List { place: Place::Top, out: &mut out };
    top.add("embed.weight", &[v, d], BF16);
    top.add("head.weight", &[v, d], BF16);
    top.add("norm.weight", &[d], BF16);
    top.hc_head("", config);
    for l in 0..config.num_hidden_layers {
        let mut list = List { place: Place::Layer(l), out: &mut out };
        list.block(&format!("layers.{l}."), config, config.layers[l], config.is_hash_layer(l));
    }
    for i in 0..config.num_nextn_predict_layers {
        let mut list = List { place: Place::Draft(i), out: &mut out };
        let p = format!("mtp.{i}.");
        list.block(&p, config, LayerKind::Window, false);
        list.fp8(&format!("{p}e_proj"), d, d);
        list.fp8(&format!("{p}h_proj"), d, d);
        list.add(&format!("{p}enorm.weight"), &[d], BF16);
        list.add(&format!("{p}hnorm.weight"), &[d], BF16);
        list.add(&format!("{p}norm.weight"), &[d], BF16);
        list.hc_head(&p, config);
    }
    if let Some(spark) = &config.dspark {
        let blocks = spark.target_layer_ids.len();
        for i in 0..blocks {
            let mut list = List { place: Place::Draft(i), out: &mut out };
            let p = format!("mtp.{i}.");
            list.block(&p, config, LayerKind::Window, false);
            if i == 0 {
                list.fp8(&format!("{p}main_proj"), d, blocks * d);
                list.add(&format!("{p}main_norm.weight"), &[d], BF16);
            }
            if i + 1 == blocks {
                list.add(&format!("{p}norm.weight"), &[d], BF16);
                list.hc_head(&p, config);
                list.add(&format!("{p}markov_head.markov_w1.weight"), &[v, spark.markov_rank], BF16);
                list.add(&format!("{p}markov_head.markov_w2.weight"), &[v, spark.markov_rank], BF16);
                list.add(&format!("{p}confidence_head.proj.weight"), &[1, d + spark.markov_rank], BF16);
            }
        }
    }
    out
}

/// Sum of bytes and number of tensors.
pub fn totals(config: &ModelConfig) -> (u64, usize) {
    let all = all(config);
    (all.iter().map(|(_, t)| t.bytes()).sum(), all.len())
}

struct List<'a> {
    place: Place,
    out: &'a mut Vec<(Place, TensorSpec)>,
}

impl List<'_> {
    fn add(&mut self, name: &str, shape: &[usize], dtypes: &'static [DType]) {
        self.out.push((self.place, TensorSpec { name: name.to_string(), shape: shape.to_vec(), dtypes }));
    }

    /// An FP8 matrix `[rows, cols]` with its 128x128 block scales.
    fn fp8(&mut self, name: &str, rows: usize, cols: usize) {
        self.add(&format!("{name}.weight"), &[rows, cols], FP8);
        self.add(&format!("{name}.scale"), &[rows.div_ceil(128), cols.div_ceil(128)], SCALE);
    }

    /// A routed expert matrix `[rows, cols]` in the checkpoint's expert format.
    fn expert(&mut self, name: &str, rows: usize, cols: usize, dtype: ExpertDtype) {
        match dtype {
            ExpertDtype::Fp8 => self.fp8(name, rows, cols),
            ExpertDtype::Fp4 => {
                self.add(&format!("{name}.weight"), &[rows, cols / 2], FP4);
                self.add(&format!("{name}.scale"), &[rows, cols / 32], FP4_SCALE);
            }
        }
    }

    fn hc_head(&mut self, prefix: &str, c: &ModelConfig) {
        self.add(&format!("{prefix}hc_head_fn"), &[c.hc_mult, c.hc_mult * c.hidden_size], F32);
        self.add(&format!("{prefix}hc_head_base"), &[c.hc_mult], F32);
        self.add(&format!("{prefix}hc_head_scale"), &[1], F32);
    }

    fn compressor(&mut self, prefix: &str, ratio: usize, width: usize, out: usize, d: usize) {
        self.add(&format!("{prefix}ape"), &[ratio, width], F32);
        self.add(&format!("{prefix}wkv.weight"), &[width, d], BF16);
        self.add(&format!("{prefix}wgate.weight"), &[width, d], BF16);
        self.add(&format!("{prefix}norm.weight"), &[out], BF16);
    }

    /// The tensors that main layers and draft blocks share.
    fn block(&mut self, p: &str, c: &ModelConfig, kind: LayerKind, hash: bool) {
        let (d, n, h, hd) = (c.hidden_size, c.hc_mult, c.num_attention_heads, c.head_dim);
        let mix = (2 + n) * n;
        for site in ["attn", "ffn"] {
            self.add(&format!("{p}{site}_norm.weight"), &[d], BF16);
            self.add(&format!("{p}hc_{site}_fn"), &[mix, n * d], F32);
            self.add(&format!("{p}hc_{site}_base"), &[mix], F32);
            self.add(&format!("{p}hc_{site}_scale"), &[3], F32);
        }
        let a = format!("{p}attn.");
        self.add(&format!("{a}attn_sink"), &[h], F32);
        self.fp8(&format!("{a}wq_a"), c.q_lora_rank, d);
        self.add(&format!("{a}q_norm.weight"), &[c.q_lora_rank], BF16);
        self.fp8(&format!("{a}wq_b"), h * hd, c.q_lora_rank);
        self.fp8(&format!("{a}wkv"), hd, d);
        self.add(&format!("{a}kv_norm.weight"), &[hd], BF16);
        self.fp8(&format!("{a}wo_a"), c.o_groups * c.o_lora_rank, h * hd / c.o_groups);
        self.fp8(&format!("{a}wo_b"), d, c.o_groups * c.o_lora_rank);
        if kind != LayerKind::Window {
            self.compressor(&format!("{a}compressor."), kind.ratio() as usize, kind.width_factor() * hd, hd, d);
        }
        if kind == LayerKind::C4 {
            let (hi, di) = (c.index_n_heads, c.index_head_dim);
            self.fp8(&format!("{a}indexer.wq_b"), hi * di, c.q_lora_rank);
            self.add(&format!("{a}indexer.weights_proj.weight"), &[hi, d], BF16);
            self.compressor(&format!("{a}indexer.compressor."), 4, 2 * di, di, d);
        }
        let f = format!("{p}ffn.");
        self.add(&format!("{f}gate.weight"), &[c.n_routed_experts, d], BF16);
        if hash {
            self.add(&format!("{f}gate.tid2eid"), &[c.vocab_size, c.num_experts_per_tok], &[DType::I64]);
        } else {
            self.add(&format!("{f}gate.bias"), &[c.n_routed_experts], F32);
        }
        let i = c.moe_intermediate_size;
        for e in 0..c.n_routed_experts {
            self.expert(&format!("{f}experts.{e}.w1"), i, d, c.expert_dtype);
            self.expert(&format!("{f}experts.{e}.w2"), d, i, c.expert_dtype);
            self.expert(&format!("{f}experts.{e}.w3"), i, d, c.expert_dtype);
        }
        self.fp8(&format!("{f}shared_experts.w1"), i, d);
        self.fp8(&format!("{f}shared_experts.w2"), d, i);
        self.fp8(&format!("{f}shared_experts.w3"), i, d);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;
    use std::collections::BTreeMap;

    #[test]
    fn published_totals_come_out_of_the_configurations_alone() {
        assert_eq!(totals(&presets::flash()), (159_609_485_896, 69_187));
        assert_eq!(totals(&presets::pro()), (864_704_792_696, 145_116));
        assert_eq!(totals(&presets::flash_0731()), (166_878_536_440, 72_317));
        assert_eq!(totals(&presets::pro_0813()), (892_727_580_904, 149_782));
    }

    #[test]
    fn published_bytes_per_layer_come_out_too() {
        let per_place = |c: &ModelConfig| {
            let mut m: BTreeMap<Place, (u64, usize)> = BTreeMap::new();
            for (p, t) in all(c) {
                let e = m.entry(p).or_default();
                *e = (e.0 + t.bytes(), e.1 + 1);
            }
            m
        };
        let flash = per_place(&presets::flash());
        for (place, expected) in [
            (Place::Layer(0), (3_566_148_952, 1565)),
            (Place::Layer(2), (3_596_055_640, 1576)),
            (Place::Layer(3), (3_568_596_312, 1569)),
            (Place::Layer(4), (3_589_851_224, 1576)),
            (Place::Draft(0), (3_593_787_756, 1575)),
        ] {
            assert_eq!(flash[&place], expected, "Flash {place:?}");
        }
        let pro = per_place(&presets::pro());
        for (place, expected) in [
            (Place::Layer(1), (13_874_466_328, 2337)),
            (Place::Layer(2), (13_909_746_200, 2344)),
            (Place::Layer(3), (13_868_262_424, 2337)),
            (Place::Layer(60), (13_903_542_296, 2344)),
            (Place::Draft(0), (13_956_587_692, 2343)),
        ] {
            assert_eq!(pro[&place], expected, "Pro {place:?}");
        }
    }
}
