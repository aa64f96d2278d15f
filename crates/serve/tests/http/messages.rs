//! POST /v1/messages and /v1/messages/count_tokens over real sockets.

use serde_json::{Value, json};

use crate::client::post_to;
use crate::scripted::{Script, Server};

const CALLS: &str = "A thought.</think>I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" string=\"true\">007</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

fn body() -> Value {
    let tool = json!({"name": "f", "input_schema": {"type": "object", "properties": {"s": {"type": "string"}}}});
    json!({"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]})
}

#[tokio::test]
async fn a_whole_answer_has_blocks_in_order() {
    let server = Server::start(Script { cached: 4, ..Script::text(CALLS) }).await;
    let answer = post_to(server.port, "/v1/messages", &body()).await.json();
    let kinds: Vec<&str> =
        answer["content"].as_array().unwrap().iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
    assert_eq!(answer["content"][2]["input"], json!({"s": "007"}));
    assert_eq!(answer["content"][3]["input"], json!({}));
    assert_eq!((&answer["stop_reason"], &answer["role"]), (&json!("tool_use"), &json!("assistant")));
    let usage = &answer["usage"];
    let prompt = server.last_request().prompt.len() as u64;
    assert_eq!(usage["input_tokens"].as_u64().unwrap() + 4, prompt, "cached tokens are counted apart");
    assert_eq!(usage["cache_read_input_tokens"], 4);
}

#[tokio::test]
async fn a_stream_has_the_order_of_the_protocol() {
    let server = Server::start(Script::text(CALLS)).await;
    let mut body = body();
    body["stream"] = true.into();
    let events = post_to(server.port, "/v1/messages", &body).await.named();
    let mut steps: Vec<String> = Vec::new();
    for (name, data) in &events {
        let step = match name.as_str() {
            "content_block_start" => format!("start {}", data["content_block"]["type"].as_str().unwrap()),
            "content_block_delta" => data["delta"]["type"].as_str().unwrap().to_owned(),
            other => other.to_owned(),
        };
        if steps.last() != Some(&step) {
            steps.push(step);
        }
    }
    assert_eq!(
        steps,
        [
            "message_start",
            "start thinking",
            "ping",
            "thinking_delta",
            "signature_delta",
            "content_block_stop",
            "start text",
            "text_delta",
            "content_block_stop",
            "start tool_use",
            "input_json_delta",
            "content_block_stop",
            "start tool_use",
            "input_json_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    let starts = events.iter().filter(|(name, _)| name == "content_block_start");
    let indices: Vec<u64> = starts.map(|(_, data)| data["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let delta = &events.iter().find(|(name, _)| name == "message_delta").unwrap().1;
    assert_eq!(delta["delta"]["stop_reason"], "tool_use");
    assert_eq!(delta["usage"]["output_tokens"], server_tokens(&events, delta));
}

/// Output tokens are counted once.
fn server_tokens(events: &[(String, Value)], delta: &Value) -> Value {
    assert_eq!(events[0].1["message"]["usage"]["output_tokens"], 0);
    delta["usage"]["output_tokens"].clone()
}

#[tokio::test]
async fn stop_texts_and_limits_have_the_names_of_the_protocol() {
    let server = Server::start(Script::text("</think>one two three")).await;
    let mut body = body();
    body["stop_sequences"] = json!(["two"]);
    let answer = post_to(server.port, "/v1/messages", &body).await.json();
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!("two")));
    assert_eq!(answer["content"], json!([{"type": "text", "text": "one "}]));
    body["stop_sequences"] = json!(null);
    body["max_tokens"] = 2.into();
    assert_eq!(post_to(server.port, "/v1/messages", &body).await.json()["stop_reason"], "max_tokens");
}

#[tokio::test]
async fn errors_have_the_form_of_the_protocol_and_name_the_field() {
    let server = Server::start(Script::text("</think>x")).await;
    let mut no_model = body();
    no_model["model"] = "other".into();
    let answer = post_to(server.port, "/v1/messages", &no_model).await;
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (404, &json!("not_found_error")));
    for (name, value, text) in [
        ("messages", json!([]), "messages"),
        ("messages", json!([{"role": "user", "content": 5}]), "messages[0]"),
        ("messages", json!([{"role": "wizard", "content": "x"}]), "messages[0]"),
        ("tools", json!([{"name": "f"}]), "tools[0].input_schema"),
        ("tools", json!([{"type": "bash_20250124", "name": "bash"}]), "tools[0].type"),
        ("tool_choice", json!({"type": "some"}), "tool_choice.type"),
        ("thinking", json!({"type": "maybe"}), "thinking"),
        ("output_config", json!({"effort": "much"}), "output_config.effort"),
        ("max_tokens", json!(0), "max_tokens"),
    ] {
        let mut body = body();
        body[name] = value;
        let answer = post_to(server.port, "/v1/messages", &body).await;
        let error = answer.json();
        assert_eq!(
            (answer.status, &error["type"], &error["error"]["type"]),
            (400, &json!("error"), &json!("invalid_request_error")),
            "{error}"
        );
        assert!(error["error"]["message"].as_str().unwrap().contains(text), "{error}");
    }
}

#[tokio::test]
async fn a_failure_in_a_stream_is_an_error_event() {
    let server = Server::playing("{\"error\": \"the model fell over\", \"delay_ms\": 50}", |options| {
        options.keep_alive = std::time::Duration::from_millis(1);
    })
    .await;
    let mut body = body();
    body["stream"] = true.into();
    let answer = post_to(server.port, "/v1/messages", &body).await;
    // It may fail before the stream begins, then it is a status.
    if answer.status == 200 {
        let events = answer.named();
        assert_eq!(events.last().unwrap().1["error"]["type"], "api_error");
    } else {
        assert_eq!((answer.status, &answer.json()["error"]["message"]), (500, &json!("the model fell over")));
    }
}

#[tokio::test]
async fn tokens_are_counted_as_they_would_be_prefilled() {
    let server = Server::start(Script::text("</think>x")).await;
    let counted = post_to(server.port, "/v1/messages/count_tokens", &body()).await.json();
    post_to(server.port, "/v1/messages", &body()).await;
    assert_eq!(counted, json!({"input_tokens": server.last_request().prompt.len()}));
}

#[tokio::test]
async fn p30_the_end_of_the_turn_is_never_text() {
    // By its token, which ends the turn, and spelled after it in a script that goes on.
    for output in ["thought</think>answer<｜end▁of▁sentence｜>", "thought</think>answer<｜end▁of▁sentence｜> and more"]
    {
        let server = Server::playing(&json!({"reply": output}).to_string(), |_| {}).await;
        let mut body = body();
        let answer = post_to(server.port, "/v1/messages", &body).await.json();
        assert_eq!(answer["content"][1]["text"], "answer");
        body["stream"] = true.into();
        assert!(!post_to(server.port, "/v1/messages", &body).await.body.contains("end▁of▁sentence"));
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_have_the_form_of_the_protocol() {
    let server = Server::start(Script::text("</think>x")).await;
    for (method, path, status) in [("POST", "/v1/messages/nope", 404), ("GET", "/v1/messages", 405)] {
        let answer = crate::client::send(server.port, method, path, b"{}").await;
        assert_eq!((answer.status, &answer.json()["type"]), (status, &json!("error")), "{}", answer.body);
    }
}
