//! Answers of the Messages protocol as named server-sent events.
//!
//! The order is the protocol's: message_start, then blocks one after the other (thinking, text, one per call), then
//! message_delta with the reason and message_stop. A ping follows the start of the first block. A thought ends with a
//! signature. A failure is an error event, and the stream ends.

use bytes::Bytes;
use longwave_text::ReplyEvent;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::answer::{Answer, Next};
use crate::errors::AnthropicError;
use crate::messages::{Head, stop, usage_json};
use crate::pump::{self, Broken};
use crate::sse;

/// Writes the answer until it ends or the client is gone.
pub(crate) async fn stream(head: Head, mut answer: Answer, frames: mpsc::Sender<Bytes>) {
    let mut blocks = Blocks { head, index: 0, open: None };
    if let Err(Broken::Failed(error)) = write(&mut blocks, &mut answer, &frames).await {
        let event = AnthropicError(error).body();
        let _ = pump::send(&frames, [sse::named("error", &event)]).await;
    }
}

async fn write(blocks: &mut Blocks, answer: &mut Answer, frames: &mpsc::Sender<Bytes>) -> Result<(), Broken> {
    let mut ready = Vec::new();
    loop {
        match pump::next(answer, frames, blocks.head.keep_alive).await? {
            Next::Started => {
                let head = &blocks.head;
                let message = json!({
                    "id": head.id, "type": "message", "role": "assistant", "model": head.model, "content": [],
                    "stop_reason": null, "stop_sequence": null, "usage": usage_json(&answer.usage()),
                });
                ready.push(json!({"type": "message_start", "message": message}));
                if head.thinking {
                    blocks.begin(
                        Kind::Thinking,
                        json!({"type": "thinking", "thinking": "", "signature": ""}),
                        &mut ready,
                    );
                }
            }
            Next::Part(part) => blocks.add(part.events, &mut ready),
            Next::End(part, finish) => {
                blocks.add(part.events, &mut ready);
                blocks.end(&mut ready);
                let (stop_reason, stop_sequence) = stop(&finish);
                let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
                ready.push(json!({"type": "message_delta", "delta": delta, "usage": usage_json(&answer.usage())}));
                ready.push(json!({"type": "message_stop"}));
                return pump::send(frames, ready.iter().map(sse::typed)).await;
            }
        }
        pump::send(frames, ready.drain(..).map(|event| sse::typed(&event))).await?;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    ToolUse,
}

/// The blocks of one answer.
struct Blocks {
    head: Head,
    /// Of the open block, or of the next one.
    index: usize,
    open: Option<Kind>,
}

impl Blocks {
    fn begin(&mut self, kind: Kind, block: Value, ready: &mut Vec<Value>) {
        self.end(ready);
        ready.push(json!({"type": "content_block_start", "index": self.index, "content_block": block}));
        if self.index == 0 {
            ready.push(json!({"type": "ping"}));
        }
        self.open = Some(kind);
    }

    fn end(&mut self, ready: &mut Vec<Value>) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            self.delta(json!({"type": "signature_delta", "signature": self.head.id}), ready);
        }
        ready.push(json!({"type": "content_block_stop", "index": self.index}));
        self.index += 1;
    }

    fn delta(&self, delta: Value, ready: &mut Vec<Value>) {
        ready.push(json!({"type": "content_block_delta", "index": self.index, "delta": delta}));
    }

    fn add(&mut self, events: Vec<ReplyEvent>, ready: &mut Vec<Value>) {
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => {
                    if self.open != Some(Kind::Thinking) {
                        let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                        self.begin(Kind::Thinking, block, ready);
                    }
                    self.delta(json!({"type": "thinking_delta", "thinking": text}), ready);
                }
                ReplyEvent::Content(text) => {
                    if self.open != Some(Kind::Text) {
                        self.begin(Kind::Text, json!({"type": "text", "text": ""}), ready);
                    }
                    self.delta(json!({"type": "text_delta", "text": text}), ready);
                }
                ReplyEvent::ToolCallStart { id, name, .. } => {
                    let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.begin(Kind::ToolUse, block, ready);
                }
                ReplyEvent::ToolCallArguments { delta, .. } => {
                    self.delta(json!({"type": "input_json_delta", "partial_json": delta}), ready);
                }
            }
        }
    }
}
