//! Checkpoints that are damaged in one place each.

use serde_json::json;

use crate::program::refused;
use crate::tiny::{Tensor, Tiny};

/// Serving `tiny` must be refused, and inspecting it too.
#[track_caller]
fn refuse(tiny: &Tiny, parts: &[&str]) {
    refused(&["serve", "--port", "0", tiny.path()], parts);
    refused(&["inspect", tiny.path()], parts);
}

#[test]
fn a_truncated_shard_says_to_fetch_it_again() {
    let tiny = Tiny::copy();
    let path = tiny.file("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..9_000_000]).unwrap();
    refuse(&tiny, &["the header describes 15959336 bytes, the file has 9000000"]);
    for keep in [whole.len() - 1000, 500, 3, 0] {
        std::fs::write(&path, &whole[..keep]).unwrap();
        refuse(&tiny, &["model.safetensors", "damaged", "fetch it again"]);
    }
}

#[test]
fn a_wrong_dtype_names_the_tensor_and_both_types() {
    let tiny = Tiny::copy().edit_one("norm.weight", |t| {
        t.dtype = "F32".into();
        t.bytes = vec![0; 4 * 256];
    });
    refuse(&tiny, &["1 faults", "dtype: norm.weight is F32, expected BF16"]);
    let tiny = Tiny::copy().edit_one("norm.weight", |t| t.dtype = "F16".into());
    refuse(&tiny, &["norm.weight is F16, which no V4 tensor has"]);
}

#[test]
fn a_wrong_shape_names_both() {
    let tiny = Tiny::copy().edit_one("layers.0.attn.wkv.weight", |t| t.shape.reverse());
    refuse(&tiny, &["shape: layers.0.attn.wkv.weight is [256, 512], expected [512, 256]"]);
}

#[test]
fn missing_and_extra_tensors_are_listed() {
    let tiny = Tiny::copy().edit(|all| {
        all.retain(|t| t.name != "layers.2.attn.indexer.wq_b.weight");
        let (name, dtype) = ("layers.2.attn.surprise".to_string(), "F32".to_string());
        all.push(Tensor { name, dtype, shape: vec![1], bytes: vec![0; 4] });
    });
    refuse(&tiny, &["2 faults", "missing: layers.2.attn.indexer.wq_b.weight", "not expected: layers.2.attn.surprise"]);
}

#[test]
fn many_faults_are_counted_and_the_first_twenty_shown() {
    let tiny = Tiny::copy().edit(|all| all.retain(|t| !t.name.starts_with("layers.4.")));
    refuse(&tiny, &["88 faults (the first 20)", "missing: layers.4.attn_norm.weight"]);
}

#[test]
fn a_nan_scale_names_the_tensor() {
    let tiny = Tiny::copy().edit_one("layers.1.ffn.experts.3.w2.scale", |t| t.bytes[7] = 255);
    refuse(&tiny, &["layers.1.ffn.experts.3.w2.scale holds a NaN scale"]);
}

#[test]
fn a_hash_table_that_names_an_absent_expert_is_refused() {
    let tiny = Tiny::copy().edit_one("layers.0.ffn.gate.tid2eid", |t| t.bytes[16] = 8);
    refuse(&tiny, &["layers.0.ffn.gate.tid2eid names expert 8, there are 8"]);
}

#[test]
fn fp4_experts_with_f32_scales_are_refused() {
    let tiny = Tiny::copy().edit_one("layers.1.ffn.experts.3.w2.scale", |t| {
        t.dtype = "F32".into();
        t.bytes = t.bytes.iter().flat_map(|_| 1f32.to_le_bytes()).collect();
    });
    refuse(&tiny, &["layers.1.ffn.experts.3.w2.scale is F32, expected F8_E8M0"]);
}

#[test]
fn an_index_that_names_an_absent_shard_says_so() {
    let tiny = Tiny::copy();
    let map =
        json!({"weight_map": {"embed.weight": "model.safetensors", "norm.weight": "model-00002-of-00002.safetensors"}});
    std::fs::write(tiny.file("model.safetensors.index.json"), map.to_string()).unwrap();
    refuse(&tiny, &["1 of 2 shards", "model-00002-of-00002.safetensors", "incomplete"]);
    std::fs::write(tiny.file("model.safetensors.index.json"), "{}").unwrap();
    refuse(&tiny, &["model.safetensors.index.json", "weight_map"]);
}

#[test]
fn converted_checkpoints_and_folders_without_weights_are_told_apart() {
    let tiny = Tiny::copy().edit_one("embed.weight", |t| t.name = "model.embed_tokens.weight".into());
    refuse(&tiny, &["transformers' names", "original release"]);
    std::fs::remove_file(tiny.file("model.safetensors")).unwrap();
    refused(&["serve", "--port", "0", tiny.path()], &["no *.safetensors", "hf download"]);
}

#[test]
fn a_missing_or_broken_tokenizer_is_named() {
    let tiny = Tiny::copy();
    std::fs::write(tiny.file("tokenizer.json"), "{}").unwrap();
    refused(&["serve", "--port", "0", tiny.path()], &["tokenizer.json"]);
    std::fs::remove_file(tiny.file("tokenizer.json")).unwrap();
    refused(&["serve", "--port", "0", tiny.path()], &["cannot read the tokenizer", "tokenizer.json"]);
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let tiny = Tiny::copy().edit(|all| {
        for t in all.iter_mut().filter(|t| ["embed.weight", "head.weight"].contains(&t.name.as_str())) {
            t.shape[0] = 1024;
            t.bytes.truncate(1024 * 256 * 2);
        }
        for t in all.iter_mut().filter(|t| t.name.ends_with("tid2eid")) {
            t.shape[0] = 1024;
            t.bytes.truncate(1024 * 2 * 8);
        }
    });
    std::fs::write(tiny.file("config.json"), Tiny::config(json!({"vocab_size": 1024})).to_string()).unwrap();
    refused(&["serve", "--port", "0", tiny.path()], &["do not belong together"]);
}
