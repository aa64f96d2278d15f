//! A streamed answer: pieces of text with the times at which they came.
//!
//! Reads OpenAI's chat and completion chunks. A piece counts when it holds text, a thought or part of a call, so a chunk
//! that only names the role is not the first token. Refuses a stream that ends without its last event.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Method, StatusCode};
use serde_json::Value;

use crate::bench::connection::{self, Server, shorten};
use crate::bench::record::Record;

/// What is known of a stream so far.
#[derive(Default)]
struct Reading {
    /// When pieces came, seconds since the request was sent.
    pieces_s: Vec<f64>,
    /// When the reason of the end came: the only time of an answer whose tokens have no text.
    finished_s: Option<f64>,
    text: String,
    usage: Value,
    done: bool,
}

/// Sends `body` and reads its answer to the end. `began` is the start of the load.
pub async fn ask(server: &Server, route: &str, body: Bytes, began: Instant) -> Record {
    let sent = Instant::now();
    let sent_s = (sent - began).as_secs_f64();
    match follow(server, route, body, sent).await {
        Ok(reading) => reading.record(sent_s),
        Err(error) => Record::failed(sent_s, sent.elapsed().as_secs_f64(), format!("{error:#}")),
    }
}

async fn follow(server: &Server, route: &str, body: Bytes, sent: Instant) -> Result<Reading> {
    let mut answer = server.send(Method::POST, route, body).await?;
    let status = answer.response.status();
    if status != StatusCode::OK {
        let text = connection::read(&mut answer).await?;
        server.give_back(answer);
        bail!("{status}: {}", shorten(&text));
    }
    let (mut reading, mut line) = (Reading::default(), Vec::new());
    while let Some(frame) = answer.response.body_mut().frame().await {
        let Ok(data) = frame.context("the stream broke off")?.into_data() else { continue };
        // All that comes together came now.
        let at_s = sent.elapsed().as_secs_f64();
        for part in data.split_inclusive(|byte| *byte == b'\n') {
            line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                reading.line(line.trim_ascii(), at_s)?;
                line.clear();
            }
        }
    }
    if !reading.done {
        bail!("the stream ended without [DONE]");
    }
    server.give_back(answer);
    Ok(reading)
}

impl Reading {
    /// One line of the event stream.
    fn line(&mut self, line: &[u8], at_s: f64) -> Result<()> {
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return Ok(()) };
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_slice(data).with_context(|| format!("no JSON: {}", shorten(data)))?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            bail!("the server failed: {error}");
        }
        if let Some(usage) = event.get("usage").filter(|usage| !usage.is_null()) {
            self.usage = usage.clone();
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            let delta = &choice["delta"];
            let texts = [&delta["content"], &choice["text"]].map(|text| text.as_str().unwrap_or_default());
            let thoughts = [&delta["reasoning_content"], &delta["reasoning"]];
            let thought = thoughts.iter().any(|text| !text.as_str().unwrap_or_default().is_empty());
            let call = delta["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
            if thought || call || texts.iter().any(|text| !text.is_empty()) {
                self.pieces_s.push(at_s);
            }
            texts.iter().for_each(|text| self.text.push_str(text));
            if !choice["finish_reason"].is_null() {
                self.finished_s = Some(at_s);
            }
        }
        Ok(())
    }

    fn record(self, sent_s: f64) -> Record {
        let count = |value: &Value| value.as_u64();
        let pieces = if self.pieces_s.is_empty() { self.finished_s.into_iter().collect() } else { self.pieces_s };
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Record::failed(sent_s, 0.0, "the stream held no choice");
        };
        Record {
            sent_s,
            prompt_tokens: count(&self.usage["prompt_tokens"]).unwrap_or(0),
            cached_tokens: count(&self.usage["prompt_tokens_details"]["cached_tokens"]),
            output_tokens: count(&self.usage["completion_tokens"]).unwrap_or(pieces.len() as u64),
            ttft_s: *first,
            latency_s: *last,
            gaps_s: pieces.windows(2).map(|pair| pair[1] - pair[0]).collect(),
            text: self.text,
            error: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[(&str, f64)]) -> Result<Record> {
        let mut reading = Reading::default();
        for (line, at_s) in lines {
            reading.line(line.as_bytes(), *at_s)?;
        }
        Ok(reading.record(5.0))
    }

    #[test]
    fn the_first_token_is_the_first_piece_with_something_in_it() {
        let record = read(&[
            (r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#, 0.1),
            (": keep-alive", 0.2),
            (r#"data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, 0.3),
            (r#"data:{"choices":[{"delta":{"content":"a"}}]}"#, 0.5),
            (r#"data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}"#, 0.6),
            (r#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}"#, 0.9),
            ("data: [DONE]", 1.0),
        ])
        .unwrap();
        assert_eq!((record.ttft_s, record.latency_s, record.sent_s), (0.3, 0.6, 5.0));
        assert_eq!((record.prompt_tokens, record.cached_tokens, record.output_tokens), (9, Some(2), 4));
        assert_eq!(record.text, "ab");
        assert_eq!(record.gaps_s.len(), 2);
        assert!((record.tpot_s().unwrap() - 0.1).abs() < 1e-12);
    }

    #[test]
    fn answers_without_text_end_when_they_finish_and_errors_are_said() {
        let record = read(&[(r#"data: {"choices":[{"text":"","finish_reason":"length"}]}"#, 0.4)]).unwrap();
        assert_eq!((record.ttft_s, record.output_tokens, record.tpot_s()), (0.4, 1, None));
        assert!(read(&[("data: [DONE]", 0.1)]).unwrap().error.unwrap().contains("no choice"));
        let error = read(&[(r#"data: {"error":{"message":"out of paper"}}"#, 0.1)]).unwrap_err();
        assert!(error.to_string().contains("out of paper"));
        assert!(read(&[("data: {", 0.1)]).unwrap_err().to_string().contains("no JSON"));
    }
}
