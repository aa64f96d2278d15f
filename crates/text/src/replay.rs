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
use crate::reply_message::{ReplyCall, ReplyMessage};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// What the model wrote as one turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// From the token after the assistant marker, so with what the prompt had opened, to the last one before the end of
    /// the turn.
    pub tokens: Vec<u32>,
    /// The prompt had opened the thought.
    pub thinking: bool,
    /// What it says.
    pub said: ReplyMessage,
}

impl Turn {
    /// Roughly what it holds, bytes.
    pub fn bytes(&self) -> usize {
        let calls: usize =
            self.said.calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len()).sum();
        4 * self.tokens.len() + self.said.reasoning.len() + self.said.content.len() + calls + 128
    }

    /// Whether a message says the same; a thought that is missing is none that differs.
    fn says(&self, content: &str, reasoning: Option<&str>, calls: &[ToolCall], ids: &[String]) -> bool {
        let same_call = |(turn, (call, id)): (&ReplyCall, (&ToolCall, &String))| {
            turn.id == *id && turn.name == call.name && same_json(&turn.arguments, &call.arguments)
        };
        content.trim_end() == self.said.content.trim_end()
            && reasoning.is_none_or(|text| text.is_empty() || text.trim_end() == self.said.reasoning.trim_end())
            && calls.len() == self.said.calls.len()
            && self.said.calls.iter().zip(calls.iter().zip(ids)).all(same_call)
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

/// By what a turn of a history is looked up.
#[derive(Debug, Clone, Copy)]
pub struct TurnKey<'a> {
    /// Ids of its calls, which no other turn has.
    pub calls: &'a [String],
    /// What [`prefix_key`] makes of the prompt before it, the assistant marker included. A turn without calls is known by
    /// it alone: the same words elsewhere are another turn, with another thought.
    pub before: [u8; 32],
}

/// Stands for the tokens of a prompt.
pub fn prefix_key(tokens: &[u32]) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    update(&mut hash, tokens);
    *hash.finalize().as_bytes()
}

/// Adds tokens to a hash.
pub(crate) fn update(hash: &mut blake3::Hasher, tokens: &[u32]) {
    for chunk in tokens.chunks(256) {
        let bytes: Vec<u8> = chunk.iter().flat_map(|token| token.to_le_bytes()).collect();
        hash.update(&bytes);
    }
}

impl ChatPlan {
    /// Token ids of the prompt. `find` is asked for the turn of each assistant message; one that says the same stands in
    /// its place in the model's own tokens, with the thought that the client may have dropped.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        find: impl Fn(&TurnKey<'_>) -> Option<Arc<Turn>>,
    ) -> Result<Vec<u32>, TokenizerError> {
        // Without tools in the prompt, thoughts of earlier turns are not rendered.
        let thoughts = self.conversation.thinking_mode && !self.conversation.tools.is_empty();
        let assistants: Vec<&InputMessage> = self
            .conversation
            .messages
            .iter()
            .filter(|message| matches!(message, InputMessage::Assistant { .. }))
            .collect();
        self.prompt().encode_with(tokenizer, |index, before| {
            let InputMessage::Assistant { content, reasoning_content, tool_calls, prefix: false } =
                *assistants.get(index)?
            else {
                // A prefix is to be continued, so it is no whole turn.
                return None;
            };
            let ids = self.call_ids.get(index).map_or(&[][..], Vec::as_slice);
            let turn = find(&TurnKey { calls: ids, before })?;
            let calls = tool_calls.as_deref().unwrap_or_default();
            // The thought is rendered exactly when the turn has one.
            let fits = turn.thinking == thoughts && turn.says(content, reasoning_content.as_deref(), calls, ids);
            fits.then_some(turn)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(content: &str, reasoning: &str, arguments: &str) -> Turn {
        let call = ReplyCall { id: "c".into(), name: "f".into(), arguments: arguments.into() };
        let said = ReplyMessage { reasoning: reasoning.into(), content: content.into(), calls: vec![call] };
        Turn { tokens: vec![1], thinking: true, said }
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
