//! The three protocols side by side: requests of real agents, and the Q cases that concern all of them.

use longwave_text::{ChatDefaults, ChatError, ChatPlan, ReplyStart};
use serde_json::{Map, Value, json};

fn read(protocol: &str, body: &Value) -> Result<ChatPlan, ChatError> {
    let body: &Map<String, Value> = body.as_object().unwrap();
    ChatPlan::of_protocol(protocol, body, ChatDefaults::default()).unwrap()
}

fn text(protocol: &str, body: &Value) -> String {
    read(protocol, body).unwrap_or_else(|error| panic!("{protocol}: {error}: {body}")).prompt().text
}

fn refusal(protocol: &str, body: &Value) -> ChatError {
    read(protocol, body).expect_err("it is refused")
}

/// The same question in the three forms.
fn asked(question: &str) -> [(&'static str, Value); 3] {
    [
        ("chat", json!({"messages": [{"role": "user", "content": question}]})),
        ("responses", json!({"input": question})),
        ("messages", json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": question}]})),
    ]
}

#[test]
fn requests_of_real_agents_become_prompts() {
    let mut count = 0;
    for (name, protocol) in [("codex", "responses"), ("claude_code", "messages"), ("opencode", "chat")] {
        let path = format!("{}/../../testdata/clients/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        for request in file["requests"].as_array().unwrap() {
            let prompt = text(protocol, &request["body"]);
            assert!(prompt.starts_with("<｜begin▁of▁sentence｜>"), "{name}, {}", request["name"]);
            assert!(!prompt.to_lowercase().contains("x-anthropic-billing-header"), "{name}, {}", request["name"]);
            // No call of the history is lost, whatever kind it is.
            let history = request["body"]["input"].as_array().or(request["body"]["messages"].as_array()).unwrap();
            let is_call = |item: &&Value| {
                item["type"].as_str().is_some_and(|kind| kind.ends_with("_call") && kind != "web_search_call")
            };
            let blocks = history.iter().flat_map(|message| message["content"].as_array().into_iter().flatten());
            let calls = history.iter().filter(is_call).count()
                + blocks.filter(|block| block["type"] == "tool_use").count()
                + history.iter().filter_map(|message| message["tool_calls"].as_array()).map(Vec::len).sum::<usize>();
            // The instructions spell the form of a call once.
            let turns = prompt.split("<｜Assistant｜>").skip(1).collect::<String>();
            assert_eq!(turns.matches("<｜DSML｜invoke name=").count(), calls, "{name}, {}", request["name"]);
            count += 1;
        }
    }
    assert!(count >= 20, "{count}");
}

#[test]
fn q7_without_a_switch_all_protocols_think_and_start_in_the_thought() {
    for (protocol, mut body) in asked("hi") {
        let plan = read(protocol, &body).unwrap();
        assert!(
            plan.prompt().text.ends_with("<｜Assistant｜><think>") && plan.reply.start == ReplyStart::Reasoning,
            "{protocol}"
        );
        body["thinking"] = json!({"type": "disabled"});
        let plan = read(protocol, &body).unwrap();
        assert!(
            plan.prompt().text.ends_with("<｜Assistant｜></think>") && plan.reply.start == ReplyStart::Content,
            "{protocol}"
        );
    }
    // One question is one prompt, however it is asked.
    let prompts: Vec<String> = asked("hi").iter().map(|(protocol, body)| text(protocol, body)).collect();
    assert!(prompts.iter().all(|prompt| *prompt == prompts[0]));
}

#[test]
fn q11_q12_efforts_are_the_same_on_all_protocols_and_disabled_wins() {
    for (effort, thinks) in [
        ("none", false),
        ("minimal", true),
        ("low", true),
        ("medium", true),
        ("high", true),
        ("xhigh", true),
        ("max", true),
        ("ultra", true),
    ] {
        let mut prompts = Vec::new();
        for (protocol, mut body) in asked("hi") {
            match protocol {
                "chat" => body["reasoning_effort"] = effort.into(),
                "responses" => body["reasoning"] = json!({"effort": effort}),
                _ => body["output_config"] = json!({"effort": effort}),
            }
            prompts.push(text(protocol, &body));
            body["thinking"] = json!({"type": "disabled"});
            assert!(text(protocol, &body).ends_with("</think>"), "{protocol} {effort}");
        }
        assert!(prompts.iter().all(|prompt| *prompt == prompts[0]), "{effort}");
        assert_eq!(prompts[0].ends_with("<think>"), thinks, "{effort}");
    }
    assert_eq!(
        refusal(
            "messages",
            &json!({"messages": [{"role": "user", "content": "x"}], "output_config": {"effort": "much"}})
        )
        .param
        .unwrap(),
        "output_config.effort"
    );
}

#[test]
fn q8_q13_a_turn_without_its_thought_is_taken_and_gets_an_empty_one() {
    let chat = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ], "tools": [{"type": "function", "function": {"name": "f"}}]});
    let messages = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
    ], "tools": [{"name": "f", "input_schema": {"type": "object"}}]});
    let responses = json!({"input": [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ], "tools": [{"type": "function", "name": "f"}]});
    for (protocol, body) in [("chat", chat), ("messages", messages), ("responses", responses)] {
        let prompt = text(protocol, &body);
        assert!(prompt.contains("<｜Assistant｜><think></think>\n\n<｜DSML｜tool_calls>"), "{protocol}: {prompt}");
        assert!(prompt.contains("<tool_result>r</tool_result>"), "{protocol}");
    }
    // The other name of a thought is taken too.
    let named = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "why"}, {"role": "user", "content": "c"}],
        "tools": [{"type": "function", "function": {"name": "f"}}]});
    assert!(text("chat", &named).contains("<think>why</think>b"));
}

#[test]
fn q15_calls_and_results_must_belong_together_and_are_rendered_in_the_order_of_the_calls() {
    let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": format!("{{\"id\": \"{id}\"}}")});
    let result = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": format!("result {id}")});
    let input = |items: &[Value]| json!({"input": items, "tools": [{"type": "function", "name": "f"}]});
    let error = refusal("responses", &input(&[call("zz"), call("aa"), result("aa")]));
    assert!(error.message.contains("zz") && error.param.as_deref() == Some("input"), "{error:?}");
    let error = refusal("responses", &input(&[result("orphan")]));
    assert!(error.message.contains("orphan") && error.param.as_deref() == Some("input"), "{error:?}");
    let prompt = text("responses", &input(&[call("zz"), call("aa"), result("aa"), result("zz")]));
    let places: Vec<usize> =
        ["zz</", "aa</", "result zz", "result aa"].iter().map(|text| prompt.find(text).unwrap()).collect();
    assert!(places.is_sorted(), "{places:?} {prompt}");
    assert_eq!(
        read("responses", &input(&[call("zz"), call("aa"), result("aa"), result("zz")])).unwrap().call_ids,
        [["zz", "aa"]]
    );

    let chat = |results: &[&str]| {
        let tool = |id: &&str| json!({"role": "tool", "tool_call_id": id, "content": format!("result {id}")});
        let calls =
            ["zz", "aa"].map(|id| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}));
        let mut messages = vec![
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "content": "", "tool_calls": calls}),
        ];
        messages.extend(results.iter().map(tool));
        json!({"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]})
    };
    assert_eq!(refusal("chat", &chat(&["aa"])).param.as_deref(), Some("messages"));
    let prompt = text("chat", &chat(&["aa", "zz"]));
    assert!(prompt.find("result zz") < prompt.find("result aa"));
    let orphan =
        json!({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "q", "content": "r"}]});
    assert_eq!(refusal("chat", &orphan).param.as_deref(), Some("messages"));
}

#[test]
fn q18_developer_and_reminder_roles_are_taken() {
    let body = json!({"messages": [{"role": "developer", "content": "Rules."}, {"role": "user", "content": "x"}, {"role": "latest_reminder", "content": "Mind."}]});
    let prompt = text("chat", &body);
    assert!(prompt.contains("Rules.") && prompt.contains("<｜latest_reminder｜>Mind."), "{prompt}");
    let body = json!({"input": [{"role": "developer", "content": "Rules."}, {"role": "user", "content": "x"}]});
    assert!(text("responses", &body).contains("Rules."));
    let body = json!({"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "Rules."}]});
    assert!(text("messages", &body).contains("Rules."));
}

#[test]
fn q19_what_cannot_be_meant_is_refused_with_its_field() {
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for (name, value, param) in [
        ("messages", json!([]), "messages"),
        ("tools", json!([tool, tool]), "tools"),
        ("tools", json!([{"type": "function", "function": {"name": "f", "parameters": 5}}]), "tools"),
        ("tool_choice", json!({"type": "function", "function": {"name": "other"}}), "tool_choice"),
        ("response_format", json!({"type": "json_schema"}), "response_format"),
    ] {
        let mut body =
            json!({"messages": [{"role": "user", "content": "x"}], "tools": [tool], "thinking": {"type": "disabled"}});
        body[name] = value;
        let error = refusal("chat", &body);
        assert!(error.param.as_deref().is_some_and(|field| field.starts_with(param)), "{error:?}: {body}");
    }
    // The rule about the word "json" is the vendor's alone.
    let body = json!({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}});
    assert!(text("chat", &body).contains("JSON object ONLY"));
    let body = json!({"input": "x", "text": {"format": {"type": "json_object"}}});
    assert!(text("responses", &body).contains("JSON object ONLY"));
}

#[test]
fn documents_that_are_text_and_search_results_are_read() {
    let content = json!([
        {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "The word is heron."}},
        {"type": "search_result", "title": "Page", "source": "https://x.example", "content": [{"type": "text", "text": "found"}]},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
    ]);
    let prompt = text("messages", &json!({"messages": [{"role": "user", "content": content}]}));
    assert!(prompt.contains("Notes\n\nThe word is heron."), "{prompt}");
    assert!(prompt.contains("Page\nhttps://x.example\n\nfound"), "{prompt}");
    assert!(prompt.contains("[Unsupported document type: application/pdf]"), "{prompt}");
    let hidden = json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "zzz"}, {"type": "text", "text": "y"}]}, {"role": "user", "content": "z"}]});
    assert!(!text("messages", &hidden).contains("zzz"));
}

#[test]
fn allowed_tools_leave_the_others_out() {
    let tools = json!([{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]);
    let mut body = json!({"input": "x", "tools": tools, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}});
    let prompt = text("responses", &body);
    assert!(prompt.contains("\"name\": \"g\"") && !prompt.contains("\"name\": \"f\""));
    body["tool_choice"]["tools"][0]["name"] = "h".into();
    assert_eq!(refusal("responses", &body).param.as_deref(), Some("tool_choice.tools"));
}

#[test]
fn a_final_message_is_continued_in_both_spellings() {
    let body = |field: &str| {
        let mut last = json!({"role": "assistant", "content": "Once upon"});
        if field == "prefix" {
            last["prefix"] = true.into();
        }
        let mut body = json!({"messages": [{"role": "user", "content": "x"}, last], "thinking": {"type": "disabled"}});
        if field != "prefix" {
            body[field] = true.into();
        }
        body
    };
    let plan = read("chat", &body("continue_final_message")).unwrap();
    assert_eq!(plan.reply.start, ReplyStart::ContentContinuation);
    assert!(plan.prompt().text.ends_with("</think>Once upon"), "{}", plan.prompt().text);
    assert_eq!(plan.prompt(), read("chat", &body("prefix")).unwrap().prompt());
    let wrong = json!({"messages": [{"role": "user", "content": "x"}], "continue_final_message": true});
    assert_eq!(refusal("chat", &wrong).param.as_deref(), Some("continue_final_message"));
}
