//! Plain answers as server-sent events, those to several prompts side by side under their indices.
//! A failure ends the stream with an error event; a client that goes away cancels what still runs.

use std::sync::Arc;

use bytes::Bytes;
use longwave_text::{ReplyEvent, ReplyFinish};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::answer::{Answer, Next, Part, Usage};
use crate::completions::{Head, add_usage, choice, legacy_logprobs};
use crate::errors::ApiError;
use crate::pump::{self, Broken};
use crate::sse;

/// Writes the answers until they end or the client is gone.
pub(crate) async fn stream(head: Arc<Head>, answers: Vec<Answer>, frames: mpsc::Sender<Bytes>) {
    let mut running = JoinSet::new();
    for (index, answer) in answers.into_iter().enumerate() {
        running.spawn(write(Texts { head: head.clone(), index, offset: 0, begun: false }, answer, frames.clone()));
    }
    let mut usage = Usage::default();
    let mut last = None;
    while let Some(ended) = running.join_next().await {
        match ended {
            Ok(Ok((index, one))) => add_usage(&mut usage, one, index % head.per_prompt == 0),
            Ok(Err(Broken::Gone)) => return,
            Ok(Err(Broken::Failed(error))) => {
                // Nothing may follow the end.
                running.shutdown().await;
                last = Some(error.body());
                break;
            }
            Err(_) => {
                last = Some(ApiError::internal("writing the answer failed").body());
                break;
            }
        }
    }
    if last.is_none() && head.include_usage {
        let mut chunk = envelope(&head, json!([]));
        chunk["usage"] = usage.json();
        last = Some(chunk);
    }
    let _ = pump::send(&frames, last.iter().map(sse::data).chain([sse::DONE])).await;
}

fn envelope(head: &Head, choices: Value) -> Value {
    let mut chunk = json!({
        "id": head.id, "object": "text_completion", "created": head.created, "model": head.model, "choices": choices,
    });
    if head.include_usage {
        chunk["usage"] = Value::Null;
    }
    chunk
}

/// Writes one answer.
async fn write(mut texts: Texts, mut answer: Answer, frames: mpsc::Sender<Bytes>) -> Result<(usize, Usage), Broken> {
    loop {
        let (part, finish) = match pump::next(&mut answer, &frames, texts.head.keep_alive).await? {
            Next::Started => {
                let echo = texts.head.echoes[texts.index].clone();
                if !echo.is_empty() {
                    pump::send(&frames, [texts.chunk(&echo, Value::Null, None)]).await?;
                }
                continue;
            }
            Next::Part(part) => (part, None),
            Next::End(part, finish) => (part, Some(finish)),
        };
        let ended = finish.is_some();
        let frame = texts.of(part, finish);
        pump::send(&frames, [frame]).await?;
        if ended {
            return Ok((texts.index, answer.usage()));
        }
    }
}

/// Makes the chunks of one answer.
struct Texts {
    head: Arc<Head>,
    index: usize,
    /// Characters written.
    offset: usize,
    /// Whether something of the answer was written.
    begun: bool,
}

impl Texts {
    fn of(&mut self, part: Part, finish: Option<ReplyFinish>) -> Bytes {
        let text = |event: ReplyEvent| match event {
            ReplyEvent::Content(text) => text,
            _ => String::new(),
        };
        let logprobs =
            if self.head.logprobs { legacy_logprobs(&part.content_logprobs, self.offset) } else { Value::Null };
        let text: String = part.events.into_iter().map(text).collect();
        self.offset += text.chars().count();
        let mut choice = choice(self.index, &text, logprobs, finish.as_ref());
        if !std::mem::replace(&mut self.begun, true) {
            self.head.add_prompt_ids(&mut choice, self.index);
        }
        if self.head.prompt_ids.is_some() {
            choice["token_ids"] = part.token_ids.into();
        }
        sse::data(&envelope(&self.head, json!([choice])))
    }

    fn chunk(&self, text: &str, logprobs: Value, finish: Option<&ReplyFinish>) -> Bytes {
        sse::data(&envelope(&self.head, json!([choice(self.index, text, logprobs, finish)])))
    }
}
