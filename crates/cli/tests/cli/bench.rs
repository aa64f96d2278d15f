//! `longwave bench`: loads on a server, points and throughput of the tiny model, what is refused.

use serde_json::Value;

use crate::program::{Server, printed, printed_json, refused, run};

/// A server that answers at once, and its folder.
fn scripted(line: &str) -> (tempfile::TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("script.jsonl");
    std::fs::write(&file, line).unwrap();
    let server = Server::start(&["--script", file.to_str().unwrap()]);
    (folder, server)
}

const REPLY: &str = r#"{"reply": "one two three four five six seven eight nine ten eleven twelve</s>"}"#;

/// The arguments of a load without thoughts, whose instructions would make prompts long; `options` are split at spaces.
fn load<'a>(server: &'a Server, options: &'a str) -> Vec<&'a str> {
    let plain = ["--extra-body", r#"{"thinking": {"type": "disabled"}}"#];
    ["bench", "serve", server.address()].into_iter().chain(options.split(' ')).chain(plain).collect()
}

#[test]
fn a_closed_loop_reports_what_was_sent_and_what_came() {
    let (folder, server) = scripted(REPLY);
    let [numbers, plot] =
        ["numbers.json", "plot.svg"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    let options = "--requests 30 --sessions 4 --input-len 64 --output-len 8 --goodput ttft:60000 --save-detailed";
    let text = printed(&load(&server, &format!("{options} --json {numbers} --plot {plot}")));
    for part in ["4 at once", "30 (100 %)", "time to first token"] {
        assert!(text.contains(part), "{text}");
    }
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&numbers).unwrap()).unwrap();
    let number = |name: &str| json[name].as_f64().unwrap_or_else(|| panic!("{name}: {}", json[name]));
    assert_eq!((number("completed"), number("failed"), number("max_concurrency")), (30.0, 0.0, 4.0));
    assert_eq!(number("total_output_tokens"), 240.0);
    // The server's own count, its frame included.
    let prompt = number("total_input_tokens") / 30.0;
    assert!((58.0..=70.0).contains(&prompt), "{prompt}");
    assert_eq!((json["ttfts"].as_array().unwrap().len(), json["itls"].as_array().unwrap().len()), (30, 30));
    assert!(number("median_e2el_ms") >= number("median_ttft_ms") && number("request_goodput") > 0.0);
    assert!(number("max_concurrent_requests") <= 4.0);
    let plot = std::fs::read_to_string(&plot).unwrap();
    assert!(plot.starts_with("<svg") && plot.ends_with("</svg>\n") && !plot.contains("NaN"), "{plot}");
}

#[test]
fn an_open_loop_ends_in_time_and_agents_find_their_prefix_again() {
    let (_folder, server) = scripted(REPLY);
    let options =
        "--rate 50 --requests 10 --turns 3 --input-len 80 --system-len 300 --turn-len 40 --output-len 8 --json -";
    let json = printed_json(&load(&server, options));
    assert_eq!((&json["completed"], &json["request_rate"]), (&30.into(), &50.0.into()));
    assert_eq!(json["max_concurrency"], Value::Null);
    // The second and third turn hold what came before, and all hold the system text.
    let share = json["total_cached_tokens"].as_f64().unwrap() / json["total_input_tokens"].as_f64().unwrap();
    assert!(share > 0.6, "{json}");
    let json = printed_json(&load(&server, "--duration 1 --sessions 2 --json -"));
    assert!(json["completed"].as_u64().unwrap() > 2 && json["duration"].as_f64().unwrap() < 30.0, "{json}");
}

#[test]
fn failures_are_counted_and_said_and_wrong_options_are_refused() {
    let (_folder, server) =
        scripted("{\"match\": \"nothing has this\", \"reply\": \"x\"}\n{\"error\": \"out of paper\"}");
    let address = server.address();
    refused(&["bench", "serve", address, "--requests", "3"], &["500", "out of paper"]);
    refused(&["bench", "serve", address, "--model", "other"], &["404", "other", "not served"]);
    refused(&["bench", "serve", "127.0.0.1:1"], &["cannot connect to 127.0.0.1:1"]);
    refused(&["bench", "serve", "https://here"], &["TLS would be measured"]);
    refused(&["bench", "serve", address, "--goodput", "speed:1"], &["--goodput speed:1", "ttft:500"]);
    refused(
        &["bench", "serve", address, "--extra-body", "{\"stream\": false}"],
        &["--extra-body", "stream", "take it out"],
    );
    refused(&["bench", "serve", address, "--output-len", "0"], &["--output-len must be at least 1"]);
    for wrong in [["--percentiles", "101"], ["--rate", "0"], ["--extra-body", "[]"], ["--range-ratio", "1"]] {
        let run = run(&[&["bench", "serve", address][..], &wrong].concat());
        assert_eq!(run.code, Some(2), "{wrong:?}: {}", run.err);
        assert!(run.err.contains(wrong[0]), "{wrong:?}: {}", run.err);
    }
    let (_folder, server) = scripted(REPLY);
    refused(&["bench", "serve", server.address(), "--input-len", "2"], &["--input-len 2 is shorter", "frame counts"]);
}

#[test]
fn the_engine_is_measured_without_a_server() {
    let cpu = ["--backend", "cpu", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4", "--json"];
    let json = printed_json(
        &[&["bench", "latency", "--batch", "1,2", "--depth", "16,300", "--repeats", "2"][..], &cpu].concat(),
    );
    let points = json["points"].as_array().unwrap();
    assert_eq!(points.len(), 4);
    for point in points {
        for name in ["median_ttft_ms", "input_throughput", "median_tpot_ms", "output_throughput", "avg_latency"] {
            assert!(point[name].as_f64().unwrap() > 0.0, "{name} of {point}");
        }
        assert_eq!(point["latencies"].as_array().unwrap().len(), 2);
    }
    assert_eq!((&points[3]["batch_size"], &points[3]["input_len"]), (&2.into(), &300.into()));
    let json = printed_json(
        &[&["bench", "throughput", "--requests", "6", "--input-len", "40", "--output-len", "5"][..], &cpu].concat(),
    );
    assert_eq!((&json["num_requests"], &json["total_num_tokens"]), (&6.into(), &270.into()));
    refused(&["bench", "latency", "--output-len", "1"], &["--output-len 1", "at least 2"]);
    refused(&[&["bench", "throughput", "--input-len", "900K"][..], &cpu].concat(), &["--max-model-len"]);
}

#[test]
fn operators_of_steps_are_measured_beside_their_floors() {
    let (folder, cpu) = (tempfile::tempdir().unwrap(), ["--backend", "cpu", "--kv-cache-memory-bytes", "64M"]);
    let few = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--steps", "2"];
    let measure = |more: &[&'static str]| [&["bench", "kernels"][..], &cpu, &few, more].concat();
    let file = folder.path().join("kernels.json");
    let options = measure(&["--batch", "1,2", "--depth", "512,2K", "--json"]);
    let text = printed(&[&options[..], &[file.to_str().unwrap()]].concat());
    for part in ["GB/s", "1 sequence behind 512 tokens", "2 sequences behind 2,048 tokens each", "a chunk of 64 tokens"]
    {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert!(
        json["probe"]["read_bytes_per_s"].as_f64().unwrap() > 0.0 && json["probe"]["launch_us"].is_null(),
        "{json}"
    );
    let points = json["points"].as_array().unwrap();
    let of = |point: &Value| ["batch_size", "tokens", "context_len"].map(|name| point[name].as_u64().unwrap());
    let expected = [[1, 1, 512], [2, 1, 512], [1, 64, 512], [1, 1, 2048], [2, 1, 2048], [1, 64, 2048]];
    assert_eq!(points.iter().map(of).collect::<Vec<_>>(), expected);
    for point in points {
        let operators = point["operators"].as_array().unwrap();
        let one = |name: &str| operators.iter().find(|operator| operator["operator"] == name);
        let sum: f64 = operators.iter().map(|operator| operator["us"].as_f64().unwrap()).sum();
        assert!(
            point["step_ms"].as_f64().unwrap() > 0.0
                && (sum / point["operators_us"].as_f64().unwrap() - 1.0).abs() < 1e-9
        );
        let wq_b = one("wq_b").unwrap();
        assert_eq!(wq_b["calls"], 5.0, "{wq_b}");
        let ratio = wq_b["us"].as_f64().unwrap() / wq_b["floor_us"].as_f64().unwrap();
        assert!((wq_b["ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-9 && ratio > 0.0, "{wq_b}");
        assert_eq!(one("router choice").unwrap()["floor_us"], Value::Null);
        assert_eq!(one("lm_head").is_some(), point["kind"] == "decode", "{point}");
    }
    let json = printed_json(&measure(&[
        "--batch",
        "1",
        "--depth",
        "1K",
        "--no-prefill",
        "--max-model-len",
        "1K",
        "--json",
        "-",
    ]));
    // The last steps end where the context does.
    assert_eq!((json["points"].as_array().unwrap().len(), &json["points"][0]["context_len"]), (1, &768.into()));
    refused(&measure(&["--depth", "100"]), &["--depth 100", "blocks of 256"]);
    refused(&measure(&["--depth", "2K", "--max-model-len", "1K"]), &["--depth 2048", "--max-model-len"]);
    refused(
        &["bench", "kernels", "--backend", "cpu", "--batch", "65", "--max-num-batched-tokens", "64"],
        &["--batch 65", "--max-num-batched-tokens"],
    );
    refused(
        &measure(&["--batch", "30", "--depth", "2K"]),
        &["30 sequences behind 2,048 tokens", "--kv-cache-memory-bytes"],
    );
    refused(&measure(&["--num-speculative-tokens", "2"]), &["without drafts"]);
    refused(&["bench", "kernels", "flash", "--load-format", "dummy", "--backend", "cpu"], &["made on a GPU"]);
}

#[test]
fn top_shows_the_operators_of_a_server_that_times_them_for_those_who_look() {
    let server = Server::start(&["--operator-times"]);
    // The first look sets the timers going, so the next one may have something to show.
    assert!(!printed(&["top", server.address(), "--once"]).contains("operator"));
    // On a busy machine the load may come too long after the look.
    let shown = (0..10).find_map(|_| {
        printed(&load(&server, "--requests 2 --sessions 1 --input-len 600 --output-len 4"));
        Some(printed(&["top", server.address(), "--once"])).filter(|text| text.contains("operator"))
    });
    let text = shown.expect("steps that were watched");
    for part in ["us a step", "routed and shared experts", " %"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn top_shows_a_server_and_says_why_it_cannot() {
    let server = Server::start::<&str>(&[]);
    printed(&load(&server, "--requests 2 --sessions 1 --input-len 600 --output-len 4"));
    let text = printed(&["top", server.address(), "--once"]);
    for part in ["running 0 of 2", "large", "units", "Steps", "and no more, because"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    refused(&["top", "127.0.0.1:1", "--once"], &["cannot connect to 127.0.0.1:1"]);
    let (_folder, scripted) = scripted(REPLY);
    refused(&["top", scripted.address(), "--once"], &["this engine shows nothing"]);
    let locked = Server::start(&["--api-key", "secret"]);
    refused(&["top", locked.address(), "--once"], &["asks for a key", "--api-key"]);
    assert!(printed(&["top", locked.address(), "--once", "--api-key", "secret"]).contains("running 0"));
}
