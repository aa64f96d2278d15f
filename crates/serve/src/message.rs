//! A whole answer, put together from its parts.
//! Used where an answer is not streamed; assumes that the parts come in order.

use longwave_text::{ReplyEvent, ReplyFinish};
use serde_json::{Value, json};

use crate::answer::{Answer, Next, Part};
use crate::errors::ApiError;

/// A call of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON, unless the token limit cut it.
    pub(crate) arguments: String,
}

/// Reads an answer to its end.
pub(crate) async fn whole(answer: &mut Answer) -> Result<(Message, ReplyFinish), ApiError> {
    let mut message = Message::default();
    loop {
        match answer.next().await? {
            Next::Started => {}
            Next::Part(part) => message.add(part),
            Next::End(part, finish) => {
                message.add(part);
                return Ok((message, finish));
            }
        }
    }
}

/// A message being put together.
#[derive(Default)]
pub(crate) struct Message {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) content_logprobs: Vec<Value>,
    pub(crate) reasoning_logprobs: Vec<Value>,
}

impl Message {
    pub(crate) fn add(&mut self, mut part: Part) {
        self.content_logprobs.append(&mut part.content_logprobs);
        self.reasoning_logprobs.append(&mut part.reasoning_logprobs);
        for event in part.events {
            match event {
                ReplyEvent::Reasoning(text) => self.reasoning.push_str(&text),
                ReplyEvent::Content(text) => self.content.push_str(&text),
                ReplyEvent::ToolCallStart { id, name, .. } => {
                    self.calls.push(Call { id, name, arguments: String::new() });
                }
                ReplyEvent::ToolCallArguments { delta, .. } => {
                    if let Some(call) = self.calls.last_mut() {
                        call.arguments.push_str(&delta);
                    }
                }
            }
        }
    }

    /// As a message of Chat Completions.
    pub(crate) fn chat_json(&self, thinking: bool) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if thinking {
            message["reasoning_content"] = self.reasoning.as_str().into();
            message["reasoning"] = self.reasoning.as_str().into();
        }
        if !self.calls.is_empty() {
            let call = |call: &Call| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": call.id, "type": "function", "function": function})
            };
            message["tool_calls"] = self.calls.iter().map(call).collect();
        }
        message
    }
}
