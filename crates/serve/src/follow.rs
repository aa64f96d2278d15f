//! Grammars of requests, on their way into the engine.
//!
//! The engine knows a constraint and no grammar; `longwave-text` knows grammars and no engine. Compiling takes
//! milliseconds, and the first one half a second more, for the vocabulary: on the blocking pool.

use std::sync::{Arc, OnceLock};

use longwave_engine::constraint::{Constraint, ConstraintSource};
use longwave_text::{AnswerRules, Grammar, GrammarState, Grammars, Tokenizer};

use crate::errors::ApiError;

/// Compiled grammars, made when the first request asks for one.
pub(crate) struct Follow {
    tokenizer: Arc<Tokenizer>,
    grammars: OnceLock<Grammars>,
}

impl Follow {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>) -> Follow {
        Follow { tokenizer, grammars: OnceLock::new() }
    }

    /// What the engine holds an answer to; `None` when nothing is asked of it.
    pub(crate) fn constraint(&self, rules: &AnswerRules) -> Result<Option<ConstraintSource>, ApiError> {
        if rules.format.is_none() && rules.calls.is_none() {
            return Ok(None);
        }
        let grammars = self.grammars.get_or_init(|| Grammars::new(self.tokenizer.clone()));
        let grammar = grammars.compile(rules)?;
        Ok(grammar.map(followed))
    }
}

/// A compiled grammar as a constraint for the engine.
pub fn followed(grammar: Arc<Grammar>) -> ConstraintSource {
    ConstraintSource::new(move || Box::new(State(grammar.start())))
}

struct State(GrammarState);

impl Constraint for State {
    fn mask(&mut self, words: &mut [u32]) -> Result<bool, String> {
        self.0.mask(words)
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.0.accept(token)
    }

    fn roll_back(&mut self, tokens: u32) -> Result<(), String> {
        self.0.roll_back(tokens)
    }

    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }
}
