//! Several answers to one prompt, prefix reports, penalties, and the health of a stalled engine.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use crate::client::{get, post};
use crate::scripted::{Script, Server};

fn ask(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hello"}], "thinking": {"type": "disabled"}});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn n_answers_are_n_choices_of_one_prompt() {
    let server = Server::start(Script::text("Oslo.")).await;
    let answer = post(server.port, ask(json!({"n": 3, "seed": 5}))).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(choices.iter().all(|c| c["message"]["content"] == "Oslo." && c["finish_reason"] == "stop"));
    let requests = server.seen.requests.lock().unwrap().clone();
    assert!(requests.iter().all(|r| r.prompt == requests[0].prompt));
    let seeds: Vec<u64> = requests.iter().map(|r| r.sampling.seed).collect();
    assert!(seeds.contains(&5), "the first answer is that of n = 1");
    assert!(seeds[0] != seeds[1] && seeds[1] != seeds[2] && seeds[0] != seeds[2], "{seeds:?}");
    // The prompt is counted once, the answers each.
    let usage = &answer["usage"];
    let one = post(server.port, ask(json!({}))).await.json()["usage"].clone();
    assert_eq!(usage["prompt_tokens"], one["prompt_tokens"]);
    assert_eq!(usage["completion_tokens"].as_u64(), one["completion_tokens"].as_u64().map(|n| 3 * n));
}

#[tokio::test]
async fn streamed_answers_carry_their_index_and_one_usage() {
    let server = Server::start(Script::text("The capital is Oslo.")).await;
    let body = ask(json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}}));
    let events = post(server.port, body).await.events();
    let (usage, chunks) = events.split_last().unwrap();
    assert!(usage["usage"]["completion_tokens"].as_u64().unwrap() > 4 && usage["choices"] == json!([]));
    for index in 0..2 {
        let own: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == index).collect();
        assert_eq!(own[0]["delta"]["role"], "assistant");
        let text: String = own.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
        assert_eq!(text, "The capital is Oslo.");
        assert_eq!(own.iter().filter(|c| c["finish_reason"] == "stop").count(), 1);
    }
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_all_its_answers() {
    let mut script = Script::text("a b c d e f g h i j k l m n o p q r s t u v w x y z");
    script.pause = std::time::Duration::from_millis(50);
    let server = Server::start(script).await;
    let body = ask(json!({"n": 3, "stream": true})).to_string();
    let mut socket = crate::client::open(server.port, "POST", "/v1/chat/completions", body.as_bytes()).await;
    socket.read_exact(&mut [0; 64]).await.unwrap();
    drop(socket);
    for _ in 0..200 {
        if server.seen.cancelled.lock().unwrap().len() == 3 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("{:?} of 3 were cancelled", server.seen.cancelled.lock().unwrap());
}

#[tokio::test]
async fn a_request_and_an_operator_can_ask_why_a_prefix_missed() {
    let server = Server::start(Script::text("Oslo.")).await;
    let plain = post(server.port, ask(json!({}))).await.json();
    assert_eq!(plain.get("prefix_report"), None, "only on request");
    let answer = post(server.port, ask(json!({"prefix_report": true}))).await.json();
    let report = &answer["prefix_report"];
    assert_eq!((&report["cached_tokens"], &report["ended_by"]), (&json!(0), &json!("off")));
    assert_eq!(report["text"], "0 prompt tokens came from the cache: it is off");
    let events = post(server.port, ask(json!({"prefix_report": true, "stream": true}))).await.events();
    let last = events.last().unwrap();
    assert_eq!((&last["choices"][0]["finish_reason"], &last["prefix_report"]), (&json!("stop"), report));

    let debug = get(server.port, "/debug/prefix").await.json();
    let requests = debug["requests"].as_array().unwrap();
    assert_eq!(requests.len(), 3);
    assert_eq!(requests[1]["id"], answer["id"], "newest first");
    assert_eq!(requests[1]["prompt_tokens"], answer["usage"]["prompt_tokens"]);
    assert_eq!(debug["units_total"]["large"], 64);
    assert!(!debug.to_string().contains("Hello"), "no text of users");
    assert_eq!(debug["host"]["records"], 0);
    let engine = get(server.port, "/debug/engine").await.json();
    assert_eq!((engine["alive"].as_bool(), engine["drafts_accepted"].as_array().map(Vec::len)), (Some(true), Some(7)));
}

#[tokio::test]
async fn penalties_salt_and_priority_reach_the_engine() {
    let server = Server::start(Script::text("Oslo.")).await;
    let fields = json!({"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2,
        "cache_salt": "tenant a", "priority": -3});
    post(server.port, ask(fields)).await;
    let request = server.last_request();
    let s = &request.sampling;
    assert_eq!((s.presence_penalty, s.frequency_penalty, s.repetition_penalty), (0.5, -1.0, 1.2));
    assert_eq!((request.salt, request.priority), (longwave_engine::request::salt_of("tenant a"), -3));
    post(server.port, ask(json!({"cache_salt": "tenant b"}))).await;
    assert_ne!(server.last_request().salt, request.salt);
    assert!(!server.last_request().sampling.has_penalties());
}

#[tokio::test]
async fn a_stalled_engine_is_in_bad_health() {
    let server = Server::start(Script::text("Oslo.")).await;
    assert_eq!(get(server.port, "/health").await.status, 200);
    server.seen.stalled.store(true, Ordering::Relaxed);
    let health = get(server.port, "/health").await;
    assert_eq!(health.status, 503);
    assert!(health.body.contains("no step"), "{}", health.body);
    let mut script = Script::text("x");
    script.refuse_submit = Some(longwave_engine::request::SubmitError::Stalled { seconds: 9 });
    let server = Server::start(script).await;
    let refused = post(server.port, ask(json!({}))).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("engine_stalled")));
    assert!(refused.headers.contains("retry-after: 9"), "{}", refused.headers);
}

/// M21: a call after deep thought is a call, with an empty text and not null.
#[tokio::test]
async fn m21_a_call_after_a_thought_of_max_effort_ends_as_a_call() {
    let call = "Deep thought.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter \
                name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let server = Server::start(Script::text(call)).await;
    let tools = json!([{"type": "function", "function": {"name": "get_weather", "description": "Weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]);
    let fields = json!({"reasoning_effort": "max", "tool_choice": "auto", "tools": tools,
        "thinking": {"type": "enabled"}});
    let choice = post(server.port, ask(fields.clone())).await.json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "");
    assert_eq!(choice["message"]["reasoning_content"], "Deep thought.");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Oslo\"}");
    let mut streamed = fields;
    streamed["stream"] = true.into();
    let events = post(server.port, ask(streamed)).await.events();
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

/// A stream that is silent for long gets comments, and clients see the same answer.
#[tokio::test]
async fn a_silent_stream_is_kept_alive() {
    let mut script = Script::text("Oslo.");
    script.pause = std::time::Duration::from_millis(300);
    let server = Server::with(script, 4096, |options| options.keep_alive = std::time::Duration::from_millis(50)).await;
    let response = post(server.port, ask(json!({"stream": true}))).await;
    assert!(response.body.matches(": keep-alive\n\n").count() >= 2, "{}", response.body);
    let events = response.events();
    let text: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "Oslo.");
}

/// The server's own default must not be what a small cache refuses.
#[tokio::test]
async fn the_default_length_fits_a_small_cache() {
    let mut script = Script::text("Oslo.");
    script.most_tokens = Some(700);
    let server = Server::start(script).await;
    assert_eq!(post(server.port, ask(json!({}))).await.status, 200);
    assert_eq!(server.last_request().max_tokens, 700);
    post(server.port, ask(json!({"max_tokens": 900}))).await;
    assert_eq!(server.last_request().max_tokens, 900, "a number that was asked for is left alone");
}
