//! GET /metrics: its text, and its values after known traffic.

use std::collections::BTreeMap;
use std::time::Duration;

use longwave_engine::request::SubmitError;
use serde_json::json;

use crate::client::{get, open, post, send};
use crate::scripted::{Script, Server};

/// Series with their labels, as written, and the types of families.
struct Scrape {
    values: BTreeMap<String, f64>,
    types: BTreeMap<String, String>,
}

impl Scrape {
    /// Reads the text and checks it: one type per family, before its samples, each sample a number.
    async fn of(server: &Server) -> Scrape {
        let response = get(server.port, "/metrics").await;
        assert_eq!(response.status, 200);
        assert!(response.headers.contains("text/plain; version=0.0.4"), "{}", response.headers);
        let (mut values, mut types) = (BTreeMap::new(), BTreeMap::new());
        for line in response.body.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(types.insert(name.to_owned(), kind.to_owned()), None, "{name} twice");
            } else if !line.starts_with("# HELP ") {
                let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
                let name = series.split('{').next().unwrap();
                let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
                let typed = types.contains_key(name) || family.is_some_and(|family| types.contains_key(family));
                assert!(typed, "{line} without a type");
                assert_eq!(values.insert(series.to_owned(), value.parse().unwrap()), None, "{series} twice");
            }
        }
        Scrape { values, types }
    }

    /// A series of the model, by name and its own labels.
    #[track_caller]
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let fits = |series: &str| {
            let (its, rest) = series.split_once('{').unwrap_or((series, ""));
            its == name && labels.iter().all(|(label, value)| rest.contains(&format!("{label}=\"{value}\"")))
        };
        let found: Vec<f64> = self.values.iter().filter(|(series, _)| fits(series)).map(|(_, &value)| value).collect();
        assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
        found[0]
    }
}

#[tokio::test]
async fn known_traffic_gives_known_values() {
    let mut script = Script::text("ab</think>cd");
    script.cached = 4;
    let tokens = script.steps.len() as f64;
    let server = Server::start(script).await;
    let ask = |max_tokens: u32, stream: bool| {
        post(
            server.port,
            json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, "stream": stream}),
        )
    };
    for stream in [false, true] {
        assert_eq!(ask(100, stream).await.status, 200);
    }
    assert_eq!(ask(2, false).await.status, 200);
    assert_eq!(get(server.port, "/v1/models/tiny").await.status, 200);
    assert_eq!(send(server.port, "POST", "/v1/chat/completions", b"{").await.status, 400);
    assert_eq!(get(server.port, "/nowhere/at/all").await.status, 404);
    let prompt = server.last_request().prompt.len() as f64;

    let scrape = Scrape::of(&server).await;
    let model = [("model_name", "Tiny"), ("engine", "0")];
    assert_eq!(scrape.value("vllm:prompt_tokens_total", &model), 3.0 * prompt);
    assert_eq!(scrape.value("vllm:generation_tokens_total", &model), 2.0 * tokens + 2.0);
    let by_reason = |reason| scrape.value("vllm:request_success_total", &[("finished_reason", reason)]);
    assert_eq!(["stop", "length", "abort", "error", "repetition"].map(by_reason), [2.0, 1.0, 0.0, 0.0, 0.0]);
    for (name, count) in [
        ("vllm:time_to_first_token_seconds", 3.0),
        ("vllm:inter_token_latency_seconds", 2.0 * (tokens - 1.0) + 1.0),
        ("vllm:request_time_per_output_token_seconds", 3.0),
        ("vllm:e2e_request_latency_seconds", 3.0),
        ("vllm:request_queue_time_seconds", 3.0),
        ("vllm:request_prefill_time_seconds", 3.0),
        ("vllm:request_decode_time_seconds", 3.0),
        ("vllm:request_inference_time_seconds", 3.0),
        ("vllm:request_prompt_tokens", 3.0),
        ("vllm:request_params_n", 3.0),
    ] {
        assert_eq!(scrape.value(&format!("{name}_count"), &model), count, "{name}");
        assert_eq!(scrape.types[name], "histogram");
    }
    assert_eq!(scrape.value("vllm:request_generation_tokens_sum", &[]), 2.0 * tokens + 2.0);
    assert_eq!(scrape.value("vllm:request_params_max_tokens_sum", &[]), 202.0);
    assert_eq!(scrape.value("vllm:request_generation_tokens_bucket", &[("le", "2")]), 1.0);
    assert_eq!(scrape.value("longwave:prefix_end_total", &[("reason", "off")]), 3.0);

    let http = |handler, method, status| {
        scrape.value("http_requests_total", &[("handler", handler), ("method", method), ("status", status)])
    };
    assert_eq!(http("/v1/chat/completions", "POST", "2xx"), 3.0);
    assert_eq!(http("/v1/chat/completions", "POST", "4xx"), 1.0);
    assert_eq!(http("/v1/models/{*name}", "GET", "2xx"), 1.0);
    assert_eq!(http("none", "GET", "4xx"), 1.0);
    assert_eq!(scrape.value("http_request_duration_seconds_count", &[("handler", "/v1/chat/completions")]), 4.0);
    assert!(!scrape.values.keys().any(|series| series.contains("nowhere") || series.contains("/metrics")));
    for (name, kind) in [
        ("vllm:num_requests_running", "gauge"),
        ("vllm:num_requests_waiting", "gauge"),
        ("vllm:kv_cache_usage_perc", "gauge"),
        ("vllm:cache_config_info", "gauge"),
        ("vllm:num_preemptions_total", "counter"),
        ("vllm:prefix_cache_queries_total", "counter"),
        ("vllm:prefix_cache_hits_total", "counter"),
        ("vllm:iteration_tokens_total", "histogram"),
        ("longwave:step_seconds_total", "counter"),
        ("longwave:engine_up", "gauge"),
    ] {
        assert_eq!(scrape.types.get(name).map(String::as_str), Some(kind), "{name}");
    }
    assert!(scrape.value("process_resident_memory_bytes", &[]) > 1e6);
}

#[tokio::test]
async fn an_abort_is_no_stop_and_a_stop_text_is_one() {
    let mut script = Script::text(&"word ".repeat(100));
    script.pause = Duration::from_millis(5);
    let server = Server::start(script).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stop": ["word word"],
                      "thinking": {"type": "disabled"}});
    let stopped = post(server.port, body).await;
    assert_eq!(stopped.json()["choices"][0]["finish_reason"], "stop");
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true}).to_string();
    let socket = open(server.port, "POST", "/v1/chat/completions", body.as_bytes()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(get(server.port, "/load").await.json()["server_load"], 1);
    drop(socket);
    let ended = async {
        loop {
            let scrape = Scrape::of(&server).await;
            let by_reason = |reason| scrape.value("vllm:request_success_total", &[("finished_reason", reason)]);
            if by_reason("abort") + by_reason("stop") == 2.0 {
                return (by_reason("abort"), by_reason("stop"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!(tokio::time::timeout(Duration::from_secs(20), ended).await.unwrap(), (1.0, 1.0));
    assert_eq!(get(server.port, "/load").await.json()["server_load"], 0);
}

#[tokio::test]
async fn requests_that_are_turned_away_are_counted_by_reason() {
    let mut script = Script::text("x");
    script.refuse_submit = Some(SubmitError::QueueFull { waiting: 9, retry_after_s: 3 });
    let server = Server::start(script).await;
    for _ in 0..2 {
        assert_eq!(post(server.port, json!({"messages": [{"role": "user", "content": "hi"}]})).await.status, 429);
    }
    let scrape = Scrape::of(&server).await;
    assert_eq!(scrape.value("vllm:admission_rejections_total", &[("reason", "queue_full")]), 2.0);
}

#[tokio::test]
async fn a_model_name_with_quotes_stays_one_label() {
    let server = Server::with(Script::text("x"), 4096, |options| {
        options.served_model_names = vec!["a\"b\\c\nd".into()];
    })
    .await;
    let scrape = Scrape::of(&server).await;
    assert_eq!(scrape.value("vllm:num_requests_running", &[("model_name", r#"a\"b\\c\nd"#)]), 0.0);
}
