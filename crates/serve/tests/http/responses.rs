//! POST /v1/responses and the routes over kept responses.

use serde_json::{Value, json};

use crate::client::{get, post_to, send};
use crate::scripted::Server;

const CALL: &str = r#"{"match": "patch", "reply": "Hm.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"apply_patch\">\n<｜DSML｜parameter name=\"input\" string=\"true\">*** Begin\n+ \"x\"</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"}
{"match": "close", "reply": "</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"agents__close\">\n<｜DSML｜parameter name=\"n\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"}
{"match": "find", "reply": "</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"tool_search\">\n<｜DSML｜parameter name=\"query\" string=\"true\">mail</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"}
{"match": "slow", "reply": "</think>one two three four five", "token_delay_ms": 200}
{"match": "cut", "reply": "</think>cut off", "finish": "length"}
{"match": "fail", "error": "broken"}
{"reply": "A thought.</think>Hello."}"#;

fn tools() -> Value {
    json!([
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}}]},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
        {"type": "web_search"},
    ])
}

async fn create(server: &Server, body: Value) -> Value {
    let answer = post_to(server.port, "/v1/responses", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

#[tokio::test]
async fn a_stream_has_the_order_of_the_protocol_and_says_what_the_whole_response_says() {
    let server = Server::playing(CALL, |_| {}).await;
    let events = post_to(server.port, "/v1/responses", &json!({"input": "hi", "stream": true})).await.named();
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let numbers: Vec<u64> = events.iter().map(|(_, data)| data["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    let streamed = &events.last().unwrap().1["response"];
    let whole = create(&server, json!({"input": "hi"})).await;
    for (streamed, whole) in streamed["output"].as_array().unwrap().iter().zip(whole["output"].as_array().unwrap()) {
        assert_eq!((&streamed["type"], &streamed["content"]), (&whole["type"], &whole["content"]));
    }
    assert_eq!((&whole["status"], &whole["reasoning"]["effort"]), (&json!("completed"), &json!("high")));
    assert_eq!(
        whole["usage"]["output_tokens_details"]["reasoning_tokens"],
        streamed["usage"]["output_tokens_details"]["reasoning_tokens"]
    );
}

#[tokio::test]
async fn custom_namespaced_and_searching_tools_come_back_as_they_were_declared() {
    let server = Server::playing(CALL, |_| {}).await;
    let events = post_to(server.port, "/v1/responses", &json!({"input": "patch", "tools": tools(), "stream": true}))
        .await
        .named();
    let deltas = events.iter().filter(|(name, _)| name == "response.custom_tool_call_input.delta");
    let input: String = deltas.map(|(_, data)| data["delta"].as_str().unwrap()).collect();
    assert_eq!(input, "*** Begin\n+ \"x\"");
    let item = events.last().unwrap().1["response"]["output"][1].clone();
    assert_eq!(
        (&item["type"], &item["name"], &item["input"]),
        (&json!("custom_tool_call"), &json!("apply_patch"), &json!(input))
    );
    let closed = create(&server, json!({"input": "close", "tools": tools()})).await["output"][0].clone();
    assert_eq!(
        (&closed["name"], &closed["namespace"], &closed["arguments"]),
        (&json!("close"), &json!("agents"), &json!("{\"n\": 3}"))
    );
    let search = create(&server, json!({"input": "find", "tools": tools()})).await["output"][0].clone();
    assert_eq!((&search["type"], &search["arguments"]), (&json!("tool_search_call"), &json!({"query": "mail"})));
    // And back again.
    let result = json!({"type": "tool_search_output", "call_id": search["call_id"], "tools": [{"type": "function", "name": "send_mail", "parameters": {"type": "object"}}]});
    let body = json!({"input": [{"role": "user", "content": "x"}, search, result], "tools": tools()});
    let prompt =
        post_to(server.port, "/render?protocol=responses", &body).await.json()["prompt"].as_str().unwrap().to_owned();
    assert!(prompt.contains("\"name\": \"send_mail\""), "{prompt}");
}

#[tokio::test]
async fn a_kept_response_is_continued_read_listed_and_forgotten() {
    let server = Server::playing(CALL, |_| {}).await;
    let first = create(&server, json!({"input": "hi"})).await;
    let id = first["id"].as_str().unwrap();
    assert_eq!(get(server.port, &format!("/v1/responses/{id}")).await.json(), first);
    let last = get(server.port, &format!("/v1/responses/{id}?stream=true")).await.named();
    assert_eq!((last[0].0.as_str(), &last[0].1["response"]), ("response.completed", &first));
    let second = create(&server, json!({"input": "again", "previous_response_id": id})).await;
    assert_eq!(second["previous_response_id"], id);
    assert!(second["usage"]["input_tokens"].as_u64() > first["usage"]["total_tokens"].as_u64());
    let items = get(server.port, &format!("/v1/responses/{id}/input_items")).await.json();
    assert_eq!((&items["data"][0]["content"], items["data"].as_array().unwrap().len()), (&json!("hi"), 1));
    assert_eq!(send(server.port, "DELETE", &format!("/v1/responses/{id}"), b"").await.json()["deleted"], true);
    assert_eq!(get(server.port, &format!("/v1/responses/{id}")).await.status, 404);
    let gone = post_to(server.port, "/v1/responses", &json!({"input": "x", "previous_response_id": id})).await;
    assert_eq!((gone.status, &gone.json()["error"]["param"]), (404, &json!("previous_response_id")));
    // Not kept when the client says so.
    let unkept = create(&server, json!({"input": "hi", "store": false})).await;
    assert_eq!(get(server.port, &format!("/v1/responses/{}", unkept["id"].as_str().unwrap())).await.status, 404);
}

#[tokio::test]
async fn the_input_of_a_response_comes_in_pages_that_end() {
    let server = Server::playing(CALL, |_| {}).await;
    // One id twice, as some clients have it.
    let say =
        |n: usize| json!({"type": "message", "role": "user", "content": n.to_string(), "id": format!("msg_{}", n / 2)});
    let first = create(&server, json!({"input": (0..5).map(say).collect::<Vec<_>>()})).await;
    let path = format!("/v1/responses/{}/input_items?order=asc&limit=2", first["id"].as_str().unwrap());
    let (mut seen, mut after) = (Vec::new(), String::new());
    loop {
        let page = get(server.port, &format!("{path}{after}")).await.json();
        seen.extend(page["data"].as_array().unwrap().iter().map(|item| item["content"].as_str().unwrap().to_owned()));
        after = format!("&after={}", page["last_id"].as_str().unwrap());
        if page["has_more"] == false {
            break;
        }
        assert!(seen.len() < 10, "pages go round in circles");
    }
    assert_eq!(seen, ["0", "1", "2", "3", "4"]);
    assert_eq!(get(server.port, &path.replace("limit=2", "limit=101")).await.status, 400);
}

#[tokio::test]
async fn a_sealed_thought_is_restored_from_what_the_client_sends_back() {
    let server = Server::playing(CALL, |_| {}).await;
    let include = json!(["reasoning.encrypted_content"]);
    let first = create(&server, json!({"input": "hi", "store": false, "include": include, "tools": tools()})).await;
    let mut thought = first["output"][0].clone();
    assert!(thought["encrypted_content"].as_str().is_some_and(|sealed| !sealed.contains("A thought")));
    thought["content"] = json!([]);
    thought["summary"] = json!([]);
    let input =
        json!([{"role": "user", "content": "hi"}, thought, first["output"][1], {"role": "user", "content": "on"}]);
    let body = json!({"input": input, "tools": tools()});
    let prompt =
        post_to(server.port, "/render?protocol=responses", &body).await.json()["prompt"].as_str().unwrap().to_owned();
    assert!(prompt.contains("<think>A thought.</think>Hello."), "{prompt}");
}

#[tokio::test]
async fn a_response_in_the_background_is_read_later_or_cancelled() {
    let server = Server::playing(CALL, |_| {}).await;
    let running = create(&server, json!({"input": "slow", "background": true})).await;
    assert_eq!(running["status"], "queued");
    let id = running["id"].as_str().unwrap();
    let cancelled = post_to(server.port, &format!("/v1/responses/{id}/cancel"), &json!({})).await.json();
    assert_eq!(cancelled["status"], "cancelled");
    let done = create(&server, json!({"input": "hi", "background": true})).await;
    let id = done["id"].as_str().unwrap();
    for _ in 0..200 {
        let now = get(server.port, &format!("/v1/responses/{id}")).await.json();
        if now["status"] == "completed" {
            assert_eq!(now["output"][1]["content"][0]["text"], "Hello.");
            let answer = post_to(server.port, &format!("/v1/responses/{id}/cancel"), &json!({})).await;
            assert_eq!(answer.status, 400);
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("it never ended");
}

#[tokio::test]
async fn what_is_cut_is_incomplete_and_what_fails_says_why() {
    let server = Server::playing(CALL, |_| {}).await;
    let cut = create(&server, json!({"input": "cut"})).await;
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let failed = post_to(server.port, "/v1/responses", &json!({"input": "fail"})).await;
    assert_eq!((failed.status, &failed.json()["error"]["message"]), (500, &json!("broken")));
    for (name, value, param) in [
        ("input", json!(5), "input"),
        ("input", json!([]), "input"),
        ("input", json!([5]), "input[0]"),
        ("input", json!([{"role": "user", "content": 5}]), "input[0]"),
        ("input", json!([{"type": "item_reference", "id": "x"}]), "input[0].id"),
        ("tools", json!([5]), "tools[0]"),
        ("tools", json!([{"name": "f"}]), "tools[0].type"),
        ("text", json!({"format": 5}), "text.format"),
        ("text", json!({"format": {"type": "x"}}), "text.format"),
        ("reasoning", json!({"effort": "much"}), "reasoning.effort"),
        ("conversation", json!("conv_1"), "conversation"),
        ("max_output_tokens", json!(0), "max_output_tokens"),
    ] {
        let mut body = json!({"input": "hi"});
        body[name] = value;
        let answer = post_to(server.port, "/v1/responses", &body).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)), "{body} {}", answer.body);
    }
    for (tools, choice) in [
        (json!([]), json!("required")),
        (json!([]), json!({"type": "function", "name": "zz"})),
        (json!([{"type": "web_search"}]), json!("required")),
    ] {
        let body = json!({"input": "hi", "tools": tools, "tool_choice": choice});
        let answer = post_to(server.port, "/v1/responses", &body).await;
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.json()["error"]["param"].as_str().unwrap().starts_with("tool_choice"), "{}", answer.body);
    }
    for path in ["/v1/responses/%ff", "/v1/responses/x?stream=a&stream=b", "/v1/models/%ff"] {
        let answer = get(server.port, path).await;
        assert_eq!((answer.status, &answer.json()["error"]["type"]), (400, &json!("invalid_request_error")), "{path}");
    }
    let unanswered = json!({"input": [{"type": "function_call", "call_id": "abc", "name": "f", "arguments": "{}"}]});
    let answer = post_to(server.port, "/v1/responses", &unanswered).await;
    assert!(answer.status == 400 && answer.body.contains("abc"), "q15: the id of the client is named: {}", answer.body);
}

#[tokio::test]
async fn a_background_response_that_was_cut_keeps_its_input() {
    let server = Server::playing(CALL, |_| {}).await;
    let running = create(&server, json!({"input": "cut", "background": true})).await;
    let path = format!("/v1/responses/{}", running["id"].as_str().unwrap());
    for _ in 0..200 {
        if get(server.port, &path).await.json()["status"] == "incomplete" {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    // What ends it comes after what keeps it.
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    let items = get(server.port, &format!("{path}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"], "cut");
    assert_eq!(
        create(&server, json!({"input": "on", "previous_response_id": running["id"]})).await["status"],
        "completed"
    );
}

#[tokio::test]
async fn a_response_in_the_background_takes_a_place_of_its_key() {
    let server = Server::playing(CALL, |options| options.security.max_concurrent_per_key = Some(1)).await;
    create(&server, json!({"input": "slow", "background": true})).await;
    let refused = post_to(server.port, "/v1/responses", &json!({"input": "hi"})).await;
    assert_eq!(refused.status, 429, "{}", refused.body);
}
