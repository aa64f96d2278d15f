//! Error bodies: every one an object with message, type, param and code; bad input is never a 500.

use longwave_engine::request::{FinishReason, Refusal, SubmitError};
use serde_json::{Value, json};

use crate::client::{Response, get, post, send};
use crate::scripted::{Script, Server};

fn error(response: &Response, status: u16) -> Value {
    assert_eq!(response.status, status, "{}", response.body);
    let body = response.json();
    let error = &body["error"];
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
    assert!(error["type"].is_string() && error["code"].is_string() && error.get("param").is_some(), "{body}");
    error.clone()
}

fn user() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

#[tokio::test]
async fn bad_fields_are_named() {
    let server = Server::start(Script::text("x")).await;
    let with = |field: &str, value: Value| {
        let mut body = json!({"model": "tiny", "messages": user()});
        body[field] = value;
        body
    };
    for (field, value, words) in [
        ("messages", json!([]), "empty"),
        ("messages", Value::Null, "required"),
        ("functions", json!([{"name": "f"}]), "tools"),
        ("temperature", json!("hot"), "number"),
        ("temperature", json!(3), "0 to 2"),
        ("top_p", json!(0), "above 0"),
        ("top_k", json!(-5), "whole number"),
        ("min_p", json!(2), "0 to 1"),
        ("n", json!(0), "expected a whole number of 1 or more"),
        ("n", json!(129), "at most 128 answers"),
        ("repetition_penalty", json!(0), "from 0.01 to 2"),
        ("priority", json!(17), "from -16 to 16"),
        ("stop_token_ids", json!((0..1025).collect::<Vec<u32>>()), "at most 1024"),
        ("presence_penalty", json!(2.5), "from -2 to 2"),
        ("prefix_report", json!("yes"), "true or false"),
        ("return_token_ids", json!(1), "true or false"),
        ("max_tokens", json!(0), "1 or more"),
        ("max_tokens", json!("many"), "whole number"),
        ("max_completion_tokens", json!(-1), "whole number"),
        ("seed", json!(1.5), "whole number"),
        ("stream", json!("yes"), "true or false"),
        ("stream_options", json!({"include_usage": true}), "stream"),
        ("logit_bias", json!({"x": 1}), "token ids"),
        ("logit_bias", json!({"999999": 1}), "token ids"),
        ("logit_bias", json!({"5": 1, "05": 1}), "twice"),
        ("top_logprobs", json!(3), "logprobs"),
        ("top_logprobs", json!(50), "20"),
        ("stop", json!(7), "string"),
        ("stop_token_ids", json!([999999]), "token ids"),
        ("thinking", json!({"type": "perhaps"}), "enabled"),
        ("reasoning_effort", json!("enormous"), "minimal"),
        ("tool_choice", json!("sometimes"), "auto"),
        ("response_format", json!({"type": "xml"}), "json_object"),
        ("model", json!(5), "string"),
    ] {
        let response = post(server.port, with(field, value.clone())).await;
        let error = error(&response, 400);
        assert_eq!(error["param"], field, "{field}: {value}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{field}: {value}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    assert!(server.seen.requests.lock().unwrap().is_empty(), "nothing reached the engine");
}

#[tokio::test]
async fn malformed_json_says_where() {
    let server = Server::start(Script::text("x")).await;
    for (body, words) in [
        ("{\"model\": \"tiny\",\n \"messages\": [}", "line 2 column"),
        ("", "line 1 column 0"),
        ("[1]", "JSON object"),
        ("{\"messages\": \"\u{0}\"}", "line 1"),
    ] {
        let response = send(server.port, "POST", "/v1/chat/completions", body.as_bytes()).await;
        let error = error(&response, 400);
        assert!(error["message"].as_str().unwrap().contains(words), "{body}: {error}");
    }
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    error(&send(server.port, "POST", "/v1/chat/completions", deep.as_bytes()).await, 400);
    error(&send(server.port, "POST", "/v1/chat/completions", b"\xff\xfe{}").await, 400);
}

#[tokio::test]
async fn an_unknown_model_or_route_is_404() {
    let server = Server::start(Script::text("x")).await;
    let unknown = error(&post(server.port, json!({"model": "gpt-9", "messages": user()})).await, 404);
    assert_eq!((unknown["param"].as_str(), unknown["code"].as_str()), (Some("model"), Some("model_not_found")));
    assert!(unknown["message"].as_str().unwrap().contains("Tiny"));
    error(&get(server.port, "/v1/nowhere").await, 404);
    error(&get(server.port, "/v1/chat/completions").await, 405);
}

#[tokio::test]
async fn q5_a_prompt_that_does_not_fit_names_the_numbers() {
    let probe = Server::start(Script::text("x")).await;
    let body = |extra: Value| {
        let mut body =
            json!({"messages": [{"role": "user", "content": "word ".repeat(20)}], "reasoning_effort": "low"});
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    post(probe.port, body(json!({}))).await;
    let prompt = probe.last_request().prompt.len();

    let server = Server::with(Script::text("x"), prompt as u32 + 10, |_| {}).await;
    assert_eq!(post(server.port, body(json!({"max_tokens": 10}))).await.status, 200);
    assert_eq!(post(server.port, body(json!({}))).await.status, 200);
    assert_eq!(server.last_request().max_tokens, 10);
    for stream in [false, true] {
        let response = post(server.port, body(json!({"max_tokens": 11, "stream": stream}))).await;
        let error = error(&response, 400);
        let message = error["message"].as_str().unwrap();
        for number in [prompt + 10, prompt + 11, prompt, 11] {
            assert!(message.contains(&number.to_string()), "{number} in {message}");
        }
        assert_eq!(error["code"], "context_length_exceeded");
    }
    let full = Server::with(Script::text("x"), prompt as u32, |_| {}).await;
    error(&post(full.port, body(json!({}))).await, 400);
}

#[tokio::test]
async fn a_large_body_is_413() {
    let server = Server::with(Script::text("x"), 4096, |options| options.max_body_bytes = 1000).await;
    let body = json!({"messages": [{"role": "user", "content": "x".repeat(2000)}]});
    let error = error(&post(server.port, body).await, 413);
    assert!(error["message"].as_str().unwrap().contains("1000"));
}

#[tokio::test]
async fn a_full_queue_is_429_with_a_time() {
    let mut script = Script::text("x");
    script.refuse_submit = Some(SubmitError::QueueFull { waiting: 9, retry_after_s: 3 });
    let server = Server::start(script.clone()).await;
    let response = post(server.port, json!({"messages": user()})).await;
    error(&response, 429);
    assert!(response.headers.contains("retry-after: 3"), "{}", response.headers);
    script.refuse_submit = Some(SubmitError::Stopped("device lost".into()));
    let stopped = Server::start(script).await;
    error(&post(stopped.port, json!({"messages": user()})).await, 503);
}

#[tokio::test]
async fn a_refusal_is_a_status_even_when_streaming() {
    let mut script = Script::text("x");
    script.end = FinishReason::Refused(Refusal::NeverFits { tokens: 99, pool: "large", need: 8, have: 4 });
    let server = Server::start(script).await;
    for stream in [false, true] {
        let error = error(&post(server.port, json!({"messages": user(), "stream": stream})).await, 400);
        assert!(error["message"].as_str().unwrap().contains("8 units"), "{error}");
    }
}

#[tokio::test]
async fn a_failure_in_the_middle_reaches_the_client() {
    let mut script = Script::text("some words</think>and");
    script.end = FinishReason::Failed("the device is gone".into());
    let server = Server::start(script).await;
    let whole = error(&post(server.port, json!({"messages": user()})).await, 500);
    assert_eq!(whole["type"], "server_error");
    let events = post(server.port, json!({"messages": user(), "stream": true})).await.events();
    let last = events.last().unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("device is gone"), "{last}");
}
