//! The stream parser on any text, cut anywhere.
//!
//! The first byte chooses how the answer starts and how it ends, the second where it is cut. Whatever the text: no panic,
//! the same message for every cut, and arguments that are JSON unless the token limit cut them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use longwave_text::{Reply, ReplyCall, ReplyEnd, ReplyEvent, ReplyFinish, ReplyMessage, ReplyOptions, ReplyStart};

fn read(options: &ReplyOptions, pieces: &[&str], end: ReplyEnd) -> (ReplyMessage, ReplyFinish) {
    let (mut reply, mut events) = (Reply::new(options.clone()), Vec::new());
    for piece in pieces {
        reply.push_text(piece, &mut events);
    }
    let finish = reply.finish(end, &mut events);
    let mut said = ReplyMessage::default();
    said.add(&events);
    let mut calls = 0;
    for event in &events {
        match event {
            ReplyEvent::ToolCallStart { index, .. } => {
                assert_eq!(*index, calls, "calls are counted");
                calls += 1;
            }
            ReplyEvent::ToolCallArguments { index, .. } => {
                assert_eq!(index + 1, calls, "arguments belong to the last call")
            }
            _ => {}
        }
    }
    (said, finish)
}

fuzz_target!(|data: &[u8]| {
    let [mode, cut, text @ ..] = data else { return };
    let text = String::from_utf8_lossy(text);
    let start = [ReplyStart::Reasoning, ReplyStart::Content, ReplyStart::ToolCalls, ReplyStart::ContentContinuation];
    let options = ReplyOptions {
        start: start[usize::from(mode & 3)],
        parse_tool_calls: mode & 4 == 0,
        stop: if mode & 8 == 0 { Vec::new() } else { vec!["stop".into(), "\n\n\n".into()] },
        call_seed: 1,
    };
    let end = if mode & 16 == 0 { ReplyEnd::Stop } else { ReplyEnd::Length };
    let whole = read(&options, &[&text], end);
    if end == ReplyEnd::Stop {
        for ReplyCall { name, arguments, .. } in &whole.0.calls {
            let json = serde_json::from_str::<serde_json::Value>(arguments);
            assert!(json.is_ok_and(|json| json.is_object()), "{name}: {arguments:?} in {text:?}");
        }
    }
    let at = text.char_indices().map(|(at, _)| at).nth(usize::from(*cut)).unwrap_or(text.len());
    assert_eq!(whole, read(&options, &[&text[..at], &text[at..]], end), "cut at {at} of {text:?}");
    if text.len() < 400 {
        let chars: Vec<String> = text.chars().map(String::from).collect();
        let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
        assert_eq!(whole, read(&options, &chars, end), "one character at a time of {text:?}");
    }
});
