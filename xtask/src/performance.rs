//! `cargo xtask performance`: writes docs/performance.md from the figures in bench/results. A test compares both.
//!
//! Assumes the files named here. A step or a product that is missing is an error that names it; what was not measured for a
//! number of tokens is a gap.

use std::fmt::Write as _;

use serde_json::Value;

use crate::{Failure, root};

/// The page, relative to the root.
pub const PAGE: &str = "docs/performance.md";

/// Writes the page.
pub fn run() -> Result<(), Failure> {
    let path = root().join(PAGE);
    std::fs::write(&path, page()?).map_err(|e| format!("{}: {e}", path.display()))
}

/// The page as the results give it.
pub fn page() -> Result<String, Failure> {
    let (steps, ranks, operators) = (results("h200_steps")?, results("h200_ranks")?, results("h200_operators")?);
    let mut out = String::from(HEAD);
    one_gpu(&mut out, &steps)?;
    two_gpus(&mut out, &ranks["flash"])?;
    drafts(&mut out, &steps["drafts_12_layers"])?;
    products(&mut out, &operators)?;
    others(&mut out, &operators)?;
    prefill(&mut out, &steps, &ranks["flash"])?;
    Ok(out)
}

const HEAD: &str = "\
# Performance

Made by `cargo xtask performance` from `bench/results`; the files there say how each figure was measured. NVIDIA H200, shapes of
V4-Flash, random weights, fp8 entries and fp4 index keys. Floors are bytes at 4.3 TB/s, or operations at the rate of the tensor
cores where that takes longer. Peers were measured on the same kind of GPU in other runs.
";

/// The newest results of this name.
fn results(name: &str) -> Result<Value, Failure> {
    let folder = root().join("bench/results");
    let files = std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let names = files.flatten().map(|file| file.file_name().to_string_lossy().into_owned());
    let newest = names
        .filter(|file| file.starts_with(name))
        .max()
        .ok_or_else(|| format!("no {name}*.json in {}", folder.display()))?;
    let text = std::fs::read_to_string(folder.join(&newest)).map_err(|e| format!("{newest}: {e}"))?;
    serde_json::from_str(&text).map_err(|e| format!("{newest}: {e}"))
}

/// A number somewhere below `value`.
fn number(value: &Value, pointer: &str) -> Result<f64, Failure> {
    value.pointer(pointer).and_then(Value::as_f64).ok_or_else(|| format!("the results have no number at {pointer}"))
}

fn list<'a>(value: &'a Value, pointer: &str) -> Result<&'a [Value], Failure> {
    let found = value.pointer(pointer).and_then(Value::as_array);
    found.map(Vec::as_slice).ok_or_else(|| format!("the results have no list at {pointer}"))
}

/// 8K, 128K, 1M.
fn context(tokens: f64) -> String {
    match tokens as u64 {
        n if n >= 1_000_000 => format!("{}M", (n + 500_000) / 1_000_000),
        n if n >= 1024 => format!("{}K", n / 1024),
        n => n.to_string(),
    }
}

fn line(out: &mut String, cells: &[String]) {
    let _ = writeln!(out, "| {} |", cells.join(" | "));
}

fn head(out: &mut String, title: &str, text: &str, columns: &[&str]) {
    let _ = writeln!(out, "\n## {title}\n\n{text}\n");
    line(out, &columns.iter().map(ToString::to_string).collect::<Vec<_>>());
    line(out, &vec!["---".into(); columns.len()]);
}

fn one_gpu(out: &mut String, steps: &Value) -> Result<(), Failure> {
    let text = "36 of 43 layers with head and embedding, as many as fit; a step of all sequences.";
    head(out, "A decode step on one H200", text, &["sequences", "context", "ms", "floor", "ms / floor"]);
    for step in list(steps, "/layers_36/steps")? {
        let [batch, tokens, ms, floor] = ["/batch", "/context", "/ms", "/floor_ms"].map(|p| number(step, p));
        let (ms, floor) = (ms?, floor?);
        line(
            out,
            &[
                batch?.to_string(),
                context(tokens?),
                format!("{ms:.2}"),
                format!("{floor:.2}"),
                format!("{:.1}", ms / floor),
            ],
        );
    }
    Ok(())
}

fn two_gpus(out: &mut String, flash: &Value) -> Result<(), Failure> {
    let peer = |name: &str| number(flash, &format!("/peer/{name}")).map(|ms| format!("{ms:.2}"));
    let text = "All 43 layers, `--tensor-parallel-size 2`. vLLM 0.33 with tensor and expert parallelism; its batches stand behind 8K \
                tokens, ours behind the context given.";
    head(out, "A decode step on two H200", text, &["sequences", "context", "ms", "vLLM, ms"]);
    for step in list(flash, "/steps")? {
        let [batch, tokens, ms] = ["/batch", "/context", "/ms"].map(|p| number(step, p));
        let (batch, tokens) = (batch? as u64, tokens?);
        let vllm = match (batch, tokens as u64) {
            (1, 8192) => peer("batch_1_8k_ms")?,
            (1, 131_072) => peer("batch_1_128k_ms")?,
            (8, _) => peer("batch_8_ms")?,
            (32, _) => peer("batch_32_ms")?,
            _ => String::new(),
        };
        line(out, &[batch.to_string(), context(tokens), format!("{:.2}", ms?), vllm]);
    }
    Ok(())
}

fn drafts(out: &mut String, steps: &Value) -> Result<(), Failure> {
    let text = "Twelve layers and the MTP module: a step that verifies 2, 4 or 8 tokens of every sequence and drafts again, \
                beside a step of one token without drafting; in brackets the ratio.";
    head(out, "Steps with drafts", text, &["sequences", "context", "1 token, ms", "2", "4", "8"]);
    for (batch, tokens) in [(1, 1000), (1, 8192), (1, 65_536), (8, 1000), (32, 1000)] {
        let ms = |drafts: u32| number(steps, &format!("/{batch} x {tokens}/{drafts}"));
        let one = ms(0)?;
        let mut cells = vec![batch.to_string(), context(f64::from(tokens)), format!("{one:.2}")];
        for drafts in [1, 3, 7] {
            cells.push(format!("{:.2} ({:.2})", ms(drafts)?, ms(drafts)? / one));
        }
        line(out, &cells);
    }
    Ok(())
}

/// A cell of a list that may have gaps.
fn cell(value: &Value) -> String {
    value.as_f64().map(|v| format!("{v:.1}")).unwrap_or_default()
}

fn products(out: &mut String, operators: &Value) -> Result<(), Failure> {
    let text = "Microseconds in graphs, weights from memory; floor and peer for one token (DeepGEMM, cuBLAS).";
    head(out, "Products with weights", text, &["", "1 token", "8", "32", "floor, 1", "peer, 1"]);
    for (group, peers) in
        [("linear_fp8_few", "peer_1 (DeepGEMM, another run)"), ("linear_bf16", "peer_1 (cuBLAS, another run)")]
    {
        let all = operators[group].as_object().ok_or_else(|| format!("the results have no {group}"))?;
        let about =
            |name: &str| name == "tokens" || name == "note" || name.starts_with("floor") || name.starts_with("peer");
        let names = all.keys().filter(|name| !about(name));
        for (i, name) in names.enumerate() {
            let us = list(&operators[group], &format!("/{name}"))?;
            if us.len() < 3 {
                return Err(format!("{group}: {name} has {} figures, and 1, 8 and 32 tokens are shown", us.len()));
            }
            let [floor, peer] = ["floor_1", peers].map(|key| cell(&all[key][i]));
            line(out, &[name.clone(), cell(&us[0]), cell(&us[1]), cell(&us[2]), floor, peer]);
        }
    }
    let experts = &operators["routed experts of Flash, gate and up then down"];
    let both = |value: &Value| number(value, "/0").and_then(|a| number(value, "/1").map(|b| a + b));
    let peer = "peer (Humming W4A8 of vLLM 0.33, whole operator, another run), 1, 4 and 8 tokens";
    let text = "Microseconds, gate and up and down together, other experts in every launch. The peer's figure has activation and sum inside.";
    head(out, "Routed experts", text, &["tokens", "experts used", "us", "floor", "us / floor", "peer"]);
    for (i, tokens) in list(experts, "/tokens")?.iter().enumerate() {
        let [few, many] = ["groups of 8", "groups of 64"].map(|form| both(&experts[form][i]));
        let (us, floor) = (few?.min(many?), both(&experts["floor"][i])?);
        let tokens = tokens.as_u64().unwrap_or_default();
        let peer = match tokens {
            1 => cell(&experts[peer][0]),
            4 => cell(&experts[peer][1]),
            8 => cell(&experts[peer][2]),
            4096 => cell(&experts["peer_4096"]),
            _ => String::new(),
        };
        let used = experts["experts used"][i].to_string();
        line(
            out,
            &[tokens.to_string(), used, format!("{us:.1}"), format!("{floor:.1}"), format!("{:.2}", us / floor), peer],
        );
    }
    Ok(())
}

fn others(out: &mut String, operators: &Value) -> Result<(), Failure> {
    let text = "Microseconds in graphs; indexer and attention behind 128K and 8K tokens of context. Operators of prefill stand beside \
                kernels in the notes of crates/cuda/kernels.";
    head(out, "Other operators", text, &["", "1 token", "8", "32", "128", "peer, 1"]);
    let mhc = &operators["mHC boundary, any multiple of 256 as width"];
    let index = &operators["index select, 512 of 32,768 entries, 64 heads"];
    let attention = &operators["attention c4a, window and 512 picks, 64 heads"];
    for (name, tokens, us, peer) in [
        ("mHC boundary", &mhc["tokens"], &mhc["us"], &mhc["peer_1 (vLLM TileLang, another run)"]),
        (
            "index scores and top 512, fp4 keys",
            &index["tokens"],
            &index["fp4"],
            &index["peer_1 (DeepGEMM logits, SGLang top-k, another run)"],
        ),
        ("c4a attention", &attention["tokens"], &attention["us"], &attention["peer_1 (FlashMLA, another run)"]),
    ] {
        let at = |n: u64| list(tokens, "").ok().and_then(|all| all.iter().position(|t| t.as_u64() == Some(n)));
        let cells = [1, 8, 32, 128].map(|n| at(n).map(|i| cell(&us[i])).unwrap_or_default());
        line(out, &[&[name.to_owned()], &cells[..], &[cell(peer)]].concat());
    }
    Ok(())
}

fn prefill(out: &mut String, steps: &Value, flash: &Value) -> Result<(), Failure> {
    let columns = ["prompt", "one H200, 36 layers", "floor", "two H200, 43 layers", "vLLM on two"];
    head(out, "Prefill", "Tokens per second, 2,048 tokens a step.", &columns);
    for tokens in [8192, 131_072] {
        let of = |value: &Value, at: &str| number(value, &format!("{at}/1 x {tokens}")).map(|v| v.to_string());
        let [one, floor] = ["prefill_tokens_per_s", "prefill_floor_tokens_per_s"]
            .map(|name| of(&steps["layers_36"], &format!("/{name}")));
        let [two, peer] = ["/prefill_tokens_per_s", "/peer/prefill_tokens_per_s"].map(|at| of(flash, at));
        line(out, &[context(f64::from(tokens)), one?, floor?, two?, peer?]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_figures_is_that_of_the_results() {
        let there = std::fs::read_to_string(root().join(PAGE)).unwrap();
        assert!(there == page().unwrap(), "run cargo xtask performance");
    }
}
