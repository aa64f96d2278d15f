//! `longwave kv`: the published figures, as text and as JSON.

use crate::program::{printed, printed_json, refused};

/// `printed` with every run of spaces as one.
fn words(args: &[&str]) -> String {
    printed(args).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn pro_at_one_million_in_bf16_is_9_62_against_83_9_gib_with_the_arithmetic() {
    let text = words(&["kv", "pro", "--context", "1048576", "--cache", "bf16", "--index", "bf16"]);
    for part in [
        "c4 main 30 layers x 262,144 entries x 1,024 B 8,053,063,680 B 7.50 GiB",
        "30 c4 layers x ((262,144 + 128) entries x 1,024 B + 262,144 keys x 256 B) = 30 x 335,675,392 B",
        "31 c128 layers x (8,192 + 128) entries x 1,024 B = 31 x 8,519,680 B",
        "sum 10,334,371,840 B 9.62 GiB",
        "(576 latent + 128 index) values x 2 B = 1,408 B per token and layer",
        "61 layers x 1,048,576 tokens x 1,408 B 90,060,095,488 B 83.9 GiB",
        "9.62 GiB against 83.9 GiB: 8.7 times less",
        "each further token adds 9,848 B",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn checkpoint_totals_follow_from_the_configurations_alone() {
    for (name, totals) in [
        ("flash", "Checkpoint: 159,609,485,896 B in 69,187 tensors"),
        ("pro", "Checkpoint: 864,704,792,696 B in 145,116 tensors"),
        ("flash-0731", "Checkpoint: 166,878,536,440 B in 72,317 tensors"),
        ("pro-0813", "Checkpoint: 892,727,580,904 B in 149,782 tensors"),
    ] {
        assert!(words(&["kv", name]).contains(totals), "{name}");
    }
}

#[test]
fn the_published_totals_are_in_the_json() {
    for (model, context, cache, index, bytes) in [
        ("flash", "128K", "bf16", "bf16", 907_411_456_u64),
        ("flash", "128K", "fp8", "fp8", 507_874_304),
        ("flash", "128K", "fp8", "fp4", 463_834_112),
        ("flash", "1M", "fp8", "fp8", 4_040_494_080),
        ("flash", "1M", "fp8", "fp4", 3_688_172_544),
        ("pro", "128K", "fp8", "fp8", 726_955_008),
        ("pro", "128K", "fp8", "fp4", 664_040_448),
        ("pro", "1M", "fp8", "fp8", 5_783_720_960),
        ("pro", "1M", "fp8", "fp4", 5_280_404_480),
    ] {
        let json = printed_json(&["kv", model, "--context", context, "--cache", cache, "--index", index, "--json"]);
        assert_eq!(json["payload"]["total_bytes"], bytes, "{model} {context} {cache} {index}");
    }
}

#[test]
fn the_json_holds_every_view() {
    let json = printed_json(&["kv", "flash", "--users", "3", "--json"]);
    // The defaults: the largest context, fp8 entries and fp4 keys.
    assert_eq!(
        (&json["context"], &json["formats"]["main"], &json["formats"]["index"]),
        (&1_048_576.into(), &"fp8".into(), &"fp4".into())
    );
    assert_eq!(json["payload"]["bytes_per_token"], 3514.25);
    assert_eq!(json["payload"]["caches"][0]["cache"], "c4_main");
    assert_eq!(json["weights"]["bytes"], 159_609_485_896_u64);
    assert_eq!(json["users"]["payload_bytes"], 3 * 3_688_172_544_u64);
    let allocated = &json["allocated"];
    assert_eq!((&allocated["logical_blocks"], &allocated["prefill_reserve_bytes"]), (&4096.into(), &0.into()));
    let buckets = allocated["buckets"].as_array().unwrap();
    assert_eq!(buckets.iter().map(|b| b["bucket"].as_str().unwrap()).collect::<Vec<_>>(), ["large", "middle", "small"]);
    let sum: u64 = buckets.iter().map(|b| b["total_bytes"].as_u64().unwrap()).sum();
    assert_eq!(allocated["total_bytes"], sum);
}

#[test]
fn a_folder_a_file_and_nothing_are_models_too() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny");
    let file = format!("{folder}/config.json");
    let of = |args: &[&str]| printed_json(args)["payload"].clone();
    let tiny = of(&["kv", "--context", "4K", "--json"]);
    assert_eq!(tiny, of(&["kv", folder, "--context", "4K", "--json"]));
    assert_eq!(tiny, of(&["kv", &file, "--context=4096", "--json"]));
}

#[test]
fn unknown_names_and_contexts_over_the_limit_are_refused() {
    refused(&["kv", "flush"], &["flash, pro, flash-0731, pro-0813", "folder"]);
    refused(&["kv", "deepseek-ai/DeepSeek-V4-Pro"], &["hf download deepseek-ai/DeepSeek-V4-Pro --local-dir"]);
    refused(&["kv", "flash", "--context", "2M"], &["--context 2097152", "1048576, the model's context"]);
    refused(&["kv", "flash", "--context", "0"], &["between 1 and 1048576"]);
}
