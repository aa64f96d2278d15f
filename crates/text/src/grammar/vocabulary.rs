//! The vocabulary as the grammar library wants it: a trie of token bytes.
//!
//! Tokens of the added vocabulary are never spelled by a grammar's text: they appear there by id only, so `</think>`,
//! `｜DSML｜` and the end of a sentence cannot hide in a string, and a string cannot hide in them.

use std::sync::Arc;

use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::tokenizer::Tokenizer;

/// The trie of a tokenizer. Takes some hundred milliseconds for 129,280 tokens.
pub(super) fn token_trie(tokenizer: &Tokenizer) -> TokEnv {
    let word = |id: u32| {
        let bytes = tokenizer.token_bytes(id);
        match bytes.first() {
            _ if tokenizer.is_added(id) => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
            // The byte that the library marks added tokens with; no UTF-8 text has it.
            Some(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
            _ => bytes.to_vec(),
        }
    };
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size()).map(word).collect();
    let info = TokRxInfo::new(words.len() as u32, tokenizer.markers().eos);
    // Not canonical: the model chooses how a text is cut into tokens, as it does without a grammar.
    Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)))
}
