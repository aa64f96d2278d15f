//! Reading `config.json` in its three spellings into [`ModelConfig`].
//!
//! The released file (model.md 1.1), the reference program's `inference/config.json` (1.3) and transformers' rewrite
//! (`layer_types`, `compress_rates`, `mlp_layer_types`, `rope_parameters`). Every key is either used, known to be inert,
//! or an error: a key that is read but not understood could change results silently.

use serde_json::{Map, Value};

use crate::config::{ConfigError, DSpark, ExpertDtype, LayerKind, ModelConfig, Yarn};

/// Keys that describe the file or a training set-up and do not change what the model computes.
const INERT: &[&str] = &[
    "_name_or_path",
    "architectures",
    "auto_map",
    "attention_dropout",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_batch_size",
    "max_seq_len",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "scale_dtype",
    "tie_weights",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

struct Fields<'a> {
    map: &'a Map<String, Value>,
    used: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// The value under the first of `names` that is present and not null.
    fn get(&mut self, names: &[&'static str]) -> Option<&'a Value> {
        self.used.extend_from_slice(names);
        names.iter().find_map(|n| self.map.get(*n).filter(|v| !v.is_null()))
    }

    fn need(&mut self, names: &[&'static str]) -> Result<&'a Value, ConfigError> {
        self.get(names).ok_or_else(|| ConfigError::Missing {
            field: names[0],
            hint: match &names[1..] {
                [] => String::new(),
                other => format!(" (nor `{}`)", other.join("`, `")),
            },
        })
    }

    fn uint(&mut self, names: &[&'static str]) -> Result<usize, ConfigError> {
        let v = self.need(names)?;
        as_uint(names[0], v)
    }

    fn float(&mut self, names: &[&'static str]) -> Result<f64, ConfigError> {
        let v = self.need(names)?;
        v.as_f64().filter(|f| f.is_finite()).ok_or_else(|| bad(names[0], v, "a finite number"))
    }

    /// A field that may be absent but, when present, must have the one value this program implements.
    fn fixed(&mut self, names: &[&'static str], expected: Value) -> Result<(), ConfigError> {
        match self.get(names) {
            Some(v) if !same(v, &expected) => Err(bad(names[0], v, &expected.to_string())),
            _ => Ok(()),
        }
    }
}

fn same(a: &Value, b: &Value) -> bool {
    a == b || (a.is_number() && a.as_f64() == b.as_f64())
}

fn bad(field: &str, found: &Value, expected: &str) -> ConfigError {
    ConfigError::Value { field: field.to_string(), found: found.to_string(), expected: expected.to_string() }
}

fn as_uint(field: &str, v: &Value) -> Result<usize, ConfigError> {
    v.as_u64()
        .and_then(|n| u32::try_from(n).ok())
        .map(|n| n as usize)
        .ok_or_else(|| bad(field, v, "a whole number below 2^32"))
}

fn array<'a>(field: &str, v: &'a Value) -> Result<&'a Vec<Value>, ConfigError> {
    v.as_array().ok_or_else(|| bad(field, v, "a list"))
}

/// Parses any of the three spellings. The caller checks relations between fields.
pub(crate) fn parse(value: &Value) -> Result<ModelConfig, ConfigError> {
    let map =
        value.as_object().ok_or_else(|| ConfigError::Architecture { found: "config.json is not an object".into() })?;
    architecture(map)?;
    let mut f = Fields { map, used: Vec::new() };

    let num_hidden_layers = f.uint(&["num_hidden_layers", "n_layers"])?;
    let num_hash_layers = hash_layers(&mut f, num_hidden_layers)?;
    let layers = layer_kinds(&mut f, num_hidden_layers)?;
    let (rope_theta, compress_rope_theta, yarn) = rope(&mut f)?;
    let dspark = dspark(&mut f)?;
    let nextn = f
        .get(&["num_nextn_predict_layers", "n_mtp_layers"])
        .map_or(Ok(0), |v| as_uint("num_nextn_predict_layers", v))?;

    f.fixed(&["scoring_func", "score_func"], "sqrtsoftplus".into())?;
    f.fixed(&["topk_method"], "noaux_tc".into())?;
    f.fixed(&["norm_topk_prob"], true.into())?;
    f.fixed(&["hidden_act"], "silu".into())?;
    f.fixed(&["attention_bias"], false.into())?;
    f.fixed(&["mlp_bias"], false.into())?;
    f.fixed(&["tie_word_embeddings"], false.into())?;
    f.fixed(&["num_key_value_heads"], 1.into())?;
    let expert_dtype = quantisation(&mut f)?;

    let config = ModelConfig {
        vocab_size: f.uint(&["vocab_size"])?,
        hidden_size: f.uint(&["hidden_size", "dim"])?,
        num_hidden_layers,
        num_attention_heads: f.uint(&["num_attention_heads", "n_heads"])?,
        head_dim: f.uint(&["head_dim"])?,
        qk_rope_head_dim: f.uint(&["qk_rope_head_dim", "rope_head_dim"])?,
        q_lora_rank: f.uint(&["q_lora_rank"])?,
        o_groups: f.uint(&["o_groups"])?,
        o_lora_rank: f.uint(&["o_lora_rank"])?,
        sliding_window: f.uint(&["sliding_window", "window_size"])? as u32,
        layers,
        index_n_heads: f.uint(&["index_n_heads"])?,
        index_head_dim: f.uint(&["index_head_dim"])?,
        index_topk: f.uint(&["index_topk"])?,
        rope_theta,
        compress_rope_theta,
        yarn,
        max_position_embeddings: f.uint(&["max_position_embeddings"])? as u32,
        hc_mult: f.uint(&["hc_mult"])?,
        hc_sinkhorn_iters: f.uint(&["hc_sinkhorn_iters"])? as u32,
        hc_eps: f.float(&["hc_eps"])? as f32,
        rms_norm_eps: f.float(&["rms_norm_eps", "norm_eps"])? as f32,
        n_routed_experts: f.uint(&["n_routed_experts", "num_local_experts"])?,
        n_shared_experts: f.uint(&["n_shared_experts"])?,
        num_experts_per_tok: f.uint(&["num_experts_per_tok", "n_activated_experts"])?,
        moe_intermediate_size: f.uint(&["moe_intermediate_size", "moe_inter_dim"])?,
        num_hash_layers,
        routed_scaling_factor: f.float(&["routed_scaling_factor", "route_scale"])? as f32,
        swiglu_limit: f.float(&["swiglu_limit"])? as f32,
        num_nextn_predict_layers: if dspark.is_some() { 0 } else { nextn },
        dspark,
        bos_token_id: f.uint(&["bos_token_id"])? as u32,
        eos_token_id: f.uint(&["eos_token_id"])? as u32,
        expert_dtype,
    };

    let unknown: Vec<String> = map
        .keys()
        .filter(|k| !f.used.contains(&k.as_str()) && !INERT.contains(&k.as_str()))
        .map(|k| format!("`{k}`"))
        .collect();
    if unknown.is_empty() { Ok(config) } else { Err(ConfigError::Unknown(unknown.join(", "))) }
}

/// Refuses everything that is not V4, saying what it is.
fn architecture(map: &Map<String, Value>) -> Result<(), ConfigError> {
    let refuse = |found: String| Err(ConfigError::Architecture { found });
    let arch = map.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
    let kind = map.get("model_type").and_then(Value::as_str);
    if map.contains_key("text_config")
        || map.contains_key("engram_layer_ids")
        || map.contains_key("kv_source_layer_ids")
    {
        return refuse(
            "it has V4.1's nested or shared-layer fields (text_config, kv_source_layer_ids, engram_*)".into(),
        );
    }
    if map.contains_key("vision_config") {
        return refuse("it has a vision tower (vision_config)".into());
    }
    match (arch, kind) {
        (None | Some("DeepseekV4ForCausalLM"), None | Some("deepseek_v4")) => {}
        (a, k) => {
            let v3 = if map.contains_key("kv_lora_rank") { ", with V3's kv_lora_rank" } else { "" };
            return refuse(format!(
                "architectures says {}, model_type says {}{v3}",
                a.map_or("nothing".into(), |s| format!("\"{s}\"")),
                k.map_or("nothing".into(), |s| format!("\"{s}\"")),
            ));
        }
    }
    if !map.contains_key("compress_ratios") && !map.contains_key("layer_types") {
        return refuse("it has neither `compress_ratios` nor `layer_types`".into());
    }
    Ok(())
}

/// `compress_ratios` (lists longer than L are accepted, model.md 1.2) or transformers' `layer_types`.
fn layer_kinds(f: &mut Fields, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let ratios = f.get(&["compress_ratios"]);
    let types = f.get(&["layer_types"]);
    if let Some(rates) = f.get(&["compress_rates"]) {
        for (kind, expected) in [("compressed_sparse_attention", 4), ("heavily_compressed_attention", 128)] {
            if let Some(r) = rates.get(kind).filter(|r| r.as_u64() != Some(expected)) {
                return Err(bad("compress_rates", r, &format!("{expected} for {kind}")));
            }
        }
    }
    let field = if ratios.is_some() { "compress_ratios" } else { "layer_types" };
    let list = array(
        field,
        ratios
            .or(types)
            .ok_or(ConfigError::Missing { field: "compress_ratios", hint: " (nor `layer_types`)".into() })?,
    )?;
    if list.len() < layers {
        return Err(ConfigError::Value {
            field: field.into(),
            found: format!("{} entries", list.len()),
            expected: format!("at least {layers}, one per layer"),
        });
    }
    let kind = |v: &Value| match (v.as_u64(), v.as_str()) {
        (Some(0), _) | (_, Some("sliding_attention")) => Ok(LayerKind::Window),
        (Some(4), _) | (_, Some("compressed_sparse_attention")) => Ok(LayerKind::C4),
        (Some(128), _) | (_, Some("heavily_compressed_attention")) => Ok(LayerKind::C128),
        _ => Err(bad(field, v, "0, 4 or 128 (sliding, compressed_sparse, heavily_compressed)")),
    };
    let kinds = list[..layers].iter().map(kind).collect::<Result<Vec<_>, _>>()?;
    // Entries past L belong to MTP or draft blocks, which are window-only.
    for v in &list[layers..] {
        if kind(v)? != LayerKind::Window {
            return Err(bad(field, v, "0 for the entries of MTP or draft layers"));
        }
    }
    Ok(kinds)
}

fn hash_layers(f: &mut Fields, layers: usize) -> Result<usize, ConfigError> {
    let types = f.get(&["mlp_layer_types"]);
    if let Some(v) = f.get(&["num_hash_layers", "n_hash_layers"]) {
        return as_uint("num_hash_layers", v);
    }
    let Some(types) = types else {
        return Err(ConfigError::Missing { field: "num_hash_layers", hint: " (nor `mlp_layer_types`)".into() });
    };
    let is_hash =
        array("mlp_layer_types", types)?.iter().take(layers).map(|v| v.as_str().is_some_and(|s| s.contains("hash")));
    let flags: Vec<bool> = is_hash.collect();
    let n = flags.iter().take_while(|h| **h).count();
    if flags[n..].contains(&true) {
        return Err(bad("mlp_layer_types", types, "hash-routed layers first, then learned ones"));
    }
    Ok(n)
}

/// Both rotary bases and YaRN, from the flat fields, `rope_scaling`, or transformers' `rope_parameters`.
fn rope(f: &mut Fields) -> Result<(f64, f64, Option<Yarn>), ConfigError> {
    let number =
        |v: &Value, field: &str| v.as_f64().filter(|x| *x > 0.0).ok_or_else(|| bad(field, v, "a positive number"));
    let yarn_of = |o: &Value, name: &str| -> Result<Option<Yarn>, ConfigError> {
        let kind = o.get("type").or(o.get("rope_type")).and_then(Value::as_str).unwrap_or("missing");
        if kind == "default" {
            return Ok(None);
        }
        if kind != "yarn" {
            return Err(ConfigError::Value {
                field: format!("{name}.type"),
                found: format!("\"{kind}\""),
                expected: "\"yarn\"".into(),
            });
        }
        let get = |k: &'static str| o.get(k).ok_or(ConfigError::Missing { field: k, hint: format!(" in {name}") });
        for k in ["mscale", "mscale_all_dim", "attention_factor"] {
            if let Some(v) = o.get(k).filter(|v| !v.is_null() && v.as_f64() != Some(1.0)) {
                return Err(bad(&format!("{name}.{k}"), v, "absent or 1: V4 has no attention temperature"));
            }
        }
        Ok(Some(Yarn {
            factor: number(get("factor")?, "factor")?,
            original_max_position_embeddings: as_uint(
                "original_max_position_embeddings",
                get("original_max_position_embeddings")?,
            )? as u32,
            beta_fast: number(get("beta_fast")?, "beta_fast")?,
            beta_slow: number(get("beta_slow")?, "beta_slow")?,
        }))
    };
    if let Some(p) = f.get(&["rope_parameters"]) {
        let part =
            |k: &'static str| p.get(k).ok_or(ConfigError::Missing { field: k, hint: " in rope_parameters".into() });
        let (main, comp) = (part("main")?, part("compress")?);
        let theta = |o: &Value| {
            o.get("rope_theta")
                .ok_or(ConfigError::Missing { field: "rope_theta", hint: " in rope_parameters".into() })
                .cloned()
        };
        let (a, b) = (number(&theta(main)?, "rope_theta")?, number(&theta(comp)?, "rope_theta")?);
        f.get(&["rope_theta", "compress_rope_theta", "rope_scaling", "partial_rotary_factor"]);
        return Ok((a, b, yarn_of(comp, "rope_parameters.compress")?));
    }
    let a = f.float(&["rope_theta"])?;
    let b = f.float(&["compress_rope_theta"])?;
    if let Some(s) = f.get(&["rope_scaling"]) {
        return Ok((a, b, yarn_of(s, "rope_scaling")?));
    }
    // The reference program's spelling keeps YaRN's numbers at top level; original_seq_len 0 turns it off.
    let Some(original) = f.get(&["original_seq_len"]) else {
        // An explicit null says that there is no YaRN; silence would be a guess.
        let said = f.map.contains_key("rope_scaling");
        return if said {
            Ok((a, b, None))
        } else {
            Err(ConfigError::Missing { field: "rope_scaling", hint: " (null turns YaRN off)".into() })
        };
    };
    let original = as_uint("original_seq_len", original)? as u32;
    let yarn = Yarn {
        factor: f.float(&["rope_factor"])?,
        original_max_position_embeddings: original,
        beta_fast: f.float(&["beta_fast"])?,
        beta_slow: f.float(&["beta_slow"])?,
    };
    Ok((a, b, (original > 0).then_some(yarn)))
}

fn dspark(f: &mut Fields) -> Result<Option<DSpark>, ConfigError> {
    let Some(block) = f.get(&["dspark_block_size"]) else { return Ok(None) };
    let ids = f.need(&["dspark_target_layer_ids"])?;
    Ok(Some(DSpark {
        block_size: as_uint("dspark_block_size", block)? as u32,
        noise_token_id: f.uint(&["dspark_noise_token_id"])? as u32,
        target_layer_ids: array("dspark_target_layer_ids", ids)?
            .iter()
            .map(|v| as_uint("dspark_target_layer_ids", v).map(|n| n as u32))
            .collect::<Result<_, _>>()?,
        markov_rank: f.uint(&["dspark_markov_rank"])?,
    }))
}

/// `quantization_config` and `expert_dtype`: fp8 e4m3 128x128 dynamic, ue8m0; experts fp4 or fp8.
fn quantisation(f: &mut Fields) -> Result<ExpertDtype, ConfigError> {
    // The reference program's flat spelling.
    f.fixed(&["scale_fmt"], "ue8m0".into())?;
    if let Some(q) = f.get(&["quantization_config"]) {
        for (key, expected) in [
            ("quant_method", Value::from("fp8")),
            ("fmt", "e4m3".into()),
            ("activation_scheme", "dynamic".into()),
            ("scale_fmt", "ue8m0".into()),
            ("weight_block_size", serde_json::json!([128, 128])),
        ] {
            match q.get(key) {
                Some(v) if same(v, &expected) => {}
                // Base checkpoints carry float32 scales and no scale_fmt (model.md 1.4).
                None if key == "scale_fmt" || key == "fmt" => {}
                found => {
                    return Err(bad(
                        &format!("quantization_config.{key}"),
                        found.unwrap_or(&Value::Null),
                        &expected.to_string(),
                    ));
                }
            }
        }
    }
    match f.get(&["expert_dtype"]).map(|v| (v, v.as_str())) {
        Some((_, Some("fp4"))) => Ok(ExpertDtype::Fp4),
        Some((_, Some("fp8"))) => Ok(ExpertDtype::Fp8),
        Some((v, _)) => Err(bad("expert_dtype", v, "\"fp4\" or \"fp8\"")),
        None => Err(ConfigError::Missing { field: "expert_dtype", hint: String::new() }),
    }
}
