//! A conversation becomes prompt tokens.
//!
//! The vendor's renderer writes the text and says which byte ranges are markers of its own; markers are encoded by id,
//! everything between two markers in one piece without the added vocabulary. A marker that the tokenizer lacks is
//! encoded as plain text.

use std::ops::Range;
use std::sync::Arc;

use deepseek_recipe_core::conversation::Conversation;
use deepseek_recipe_encoding::PromptEncoding;
use deepseek_recipe_encoding::dsv4::DeepseekV4Encoding;

use crate::replay::{self, Turn};
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
        self.encode_with(tokenizer, |_, _| None)
    }

    /// Token ids, where a turn that `turn` gives for an assistant turn, by its number and the key of all before it, stands for
    /// the text between its marker and its end.
    pub(crate) fn encode_with(
        &self,
        tokenizer: &Tokenizer,
        turn: impl Fn(usize, [u8; 32]) -> Option<Arc<Turn>>,
    ) -> Result<Vec<u32>, TokenizerError> {
        let markers = tokenizer.markers();
        let mut ids = Vec::with_capacity(self.text.len() / 4 + self.markers.len());
        let (mut hash, mut hashed) = (blake3::Hasher::new(), 0);
        let (mut from, mut turns, mut in_turn) = (0, 0, false);
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
            if id == markers.assistant {
                replay::update(&mut hash, &ids[hashed..]);
                hashed = ids.len();
                if let Some(turn) = turn(turns, *hash.finalize().as_bytes()) {
                    ids.extend_from_slice(&turn.tokens);
                    in_turn = true;
                }
                turns += 1;
            }
        }
        if !in_turn {
            ids.extend(tokenizer.encode_text(&self.text[from..])?);
        }
        Ok(ids)
    }
}
