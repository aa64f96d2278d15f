//! Tool calls that are forced, offered and strict, held to their syntax and schemas.

use longwave_text::grammar::{CallRules, Format, ToolRule};
use longwave_text::{AnswerRules, ChatDefaults, ChatPlan};
use serde_json::{Map, Value, json};

use crate::grammars::{GRAMMARS, TOKENIZER, follow, format, mask, refused, rules, schema, tokens};

pub fn tool(name: &str, strict: bool, parameters: Value) -> ToolRule {
    ToolRule { name: name.into(), parameters, strict, param: format!("tools[{name}]") }
}

pub fn calls(tools: Vec<ToolRule>) -> CallRules {
    CallRules { tools, forced: true, opened: true, parallel: true }
}

pub fn parameter(name: &str, string: bool, value: &str) -> String {
    format!("<｜DSML｜parameter name=\"{name}\" string=\"{string}\">{value}</｜DSML｜parameter>\n")
}

pub fn invoke(name: &str, parameters: &[String]) -> String {
    format!("<｜DSML｜invoke name=\"{name}\">\n{}</｜DSML｜invoke>", parameters.concat())
}

pub const END: &str = "\n</｜DSML｜tool_calls>";

pub fn weather() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f", null]}},
        "required": ["city"], "additionalProperties": false})
}

/// Whether one call is allowed under a schema, when the block was opened.
fn call(parameters: Value, strict: bool, written: &[String]) -> bool {
    let rules = AnswerRules { calls: Some(calls(vec![tool("f", strict, parameters)])), ..AnswerRules::default() };
    follow(&rules, &(invoke("f", written) + END)) == Ok(true)
}

#[test]
fn q10_calls_keep_to_names_and_schemas() {
    for strict in [false, true] {
        let call = |written: &[String]| call(weather(), strict, written);
        let city = parameter("city", true, "Paris </x> 2>&1\n<think>");
        assert!(call(std::slice::from_ref(&city)));
        assert!(call(&[parameter("days", false, "3"), parameter("unit", true, "c"), city.clone()]), "in any order");
        assert!(call(&[city.clone(), parameter("unit", false, "null")]));
        assert!(call(&[parameter("city", true, "")]));
        assert!(!call(&[]), "a required parameter is missing");
        assert!(!call(&[parameter("days", false, "3")]));
        assert!(!call(&[city.clone(), city.clone()]), "twice");
        assert!(!call(&[city.clone(), parameter("days", false, "\"3\"")]));
        assert!(!call(&[city.clone(), parameter("days", true, "3")]));
        assert!(!call(&[city.clone(), parameter("unit", true, "k")]));
        assert!(!call(&[city, parameter("cityname", true, "x")]), "an unknown parameter");
    }
    let rules = AnswerRules {
        calls: Some(calls(vec![tool("f", false, weather()), tool("fg", false, json!({}))])),
        ..AnswerRules::default()
    };
    let one = |name: &str| invoke(name, &[parameter("city", true, "x")]);
    assert_eq!(follow(&rules, &(one("f") + "\n" + &one("fg") + END)), Ok(true), "several calls");
    assert!(follow(&rules, &(one("g") + END)).is_err());
    assert!(follow(&rules, &(one("f") + END + "\n")).is_err(), "nothing behind the block");
    assert_eq!(follow(&rules, &(invoke("fg", &[]) + END)), Ok(true));
    assert_eq!(follow(&rules, &(invoke("fg", &["\n".into()]) + END)), Ok(true), "as the Python encoder writes it");
    let single = AnswerRules {
        calls: Some(CallRules { parallel: false, ..rules.calls.clone().unwrap() }),
        ..AnswerRules::default()
    };
    assert_eq!(follow(&single, &(one("f") + END)), Ok(true));
    assert!(follow(&single, &(one("f") + "\n" + &one("fg") + END)).is_err());
}

#[test]
fn q10_parameters_that_a_schema_leaves_open_take_any_name_but_the_known_ones() {
    let open = json!({"type": "object", "properties": {"city": {"type": "integer"}}});
    let call = |written: &[String]| call(open.clone(), false, written);
    assert!(call(&[
        parameter("citya", true, "x"),
        parameter("color", false, "[1, {\"x\": null}]"),
        parameter("ci", true, "")
    ]));
    assert!(call(&[parameter("city", false, "3"), parameter("x", true, "y")]));
    assert!(!call(&[parameter("city", true, "three")]));
    assert!(!call(&[parameter("x", false, "no json")]));
}

#[test]
fn q10_strict_tools_are_held_to_the_letter_and_others_to_kinds() {
    let nested = json!({"type": "object", "properties": {
        "list": {"type": "array", "items": {"$ref": "#/$defs/pair"}}, "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "either": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 3}, {"type": "null"}]}},
        "required": ["list"], "additionalProperties": false,
        "$defs": {"pair": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": false}}});
    let list = |text: &str| parameter("list", false, text);
    for (written, strict, loose) in [
        (vec![list(r#"[{"a": 1, "b": 2}]"#)], true, true),
        (vec![list(r#"[{"b": 2, "a": 1}]"#)], false, true),
        (vec![list(r#"[{"a": 1}]"#)], false, true),
        (vec![list("{}")], false, false),
        (vec![list("[]"), parameter("code", true, "ABC")], true, true),
        (vec![list("[]"), parameter("code", true, "ABCD")], false, true),
        (vec![list("[]"), parameter("either", true, "ab")], true, true),
        (vec![list("[]"), parameter("either", false, "null")], true, true),
        (vec![list("[]"), parameter("either", true, "abcd")], false, true),
        (vec![list("[]"), parameter("either", false, "1")], false, false),
    ] {
        assert_eq!(call(nested.clone(), true, &written), strict, "strict: {written:?}");
        assert_eq!(call(nested.clone(), false, &written), loose, "loose: {written:?}");
    }
    // More required parameters than are counted off: strict ones come in their order.
    let names: Vec<String> = (0..9).map(|i| format!("p{i}")).collect();
    let properties: Map<String, Value> = names.iter().map(|n| (n.clone(), json!({"type": "integer"}))).collect();
    let many = json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false});
    let mut written: Vec<String> = names.iter().map(|n| parameter(n, false, "1")).collect();
    assert!(call(many.clone(), true, &written) && call(many.clone(), false, &written));
    assert!(!call(many.clone(), true, &written[1..]) && call(many.clone(), false, &written[1..]));
    written.reverse();
    assert!(!call(many.clone(), true, &written) && call(many, false, &written));
}

#[test]
fn q10_strings_of_strict_tools_are_held_to_their_format() {
    let cases: [(&str, &[&str], &[&str]); 11] = [
        ("date", &["2026-02-29", "1999-12-31"], &["2026-02-30", "2026-04-31", "26-01-01", "2026-1-1"]),
        ("time", &["23:59:60Z", "00:00:00.5+02:00"], &["24:00:00Z", "12:00:00", "12:00Z"]),
        ("date-time", &["2026-11-30T06:48:35Z"], &["2026-11-30 06:48:35Z", "2026-11-30"]),
        ("duration", &["P1Y2M3D", "PT1H", "P3W", "P1DT12H"], &["P", "P1DT", "1D", "P1Y2W", "PT1D", "P1Y3D"]),
        ("uuid", &["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], &["2eb8aa08aa9811eab4aa73b441d16380", "2eb8"]),
        ("hostname", &["a", "api.example.com"], &["-a", "a-.b", "a..b", ""]),
        ("email", &["first.last@example.com", "a@[127.0.0.1]"], &["@example.com", "a@", "a b@c", ".a@b"]),
        ("ipv4", &["0.0.0.0", "255.10.1.99"], &["256.0.0.1", "1.2.3", "01.2.3.4"]),
        ("ipv6", &["::", "::1", "fe80::a:b", "1:2:3:4:5:6:7:8", "1::"], &["1:2:3", "1::2::3", "12345::", ":1"]),
        (
            "ipv6",
            &["::ffff:192.0.2.1", "1:2:3:4:5:6:1.2.3.4", "64:ff9b::192.0.2.33", "::1.2.3.4", "1::5:6:1.2.3.4"],
            &["::1.2.3", "1:2:3:4:5:6:7:1.2.3.4", "1.2.3.4", "::256.0.0.1", "1:2:3:4:5:6::1.2.3.4"],
        ),
        ("uri", &["https://example.com/a?b=%20#c", "about:", "urn:isbn:04"], &["example.com", "http://a b", "x:%2"]),
    ];
    let takes = |schema: &Value, strict: bool, text: &str| {
        let tool =
            json!({"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": false});
        call(tool, strict, &[parameter("a", true, text)])
    };
    for (format, right, wrong) in cases {
        let schema = json!({"type": "string", "format": format});
        right.iter().for_each(|text| assert!(takes(&schema, true, text), "{format} must take {text:?}"));
        wrong.iter().for_each(|text| assert!(!takes(&schema, true, text), "{format} must refuse {text:?}"));
        assert!(takes(&schema, false, wrong[0]), "tools that are not strict are held to kinds");
    }
    let both = json!({"type": "string", "format": "date", "pattern": "^2026"});
    assert!(takes(&both, true, "2026-11-30") && !takes(&both, true, "2025-11-30") && !takes(&both, true, "2026"));
    assert!(takes(&json!({"type": "string", "format": "password"}), true, "any text"));
    let untyped = json!({"format": "date"});
    assert!(takes(&untyped, true, "2026-11-30") && !takes(&untyped, true, "today"));
}

#[test]
fn q10_a_schema_beyond_the_grammar_is_an_error_only_for_strict_tools() {
    let odd = json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}, "required": ["a"]});
    let list = AnswerRules {
        calls: Some(calls(vec![tool("f", false, weather()), tool("odd", true, odd.clone())])),
        ..AnswerRules::default()
    };
    let (param, message) = refused(&list);
    assert!(param == "tools[odd]" && message.contains("uniqueItems"), "{param}: {message}");
    assert!(call(odd, false, &[parameter("a", false, "[1, 1]")]));
    for parameters in [
        json!({"$ref": "#/nowhere"}),
        json!({"type": "object", "properties": {"a": {"pattern": "(?=a)"}, "b": {"$ref": "#/x"}}}),
        json!({"oneOf": [{}, {}]}),
        json!(5),
        json!(null),
    ] {
        assert!(
            call(parameters.clone(), false, &[parameter("a", true, "x"), parameter("b", false, "1")]),
            "{parameters}"
        );
    }
}

#[test]
fn q10_a_call_is_forced_behind_a_thought() {
    let tools = json!([{"type": "function", "function": {"name": "get", "parameters": weather()}},
        {"type": "function", "function": {"name": "other", "strict": true, "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}}]);
    let block = "\n\n<｜DSML｜tool_calls>\n";
    let get = invoke("get", &[parameter("city", true, "Oslo")]);
    let of = |choice: Value| rules(json!({"tools": tools, "tool_choice": choice})).unwrap();
    let required = of(json!("required"));
    assert!(required.thought && required.calls.as_ref().is_some_and(|c| c.forced && !c.opened && c.tools[1].strict));
    assert_eq!(follow(&required, &format!("Let me see.</think>{block}{get}{END}")), Ok(true));
    assert_eq!(follow(&required, &format!("</think>{block}{}{END}", invoke("other", &[]))), Ok(true));
    assert_eq!(follow(&required, "x</think>Hello"), Err("x</think>".into()));
    let named = of(json!({"type": "function", "function": {"name": "other"}}));
    assert!(follow(&named, &format!("x</think>{block}{get}{END}")).is_err());
    assert_eq!(follow(&named, &format!("x</think>{block}{}{END}", invoke("other", &[]))), Ok(true));
    let opened =
        rules(json!({"tools": tools, "tool_choice": "required", "thinking": false, "parallel_tool_calls": false}))
            .unwrap();
    assert_eq!(opened.calls.as_ref().map(|c| (c.forced, c.opened, c.parallel)), Some((true, true, false)));
    assert_eq!(follow(&opened, &(get.clone() + END)), Ok(true));
    assert!(rules(json!({"tools": tools, "tool_choice": "none"})).unwrap().calls.is_none());
    // The other two protocols.
    let body = |body: Value| -> Map<String, Value> { body.as_object().unwrap().clone() };
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false});
    let flat = json!([{"type": "function", "name": "get", "parameters": city, "strict": true}, {"type": "function", "name": "other", "parameters": weather()}]);
    for (choice, count) in [(json!("required"), 2), (json!({"type": "function", "name": "get"}), 1)] {
        let request = body(json!({"input": "u", "tools": flat, "tool_choice": choice}));
        let plan = ChatPlan::from_responses(&request, ChatDefaults::default()).unwrap();
        assert!(plan.rules.calls.is_some_and(|c| c.forced && !c.opened && c.tools.len() == count && c.tools[0].strict));
    }
    let flat =
        json!([{"name": "get", "input_schema": weather()}, {"name": "other", "input_schema": {"type": "object"}}]);
    for (choice, count, thinking) in [
        (json!({"type": "any"}), 2, true),
        (json!({"type": "tool", "name": "get"}), 1, true),
        (json!({"type": "any", "disable_parallel_tool_use": true}), 2, false),
    ] {
        let request = body(
            json!({"messages": [{"role": "user", "content": "u"}], "max_tokens": 9, "tools": flat, "tool_choice": choice, "thinking": {"type": if thinking { "enabled" } else { "disabled" }}}),
        );
        let calls = ChatPlan::from_messages(&request, ChatDefaults::default()).unwrap().rules.calls.unwrap();
        assert!(
            calls.forced && calls.opened != thinking && calls.tools.len() == count && calls.parallel == thinking,
            "{choice}"
        );
    }
}

#[test]
fn q10_free_calls_cost_nothing_until_the_marker_and_are_held_from_there() {
    let free = CallRules { forced: false, opened: false, ..calls(vec![tool("get", false, weather())]) };
    let rules = AnswerRules { thought: true, calls: Some(free.clone()), ..AnswerRules::default() };
    let get = invoke("get", &[parameter("city", true, "Oslo")]);
    let text = format!("I <｜DSML｜tool</think>Look: ｜DSML｜ and 2 < 3.\n\n<｜DSML｜tool_calls>\n{get}{END}");
    assert_eq!(follow(&rules, &text), Ok(true));
    let mut state = GRAMMARS.compile(&rules).unwrap().unwrap().start();
    let tokens = tokens(&text);
    let dsml = TOKENIZER.markers().dsml.unwrap();
    // The third marker of the text is the first that opens a tag behind the thought.
    let at = tokens.iter().enumerate().filter(|(_, t)| **t == dsml).nth(2).unwrap().0;
    for (i, &token) in tokens.iter().enumerate() {
        assert_eq!(mask(&mut state).is_some(), i > at, "token {i}");
        state.accept(token).unwrap();
    }
    assert!(state.is_complete());
    assert_eq!(follow(&rules, "x</think>Hello.<｜end▁of▁sentence｜>"), Ok(false));
    // A wrapper that the model misspells is put right.
    assert_eq!(follow(&rules, "</think><｜DSML｜invoke"), Err("</think><｜DSML｜".into()));
    // With a format, the answer is one or the other.
    let both = AnswerRules { calls: Some(free), ..format(Format::Schema(schema())) };
    assert_eq!(follow(&both, r#"{"a": 1}"#), Ok(true));
    assert_eq!(follow(&both, &format!("\n\n<｜DSML｜tool_calls>\n{get}{END}")), Ok(true));
    assert!(follow(&both, "Hello").is_err());
}
