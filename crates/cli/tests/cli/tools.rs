//! `longwave inspect` and `longwave doctor`.

use crate::program::{printed, printed_json};
use crate::tiny::Tiny;

#[test]
fn presets_are_inspected_without_weights() {
    let text = printed(&["inspect", "flash"]);
    for part in [
        "DeepSeek-V4-Flash",
        "0-1 window, 2-41 (c4, c128) x 20, 42 c4",
        "159,609,485,896 B in 69,187 tensors",
        "290.9 B parameters",
        "routed experts",
        "3-41 odd c128",
        "No weights here",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let json = printed_json(&["inspect", "pro", "--json"]);
    assert_eq!(json["total"]["bytes"], 864_704_792_696_u64);
    assert_eq!(json["by_dtype"]["I8"]["bytes"], 786_381_668_352_u64);
    let layers = json["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 1 + 61 + 1);
    assert_eq!((&layers[3]["place"], &layers[3]["kind"]), (&"layers.2".into(), &"c4".into()));
    assert_eq!(layers[3]["bytes"], 13_909_746_200_u64);
    assert!(json["shards"].is_null());
}

#[test]
fn the_embedded_model_and_a_folder_are_verified() {
    let text = printed(&["inspect"]);
    assert!(text.contains("longwave-tiny") && text.contains("Verified"), "{text}");
    let tiny = Tiny::copy();
    let json = printed_json(&["inspect", tiny.path(), "--json"]);
    assert_eq!((&json["total"]["tensors"], &json["total"]["bytes"]), (&508.into(), &15_908_736.into()));
    assert_eq!((&json["shards"][0]["name"], &json["shards"][0]["tensors"]), (&"model.safetensors".into(), &508.into()));
}

#[test]
fn f32_block_scales_of_base_checkpoints_are_counted_as_they_are() {
    let scale = "layers.0.attn.wq_a.scale";
    let tiny = Tiny::copy().edit_one(scale, |t| {
        t.dtype = "F32".into();
        t.bytes = t.bytes.iter().flat_map(|&e| 2f32.powi(i32::from(e) - 127).to_le_bytes()).collect();
    });
    let json = printed_json(&["inspect", tiny.path(), "--json"]);
    assert!(json["total"]["bytes"].as_u64().unwrap() > 15_908_736);
}

#[test]
fn the_doctor_describes_this_machine() {
    let json = printed_json(&["doctor", "--json"]);
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert!(json["cpu"]["cores"].as_u64().unwrap() >= 1 && json["cpu"]["simd"].is_string());
    // Whether there are kernels depends on where it was built.
    assert!(json["nvidia"]["gpus"].is_array() && json["kernels"].is_array());
    let files: Vec<&str> = json["libraries"].as_array().unwrap().iter().map(|l| l["file"].as_str().unwrap()).collect();
    assert_eq!(files, ["libnccl.so.2", "libnixl_capi.so", "nvcc"]);
    let text = printed(&["doctor"]);
    assert!(text.contains("SIMD in use") && text.contains("GPU kernels"), "{text}");
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_longwave"));
    let out = command.args(["inspect", "pro"]).stdout(writer).output().unwrap();
    assert_eq!((out.status.code(), String::from_utf8_lossy(&out.stderr).as_ref()), (Some(0), ""));
}
