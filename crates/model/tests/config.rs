//! The three spellings of `config.json` give one configuration: the released file (model.md 1.1), the reference
//! program's own (1.3) and transformers' rewrite. What is missing, unknown or has another value is refused by name.

// The lint knows only functions marked #[test]; helpers may unwrap as well.
#![allow(clippy::unwrap_used)]
#![recursion_limit = "512"]

use longwave_model::{ModelConfig, presets};
use serde_json::{Value, json};

/// `compress_ratios` of Flash: two window layers, then c4 and c128 in turn, the last entry for the MTP layer.
fn ratios() -> Vec<u32> {
    let mut all = vec![0, 0];
    all.extend([4, 128].repeat(20));
    all.extend([4, 0]);
    all
}

/// The released Flash file.
fn released() -> Value {
    json!({
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
        "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
        "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "compress_ratios": ratios(),
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
            "beta_fast": 32, "beta_slow": 1},
        "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048, "num_hash_layers": 3, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 1, "hidden_act": "silu", "attention_bias": false, "attention_dropout": 0.0,
        "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.02,
        "use_cache": true, "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    })
}

/// The same model as the reference program writes it.
fn reference() -> Value {
    json!({
        "vocab_size": 129280, "dim": 4096, "n_layers": 43, "n_heads": 64, "head_dim": 512, "rope_head_dim": 64,
        "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "window_size": 128, "compress_ratios": ratios(),
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000,
        "compress_rope_theta": 160000, "original_seq_len": 65536, "rope_factor": 16, "beta_fast": 32,
        "beta_slow": 1, "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "norm_eps": 1e-6, "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 6,
        "moe_inter_dim": 2048, "n_hash_layers": 3, "score_func": "sqrtsoftplus", "route_scale": 1.5,
        "swiglu_limit": 10.0, "n_mtp_layers": 1, "bos_token_id": 0, "eos_token_id": 1, "dtype": "fp8",
        "scale_fmt": "ue8m0", "scale_dtype": "fp8", "expert_dtype": "fp4"
    })
}

/// The same model after transformers 5 has loaded and saved it.
fn rewritten() -> Value {
    let mut out = released();
    let (mut layers, mut mlp) = (vec!["sliding_attention"; 2], vec!["hash_moe"; 3]);
    layers.extend(["compressed_sparse_attention", "heavily_compressed_attention"].repeat(20));
    layers.push("compressed_sparse_attention");
    mlp.resize(43, "moe");
    let map = out.as_object_mut().unwrap();
    for gone in ["compress_ratios", "num_hash_layers", "rope_scaling", "torch_dtype"] {
        map.remove(gone);
    }
    let new = json!({
        "layer_types": layers, "mlp_layer_types": mlp, "dtype": "bfloat16", "_name_or_path": "",
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
            "compress": {"type": "yarn", "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                "original_max_position_embeddings": 65536, "rope_theta": 160000, "partial_rotary_factor": 0.125,
                "attention_factor": 1.0}
        },
        "partial_rotary_factor": 0.125, "mlp_bias": false, "pad_token_id": 2, "output_router_logits": false,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "output_hidden_states": false,
        "output_attentions": false, "return_dict": true, "chunk_size_feed_forward": 0, "is_encoder_decoder": false,
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": null
    });
    map.extend(new.as_object().unwrap().clone());
    out
}

fn with(mut config: Value, changes: Value) -> Value {
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

fn refusal(config: &Value) -> String {
    ModelConfig::from_json(config).unwrap_err().to_string()
}

#[test]
fn all_three_spellings_give_flash() {
    for (spelling, json) in [("released", released()), ("reference", reference()), ("transformers", rewritten())] {
        let config = ModelConfig::from_json(&json).unwrap_or_else(|e| panic!("{spelling}: {e}"));
        assert_eq!(config, presets::flash(), "{spelling}");
    }
}

#[test]
fn pro_and_the_0731_release_are_read_from_their_own_fields() {
    let mut list = [128, 128].to_vec();
    list.extend([4, 128].repeat(29));
    list.extend([4, 0]);
    let pro = json!({
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536,
        "o_groups": 16, "compress_ratios": list, "index_topk": 1024, "n_routed_experts": 384,
        "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5
    });
    assert_eq!(ModelConfig::from_json(&with(released(), pro)).unwrap(), presets::pro());

    let mut longer = ratios();
    longer.extend([0, 0]);
    let dspark = json!({
        "compress_ratios": longer, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256, "num_nextn_predict_layers": 3
    });
    assert_eq!(ModelConfig::from_json(&with(released(), dspark)).unwrap(), presets::flash_0731());
}

#[test]
fn every_field_that_changes_results_is_needed() {
    let inert = [
        "architectures",
        "model_type",
        "attention_dropout",
        "initializer_range",
        "use_cache",
        "torch_dtype",
        "transformers_version",
    ];
    // Fixed in V4: absent means the one value that exists. Without the MTP field there is no MTP module;
    // without quantization_config the storage is what the tensors say. An explicit null turns YaRN off.
    let fixed = [
        "num_key_value_heads",
        "scoring_func",
        "topk_method",
        "norm_topk_prob",
        "hidden_act",
        "attention_bias",
        "tie_word_embeddings",
        "num_nextn_predict_layers",
        "quantization_config",
    ];
    for key in released().as_object().unwrap().keys() {
        let mut json = released();
        json.as_object_mut().unwrap().remove(key);
        let result = ModelConfig::from_json(&json);
        if inert.contains(&key.as_str()) || fixed.contains(&key.as_str()) {
            assert!(result.is_ok(), "{key}");
        } else {
            let text = result.unwrap_err().to_string();
            assert!(text.contains(&format!("`{key}`")), "{key}: {text}");
        }
    }
}

#[test]
fn yarn_is_off_only_when_the_file_says_so() {
    let config = ModelConfig::from_json(&with(released(), json!({"rope_scaling": null}))).unwrap();
    assert_eq!(config.yarn, None);
}

#[test]
fn values_that_this_program_does_not_implement_are_refused_by_name() {
    for (field, value) in [
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("hidden_act", json!("gelu")),
        ("num_key_value_heads", json!(8)),
        ("tie_word_embeddings", json!(true)),
        ("expert_dtype", json!("int4")),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!(4097)),
        ("hidden_size", json!("4096")),
        ("hc_mult", json!(2)),
        ("sliding_window", json!(256)),
        ("rms_norm_eps", json!("tiny")),
        ("compress_ratios", json!([0, 0, 4])),
        ("compress_ratios", json!(vec![8; 44])),
        ("eos_token_id", json!(129_280)),
        ("num_attention_heads", json!(4_294_967_288_u32)),
        ("n_routed_experts", json!(8_000_000)),
        ("max_position_embeddings", json!(u32::MAX)),
        ("rms_norm_eps", json!(-1e-6)),
        ("swiglu_limit", json!(0)),
        ("rope_theta", json!(0)),
    ] {
        let text = refusal(&with(released(), json!({ field: value })));
        assert!(text.contains(&format!("`{field}`")) && text.contains("expected"), "{field}: {text}");
    }
    let scaling = json!({"rope_scaling": {"type": "linear", "factor": 16}});
    assert!(refusal(&with(released(), scaling)).contains("rope_scaling.type"));
    let spark = json!({"dspark_block_size": 5, "dspark_noise_token_id": 1, "dspark_target_layer_ids": [43],
        "dspark_markov_rank": 256});
    assert!(refusal(&with(released(), spark)).contains("layers below 43"));
    let quant = json!({"quantization_config": {"quant_method": "awq"}});
    assert!(refusal(&with(released(), quant)).contains("quantization_config.quant_method"));
}

#[test]
fn unknown_fields_and_other_architectures_say_what_was_found() {
    let text = refusal(&with(released(), json!({"attention_sparsity": 3, "zeta": 1})));
    assert!(text.contains("`attention_sparsity`, `zeta`"), "{text}");
    for (changes, found) in [
        (json!({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512}), "V3's"),
        (json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}), "LlamaForCausalLM"),
        (json!({"text_config": {}}), "V4.1"),
        (json!({"vision_config": {}}), "vision"),
    ] {
        let text = refusal(&with(released(), changes));
        assert!(text.contains("not a DeepSeek-V4 checkpoint") && text.contains(found), "{text}");
    }
    assert!(refusal(&json!([1])).contains("not an object"));
}
