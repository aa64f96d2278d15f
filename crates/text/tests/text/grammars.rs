//! What requests ask of their answers, and grammars that hold answers to it.

use std::sync::{Arc, LazyLock};

use longwave_text::grammar::{CallRules, Format, FormatRule, GrammarState};
use longwave_text::{AnswerRules, ChatDefaults, ChatPlan, Grammars, Tokenizer};
use serde_json::{Map, Value, json};

use crate::calls::{END, calls, invoke, parameter, tool, weather};

pub static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(crate::tiny()));
pub static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| Grammars::new(TOKENIZER.clone()));

/// Token ids of a text; the added tokens among it by id.
pub fn tokens(text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    let mut rest = text;
    let first = |rest: &str| {
        let marks = ["｜DSML｜", "<think>", "</think>", "<｜end▁of▁sentence｜>", "<｜User｜>"];
        marks.into_iter().filter_map(|mark| Some((rest.find(mark)?, mark))).min()
    };
    while let Some((at, mark)) = first(rest) {
        ids.extend(TOKENIZER.encode_text(&rest[..at]).unwrap());
        ids.push(TOKENIZER.added_id(mark).unwrap());
        rest = &rest[at + mark.len()..];
    }
    ids.extend(TOKENIZER.encode_text(rest).unwrap());
    ids
}

pub fn mask(state: &mut GrammarState) -> Option<Vec<u32>> {
    let mut words = vec![0; TOKENIZER.vocab_size().div_ceil(32) as usize];
    state.mask(&mut words).unwrap().then_some(words)
}

pub fn allows(mask: &Option<Vec<u32>>, token: u32) -> bool {
    mask.as_ref().is_none_or(|words| words[token as usize / 32] >> (token % 32) & 1 == 1)
}

/// How far an answer is allowed: `Ok` whether it may end there, `Err` what came before the first token that is not.
pub fn follow(rules: &AnswerRules, text: &str) -> Result<bool, String> {
    let mut state = GRAMMARS.compile(rules).unwrap().expect("something is asked").start();
    let tokens = tokens(text);
    for (i, &token) in tokens.iter().enumerate() {
        if state.is_complete() || !allows(&mask(&mut state), token) {
            return Err(TOKENIZER.decode(&tokens[..i]));
        }
        state.accept(token).unwrap();
    }
    Ok(state.is_complete() || state.may_end())
}

pub fn format(format: Format) -> AnswerRules {
    AnswerRules { format: Some(FormatRule { format, param: "response_format".into() }), ..AnswerRules::default() }
}

pub fn refused(rules: &AnswerRules) -> (String, String) {
    let Err(error) = GRAMMARS.compile(rules) else { panic!("not refused: {rules:?}") };
    (error.param.unwrap(), error.message)
}

/// The rules of a chat body.
pub fn rules(extra: Value) -> Result<AnswerRules, longwave_text::ChatError> {
    let mut body = json!({"messages": [{"role": "user", "content": "u"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let Value::Object(body) = body else { unreachable!() };
    ChatPlan::from_body(&body, ChatDefaults::default()).map(|plan| plan.rules)
}

const A: &str =
    r#"{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}"#;

pub fn schema() -> Value {
    serde_json::from_str(A).unwrap()
}

#[test]
fn e6_every_spelling_of_a_format_means_the_same() {
    let of = |extra: Value| {
        let rule = rules(extra).unwrap().format.unwrap();
        (rule.format, rule.param)
    };
    let (json, param) =
        of(json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema()}}}));
    assert_eq!((json, param.as_str()), (Format::Schema(schema()), "response_format.json_schema.schema"));
    for (extra, expected, at) in [
        (json!({"response_format": {"type": "json_object"}}), Format::Object, "response_format"),
        (json!({"response_format": {"type": "regex", "pattern": "a+"}}), Format::Regex("a+".into()), "response_format"),
        (json!({"guided_json": schema()}), Format::Schema(schema()), "guided_json"),
        (json!({"guided_json": A}), Format::Schema(schema()), "guided_json"),
        (json!({"guided_regex": "a+"}), Format::Regex("a+".into()), "guided_regex"),
        (json!({"guided_choice": ["a", "b"]}), Format::Choice(vec!["a".into(), "b".into()]), "guided_choice"),
        (json!({"guided_grammar": "start: \"a\""}), Format::Lark("start: \"a\"".into()), "guided_grammar"),
        (json!({"structured_outputs": {"json": schema()}}), Format::Schema(schema()), "structured_outputs.json"),
        (json!({"structured_outputs": {"regex": "a+"}}), Format::Regex("a+".into()), "structured_outputs.regex"),
        (json!({"structured_outputs": {"json_object": true}}), Format::Object, "structured_outputs.json_object"),
        (
            json!({"structured_outputs": {"choice": ["x"]}}),
            Format::Choice(vec!["x".into()]),
            "structured_outputs.choice",
        ),
        (
            json!({"structured_outputs": {"grammar": "start: \"a\""}}),
            Format::Lark("start: \"a\"".into()),
            "structured_outputs.grammar",
        ),
    ] {
        assert_eq!(of(extra.clone()), (expected, at.to_owned()), "{extra}");
    }
    for extra in [
        json!({}),
        json!({"response_format": {"type": "text"}}),
        json!({"structured_outputs": {"json_object": false}}),
        json!({"guided_json": null}),
        json!({"text": "x"}),
    ] {
        assert_eq!(rules(extra.clone()).unwrap().format, None, "{extra}");
    }
    let body = |body: Value| -> Map<String, Value> { body.as_object().unwrap().clone() };
    let form = json!({"type": "json_schema", "name": "n", "schema": schema()});
    let responses = body(json!({"input": "u", "text": {"format": form}}));
    let plan = ChatPlan::from_responses(&responses, ChatDefaults::default()).unwrap();
    assert_eq!(
        plan.rules.format,
        Some(FormatRule { format: Format::Schema(schema()), param: "text.format.schema".into() })
    );
    for holder in [json!({"output_config": {"format": form}}), json!({"output_format": form})] {
        let mut messages = body(json!({"messages": [{"role": "user", "content": "u"}], "max_tokens": 9}));
        messages.extend(body(holder));
        let plan = ChatPlan::from_messages(&messages, ChatDefaults::default()).unwrap();
        assert_eq!(plan.rules.format.clone().unwrap().format, Format::Schema(schema()));
        assert!(plan.prompt().text.contains("## Response Format"), "the prompt says it as well");
    }
}

#[test]
fn e6_what_cannot_be_asked_for_names_its_field() {
    for (extra, param, words) in [
        (json!({"guided_json": schema(), "guided_regex": "a"}), "guided_regex", "one format"),
        (json!({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}), "guided_choice", "one format"),
        (json!({"guided_json": 5}), "guided_json", "JSON schema"),
        (json!({"guided_json": "{"}), "guided_json", "JSON schema"),
        (json!({"guided_regex": ""}), "guided_regex", "regular expression"),
        (json!({"guided_choice": []}), "guided_choice", "list"),
        (json!({"guided_choice": ["a", ""]}), "guided_choice", "not empty"),
        (json!({"guided_choice": [1]}), "guided_choice", "texts"),
        (json!({"guided_grammar": "root ::= \"a\""}), "guided_grammar", "Lark"),
        (json!({"structured_outputs": {"structural_tag": {}}}), "structured_outputs.structural_tag", "not supported"),
        (json!({"response_format": {"type": "structural_tag", "structures": []}}), "response_format", "not supported"),
        (json!({"response_format": {"type": "regex"}}), "response_format.pattern", "required"),
        (json!({"structured_outputs": "json"}), "structured_outputs", "object"),
        (json!({"structured_outputs": {"json_object": "yes"}}), "structured_outputs.json_object", "true or false"),
    ] {
        let error = rules(extra.clone()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{extra}: {error}");
        assert!(error.message.contains(words), "{extra}: {error}");
    }
}

#[test]
fn e6_what_a_grammar_cannot_hold_names_the_keyword() {
    for (schema, words) in [
        (json!({"not": {}}), "\"not\""),
        (json!({"type": "array", "uniqueItems": true}), "\"uniqueItems\""),
        (json!({"properties": {"a": {"if": {}, "then": {}}}}), "\"if\""),
        (json!({"oneOf": [{"type": "string"}, {"minLength": 3}]}), "oneOf"),
        (json!({"$ref": "https://elsewhere/x"}), "$ref"),
        (json!({"$ref": "#/$defs/nothing"}), "nothing"),
        (json!({"type": "string", "pattern": "(?=a)b"}), "look"),
        (json!(false), "schema"),
        (json!({"type": "integer", "minimum": 5, "maximum": 4}), "5"),
    ] {
        let (param, message) = refused(&format(Format::Schema(schema.clone())));
        assert!(param == "response_format" && message.contains(words), "{schema}: {message}");
        assert!(message.lines().count() == 1 && !message.contains("x-guidance"), "{message}");
    }
    for rule in [
        Format::Regex("(?=a)b".into()),
        Format::Regex("(".into()),
        Format::Lark("start: x".into()),
        Format::Lark("start".into()),
    ] {
        let (param, message) = refused(&format(rule.clone()));
        assert!(param == "response_format" && message.lines().count() == 1, "{rule:?}: {message}");
    }
    let wide: Map<String, Value> = (0..60_000).map(|i| (format!("property{i}"), json!({"type": "string"}))).collect();
    let (_, message) = refused(&format(Format::Schema(json!({"type": "object", "properties": wide}))));
    assert!(message.contains("limit"), "{message}");
}

#[test]
fn e6_json_may_be_printed_nicely_and_not_for_ever() {
    let rules = format(Format::Schema(schema()));
    for text in [r#"{"a":1}"#, r#"{"a": -12}"#, "{\n  \"a\": 0\n}", r#"{ "a" : 1 }"#] {
        assert_eq!(follow(&rules, text), Ok(true), "{text}");
    }
    for (text, until) in [
        (r#" {"a":1}"#, ""),
        (r#"{"a":1} "#, r#"{"a":1}"#),
        (r#"{"a":1.5}"#, r#"{"a":1"#),
        (r#"{"a":1,"b":2}"#, r#"{"a":1"#),
        (r#"{"b":2}"#, r#"{""#),
        ("{}", "{"),
        ("[1]", ""),
        ("```json", ""),
    ] {
        assert_eq!(follow(&rules, text), Err(until.into()), "{text}");
    }
    let spaces = format!("{{\n{}\"a\":1}}", " ".repeat(200));
    assert!(follow(&rules, &spaces).is_err_and(|until| until.len() < 70));
    assert!(follow(&rules, "{\n\n\"a\": 1}").is_err() && follow(&rules, "{  \"a\": 1}").is_err());
    let any = format(Format::Object);
    assert_eq!(
        follow(&any, "{\"x\": [1, {\"y\": null}], \"é\": \"\\u00e9 <｜User｜>\"}"),
        Err("{\"x\": [1, {\"y\": null}], \"é\": \"\\u00e9 ".into())
    );
    assert_eq!(follow(&any, "{\"x\": [1, {\"y\": null}], \"é\": \"\\u00e9 杭 </thin>\"}"), Ok(true));
}

#[test]
fn e6_regex_choice_and_grammar_hold_the_whole_answer() {
    let regex = format(Format::Regex("^[a-z]+\\d{2}$".into()));
    assert_eq!(follow(&regex, "abc12"), Ok(true));
    assert_eq!(follow(&regex, "abc1"), Ok(false));
    assert_eq!(follow(&regex, "Abc12"), Err(String::new()));
    let choice = format(Format::Choice(vec!["yes".into(), "no \"way\"\n".into()]));
    assert_eq!(follow(&choice, "no \"way\"\n"), Ok(true));
    assert_eq!(follow(&choice, "no"), Ok(false));
    let lark = format(Format::Lark("start: \"a\" b+\nb: /[0-9]/ | \",\"".into()));
    assert_eq!(follow(&lark, "a1,2"), Ok(true));
    assert!(follow(&lark, "ab").is_err());
}

#[test]
fn m11_the_grammar_is_off_until_the_thought_ends() {
    let rules = AnswerRules { thought: true, ..format(Format::Schema(schema())) };
    assert_eq!(follow(&rules, "anything <think> {\"b\": ｜ at all</think>{\"a\": 1}"), Ok(true));
    assert_eq!(follow(&rules, "x</think>y"), Err("x</think>".into()));
    assert_eq!(follow(&rules, "</think>{\"a\": 1}"), Ok(true));
    // A thought is not an answer: it must not be the end, and no call begins inside it.
    assert_eq!(follow(&rules, "x<｜end▁of▁sentence｜>"), Err("x".into()));
    assert_eq!(follow(&rules, "x<｜DSML｜"), Err("x<".into()));
}

/// Tokens that are taken back leave no trace: walks with and without looking ahead see equal masks.
#[test]
fn m11_taking_tokens_back_is_exact_across_stages() {
    let free = CallRules {
        forced: false,
        opened: false,
        ..calls(vec![tool("get", true, weather()), tool("x", false, json!({}))])
    };
    let get = invoke("get", &[parameter("days", false, "12"), parameter("city", true, "Oslo </b")]);
    let block = format!("\n\n<｜DSML｜tool_calls>\n{get}{END}");
    let forced = CallRules { forced: true, ..free.clone() };
    let schema = AnswerRules { thought: true, ..format(Format::Schema(schema())) };
    for (rules, text) in [
        (schema, "ab c</think>{\"a\": 123}".to_owned()),
        (AnswerRules { thought: true, calls: Some(free), format: None }, format!("a</think>b <｜DSML {block}")),
        (AnswerRules { thought: true, calls: Some(forced), format: None }, format!("a</think>{block}")),
    ] {
        let grammar = GRAMMARS.compile(&rules).unwrap().unwrap();
        let tokens = tokens(&text);
        let mut plain = grammar.start();
        let masks: Vec<_> = tokens
            .iter()
            .map(|&token| {
                let mask = mask(&mut plain);
                assert!(allows(&mask, token));
                plain.accept(token).unwrap();
                mask
            })
            .collect();
        assert!(plain.is_complete());
        for depth in 1..8usize {
            let mut state = grammar.start();
            for i in 0..tokens.len() {
                let ahead = &tokens[i..(i + depth).min(tokens.len())];
                for (j, &token) in ahead.iter().enumerate() {
                    assert!(mask(&mut state) == masks[i + j], "{depth} ahead, token {i} + {j}");
                    state.accept(token).unwrap();
                }
                state.roll_back(ahead.len() as u32).unwrap();
                assert!(!state.is_complete());
                assert!(mask(&mut state) == masks[i], "{depth} ahead, back at {i}");
                state.accept(tokens[i]).unwrap();
            }
            assert!(state.is_complete());
        }
        // A token that is not allowed is not taken, and the state stays what it was.
        let mut state = grammar.start();
        tokens[..tokens.len() - 1].iter().for_each(|&token| state.accept(token).unwrap());
        assert!(state.accept(TOKENIZER.markers().think).is_err());
        assert!(mask(&mut state) == masks[tokens.len() - 1]);
    }
}

#[test]
fn equal_rules_share_a_compiled_grammar() {
    let one = GRAMMARS.compile(&format(Format::Regex("share+".into()))).unwrap().unwrap();
    let two = GRAMMARS.compile(&format(Format::Regex("share+".into()))).unwrap().unwrap();
    let three =
        GRAMMARS.compile(&AnswerRules { thought: true, ..format(Format::Regex("share+".into())) }).unwrap().unwrap();
    assert!(Arc::ptr_eq(&one, &two) && !Arc::ptr_eq(&one, &three));
    assert!(GRAMMARS.compile(&AnswerRules { thought: true, ..AnswerRules::default() }).unwrap().is_none());
}
