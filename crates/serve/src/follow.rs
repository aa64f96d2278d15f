//! Grammars of requests, on their way into the engine.
//!
//! The engine knows a constraint and no grammar; `longwave-text` knows grammars and no engine. Compiling takes
//! milliseconds, and the first one half a second more, for the vocabulary: on the blocking pool.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

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
    ConstraintSource::new(move || Box::new(State { grammar: grammar.start(), masks: 0, spent: Duration::ZERO }))
}

/// Time that a grammar may take at its first tokens, and for each token after them. It runs between the steps of everybody:
/// one that takes longer ends its own request.
const BUDGET: [Duration; 2] = [Duration::from_secs(1), Duration::from_millis(5)];

struct State {
    grammar: GrammarState,
    masks: u32,
    spent: Duration,
}

impl Constraint for State {
    fn mask(&mut self, words: &mut [u32]) -> Result<bool, String> {
        let started = Instant::now();
        let mask = self.grammar.mask(words);
        self.spent += started.elapsed();
        self.masks += 1;
        if self.spent > BUDGET[0] + BUDGET[1] * self.masks {
            return Err(format!(
                "the grammar is too complex: {} ms for {} tokens; write rules that can be read in one way only",
                self.spent.as_millis(),
                self.masks
            ));
        }
        mask
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.grammar.accept(token)
    }

    fn roll_back(&mut self, tokens: u32) -> Result<(), String> {
        self.grammar.roll_back(tokens)
    }

    fn is_complete(&self) -> bool {
        self.grammar.is_complete()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_text::ChatPlan;
    use serde_json::json;

    #[test]
    fn a_grammar_that_can_be_read_in_too_many_ways_ends_its_own_request() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny/tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::from_file(&path).unwrap());
        let body = json!({
            "messages": [{"role": "user", "content": "x"}], "thinking": {"type": "disabled"},
            "guided_grammar": "start: start start | /[a-z]/ | \" \"",
        });
        let plan = ChatPlan::from_body(body.as_object().unwrap(), Default::default()).unwrap();
        let follow = Follow::new(tokenizer.clone());
        let constraint = follow.constraint(&plan.rules).unwrap().unwrap();
        let mut state = constraint.start();
        let token = tokenizer.encode_text("a").unwrap()[0];
        let mut words = vec![0; tokenizer.vocab_size().div_ceil(32) as usize];
        let failed = (0..2000).find_map(|_| match state.mask(&mut words) {
            Ok(_) => state.accept(token).err(),
            Err(why) => Some(why),
        });
        assert!(failed.is_some_and(|why| why.contains("complex") || why.contains("limit")));
    }
}
