//! Conversations that come back in the client's own words hit what the model wrote (cases Q1 to Q3).

use serde_json::{Value, json};

use crate::client::post_to;
use crate::scripted::Server;

/// A call as no renderer would write it: other spaces, other order.
const CALL: &str = r#"{"match": "look", "reply": "I should look.\n</think>Let me look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"o\" string=\"false\">{\"k\":1,\"j\":[1,2]}</｜DSML｜parameter>\n<｜DSML｜parameter name=\"s\" string=\"true\">a  b</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"}
{"reply": "done</think>All done."}"#;

fn schema() -> Value {
    json!({"type": "object", "properties": {"o": {"type": "object"}, "s": {"type": "string"}}})
}

#[tokio::test]
async fn q1_a_call_that_comes_back_in_other_words_is_found_on_chat() {
    let server = Server::playing(CALL, |_| {}).await;
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": schema()}}]);
    let question = json!({"role": "user", "content": "look"});
    let first =
        post_to(server.port, "/v1/chat/completions", &json!({"messages": [question], "tools": tools})).await.json();
    let id = &first["choices"][0]["message"]["tool_calls"][0]["id"];
    let arguments = "{\"s\":\"a  b\",   \"o\": {\"j\": [1, 2], \"k\": 1}}";
    let mut call = json!({
        "role": "assistant", "content": "Let me look.",
        "tool_calls": [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}],
    });
    let result = json!({"role": "tool", "tool_call_id": id, "content": "42"});
    let usage = &first["usage"];
    let known = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    // The thought is left out, given as it was, given as an empty text.
    let thought = &first["choices"][0]["message"]["reasoning_content"];
    for reasoning in [json!(null), thought.clone(), json!("")] {
        call["reasoning_content"] = reasoning;
        let body = json!({"messages": [question, call, result], "tools": tools});
        let second = post_to(server.port, "/v1/chat/completions", &body).await.json();
        let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert!(cached >= known, "{cached} of {known}");
    }
    // Another thought or other arguments are the client's to say.
    for (reasoning, arguments) in [(json!("Another thought."), arguments), (json!(null), "{\"s\": \"other\"}")] {
        call["reasoning_content"] = reasoning;
        call["tool_calls"][0]["function"]["arguments"] = arguments.into();
        let body = json!({"messages": [question, call, result], "tools": tools});
        let second = post_to(server.port, "/v1/chat/completions", &body).await.json();
        assert!(second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() < known);
    }
}

#[tokio::test]
async fn q1_a_call_is_found_on_messages_with_and_without_its_thought() {
    let server = Server::playing(CALL, |_| {}).await;
    let tools = json!([{"name": "f", "input_schema": schema()}]);
    let question = json!({"role": "user", "content": "look"});
    let body = json!({"model": "tiny", "max_tokens": 100, "messages": [question], "tools": tools});
    let first = post_to(server.port, "/v1/messages", &body).await.json();
    let usage = &first["usage"];
    let known = usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap();
    let mut content = first["content"].clone();
    content[2]["input"] = json!({"s": "a  b", "o": {"j": [1, 2], "k": 1}});
    let result = json!({"type": "tool_result", "tool_use_id": content[2]["id"], "content": "42"});
    for skipped in [0, 1] {
        let blocks = &content.as_array().unwrap()[skipped..];
        let turn = json!({"role": "assistant", "content": blocks});
        let messages = json!([question, turn, {"role": "user", "content": [result]}]);
        let body = json!({"model": "tiny", "max_tokens": 100, "messages": messages, "tools": tools});
        let second = post_to(server.port, "/v1/messages", &body).await.json();
        let cached = second["usage"]["cache_read_input_tokens"].as_u64().unwrap();
        assert!(cached >= known, "{cached} of {known}");
    }
}

#[tokio::test]
async fn q1_a_call_is_found_on_responses_by_id_and_by_items() {
    let server = Server::playing(CALL, |_| {}).await;
    let tools = json!([{"type": "function", "name": "f", "parameters": schema()}]);
    let body = json!({"input": "look", "tools": tools});
    let first = post_to(server.port, "/v1/responses", &body).await.json();
    let usage = &first["usage"];
    let known = usage["total_tokens"].as_u64().unwrap();
    let call_id = first["output"].as_array().unwrap().last().unwrap()["call_id"].clone();
    let result = json!({"type": "function_call_output", "call_id": call_id, "output": "42"});
    let by_id = json!({"previous_response_id": first["id"], "input": [result], "tools": tools});
    let call = json!({"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{\"s\":\"a  b\",\"o\":{\"j\":[1,2],\"k\":1}}"});
    let text = json!({"role": "assistant", "content": "Let me look."});
    let by_items = json!({"input": [{"role": "user", "content": "look"}, text, call, result], "tools": tools});
    for body in [by_id, by_items] {
        let second = post_to(server.port, "/v1/responses", &body).await.json();
        let cached = second["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert!(cached >= known, "{cached} of {known}: {second}");
    }
}

#[tokio::test]
async fn a_text_answer_comes_back_with_the_tokens_of_the_model() {
    // Written in two halves, which the tokenizer would join.
    let server = Server::playing("{\"reply\": \"Hel</think>lo\"}", |_| {}).await;
    let question = json!({"role": "user", "content": "hi"});
    let body = json!({"messages": [question], "thinking": {"type": "disabled"}});
    let first = post_to(server.port, "/v1/chat/completions", &body).await.json();
    let text = &first["choices"][0]["message"]["content"];
    assert_eq!(text, "Hello", "a stray end tag is swallowed");
    let turn = json!({"role": "assistant", "content": text});
    let body = json!({"messages": [question, turn, question], "thinking": {"type": "disabled"}});
    let second = post_to(server.port, "/v1/chat/completions", &body).await.json();
    let known = first["usage"]["total_tokens"].as_u64().unwrap();
    assert!(second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= known);
}

#[tokio::test]
async fn q2_q3_marks_and_billing_lines_do_not_change_the_prompt() {
    let server = Server::playing("{\"reply\": \"</think>ok\"}", |_| {}).await;
    let mark = json!({"type": "ephemeral"});
    let body = |billing: &str, marked: usize| {
        let mut blocks = [json!({"type": "text", "text": "one"}), json!({"type": "text", "text": "two"})];
        blocks[marked]["cache_control"] = mark.clone();
        let system = json!([
            {"type": "text", "text": format!("x-Anthropic-Billing-Header: cc; cch={billing};")},
            {"type": "text", "text": "Be short.", "cache_control": mark},
        ]);
        json!({"model": "tiny", "max_tokens": 10, "system": system, "messages": [{"role": "user", "content": blocks}]})
    };
    let mut prompts = Vec::new();
    for (billing, marked) in [("AAAA", 0), ("BBBB", 0), ("AAAA", 1)] {
        let rendered = post_to(server.port, "/render?protocol=messages", &body(billing, marked)).await.json();
        prompts.push(rendered["prompt_token_ids"].clone());
        let answer = post_to(server.port, "/v1/messages", &body(billing, marked)).await.json();
        let usage = &answer["usage"];
        let cached = usage["cache_read_input_tokens"].as_u64().unwrap();
        // All but the last token, which is always computed.
        let hit = prompts.len() == 1 || usage["input_tokens"] == 1 && cached > 0;
        assert!(hit, "{usage}");
    }
    assert!(prompts.iter().all(|prompt| *prompt == prompts[0]));
}

#[tokio::test]
async fn a_thought_never_enters_another_conversation_that_says_the_same_words() {
    let script = "{\"match\": \"first\", \"reply\": \"SECRET 4711</think>Done.\"}\n{\"match\": \"second\", \"reply\": \"Other thought</think>Done.\"}\n{\"reply\": \"</think>x\"}";
    let server = Server::playing(script, |_| {}).await;
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let ask = |messages: Value| json!({"messages": messages, "tools": tools});
    let user = |text: &str| json!({"role": "user", "content": text});
    let done = json!({"role": "assistant", "content": "Done."});
    let used = |answer: &Value| {
        let usage = &answer["usage"];
        (usage["prompt_tokens"].as_u64().unwrap(), usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap())
    };
    post_to(server.port, "/v1/chat/completions", &ask(json!([user("first")]))).await;
    // Somebody else's history with the same words is rendered as it came.
    let other = ask(json!([user("unrelated"), done, user("what was your thought?")]));
    let rendered = post_to(server.port, "/render", &other).await.json()["count"].as_u64().unwrap();
    let answer = post_to(server.port, "/v1/chat/completions", &other).await.json();
    assert_eq!(used(&answer).0, rendered, "no thought was put in");
    // Two turns of one conversation that say the same keep their own thoughts.
    let second = ask(json!([user("first"), done, user("second")]));
    let second = post_to(server.port, "/v1/chat/completions", &second).await.json();
    let known = second["usage"]["total_tokens"].as_u64().unwrap();
    let third = ask(json!([user("first"), done, user("second"), done, user("third")]));
    let third = post_to(server.port, "/v1/chat/completions", &third).await.json();
    assert!(used(&third).1 >= known, "{third}");
}
