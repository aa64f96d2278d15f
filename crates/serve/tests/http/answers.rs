//! Answers: whole and streamed, reasoning, calls, usage, stop texts, sampling.

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{get, open, post};
use crate::scripted::{Script, Server};

fn ask(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]});
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters":
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])
}

fn call(thought: &str) -> String {
    format!(
        "{thought}\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" \
         string=\"true\">Oslo \"x\" 2>&1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
}

/// The text of a delta field over all events.
fn joined(events: &[Value], field: &str) -> String {
    events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
}

#[tokio::test]
async fn a_whole_answer_has_reasoning_content_and_usage() {
    let mut script = Script::text("I think.</think>The capital is Oslo.");
    script.cached = 2;
    let server = Server::start(script).await;
    let response = post(server.port, ask(json!({}))).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let answer = response.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "The capital is Oslo.");
    assert_eq!(choice["message"]["reasoning_content"], "I think.");
    assert_eq!(choice["message"]["reasoning"], "I think.");
    assert_eq!(choice["message"].get("tool_calls"), None);
    assert_eq!(choice["finish_reason"], "stop");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!((answer["object"].as_str(), answer["model"].as_str()), (Some("chat.completion"), Some("Tiny")));

    let request = server.last_request();
    let usage = &answer["usage"];
    let reasoning = server.tokenizer.encode_text("I think.").unwrap().len();
    let output = server.tokenizer.encode_output("I think.</think>The capital is Oslo.").unwrap().len() + 1;
    assert_eq!(usage["prompt_tokens"], request.prompt.len());
    assert_eq!(usage["completion_tokens"], output);
    assert_eq!(usage["total_tokens"], request.prompt.len() + output);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 2);
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], reasoning);
    assert_eq!(usage["prompt_cache_hit_tokens"], 2);
    // No max_tokens: what the context leaves.
    assert_eq!(request.max_tokens as usize, 4096 - request.prompt.len());
    assert_eq!(request.stop_tokens, [server.tokenizer.markers().eos]);
}

#[tokio::test]
async fn a_streamed_answer_joins_to_the_whole_one() {
    let server = Server::start(Script::text("I think.</think>The capital is Oslo.")).await;
    let body = ask(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let response = post(server.port, body).await;
    let events = response.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(joined(&events, "content"), "The capital is Oslo.");
    assert_eq!(joined(&events, "reasoning_content"), "I think.");
    assert_eq!(joined(&events, "reasoning"), "I think.");
    let (usage, before) = events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert!(usage["usage"]["completion_tokens"].as_u64().unwrap() > 5);
    let reasons: Vec<&str> = before.iter().filter_map(|event| event["choices"][0]["finish_reason"].as_str()).collect();
    assert_eq!(reasons, ["stop"]);
    assert_eq!(before.last().unwrap()["choices"][0]["finish_reason"], "stop");
    assert!(before.iter().all(|event| event["usage"].is_null() && event["id"] == usage["id"]));

    let plain = post(server.port, ask(json!({"stream": true}))).await.events();
    assert!(plain.iter().all(|event| event.get("usage").is_none()));
    assert_eq!(plain.last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_tool_call_is_structured_and_its_result_is_rendered() {
    let server = Server::start(Script::text(&call("I call.</think>"))).await;
    let answer = post(server.port, ask(json!({"tools": weather()}))).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((call["type"].as_str(), call["function"]["name"].as_str()), (Some("function"), Some("get_weather")));
    assert_eq!(call["function"]["arguments"], "{\"city\": \"Oslo \\\"x\\\" 2>&1\"}");

    let back = json!({"tools": weather(), "messages": [{"role": "user", "content": "Hello"}, choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21"}]});
    let response = post(server.port, ask(back)).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let prompt = server.tokenizer.decode(&server.last_request().prompt);
    assert!(prompt.contains("I call.</think>\n\n<｜DSML｜tool_calls>"), "{prompt}");
    assert!(prompt.ends_with("<｜User｜><tool_result>sunny, 21</tool_result><｜Assistant｜><think>"), "{prompt}");
}

#[tokio::test]
async fn a_streamed_call_comes_in_deltas_by_index() {
    let server = Server::start(Script::text(&call("I call.</think>"))).await;
    let events = post(server.port, ask(json!({"tools": weather(), "stream": true}))).await.events();
    let calls: Vec<&Value> = events
        .iter()
        .map(|event| &event["choices"][0]["delta"]["tool_calls"][0])
        .filter(|call| !call.is_null())
        .collect();
    assert!(calls.len() > 3 && calls.iter().all(|call| call["index"] == 0));
    assert_eq!(calls[0]["function"], json!({"name": "get_weather", "arguments": ""}));
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"));
    assert!(calls[1..].iter().all(|call| call.get("id").is_none() && call["function"].get("name").is_none()));
    let arguments: String = calls.iter().map(|call| call["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({"city": "Oslo \"x\" 2>&1"}));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(joined(&events, "content"), "");
}

#[tokio::test]
async fn thinking_off_gives_content_only() {
    let server = Server::start(Script::text("Hi there.")).await;
    let answer = post(server.port, ask(json!({"thinking": {"type": "disabled"}}))).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message, &json!({"role": "assistant", "content": "Hi there."}));
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
    let request = server.last_request();
    assert_eq!(*request.prompt.last().unwrap(), server.tokenizer.markers().end_think);
}

#[tokio::test]
async fn characters_split_over_tokens_arrive_whole() {
    let text = "杭州 🤭 é";
    let mut script = Script::text("");
    let tokenizer = crate::scripted::tokenizer();
    let of_byte =
        |byte| (0..tokenizer.vocab_size()).find(|&id| !tokenizer.is_added(id) && tokenizer.token_bytes(id) == [byte]);
    script.steps = text.bytes().map(|byte| vec![of_byte(byte).unwrap()]).collect();
    let server = Server::start(script).await;
    let body = ask(json!({"stream": true, "thinking": {"type": "disabled"}}));
    let events = post(server.port, body).await.events();
    assert_eq!(joined(&events, "content"), text);
    assert!(!joined(&events, "content").contains('\u{fffd}'));
}

#[tokio::test]
async fn length_and_stop_texts_end_an_answer() {
    let server = Server::start(Script::text("one two END three")).await;
    let off = json!({"type": "disabled"});
    let cut = post(server.port, ask(json!({"thinking": off, "max_tokens": 2}))).await.json();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert_eq!(cut["usage"]["completion_tokens"], 2);
    let both = json!({"thinking": off, "max_tokens": 2, "max_completion_tokens": 3});
    assert_eq!(post(server.port, ask(both)).await.json()["usage"]["completion_tokens"], 3);

    let stopped = post(server.port, ask(json!({"thinking": off, "stop": ["END"]}))).await.json();
    assert_eq!(stopped["choices"][0]["message"]["content"], "one two ");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][0]["stop_reason"], "END");
    assert!(server.cancelled().await, "the rest of the generation is cancelled");
    let streamed = post(server.port, ask(json!({"thinking": off, "stop": "END", "stream": true}))).await.events();
    assert_eq!(joined(&streamed, "content"), "one two ");
}

#[tokio::test]
async fn sampling_fields_reach_the_engine() {
    let server = Server::with(Script::text("x"), 4096, |options| options.sampling.top_k = 7).await;
    post(server.port, ask(json!({"messages": [{"role": "user", "content": "a"}]}))).await;
    let default = server.last_request().sampling;
    assert_eq!((default.temperature, default.top_p, default.top_k, default.min_p), (1.0, 1.0, 7, 0.0));
    let extra = json!({"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": 42,
        "logit_bias": {"100": -5}, "min_tokens": 1, "stop_token_ids": [77], "priority": -3, "cache_salt": "a",
        "frequency_penalty": 0.5, "a_field_from_the_future": {"x": 1}});
    let response = post(server.port, ask(extra)).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let request = server.last_request();
    let sampling = request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.0, 0.5, 0, 0.1));
    assert_eq!((sampling.seed, sampling.bias, sampling.top_logprobs), (42, vec![(100, -5.0)], None));
    assert_eq!((request.min_tokens, request.priority), (1, -3));
    assert!(request.stop_tokens.contains(&77) && request.salt != 0);
    let answer = post(server.port, ask(json!({"ignore_eos": true, "thinking": {"type": "disabled"}}))).await.json();
    assert!(server.last_request().stop_tokens.is_empty());
    assert_eq!(answer["choices"][0]["message"]["content"], "x");
    assert_eq!(answer["usage"]["completion_tokens"], 2);
}

#[tokio::test]
async fn logprobs_have_one_entry_per_content_token() {
    let server = Server::start(Script::text("hm</think>The answer")).await;
    let wanted = server.tokenizer.encode_text("The answer").unwrap();
    let answer = post(server.port, ask(json!({"logprobs": true, "top_logprobs": 2}))).await.json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap())
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.ends_with("The answer"), "{text:?}");
    assert!(content.len() >= wanted.len());
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(content[0]["logprob"], -0.5);
    let events = post(server.port, ask(json!({"logprobs": true, "stream": true}))).await.events();
    let streamed: usize =
        events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array()).map(Vec::len).sum();
    assert_eq!(streamed, content.len());
}

/// Requests of many clients at once, some of which leave: every request ends once, finished or cancelled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_clients_is_answered() {
    let mut script = Script::text("I think.</think>The capital is Oslo.");
    script.pause = Duration::from_millis(1);
    let server = Server::start(script).await;
    let port = server.port;
    let clients: Vec<_> = (0..120)
        .map(|client| {
            tokio::spawn(async move {
                let body = ask(json!({"stream": client % 2 == 0}));
                if client % 5 == 0 {
                    let text = body.to_string();
                    let socket = open(port, "POST", "/v1/chat/completions", text.as_bytes()).await;
                    tokio::time::sleep(Duration::from_millis(client % 17)).await;
                    drop(socket);
                } else if client % 2 == 0 {
                    assert_eq!(joined(&post(port, body).await.events(), "content"), "The capital is Oslo.");
                } else {
                    let answer = post(port, body).await.json();
                    assert_eq!(answer["choices"][0]["message"]["content"], "The capital is Oslo.");
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    assert_eq!(get(port, "/health").await.status, 200);
    let cancelled = server.seen.cancelled.lock().unwrap().clone();
    assert!(cancelled.len() <= 24, "only clients that left are cancelled: {cancelled:?}");
}

#[tokio::test]
async fn models_are_listed_and_names_are_forgiving() {
    let names = vec!["deepseek-ai/DeepSeek-V4-Flash".to_owned(), "tiny".to_owned()];
    let server = Server::with(Script::text("x"), 2048, |options| options.served_model_names = names).await;
    let list = get(server.port, "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "deepseek-ai/DeepSeek-V4-Flash");
    assert_eq!(list["data"][1]["max_model_len"], 2048);
    let one = get(server.port, "/v1/models/deepseek-ai/DeepSeek-V4-Flash").await.json();
    assert_eq!(one["id"], "deepseek-ai/DeepSeek-V4-Flash");
    assert_eq!(get(server.port, "/v1/models/gpt-9").await.status, 404);
    for name in ["TINY", "tiny[1m]", "DEEPSEEK-AI/deepseek-v4-flash[1M]"] {
        assert_eq!(post(server.port, ask(json!({"model": name}))).await.status, 200, "{name}");
    }
}

#[tokio::test]
async fn include_reasoning_false_leaves_the_thought_out() {
    let server = Server::start(Script::text("a thought</think>answer")).await;
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "include_reasoning": false});
    let message = post(server.port, body.clone()).await.json()["choices"][0]["message"].clone();
    assert_eq!(message, json!({"role": "assistant", "content": "answer"}));
    body["stream"] = true.into();
    assert!(!post(server.port, body).await.body.contains("thought"));
}

/// The numbers of a list, over all choices of events.
fn ids(events: &[Value]) -> Vec<u64> {
    let lists = events.iter().filter_map(|event| event["choices"][0]["token_ids"].as_array());
    lists.flatten().map(|id| id.as_u64().unwrap()).collect()
}

#[tokio::test]
async fn token_ids_are_given_whole_and_streamed_when_they_are_asked_for() {
    let output = "I think.</think>The capital is Oslo.";
    for hidden in [false, true] {
        let server = Server::start(Script::text(output)).await;
        let extra = json!({"return_token_ids": true, "logprobs": true, "include_reasoning": !hidden});
        let whole = post(server.port, ask(extra.clone())).await.json();
        let request = server.last_request();
        assert_eq!(whole["prompt_token_ids"], json!(request.prompt));
        let mut all: Vec<u64> = server.tokenizer.encode_output(output).unwrap().into_iter().map(u64::from).collect();
        all.push(u64::from(server.tokenizer.markers().eos));
        assert_eq!(ids(std::slice::from_ref(&whole)), all, "the end of the turn included");
        assert_eq!(whole["usage"]["completion_tokens"], all.len());
        let beside: Vec<u64> = whole["choices"][0]["logprobs"]["content"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["token_id"].as_u64().unwrap())
            .collect();
        assert_eq!(beside, all[all.len() - 1 - beside.len()..all.len() - 1]);

        let mut streamed = extra;
        streamed["stream"] = true.into();
        let events = post(server.port, ask(streamed)).await.events();
        assert_eq!(ids(&events), all, "reasoning hidden: {hidden}");
        assert_eq!(events[0]["prompt_token_ids"], json!(request.prompt));
        assert!(events[1..].iter().all(|event| event.get("prompt_token_ids").is_none()));
    }
    let server = Server::start(Script::text(output)).await;
    let plain = post(server.port, ask(json!({"logprobs": true}))).await;
    assert!(!plain.body.contains("token_id"), "only on request: {}", plain.body);
}
