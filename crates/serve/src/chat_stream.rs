//! Chat answers as server-sent events, several at once when several were asked for.
//!
//! Each answer has a task that writes its chunks under its index; one ends the stream when all have ended, with the usage
//! of all. A failure ends the stream with an error event; a client that goes away cancels what still runs.

use std::sync::Arc;

use bytes::Bytes;
use longwave_text::ReplyEvent;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::answer::{Answer, Next, Part, Usage};
use crate::chat::{Head, finish_reason, stop_reason};
use crate::errors::ApiError;
use crate::pump::{self, Broken};
use crate::sse;

/// Writes the answers until they end or the client is gone.
pub(crate) async fn stream(head: Arc<Head>, answers: Vec<Answer>, frames: mpsc::Sender<Bytes>) {
    let mut running = JoinSet::new();
    for (index, answer) in answers.into_iter().enumerate() {
        running.spawn(write(Chunks { head: head.clone(), index }, answer, frames.clone()));
    }
    let mut usage = Usage::default();
    while let Some(ended) = running.join_next().await {
        match ended {
            Ok(Ok((index, one))) => {
                if index == 0 {
                    // The first answer computed the prompt; the others found it.
                    (usage.prompt_tokens, usage.cached_tokens) = (one.prompt_tokens, one.cached_tokens);
                }
                usage.add(one);
            }
            Ok(Err(Broken::Gone)) => return,
            Ok(Err(Broken::Failed(error))) => {
                // Nothing may follow the end.
                running.shutdown().await;
                return end(&frames, Some(error.body())).await;
            }
            Err(_) => return end(&frames, Some(ApiError::internal("writing the answer failed").body())).await,
        }
    }
    let usage = head.include_usage.then(|| {
        let mut chunk = Chunks { head: head.clone(), index: 0 }.envelope(json!([]));
        chunk["usage"] = usage.json();
        chunk
    });
    end(&frames, usage).await;
}

async fn end(frames: &mpsc::Sender<Bytes>, last: Option<Value>) {
    for frame in last.iter().map(sse::data).chain([sse::DONE]) {
        if frames.send(frame).await.is_err() {
            return;
        }
    }
}

/// Writes one answer.
async fn write(chunks: Chunks, mut answer: Answer, frames: mpsc::Sender<Bytes>) -> Result<(usize, Usage), Broken> {
    let mut ready = vec![chunks.chunk(json!({"role": "assistant", "content": ""}), Value::Null, Value::Null)];
    // All answers have one prompt.
    if let Some(ids) = chunks.head.prompt_ids.as_ref().filter(|_| chunks.index == 0) {
        ready[0]["prompt_token_ids"] = ids.as_slice().into();
    }
    let (mut ended, mut ids) = (false, Vec::new());
    loop {
        pump::send(&frames, ready.drain(..).map(|chunk| sse::data(&chunk))).await?;
        if ended {
            return Ok((chunks.index, answer.usage()));
        }
        match pump::next(&mut answer, &frames, chunks.head.keep_alive).await? {
            Next::Started => {}
            Next::Part(mut part) => {
                ids.append(&mut part.token_ids);
                ready = chunks.deltas(part);
            }
            Next::End(mut part, finish) => {
                ids.append(&mut part.token_ids);
                ready = chunks.deltas(part);
                let mut last = chunks.chunk(json!({}), finish_reason(&finish).into(), Value::Null);
                last["choices"][0]["stop_reason"] = stop_reason(&finish);
                if chunks.head.prefix_report {
                    last["prefix_report"] = answer.prefix_report();
                }
                ready.push(last);
                ended = true;
            }
        }
        // A thought that is not shown keeps its tokens for what comes behind it.
        if let Some(first) = ready.first_mut().filter(|_| !ids.is_empty()) {
            first["choices"][0]["token_ids"] = std::mem::take(&mut ids).into();
        }
    }
}

/// Makes the chunks of one answer.
struct Chunks {
    head: Arc<Head>,
    index: usize,
}

impl Chunks {
    fn envelope(&self, choices: Value) -> Value {
        let mut object = Map::new();
        object.insert("id".into(), self.head.id.as_str().into());
        object.insert("object".into(), "chat.completion.chunk".into());
        object.insert("created".into(), self.head.created.into());
        object.insert("model".into(), self.head.model.as_str().into());
        object.insert("choices".into(), choices);
        if self.head.include_usage {
            object.insert("usage".into(), Value::Null);
        }
        object.into()
    }

    fn chunk(&self, delta: Value, finish: Value, logprobs: Value) -> Value {
        self.envelope(json!([{"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]))
    }

    fn deltas(&self, mut part: Part) -> Vec<Value> {
        let events = std::mem::take(&mut part.events);
        let delta = |event| match event {
            ReplyEvent::Reasoning(text) => {
                let logprobs = std::mem::take(&mut part.reasoning_logprobs);
                let logprobs = if logprobs.is_empty() {
                    Value::Null
                } else {
                    json!({"content": null, "reasoning_content": logprobs})
                };
                self.chunk(json!({"reasoning_content": text, "reasoning": text}), Value::Null, logprobs)
            }
            ReplyEvent::Content(text) => {
                let logprobs = std::mem::take(&mut part.content_logprobs);
                let logprobs = if logprobs.is_empty() { Value::Null } else { json!({"content": logprobs}) };
                self.chunk(json!({"content": text}), Value::Null, logprobs)
            }
            ReplyEvent::ToolCallStart { index, id, name } => {
                let function = json!({"name": name, "arguments": ""});
                let call = json!({"index": index, "id": id, "type": "function", "function": function});
                self.chunk(json!({"tool_calls": [call]}), Value::Null, Value::Null)
            }
            ReplyEvent::ToolCallArguments { index, delta } => {
                let call = json!({"index": index, "function": {"arguments": delta}});
                self.chunk(json!({"tool_calls": [call]}), Value::Null, Value::Null)
            }
        };
        let shown = |event: &ReplyEvent| self.head.reasoning || !matches!(event, ReplyEvent::Reasoning(_));
        events.into_iter().filter(shown).map(delta).collect()
    }
}
