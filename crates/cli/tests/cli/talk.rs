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

#[test]
fn prove_finds_no_difference() {
    let json = printed_json(&["prove", "--requests", "6", "--json"]);
    assert_eq!(json["equal"], true);
    let ways = json["ways"].as_array().unwrap();
    assert!(ways.len() >= 8);
    for way in ways {
        assert!(
            way["differences"] == 0 && way["logit_differences"] == 0 && way["tokens"].as_u64().unwrap() > 10,
            "{way}"
        );
    }
}

#[test]
fn prove_refuses_a_folder_without_a_model() {
    refused(&["prove", "."], &["config.json"]);
}
