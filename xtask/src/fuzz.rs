//! `cargo xtask fuzz TARGET [SECONDS]`: a fuzz target with coverage feedback, on the stable compiler.
//!
//! Sets the flags that `cargo fuzz` would set, without a sanitizer: there is no unsafe code on these paths. The corpus begins
//! with the requests of real agents and the outputs of the parser's tests, and grows in `fuzz/corpus`. Needs a C++ compiler.

use std::path::Path;
use std::process::Command;

use crate::process::{cargo, output, run as run_command};
use crate::{Failure, root};

const TARGETS: [&str; 2] = ["reply", "requests"];

const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

/// Builds and runs.
pub fn run(args: &[String]) -> Result<(), Failure> {
    let usage = || format!("usage: cargo xtask fuzz {} [SECONDS]", TARGETS.join("|"));
    let (target, seconds) = match args {
        [target] => (target, 600),
        [target, seconds] => (target, seconds.parse::<u32>().map_err(|_| usage())?),
        _ => return Err(usage()),
    };
    if !TARGETS.contains(&target.as_str()) {
        return Err(usage());
    }
    let host = String::from_utf8_lossy(&output(Command::new("rustc").arg("-vV"))?).into_owned();
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("rustc names no host")?.to_owned();
    let folder = root().join("fuzz");
    let mut build = cargo();
    // With a target named, build scripts stay without instrumentation.
    build.current_dir(&folder).env("RUSTFLAGS", FLAGS).args(["build", "--release", "--target", &host, "--bin", target]);
    run_command(&mut build)?;
    let corpus = folder.join("corpus").join(target);
    seed(target, &corpus)?;
    let program = folder.join("target").join(&host).join("release").join(target);
    let mut fuzz = Command::new(program);
    fuzz.current_dir(&folder).arg(&corpus).arg(format!("-max_total_time={seconds}"));
    // Long enough for a request with tools.
    fuzz.args(["-max_len=8192", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1", "-verbosity=0"]);
    run_command(&mut fuzz)
}

/// First inputs.
fn seed(target: &str, corpus: &Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| format!("{}: {error}", corpus.display());
    std::fs::create_dir_all(corpus).map_err(failed)?;
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    if target == "reply" {
        let d = "\u{ff5c}DSML\u{ff5c}";
        let call = format!(
            "\n\n<{d}tool_calls>\n<{d}invoke name=\"f\">\n<{d}parameter name=\"s\" string=\"true\">a</{d}parameter>\n\
             <{d}parameter name=\"n\" string=\"false\">[1, {{\"k\": null}}]</{d}parameter>\n</{d}invoke>\n</{d}tool_calls>"
        );
        for text in [format!("a</think>b{call}"), call, "a</think>stop b</think>c<think>".to_owned()] {
            for mode in [0u8, 1, 2, 8, 16] {
                inputs.push([&[mode, 9], text.as_bytes()].concat());
            }
        }
    } else {
        for (route, name) in [(0u8, "opencode"), (1, "codex"), (2, "claude_code"), (7, "codex"), (8, "claude_code")] {
            let path = root().join(format!("testdata/clients/{name}.json"));
            let text = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            let file: serde_json::Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
            for request in file["requests"].as_array().into_iter().flatten() {
                inputs.push([&[route], request["body"].to_string().as_bytes()].concat());
            }
        }
        for (route, body) in [
            (0u8, r#"{"messages": [{"role": "user", "content": "a"}], "n": 2, "logprobs": true, "stop": ["x"]}"#),
            (1, r#"{"input": "a", "stream": true, "tools": [{"type": "custom", "name": "p"}], "tool_choice": "auto"}"#),
            (3, r#"{"prompt": ["a", [1, 2]], "suffix": null, "echo": true, "max_tokens": 2}"#),
            (5, r#"{"prompt": "a", "add_special_tokens": false}"#),
            (6, r#"{"tokens": [1, 2, 3]}"#),
        ] {
            inputs.push([&[route], body.as_bytes()].concat());
        }
    }
    for (index, input) in inputs.iter().enumerate() {
        std::fs::write(corpus.join(format!("seed-{index:03}")), input).map_err(failed)?;
    }
    Ok(())
}
