//! An answer put together from its events: the thought, the text, the calls.
//! Assumes events in the order in which they came; arguments belong to the call that began last.

use serde_json::{Value, json};

use crate::reply::ReplyEvent;

/// A call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyCall {
    /// Identity for the tool result.
    pub id: String,
    /// Function, by its name in the prompt.
    pub name: String,
    /// JSON, unless the token limit cut it.
    pub arguments: String,
}

/// An answer so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplyMessage {
    /// The thought.
    pub reasoning: String,
    /// The text.
    pub content: String,
    /// The calls.
    pub calls: Vec<ReplyCall>,
}

impl ReplyMessage {
    /// Takes what came next.
    pub fn add(&mut self, events: &[ReplyEvent]) {
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => self.reasoning.push_str(text),
                ReplyEvent::Content(text) => self.content.push_str(text),
                ReplyEvent::ToolCallStart { id, name, .. } => {
                    let call = ReplyCall { id: id.clone(), name: name.clone(), arguments: String::new() };
                    self.calls.push(call);
                }
                ReplyEvent::ToolCallArguments { delta, .. } => {
                    if let Some(call) = self.calls.last_mut() {
                        call.arguments.push_str(delta);
                    }
                }
            }
        }
    }

    /// As a message of Chat Completions, without its thought.
    pub fn chat_json(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if !self.calls.is_empty() {
            let call = |call: &ReplyCall| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": call.id, "type": "function", "function": function})
            };
            message["tool_calls"] = self.calls.iter().map(call).collect();
        }
        message
    }
}
