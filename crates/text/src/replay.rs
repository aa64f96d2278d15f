//! Turns of the model in a later prompt, with the very tokens that it wrote.
//!
//! Clients send a conversation back in their own words: keys of arguments in another order, other spaces, thoughts left
//! out. Rendered anew, such a turn differs from what is in the cache by a few tokens, and everything after it is computed
//! again. A [`Turn`] that says the same as a message of the history takes its place, token by token, and gives the thought
//! back that the client dropped. A message that says anything else is rendered as it came.

use std::sync::Arc;

use deepseek_recipe_core::messages::{InputMessage, ToolCall};
use serde_json::Value;

use crate::plan::ChatPlan;

/// A call of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnCall {
    /// Identity that the client got.
    pub id: String,
    /// Function, by its name in the prompt.
    pub name: String,
    /// JSON.
    pub arguments: String,
}

/// What the model wrote as one turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// From the token after the assistant marker, so with what the prompt had opened, to the last one before the end of
    /// the turn.
    pub tokens: Vec<u32>,
    /// The prompt had opened the thought.
    pub thinking: bool,
    /// The thought.
    pub reasoning: String,
    /// The text.
    pub content: String,
    /// The calls.
    pub calls: Vec<TurnCall>,
}

impl Turn {
    /// Roughly what it holds, bytes.
    pub fn bytes(&self) -> usize {
        let calls: usize = self.calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len()).sum();
        4 * self.tokens.len() + self.reasoning.len() + self.content.len() + calls + 128
    }

    /// Whether a message says the same; a thought that is missing is none that differs.
    fn says(&self, content: &str, reasoning: Option<&str>, calls: &[ToolCall], ids: &[String]) -> bool {
        let same_call = |(turn, (call, id)): (&TurnCall, (&ToolCall, &String))| {
            turn.id == *id && turn.name == call.name && same_json(&turn.arguments, &call.arguments)
        };
        content.trim_end() == self.content.trim_end()
            && reasoning.is_none_or(|text| text.is_empty() || text.trim_end() == self.reasoning.trim_end())
            && calls.len() == self.calls.len()
            && self.calls.iter().zip(calls.iter().zip(ids)).all(same_call)
    }
}

/// Equal as JSON, whatever the order of keys; texts that are no JSON must be equal.
fn same_json(one: &str, other: &str) -> bool {
    one == other
        || match (serde_json::from_str::<Value>(one), serde_json::from_str::<Value>(other)) {
            (Ok(one), Ok(other)) => one == other,
            _ => false,
        }
}

impl ChatPlan {
    /// Asks `find` for the turn of each assistant message, by the ids of its calls and its content, and takes those that
    /// say the same.
    pub fn recall(&mut self, find: impl Fn(&[String], &str) -> Option<Arc<Turn>>) {
        let thinking = self.conversation.thinking_mode;
        // Without tools in the prompt, thoughts of earlier turns are not rendered.
        let thoughts = !self.conversation.tools.is_empty();
        let mut turns = Vec::with_capacity(self.call_ids.len());
        for message in &mut self.conversation.messages {
            let InputMessage::Assistant { content, reasoning_content, tool_calls, prefix } = message else { continue };
            let ids = self.call_ids.get(turns.len()).map_or(&[][..], Vec::as_slice);
            // A prefix is to be continued, so it is no whole turn.
            let found = if *prefix { None } else { find(ids, content) };
            let turn = found.filter(|turn| {
                let given = reasoning_content.as_deref();
                // The thought is rendered exactly when the turn has one.
                turn.thinking == (thinking && thoughts)
                    && turn.says(content, given, tool_calls.as_deref().unwrap_or_default(), ids)
            });
            if let Some(turn) = turn.as_ref().filter(|turn| turn.thinking) {
                *reasoning_content = Some(turn.reasoning.clone());
            }
            turns.push(turn);
        }
        self.turns = turns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(content: &str, reasoning: &str, arguments: &str) -> Turn {
        let call = TurnCall { id: "c".into(), name: "f".into(), arguments: arguments.into() };
        Turn {
            tokens: vec![1],
            thinking: true,
            reasoning: reasoning.into(),
            content: content.into(),
            calls: vec![call],
        }
    }

    #[test]
    fn a_turn_is_recognised_by_what_it_says() {
        let turn = turn("look", "hm", "{\"a\": 1, \"b\": {\"c\": []}}");
        let call =
            |arguments: &str| vec![ToolCall { id: "000000".into(), name: "f".into(), arguments: arguments.into() }];
        let ids = ["c".to_owned()];
        let same = call("{\"b\":{\"c\":[]},\"a\":1}");
        assert!(turn.says("look", Some("hm"), &same, &ids) && turn.says("look\n", None, &same, &ids));
        assert!(turn.says("look", Some(""), &same, &ids));
        assert!(!turn.says("look", Some("other"), &same, &ids) && !turn.says("see", None, &same, &ids));
        assert!(!turn.says("look", None, &call("{\"a\": 1}"), &ids) && !turn.says("look", None, &[], &[]));
        assert!(!turn.says("look", None, &same, &["d".to_owned()]));
    }
}
