//! `longwave explore --export`: what is written, and that other people's folders are left alone.

use serde_json::Value;

use crate::program::{printed_json, refused, run};

#[test]
fn a_backend_that_cannot_tell_what_tokens_read_is_refused_with_the_one_that_can() {
    refused(&["explore", "--port", "0", "--backend", "cuda"], &["does not tell", "leave --backend out"]);
    refused(&["explore", "--port", "0", "/nowhere"], &["/nowhere"]);
}

#[test]
fn an_export_holds_the_page_and_the_calculators_tables() {
    let folder = tempfile::tempdir().unwrap();
    let site = folder.path().join("site");
    let args = ["explore", "--export", site.to_str().unwrap()];
    // Twice: an older export is written over.
    for _ in 0..2 {
        let run = run(&args);
        assert_eq!(run.code, Some(0), "{}", run.err);
    }
    let text = |name: &str| std::fs::read_to_string(site.join(name)).unwrap();
    assert!(text("index.html").contains("content=\"files\""));
    let table: Value = serde_json::from_str(&text("memory/pro-bf16-fp8.json")).unwrap();
    let row = table.as_array().unwrap().iter().find(|row| row["context"] == 131_072).unwrap();
    let gpus = ["--gpus", "8", "--gpu-memory", "141000000000", "--json"];
    let kv = ["kv", "pro", "--context", "128K", "--cache", "bf16", "--index", "fp8"];
    let counted = printed_json(&[&kv[..], &gpus].concat());
    for name in ["payload", "allocated", "v32", "weights", "layers"] {
        assert_eq!(row[name], counted[name], "{name}");
    }
    assert!(row["fits"].as_array().unwrap().contains(&counted["fit"]));

    std::fs::write(site.join("letter.txt"), "mine").unwrap();
    refused(&args, &["letter.txt", "not the explorer's"]);
}
