//! The P cases of CONTRIBUTING.md: each output whole, in every two-piece split, per character and per token.

use longwave_text::{Reply, ReplyEnd, ReplyEvent, ReplyFinish, ReplyOptions, ReplyStart, Tokenizer};

const D: &str = "｜DSML｜";

#[derive(Debug, Default, PartialEq, Eq)]
struct Message {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
}

fn options(start: ReplyStart) -> ReplyOptions {
    ReplyOptions { start, parse_tool_calls: true, stop: Vec::new(), call_seed: 7 }
}

fn message(events: &[ReplyEvent]) -> Message {
    let mut message = Message::default();
    for event in events {
        match event {
            ReplyEvent::Reasoning(text) => message.reasoning.push_str(text),
            ReplyEvent::Content(text) => message.content.push_str(text),
            ReplyEvent::ToolCallStart { index, name, id } => {
                assert_eq!(*index as usize, message.calls.len());
                assert!(id.starts_with("call_"));
                message.calls.push((name.clone(), String::new()));
            }
            ReplyEvent::ToolCallArguments { index, delta } => message.calls[*index as usize].1.push_str(delta),
        }
    }
    message
}

fn read(options: ReplyOptions, pieces: &[&str], end: ReplyEnd) -> (Message, ReplyFinish) {
    let mut reply = Reply::new(options);
    let mut events = Vec::new();
    for piece in pieces {
        reply.push_text(piece, &mut events);
    }
    let finish = reply.finish(end, &mut events);
    (message(&events), finish)
}

fn read_ids(tokenizer: &Tokenizer, options: ReplyOptions, ids: &[u32], end: ReplyEnd) -> (Message, ReplyFinish) {
    let mut reply = Reply::new(options);
    let mut events = Vec::new();
    for &id in ids {
        reply.push_token(tokenizer, id, &mut events);
    }
    let finish = reply.finish(end, &mut events);
    (message(&events), finish)
}

/// Reads `output` in every way and gives the one answer.
fn every_cut(options: ReplyOptions, output: &str, end: ReplyEnd) -> (Message, ReplyFinish) {
    let whole = read(options.clone(), &[output], end);
    let mut edges: Vec<usize> = output.char_indices().map(|(at, _)| at).collect();
    edges.push(output.len());
    for &edge in &edges {
        let cut = read(options.clone(), &[&output[..edge], &output[edge..]], end);
        assert_eq!(cut, whole, "{output:?} cut at {edge}");
    }
    let characters: Vec<&str> = edges.windows(2).map(|pair| &output[pair[0]..pair[1]]).collect();
    assert_eq!(read(options.clone(), &characters, end), whole, "{output:?} per character");
    let tokenizer = crate::tiny();
    let tokens = read_ids(&tokenizer, options, &tokenizer.encode_output(output).unwrap(), end);
    assert_eq!(tokens, whole, "{output:?} per token");
    whole
}

fn block(invokes: &[String]) -> String {
    format!("\n\n<{D}tool_calls>\n{}\n</{D}tool_calls>", invokes.join("\n"))
}

fn invoke(name: &str, parameters: &[(&str, bool, &str)]) -> String {
    let parameters: String = parameters
        .iter()
        .map(|(key, string, value)| {
            format!("<{D}parameter name=\"{key}\" string=\"{string}\">{value}</{D}parameter>\n")
        })
        .collect();
    format!("<{D}invoke name=\"{name}\">\n{parameters}</{D}invoke>")
}

fn stopped(output: &str) -> (Message, ReplyFinish) {
    every_cut(options(ReplyStart::Reasoning), output, ReplyEnd::Stop)
}

fn expect(output: &str, reasoning: &str, content: &str, calls: &[(&str, &str)]) {
    let (message, finish) = stopped(output);
    let calls: Vec<(String, String)> = calls.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    let want = if calls.is_empty() { ReplyFinish::Stop(None) } else { ReplyFinish::ToolCalls };
    assert_eq!(message, Message { reasoning: reasoning.into(), content: content.into(), calls }, "{output:?}");
    assert_eq!(finish, want, "{output:?}");
}

#[test]
fn p1_p2_p3_reasoning_ends_once() {
    expect("think</think>answer", "think", "answer", &[]);
    expect("\nthink\n</think>\n\nanswer", "think", "answer", &[]);
    expect("Good morning!", "Good morning!", "", &[]);
    expect("a</think>b</think>c", "a", "bc", &[]);
    expect("", "", "", &[]);
}

#[test]
fn p5_p6_values_keep_their_types() {
    let call = |parameters: &[(&str, bool, &str)]| format!("t</think>{}", block(&[invoke("f", parameters)]));
    expect(&call(&[("s", true, "007")]), "t", "", &[("f", "{\"s\": \"007\"}")]);
    expect(
        &call(&[("n", false, "3"), ("b", false, "true"), ("a", false, "[1, 2]"), ("o", false, "{\"k\": null}")]),
        "t",
        "",
        &[("f", "{\"n\": 3, \"b\": true, \"a\": [1, 2], \"o\": {\"k\": null}}")],
    );
}

#[test]
fn p7_p20_strings_are_escaped_and_may_be_empty() {
    let call = |value: &str| format!("t</think>{}", block(&[invoke("f", &[("s", true, value)])]));
    expect(&call("a\"b\\c\nd 2>&1"), "t", "", &[("f", "{\"s\": \"a\\\"b\\\\c\\nd 2>&1\"}")]);
    expect(&call(""), "t", "", &[("f", "{\"s\": \"\"}")]);
    expect(&call("杭州 🤭 </b> \u{fffd}"), "t", "", &[("f", "{\"s\": \"杭州 🤭 </b> \u{fffd}\"}")]);
}

#[test]
fn p8_p9_two_calls_and_an_empty_one() {
    let two = block(&[invoke("f", &[("s", true, "x")]), invoke("g", &[])]);
    expect(&format!("t</think>{two}"), "t", "", &[("f", "{\"s\": \"x\"}"), ("g", "{}")]);
    let mut reply = Reply::new(options(ReplyStart::Content));
    let mut events = Vec::new();
    reply.push_text(&two, &mut events);
    let ids: Vec<&String> = events
        .iter()
        .filter_map(|event| match event {
            ReplyEvent::ToolCallStart { id, .. } => Some(id),
            _ => None,
        })
        .collect();
    assert!(ids.len() == 2 && ids[0] != ids[1], "{ids:?}");
}

#[test]
fn p10_p11_p12_text_around_the_block() {
    let call = block(&[invoke("f", &[])]);
    expect(&format!("t</think>I will look.\n{call}"), "t", "I will look.", &[("f", "{}")]);
    expect(&format!("t</think>{call}trailing"), "t", "", &[("f", "{}")]);
    expect(&format!("thinking...{call}"), "thinking...", "", &[("f", "{}")]);
}

#[test]
fn p13_p14_a_bad_wrapper_is_still_a_call() {
    let call = invoke("f", &[("s", true, "x")]);
    expect(&format!("t</think>{call}"), "t", "", &[("f", "{\"s\": \"x\"}")]);
    expect(&format!("t</think>\n\n<{D}toolcalls>\n{call}\n</{D}tool_calls>"), "t", "", &[("f", "{\"s\": \"x\"}")]);
}

#[test]
fn p16_p17_a_cut_call_shows_no_markup() {
    let full = format!("t</think>{}", block(&[invoke("f", &[("s", true, "hello")])]));
    for (until, want) in [("hel", "{\"s\": \"hel"), ("hello</", "{\"s\": \"hello")] {
        let output = &full[..full.find(until).unwrap() + until.len()];
        let (message, finish) = every_cut(options(ReplyStart::Reasoning), output, ReplyEnd::Length);
        assert_eq!(finish, ReplyFinish::Length);
        assert!(message.calls[0].1.starts_with(want) && !message.calls[0].1.contains("DSML"), "{message:?}");
    }
}

#[test]
fn p18_held_text_is_given_back_at_the_end() {
    expect("t</think>2 <", "t", "2 <", &[]);
    let (message, _) = read(options(ReplyStart::Reasoning), &["t</think>2 <｜DS"], ReplyEnd::Stop);
    assert_eq!(message.content, "2 <｜DS");
}

#[test]
fn p25_markup_in_ordinary_tokens_is_text() {
    let tokenizer = crate::tiny();
    let output = format!("see{}</think>", block(&[invoke("f", &[])]));
    let ids = tokenizer.encode_text(&output).unwrap();
    let (message, finish) = read_ids(&tokenizer, options(ReplyStart::Content), &ids, ReplyEnd::Stop);
    assert_eq!((message.content, message.calls.len(), finish), (output, 0, ReplyFinish::Stop(None)));
}

#[test]
fn p26_a_long_value_streams() {
    let value = "abcdefgh".repeat(50);
    let output = block(&[invoke("f", &[("s", true, &value)])]);
    let mut reply = Reply::new(options(ReplyStart::Content));
    let mut deltas = 0;
    let mut all = Vec::new();
    let characters: Vec<char> = output.chars().collect();
    for piece in characters.chunks(8) {
        let mut events = Vec::new();
        reply.push_text(&piece.iter().collect::<String>(), &mut events);
        deltas += events.iter().filter(|event| matches!(event, ReplyEvent::ToolCallArguments { .. })).count();
        all.extend(events);
    }
    reply.finish(ReplyEnd::Stop, &mut all);
    assert_eq!(message(&all).calls[0].1, format!("{{\"s\": \"{value}\"}}"));
    assert!(deltas >= 50, "{deltas}");
}

#[test]
fn p28_without_tools_markup_is_text() {
    let output = format!("see{}", block(&[invoke("f", &[])]));
    let plain = ReplyOptions { parse_tool_calls: false, ..options(ReplyStart::Content) };
    let (message, finish) = every_cut(plain, &output, ReplyEnd::Stop);
    assert_eq!((message.content, finish), (output, ReplyFinish::Stop(None)));
}

#[test]
fn a_repeated_think_tag_is_swallowed_at_the_start_only() {
    expect("<think>t</think>answer", "t", "answer", &[]);
    expect("\n<think>\nt</think>answer", "t", "answer", &[]);
    expect("<thin", "<thin", "", &[]);
    expect("<thin</think>x", "<thin", "x", &[]);
    expect("a <think> b</think>c", "a <think> b", "c", &[]);
    let (message, _) = every_cut(options(ReplyStart::Content), "<think>x", ReplyEnd::Stop);
    assert_eq!(message.content, "<think>x");
}

#[test]
fn stop_texts_end_the_content_and_not_the_reasoning() {
    let stop = ReplyOptions { stop: vec!["END".into()], ..options(ReplyStart::Reasoning) };
    let (message, finish) = every_cut(stop, "an END here</think>text END more", ReplyEnd::Stop);
    assert_eq!((message.reasoning.as_str(), message.content.as_str()), ("an END here", "text "));
    assert_eq!(finish, ReplyFinish::Stop(Some("END".into())));
}

#[test]
fn characters_are_never_split_over_tokens() {
    let tokenizer = crate::tiny();
    let text = "杭州 🤭 é \u{fffd} ok \u{fffd}";
    let mut reply = Reply::new(options(ReplyStart::Content));
    let mut events = Vec::new();
    // One token per byte: the hardest spelling a model could choose.
    for byte in text.bytes() {
        let id = (0..tokenizer.vocab_size()).find(|&id| !tokenizer.is_added(id) && tokenizer.token_bytes(id) == [byte]);
        let mut step = Vec::new();
        reply.push_token(&tokenizer, id.unwrap(), &mut step);
        for event in &step {
            assert!(matches!(event, ReplyEvent::Content(text) if !text.is_empty()));
        }
        events.extend(step);
    }
    reply.finish(ReplyEnd::Stop, &mut events);
    assert_eq!(message(&events).content, text);
}

#[test]
fn reasoning_tokens_are_counted_up_to_the_end_tag() {
    let tokenizer = crate::tiny();
    let reasoning = tokenizer.encode_text("some thought").unwrap();
    let output = tokenizer.encode_output("some thought</think>answer").unwrap();
    let mut reply = Reply::new(options(ReplyStart::Reasoning));
    let mut events = Vec::new();
    for id in output {
        reply.push_token(&tokenizer, id, &mut events);
    }
    reply.finish(ReplyEnd::Stop, &mut events);
    assert_eq!(reply.reasoning_tokens() as usize, reasoning.len());
}

#[test]
fn p21_a_value_that_is_no_json_becomes_a_string() {
    let call = |parameters: &[(&str, bool, &str)]| format!("t</think>{}", block(&[invoke("f", parameters)]));
    let wants = [
        (vec![("o", false, "not json")], "{\"o\": \"not json\"}"),
        (vec![("o", false, "")], "{\"o\": \"\"}"),
        (
            vec![("o", false, "a, b } c"), ("s", true, "x, \"y\": z")],
            "{\"o\": \"a, b } c\", \"s\": \"x, \\\"y\\\": z\"}",
        ),
        (vec![("o", false, "[1, 2"), ("n", false, "3")], "{\"o\": \"[1, 2\", \"n\": 3}"),
        (vec![("o", false, "[1, 2")], "{\"o\": \"[1, 2\"}"),
        (vec![("o", false, "\"plain\""), ("n", false, "3")], "{\"o\": \"plain\", \"n\": 3}"),
        // Found by fuzzing: the same wherever the quote is cut off.
        (vec![("o", false, "\": no end"), ("n", false, "3")], "{\"o\": \": no end\", \"n\": 3}"),
        (vec![("o", false, "\"a\" and more")], "{\"o\": \"a\"}"),
        (vec![("o", false, "333e33333"), ("n", false, "1e3")], "{\"o\": \"333e33333\", \"n\": 1e3}"),
        // Found by fuzzing: escapes that are none.
        (vec![("o", false, "\"\\\u{2}\u{0}")], "{\"o\": \"\\\\\\u0002\\u0000\"}"),
        (vec![("o", false, "\"\\u12 \\ud83d \\q")], "{\"o\": \"\\\\u12 \\\\ud83d \\\\q\"}"),
        (vec![("o", false, "\"\\ud83d\\ude00 \\u00e9\"")], "{\"o\": \"\\ud83d\\ude00 \\u00e9\"}"),
        (
            vec![("o", false, "{\"a, b\": [1, {\"}\": \", \"}], \"c\": \"d\"}"), ("n", false, "-1.5e3")],
            "{\"o\": {\"a, b\": [1, {\"}\": \", \"}], \"c\": \"d\"}, \"n\": -1.5e3}",
        ),
    ];
    for (parameters, want) in wants {
        let (message, _) = stopped(&call(&parameters));
        let arguments = &message.calls[0].1;
        assert_eq!(arguments, want, "{parameters:?}");
    }
}

#[test]
fn a_repeated_parameter_is_given_once() {
    let call = block(&[invoke("f", &[("s", true, "a"), ("n", false, "1"), ("s", true, "b"), ("n", false, "{}")])]);
    expect(&call, "", "", &[("f", "{\"s\": \"a\", \"n\": 1}")]);
}

#[test]
fn a_call_without_its_closing_tags_is_complete() {
    let full = block(&[invoke("f", &[("s", true, "x"), ("n", false, "12")])]);
    for (until, want) in [
        ("name=\"f\">", "{}"),
        ("\"true\">x", "{\"s\": \"x\"}"),
        ("x</｜DSML｜parameter>", "{\"s\": \"x\"}"),
        ("\"false\">12", "{\"s\": \"x\", \"n\": 12}"),
        ("12</｜DSML｜parameter>", "{\"s\": \"x\", \"n\": 12}"),
        ("</｜DSML｜invoke>", "{\"s\": \"x\", \"n\": 12}"),
    ] {
        expect(&full[..full.find(until).unwrap() + until.len()], "", "", &[("f", want)]);
    }
}

#[test]
fn a_tag_without_its_string_attribute_leaks_no_markup() {
    let tag = |value: &str| {
        let parameter = format!("<{D}parameter name=\"k\">{value}</{D}parameter>\n");
        block(&[format!("<{D}invoke name=\"f\">\n{parameter}</{D}invoke>")])
    };
    expect(&tag("12"), "", "", &[("f", "{\"k\": 12}")]);
    expect(&tag("word"), "", "", &[("f", "{\"k\": \"word\"}")]);
}

/// Outputs put together from fragments at random: whatever the model writes, the answer does not depend on the cuts,
/// arguments are JSON unless the limit cut them, and neither calls nor content show more than their share.
#[test]
fn random_outputs_read_the_same_however_they_are_cut() {
    let fragments = [
        "<",
        "</",
        D,
        "tool_calls>",
        "invoke name=\"",
        "f\">",
        "parameter name=\"",
        "k\" string=\"true\">",
        "</think>",
        "k\" string=\"false\">",
        "n\" string=\"false\">",
        "\"",
        "{",
        "}",
        "[1,",
        "12",
        ": ",
        "\n",
        "text",
        "杭",
        "\\",
        "<think>",
        "<｜DSML｜tool_calls>\n",
        "<｜DSML｜invoke name=\"g\">\n",
        "<｜DSML｜parameter name=\"a\" string=\"true\">",
        "<｜DSML｜parameter name=\"b\" string=\"false\">",
        "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>\n",
        "</｜DSML｜tool_calls>",
    ];
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let starts = [ReplyStart::Reasoning, ReplyStart::Content, ReplyStart::ToolCalls];
    for round in 0..4000 {
        let output: String = (0..next(24)).map(|_| fragments[next(fragments.len())]).collect();
        let options = options(starts[round % 3]);
        let whole = read(options.clone(), &[&output], ReplyEnd::Stop);
        let mut edges: Vec<usize> = output.char_indices().map(|(at, _)| at).chain([output.len()]).collect();
        let characters: Vec<&str> = edges.windows(2).map(|pair| &output[pair[0]..pair[1]]).collect();
        let single = read(options.clone(), &characters, ReplyEnd::Stop);
        edges.retain(|_| next(3) == 0);
        let ends = [&[0], edges.as_slice(), &[output.len()]].concat();
        let pieces: Vec<&str> = ends.windows(2).map(|pair| &output[pair[0]..pair[1]]).collect();
        let some = read(options, &pieces, ReplyEnd::Stop);
        // A value that claims to be JSON and begins with a quote streams or waits, depending on the cut; when it is no
        // JSON the two differ in what they save of it.
        if !output.contains("false\">\"") {
            assert_eq!(single, whole, "{output:?} per character");
            assert_eq!(some, whole, "{output:?} at {edges:?}");
        }
        for (_, arguments) in [whole, single, some].iter().flat_map(|read| &read.0.calls) {
            let parsed = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(arguments);
            assert!(parsed.is_ok(), "{output:?} gives {arguments}");
        }
    }
}
