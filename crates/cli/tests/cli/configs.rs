//! Configurations that are refused: other architectures, missing, unknown and wrong fields.

use serde_json::{Value, json};

use crate::program::refused;
use crate::tiny::Tiny;

/// The command on a folder that holds only this configuration must be refused.
#[track_caller]
fn refuse(config: &Value, parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let path = dir.path().to_str().unwrap();
    for command in [&["serve", "--port", "0", path][..], &["inspect", path]] {
        refused(command, parts);
    }
}

#[test]
fn other_architectures_are_named() {
    let v3 = json!({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "num_hidden_layers": 61, "kv_lora_rank": 512, "q_lora_rank": 1536});
    refuse(&v3, &["not a DeepSeek-V4 checkpoint", "DeepseekV3ForCausalLM", "kv_lora_rank"]);
    let v41 = json!({"architectures": ["DeepseekV41ForConditionalGeneration"], "model_type": "deepseek_v41",
        "text_config": {"hidden_size": 4096}});
    refuse(&v41, &["not a DeepSeek-V4 checkpoint", "V4.1"]);
    let llama = json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096});
    refuse(&llama, &["not a DeepSeek-V4 checkpoint", "LlamaForCausalLM", "llama"]);
}

#[test]
fn fields_that_are_missing_wrong_or_unknown_are_named() {
    refuse(&Tiny::config(json!({"index_topk": null})), &["no field `index_topk`"]);
    refuse(&Tiny::config(json!({"hidden_size": 250})), &["`hidden_size` is 250", "multiple of 128"]);
    refuse(&Tiny::config(json!({"scoring_func": "softmax"})), &["`scoring_func` is \"softmax\"", "sqrtsoftplus"]);
    refuse(&Tiny::config(json!({"compress_ratios": [0, 4]})), &["`compress_ratios` is 2 entries", "at least 5"]);
    refuse(&Tiny::config(json!({"mystery": 1})), &["does not know: `mystery`", "delete"]);
}

#[test]
fn a_folder_without_a_configuration_or_with_a_broken_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    refused(&["serve", "--port", "0", path], &["config.json", "Give a folder"]);
    std::fs::write(dir.path().join("config.json"), "{\"hidden_size\": 1,").unwrap();
    refused(&["serve", "--port", "0", path], &["config.json is not valid JSON", "line 1"]);
}

#[test]
fn names_that_are_not_folders_say_how_to_get_one() {
    let hub = "deepseek-ai/DeepSeek-V4-Flash";
    for command in ["serve", "chat", "inspect", "kv"] {
        refused(&[command, hub], &["hf download deepseek-ai/DeepSeek-V4-Flash --local-dir DeepSeek-V4-Flash"]);
    }
    refused(&["serve", "--port", "0", "/nowhere/model"], &["no folder \"/nowhere/model\""]);
    refused(&["serve", "--port", "0", "flash"], &["has no weights", "hf download"]);
    let tiny = Tiny::copy();
    let file = tiny.file("config.json");
    refused(&["chat", file.to_str().unwrap()], &["is a file", "folder"]);
}
