//! `longwave chat` and `longwave prove`: a model that answers in the terminal, and one that answers equally in every way.

use crate::program::{printed, printed_json, refused, typed};

#[test]
fn chat_answers_line_by_line_and_forgets_on_reset() {
    let input = "Hello, who are you?\nWhat is the opposite of day?\n/reset\nWhat is the capital of Norway?\n";
    let run = typed(&["chat", "--temperature", "0", "--stats"], input);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let lines: Vec<&str> = run.out.lines().collect();
    let expected = [
        "I am a tiny language model with the DeepSeek V4 architecture.",
        "The opposite of day is night.",
        "The capital of Norway is Oslo.",
    ];
    assert_eq!(lines, expected);
    // The second prompt holds the first turn; after /reset the third is short again.
    let prompts: Vec<u32> = run
        .err
        .lines()
        .filter_map(|l| l.strip_prefix('(')?.split_once(" prompt tokens").and_then(|p| p.0.parse().ok()))
        .collect();
    assert!(prompts.len() == 3 && prompts[1] > prompts[0] + 10 && prompts[2] < prompts[1], "{prompts:?}");
}

#[test]
fn quick_chat_thinks_when_asked_to() {
    let out = printed(&["chat", "--thinking", "--temperature", "0", "-q", "What is the capital of Norway?"]);
    assert_eq!(out, "The capital of Norway is Oslo.\nThe capital of Norway is Oslo.\n");
}

/// All ways in which a set is served.
const WAYS: [&str; 25] = [
    "plain",
    "plain, behind one long text",
    "chunks of 1",
    "chunks of 3",
    "chunks of 64",
    "chunks of 129",
    "batch of 4, 33 tokens a step",
    "batch of all, 256 tokens a step",
    "reused prefixes",
    "reused prefixes, drafts of 3",
    "reused prefixes, constant eviction",
    "preemption, state kept",
    "preemption, state lost, drafts of 1",
    "evicted checkpoints, window replay",
    "the same, drafts of 3",
    "tier round trip, host",
    "tier round trip, disk and restart",
    "drafts of 1",
    "drafts of 3, 33 tokens a step",
    "drafts of 7, one by one",
    "right drafts of 3",
    "wrong drafts of 3",
    "random drafts of 5",
    "batch of all, one thread",
    "batch of all, AVX2",
];

#[test]
fn prove_finds_no_difference() {
    let json = printed_json(&["prove", "--requests", "6", "--json"]);
    assert!(json["equal"] == true && json["exercised"] == true, "{json}");
    let ways = json["ways"].as_array().unwrap();
    assert_eq!(ways.iter().map(|w| w["way"].as_str().unwrap()).collect::<Vec<_>>(), WAYS);
    for way in ways {
        assert!(
            way["differences"] == 0 && way["logit_differences"] == 0 && way["tokens"].as_u64().unwrap() > 10,
            "{way}"
        );
        assert!(way["exercised"] == true && way["missing"].is_null(), "{way}");
    }
}

#[test]
fn prove_with_one_request_says_what_it_did_not_exercise() {
    let json = printed_json(&["prove", "--requests", "1", "--json"]);
    assert!(json["equal"] == true && json["exercised"] == false, "{json}");
    let ways = json["ways"].as_array().unwrap();
    let way = |name: &str| ways.iter().find(|w| w["way"] == name).unwrap();
    assert_eq!(ways.len(), WAYS.len());
    // The one prompt has one token: nothing to reuse.
    assert!(way("reused prefixes")["missing"] == "prefix hit" && way("reused prefixes")["exercised"] == false);
    assert!(way("chunks of 1")["exercised"] == true && way("chunks of 1")["missing"].is_null());
}

#[test]
fn prove_refuses_a_folder_without_a_model() {
    refused(&["prove", "."], &["config.json"]);
}
