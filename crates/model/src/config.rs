//! The configuration of a DeepSeek-V4 model: every field of `model.md` section 1, checked.
//!
//! Assumes the DeepSeek-V4 architecture (`DeepseekV4ForCausalLM`). Refuses any other architecture, unknown values of
//! enumerated fields and shapes that do not fit together; it never fills in a default for a field that changes results.

use std::path::Path;

use thiserror::Error;

/// Kind of a layer's attention, from `compress_ratios` (model.md 1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Sliding window only (ratio 0).
    Window,
    /// Window plus the compressed entries of ratio 4 that the indexer picks.
    C4,
    /// Window plus all compressed entries of ratio 128.
    C128,
}

impl LayerKind {
    /// Its name: window, c4 or c128.
    pub fn name(self) -> &'static str {
        match self {
            LayerKind::Window => "window",
            LayerKind::C4 => "c4",
            LayerKind::C128 => "c128",
        }
    }

    /// Compression ratio `m`: 0, 4 or 128.
    pub fn ratio(self) -> u32 {
        match self {
            LayerKind::Window => 0,
            LayerKind::C4 => 4,
            LayerKind::C128 => 128,
        }
    }

    /// Compressor width factor `c` (model.md 0.1): 2 for the overlapping c4 compressor, 1 for c128, 0 without one.
    pub fn width_factor(self) -> usize {
        match self {
            LayerKind::Window => 0,
            LayerKind::C4 => 2,
            LayerKind::C128 => 1,
        }
    }
}

/// Storage of the routed experts (`expert_dtype`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertDtype {
    /// Packed e2m1 with one ue8m0 scale per 32 inputs (model.md 2.5).
    Fp4,
    /// e4m3 with 128x128 blocks (Base checkpoints, model.md 1.4).
    Fp8,
}

/// YaRN scaling of the compressed layers' rotary table (model.md 3.3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Stretch factor (16 in the released models).
    pub factor: f64,
    /// Positions of the original training context (65,536).
    pub original_max_position_embeddings: u32,
    /// Rotations above which a frequency is kept (32).
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor` (1).
    pub beta_slow: f64,
}

/// Block drafter of the 0731 and later checkpoints (model.md appendix B). Its tensors replace the MTP module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DSpark {
    /// Positions drafted at once (`dspark_block_size`).
    pub block_size: u32,
    /// Token id that fills the undrafted positions.
    pub noise_token_id: u32,
    /// Main layers whose streams feed the drafter.
    pub target_layer_ids: Vec<u32>,
    /// Rank of the markov head.
    pub markov_rank: usize,
}

/// A checked DeepSeek-V4 configuration. Field names are those of `config.json`; symbols in brackets are model.md's.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// `V`: rows of embedding and head.
    pub vocab_size: usize,
    /// `D`.
    pub hidden_size: usize,
    /// `L`, the MTP layer not counted.
    pub num_hidden_layers: usize,
    /// `H`.
    pub num_attention_heads: usize,
    /// `d`: head size, the rotary part included.
    pub head_dim: usize,
    /// `dr`: the last channels of each head.
    pub qk_rope_head_dim: usize,
    /// `ql`.
    pub q_lora_rank: usize,
    /// `G`.
    pub o_groups: usize,
    /// `ol`.
    pub o_lora_rank: usize,
    /// `W`, the query token included.
    pub sliding_window: u32,
    /// Kind of every main layer, `num_hidden_layers` of them.
    pub layers: Vec<LayerKind>,
    /// `Hi`.
    pub index_n_heads: usize,
    /// `di`.
    pub index_head_dim: usize,
    /// `K`: entries picked per query in c4 layers.
    pub index_topk: usize,
    /// Rotary base of window layers and the MTP layer.
    pub rope_theta: f64,
    /// Rotary base of c4 and c128 layers.
    pub compress_rope_theta: f64,
    /// YaRN of the compressed layers; `None` when `rope_scaling` is null.
    pub yarn: Option<Yarn>,
    /// Largest context.
    pub max_position_embeddings: u32,
    /// `n`: residual streams.
    pub hc_mult: usize,
    /// Column passes of the Sinkhorn normalisation (model.md 5.2).
    pub hc_sinkhorn_iters: u32,
    /// Added in pre-weights and in Sinkhorn.
    pub hc_eps: f32,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// `E`.
    pub n_routed_experts: usize,
    /// Shared experts; always 1.
    pub n_shared_experts: usize,
    /// `k_e`.
    pub num_experts_per_tok: usize,
    /// `I`.
    pub moe_intermediate_size: usize,
    /// Layers `0..num_hash_layers` route by token id.
    pub num_hash_layers: usize,
    /// Multiplied after normalisation of the router weights.
    pub routed_scaling_factor: f32,
    /// Clamp of the expert activations (routed and shared).
    pub swiglu_limit: f32,
    /// MTP modules (`mtp.N.*`) in the checkpoint: 0 or 1. Always 0 when `dspark` is set.
    pub num_nextn_predict_layers: usize,
    /// The block drafter, if the checkpoint has one.
    pub dspark: Option<DSpark>,
    /// Begin-of-sentence token.
    pub bos_token_id: u32,
    /// End-of-sentence token.
    pub eos_token_id: u32,
    /// Storage of the routed experts.
    pub expert_dtype: ExpertDtype,
}

/// Why a configuration was refused.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read {path}: {source}. Give a folder that holds a DeepSeek-V4 checkpoint (config.json, *.safetensors)"
    )]
    Io {
        /// File that was tried.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// The file is not JSON.
    #[error("{path} is not valid JSON")]
    Json {
        /// File that was read.
        path: String,
        /// Cause, with line and column.
        source: serde_json::Error,
    },
    /// Another architecture.
    #[error(
        "this is not a DeepSeek-V4 checkpoint: {found}. Longwave serves DeepSeek-V4 (Flash, Pro and their Base and 0731 variants) only"
    )]
    Architecture {
        /// What was found, in words.
        found: String,
    },
    /// A field that the model needs is absent.
    #[error("config.json has no field `{field}`{hint}; results would depend on a guess, so it is refused")]
    Missing {
        /// Field name.
        field: &'static str,
        /// Other accepted spellings.
        hint: String,
    },
    /// A field has a value that this program does not know.
    #[error("config.json: `{field}` is {found}, expected {expected}")]
    Value {
        /// Field name.
        field: String,
        /// Value in the file.
        found: String,
        /// What is supported.
        expected: String,
    },
    /// Fields that are not known at all.
    #[error(
        "config.json has fields that this version does not know: {0}. They may change results, so the model is refused; delete a field from the file if you know that it is inert"
    )]
    Unknown(String),
}

impl ModelConfig {
    /// Reads and checks `config.json` at `path` (a file, or the folder that holds it).
    pub fn read(path: &Path) -> Result<ModelConfig, ConfigError> {
        let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let shown = file.display().to_string();
        let text = std::fs::read_to_string(&file).map_err(|source| ConfigError::Io { path: shown.clone(), source })?;
        let value = serde_json::from_str(&text).map_err(|source| ConfigError::Json { path: shown, source })?;
        ModelConfig::from_json(&value)
    }

    /// Checks a parsed `config.json`: the released spelling, the reference program's own, or transformers' rewrite
    /// (model.md 1.1 and 1.3).
    pub fn from_json(value: &serde_json::Value) -> Result<ModelConfig, ConfigError> {
        let config = crate::config_json::parse(value)?;
        config.check_ranges()?;
        config.check()?;
        Ok(config)
    }

    /// Kind of layer `l`; `l = num_hidden_layers` is the MTP layer, which is window-only (model.md 8.1).
    pub fn layer_kind(&self, l: usize) -> LayerKind {
        self.layers.get(l).copied().unwrap_or(LayerKind::Window)
    }

    /// Layers of `kind`, in order; the MTP layer is not among them.
    pub fn layers_of(&self, kind: LayerKind) -> Vec<usize> {
        (0..self.num_hidden_layers).filter(|&l| self.layers[l] == kind).collect()
    }

    /// Whether layer `l` routes by token id (model.md 7.1).
    pub fn is_hash_layer(&self, l: usize) -> bool {
        l < self.num_hash_layers
    }

    /// `dn`: channels of a head that carry no rotation.
    pub fn nope_dim(&self) -> usize {
        self.head_dim - self.qk_rope_head_dim
    }

    /// A short name for logs: Flash or Pro by shape, else the main sizes.
    pub fn describe(&self) -> String {
        let name = match (self.hidden_size, self.num_hidden_layers) {
            (4096, 43) => "DeepSeek-V4-Flash".to_string(),
            (7168, 61) => "DeepSeek-V4-Pro".to_string(),
            (d, l) => format!("DeepSeek-V4 (hidden {d}, {l} layers)"),
        };
        if self.dspark.is_some() { format!("{name} with DSpark drafter") } else { name }
    }

    /// Values that no DeepSeek-V4 has and that would overflow a size or give NaN. The bounds are far above the released
    /// models, so that a damaged file is named here and not by whatever it breaks later.
    fn check_ranges(&self) -> Result<(), ConfigError> {
        let fail = |field: &str, found: String, expected: String| {
            Err(ConfigError::Value { field: field.to_string(), found, expected })
        };
        for (field, v, most) in [
            ("vocab_size", self.vocab_size, 1 << 22),
            ("hidden_size", self.hidden_size, 1 << 17),
            ("num_hidden_layers", self.num_hidden_layers, 256),
            ("num_attention_heads", self.num_attention_heads, 4096),
            ("q_lora_rank", self.q_lora_rank, 1 << 17),
            ("o_groups", self.o_groups, 4096),
            ("o_lora_rank", self.o_lora_rank, 1 << 17),
            ("index_n_heads", self.index_n_heads, 4096),
            ("index_topk", self.index_topk, 1 << 20),
            ("n_routed_experts", self.n_routed_experts, 1024),
            ("moe_intermediate_size", self.moe_intermediate_size, 1 << 17),
            ("hc_sinkhorn_iters", self.hc_sinkhorn_iters as usize, 1000),
            ("max_position_embeddings", self.max_position_embeddings as usize, 1 << 24),
        ] {
            if v > most {
                return fail(field, v.to_string(), format!("at most {most}"));
            }
        }
        for (field, v) in [
            ("rope_theta", self.rope_theta),
            ("compress_rope_theta", self.compress_rope_theta),
            ("hc_eps", self.hc_eps.into()),
            ("rms_norm_eps", self.rms_norm_eps.into()),
            ("routed_scaling_factor", self.routed_scaling_factor.into()),
            ("swiglu_limit", self.swiglu_limit.into()),
        ] {
            if !(v > 0.0 && v.is_finite()) {
                return fail(field, v.to_string(), "a positive number".into());
            }
        }
        if self.yarn.is_some_and(|y| y.original_max_position_embeddings == 0) {
            return fail("rope_scaling.original_max_position_embeddings", "0".into(), "a positive number".into());
        }
        if let Some(spark) = &self.dspark {
            let layers = self.num_hidden_layers;
            if spark.target_layer_ids.is_empty() || spark.target_layer_ids.iter().any(|&l| l as usize >= layers) {
                let found = format!("{:?}", spark.target_layer_ids);
                return fail("dspark_target_layer_ids", found, format!("layers below {layers}, at least one"));
            }
            if spark.block_size == 0 || spark.markov_rank == 0 || spark.markov_rank > 1 << 17 {
                let found = format!("{}, {}", spark.block_size, spark.markov_rank);
                return fail("dspark_block_size, dspark_markov_rank", found, "positive sizes".into());
            }
        }
        Ok(())
    }

    /// Relations between fields that every later computation relies on.
    fn check(&self) -> Result<(), ConfigError> {
        let fail = |field: &str, found: String, expected: String| {
            Err(ConfigError::Value { field: field.to_string(), found, expected })
        };
        for (field, v) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("q_lora_rank", self.q_lora_rank),
            ("o_groups", self.o_groups),
            ("o_lora_rank", self.o_lora_rank),
            ("index_n_heads", self.index_n_heads),
            ("index_topk", self.index_topk),
            ("n_routed_experts", self.n_routed_experts),
            ("num_experts_per_tok", self.num_experts_per_tok),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings as usize),
        ] {
            if v == 0 {
                return fail(field, "0".into(), "a positive number".into());
            }
        }
        for (field, v) in [
            ("hidden_size", self.hidden_size),
            ("q_lora_rank", self.q_lora_rank),
            ("o_lora_rank", self.o_lora_rank),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ] {
            if !v.is_multiple_of(128) {
                return fail(field, v.to_string(), "a multiple of 128 (the fp8 scale blocks)".into());
            }
        }
        if (self.head_dim, self.qk_rope_head_dim) != (512, 64) {
            return fail(
                "head_dim, qk_rope_head_dim",
                format!("{}, {}", self.head_dim, self.qk_rope_head_dim),
                "512, 64 (the cache formats are made for them)".into(),
            );
        }
        if self.index_head_dim != 128 {
            return fail("index_head_dim", self.index_head_dim.to_string(), "128".into());
        }
        if self.sliding_window != 128 {
            return fail("sliding_window", self.sliding_window.to_string(), "128".into());
        }
        if self.hc_mult != 4 {
            return fail("hc_mult", self.hc_mult.to_string(), "4".into());
        }
        if self.hc_sinkhorn_iters == 0 {
            return fail("hc_sinkhorn_iters", "0".into(), "at least 1".into());
        }
        if !self.num_attention_heads.is_multiple_of(self.o_groups) {
            return fail(
                "o_groups",
                self.o_groups.to_string(),
                format!("a divisor of {} heads", self.num_attention_heads),
            );
        }
        if self.num_experts_per_tok > self.n_routed_experts {
            return fail(
                "num_experts_per_tok",
                self.num_experts_per_tok.to_string(),
                format!("at most the {} routed experts", self.n_routed_experts),
            );
        }
        if self.n_shared_experts != 1 {
            return fail("n_shared_experts", self.n_shared_experts.to_string(), "1".into());
        }
        if self.num_nextn_predict_layers > 1 {
            return fail("num_nextn_predict_layers", self.num_nextn_predict_layers.to_string(), "0 or 1".into());
        }
        if self.num_hash_layers > self.num_hidden_layers {
            return fail("num_hash_layers", self.num_hash_layers.to_string(), "at most num_hidden_layers".into());
        }
        for (field, v) in [("bos_token_id", self.bos_token_id), ("eos_token_id", self.eos_token_id)] {
            if v as usize >= self.vocab_size {
                return fail(field, v.to_string(), format!("below vocab_size {}", self.vocab_size));
            }
        }
        Ok(())
    }
}
