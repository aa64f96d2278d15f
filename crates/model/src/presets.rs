//! The released configurations, for commands that need no checkpoint (`longwave kv flash`).
//!
//! Values are those of the published `config.json` files (model.md 1.1, 1.2).

use crate::config::{DSpark, ExpertDtype, LayerKind, ModelConfig, Yarn};

/// Looks a preset up by the name a user types; `None` when it is not one of [`NAMES`].
pub fn by_name(name: &str) -> Option<ModelConfig> {
    match name.to_ascii_lowercase().as_str() {
        "flash" | "deepseek-v4-flash" => Some(flash()),
        "pro" | "deepseek-v4-pro" => Some(pro()),
        "flash-0731" => Some(flash_0731()),
        "pro-0813" => Some(pro_0813()),
        _ => None,
    }
}

/// Names that [`by_name`] knows.
pub const NAMES: &[&str] = &["flash", "pro", "flash-0731", "pro-0813"];

/// DeepSeek-V4-Flash (April).
pub fn flash() -> ModelConfig {
    let mut layers = vec![LayerKind::Window; 2];
    layers.extend((2..43).map(|l| if l % 2 == 0 { LayerKind::C4 } else { LayerKind::C128 }));
    ModelConfig {
        vocab_size: 129_280,
        hidden_size: 4096,
        num_hidden_layers: 43,
        num_attention_heads: 64,
        head_dim: 512,
        qk_rope_head_dim: 64,
        q_lora_rank: 1024,
        o_groups: 8,
        o_lora_rank: 1024,
        sliding_window: 128,
        layers,
        index_n_heads: 64,
        index_head_dim: 128,
        index_topk: 512,
        rope_theta: 10_000.0,
        compress_rope_theta: 160_000.0,
        yarn: Some(Yarn { factor: 16.0, original_max_position_embeddings: 65_536, beta_fast: 32.0, beta_slow: 1.0 }),
        max_position_embeddings: 1_048_576,
        hc_mult: 4,
        hc_sinkhorn_iters: 20,
        hc_eps: 1e-6,
        rms_norm_eps: 1e-6,
        n_routed_experts: 256,
        n_shared_experts: 1,
        num_experts_per_tok: 6,
        moe_intermediate_size: 2048,
        num_hash_layers: 3,
        routed_scaling_factor: 1.5,
        swiglu_limit: 10.0,
        num_nextn_predict_layers: 1,
        dspark: None,
        bos_token_id: 0,
        eos_token_id: 1,
        expert_dtype: ExpertDtype::Fp4,
    }
}

/// DeepSeek-V4-Pro (April).
pub fn pro() -> ModelConfig {
    let mut layers = vec![LayerKind::C128; 2];
    layers.extend((2..61).map(|l| if l % 2 == 0 { LayerKind::C4 } else { LayerKind::C128 }));
    ModelConfig {
        hidden_size: 7168,
        num_hidden_layers: 61,
        num_attention_heads: 128,
        q_lora_rank: 1536,
        o_groups: 16,
        layers,
        index_topk: 1024,
        n_routed_experts: 384,
        moe_intermediate_size: 3072,
        routed_scaling_factor: 2.5,
        ..flash()
    }
}

/// DeepSeek-V4-Flash-0731: Flash with the DSpark drafter in place of the MTP module.
pub fn flash_0731() -> ModelConfig {
    let dspark =
        DSpark { block_size: 5, noise_token_id: 128_799, target_layer_ids: vec![40, 41, 42], markov_rank: 256 };
    ModelConfig { num_nextn_predict_layers: 0, dspark: Some(dspark), ..flash() }
}

/// DeepSeek-V4-Pro-0813: Pro with the DSpark drafter.
pub fn pro_0813() -> ModelConfig {
    let dspark =
        DSpark { block_size: 5, noise_token_id: 128_799, target_layer_ids: vec![58, 59, 60], markov_rank: 512 };
    ModelConfig { num_nextn_predict_layers: 0, dspark: Some(dspark), ..pro() }
}
