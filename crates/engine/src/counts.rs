//! Which tokens a sequence has so far, for penalties. A backend keeps one per seat; the engine tells it the history once.
//! Assumes that tokens come in order of their positions; refuses nothing.

use std::collections::BTreeMap;

use crate::step::Token;

/// Tokens of one sequence so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Occurrences in the answer; a token of the prompt alone has none.
    tokens: BTreeMap<Token, u32>,
}

impl Counts {
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.tokens.clear();
    }

    /// Counts `tokens`, the first of them at `position`; those before `answer_from` are the prompt's.
    pub fn add(&mut self, tokens: &[Token], position: u32, answer_from: u32) {
        for (at, &token) in (position..).zip(tokens) {
            *self.tokens.entry(token).or_default() += u32::from(at >= answer_from);
        }
    }

    /// Tokens in ascending order with their occurrences in the answer.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Token, u32)> + '_ {
        self.tokens.iter().map(|(&token, &times)| (token, times))
    }
}
