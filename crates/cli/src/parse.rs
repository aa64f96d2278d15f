//! `longwave parse`: what the stream parser makes of a model's output, without a model.
//!
//! The output is text, read from standard input; markers are recognised by their spelling. A request says how the answer
//! starts and which tools there are; without one, the output starts inside the thought and tools are parsed. With
//! `--jsonl` each line of the input is an object with `output` and, when wanted, `request` and `finish`.

use std::io::{BufRead, Read, Write};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use longwave_text::{ChatDefaults, Reply, ReplyEnd, ReplyEvent, ReplyFinish, ReplyMessage, ReplyOptions, ReplyStart};
use serde_json::{Map, Value, json};

use crate::render::{self, Protocol};

/// How a text is fed to the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pieces {
    Whole,
    /// So many characters at a time.
    Chars(usize),
}

impl FromStr for Pieces {
    type Err = String;

    fn from_str(text: &str) -> Result<Pieces, String> {
        match text {
            "whole" => Ok(Pieces::Whole),
            "chars" => Ok(Pieces::Chars(1)),
            _ => match text.parse() {
                Ok(count) if count > 0 => Ok(Pieces::Chars(count)),
                _ => Err(format!("{text:?} is neither whole, nor chars, nor a number of characters")),
            },
        }
    }
}

/// How the output ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum End {
    /// The model ended its turn.
    Stop,
    /// The token limit.
    Length,
}

/// Arguments of `longwave parse`.
#[derive(clap::Args)]
pub struct Args {
    /// Form of the request.
    #[arg(long, value_enum, default_value = "chat")]
    protocol: Protocol,
    /// The request that the output answers, JSON.
    #[arg(long)]
    request: Option<PathBuf>,
    /// Feed the output whole, one character at a time (chars), or so many characters at a time.
    #[arg(long, default_value = "whole")]
    pieces: Pieces,
    /// How the output ended.
    #[arg(long, value_enum, default_value = "stop")]
    finish: End,
    /// Print each event of the stream before the message.
    #[arg(long)]
    events: bool,
    /// Read JSON lines, print one result per line.
    #[arg(long)]
    jsonl: bool,
}

/// Parses standard input.
pub fn run(args: Args) -> Result<()> {
    let request = args.request.as_deref().map(render::read_body).transpose()?;
    let mut out = std::io::stdout().lock();
    if !args.jsonl {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read the output from standard input")?;
        return print(&mut out, &args, options(&args, request.as_ref())?, &text, args.finish);
    }
    for (index, line) in std::io::stdin().lock().lines().enumerate() {
        let line = line.context("cannot read standard input")?;
        if line.trim().is_empty() {
            continue;
        }
        one_line(&mut out, &args, request.as_ref(), &line).with_context(|| format!("line {}", index + 1))?;
    }
    Ok(())
}

fn one_line(out: &mut impl Write, args: &Args, request: Option<&Map<String, Value>>, line: &str) -> Result<()> {
    let line: Value = serde_json::from_str(line)?;
    let output = line["output"].as_str().ok_or_else(|| anyhow!("needs a text under \"output\""))?;
    let end = match line["finish"].as_str() {
        None => args.finish,
        Some("stop") => End::Stop,
        Some("length") => End::Length,
        Some(other) => bail!("finish: expected stop or length, got {other:?}"),
    };
    let request = line["request"].as_object().or(request);
    print(out, args, options(args, request)?, output, end)
}

/// How the answer to a request is read.
fn options(args: &Args, request: Option<&Map<String, Value>>) -> Result<ReplyOptions> {
    match request {
        Some(body) => Ok(render::plan(args.protocol, body, ChatDefaults::default())?.reply),
        None => {
            Ok(ReplyOptions { start: ReplyStart::Reasoning, parse_tool_calls: true, stop: Vec::new(), call_seed: 0 })
        }
    }
}

fn print(out: &mut impl Write, args: &Args, options: ReplyOptions, text: &str, end: End) -> Result<()> {
    let (mut reply, mut said) = (Reply::new(options), ReplyMessage::default());
    let mut take = |new: Vec<ReplyEvent>| -> Result<()> {
        for event in new.iter().filter(|_| args.events) {
            writeln!(out, "{}", event_json(event))?;
        }
        said.add(&new);
        Ok(())
    };
    for piece in pieces(text, args.pieces) {
        let mut new = Vec::new();
        reply.push_text(piece, &mut new);
        take(new)?;
    }
    let (end, mut new) = (if end == End::Stop { ReplyEnd::Stop } else { ReplyEnd::Length }, Vec::new());
    let finish = reply.finish(end, &mut new);
    take(new)?;
    writeln!(out, "{}", result(&said, &finish))?;
    Ok(())
}

fn pieces(text: &str, pieces: Pieces) -> Vec<&str> {
    let Pieces::Chars(count) = pieces else { return vec![text] };
    let starts = text.char_indices().map(|(at, _)| at).step_by(count).chain([text.len()]).collect::<Vec<_>>();
    starts.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect()
}

fn event_json(event: &ReplyEvent) -> Value {
    match event {
        ReplyEvent::Reasoning(text) => json!({"event": "reasoning", "delta": text}),
        ReplyEvent::Content(text) => json!({"event": "content", "delta": text}),
        ReplyEvent::ToolCallStart { index, id, name } => {
            json!({"event": "tool_call", "index": index, "id": id, "name": name})
        }
        ReplyEvent::ToolCallArguments { index, delta } => {
            json!({"event": "arguments", "index": index, "delta": delta})
        }
    }
}

/// The message of Chat Completions, and why it ended.
fn result(said: &ReplyMessage, finish: &ReplyFinish) -> Value {
    let mut message = said.chat_json();
    message["reasoning_content"] = said.reasoning.as_str().into();
    let (reason, stop) = match finish {
        ReplyFinish::Stop(stop) => ("stop", stop.as_deref()),
        ReplyFinish::Length => ("length", None),
        ReplyFinish::ToolCalls => ("tool_calls", None),
    };
    json!({"message": message, "finish_reason": reason, "stop_reason": stop})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_characters_and_all_of_the_text() {
        let text = "a\u{ff5c}b\u{1f600}c";
        for (name, count) in [("whole", 1), ("chars", 5), ("2", 3), ("9", 1)] {
            let cut = pieces(text, name.parse().unwrap());
            assert_eq!((cut.concat().as_str(), cut.len()), (text, count), "{name}");
        }
        assert!("0".parse::<Pieces>().is_err() && "words".parse::<Pieces>().is_err());
    }
}
