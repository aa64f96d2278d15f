//! A conversation becomes prompt tokens.
//!
//! The vendor's renderer writes the text and says which byte ranges are markers of its own; markers are encoded by id,
//! everything between two markers in one piece without the added vocabulary. A marker that the tokenizer lacks is
//! encoded as plain text.

use std::ops::Range;

use deepseek_recipe_core::conversation::Conversation;
use deepseek_recipe_encoding::PromptEncoding;
use deepseek_recipe_encoding::dsv4::DeepseekV4Encoding;

use crate::tokenizer::{Tokenizer, TokenizerError};

/// A rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The whole text, markers spelled out.
    pub text: String,
    /// Byte ranges of the markers that the renderer wrote, ascending and disjoint.
    pub markers: Vec<Range<usize>>,
}

impl Prompt {
    /// Renders a conversation.
    pub fn render(conversation: &Conversation) -> Prompt {
        let rendered = DeepseekV4Encoding::new().render_conversation(conversation);
        Prompt { text: rendered.prompt, markers: rendered.special_ranges }
    }

    /// Token ids of the prompt.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(tokenizer, &[])
    }

    /// Token ids, where `turns[k]`, if there is one, stands for the text of assistant turn `k` between its marker and its end.
    pub fn encode_with(&self, tokenizer: &Tokenizer, turns: &[Option<&[u32]>]) -> Result<Vec<u32>, TokenizerError> {
        let markers = tokenizer.markers();
        let mut ids = Vec::with_capacity(self.text.len() / 4 + self.markers.len());
        let (mut from, mut turns, mut in_turn) = (0, turns.iter(), false);
        for range in &self.markers {
            // An unknown marker stays part of the text around it.
            let Some(id) = tokenizer.added_id(&self.text[range.clone()]) else { continue };
            if in_turn && id != markers.eos {
                continue;
            }
            if !in_turn {
                ids.extend(tokenizer.encode_text(&self.text[from..range.start])?);
            }
            ids.push(id);
            from = range.end;
            in_turn = false;
            if id == markers.assistant
                && let Some(Some(tokens)) = turns.next()
            {
                ids.extend_from_slice(tokens);
                in_turn = true;
            }
        }
        if !in_turn {
            ids.extend(tokenizer.encode_text(&self.text[from..])?);
        }
        Ok(ids)
    }
}
