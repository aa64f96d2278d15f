//! Where one answer stands in its grammar.
//!
//! Three stages: a thought, until its end token comes; free text, until a tool block begins; the grammar. A format or a
//! forced call goes from the thought to the grammar, other tools through free text; a thought that nothing follows yet
//! costs nothing. Tokens can be taken back exactly, across stages.

use std::sync::Arc;

use llguidance::Matcher;

/// A compiled grammar, to start answers from.
pub struct Grammar {
    /// Before the first token; copied for every answer.
    pub(super) pristine: Matcher,
    /// The answer begins inside a thought.
    pub(super) thought: bool,
    /// The grammar waits for a tool block after the thought, else it begins there.
    pub(super) waits: bool,
    pub(super) marks: Marks,
}

/// What of the vocabulary the stages depend on.
#[derive(Debug, Clone)]
pub(super) struct Marks {
    pub end_think: u32,
    pub eos: u32,
    pub dsml: Option<u32>,
    /// Bit `t` of the words: token `t` ends with `<`.
    pub opens: Arc<[u32]>,
}

/// The state of one answer.
pub struct GrammarState {
    grammar: Arc<Grammar>,
    /// Once the grammar began.
    matcher: Option<Matcher>,
    /// Tokens since then, to begin again after an error.
    fed: Vec<u32>,
    accepted: u32,
    /// Tokens that were accepted when the thought was over, and when the grammar began.
    thought_end: Option<u32>,
    began: Option<u32>,
    /// Of the last tokens, the latest in bit 0, which ended with `<`.
    opened: u64,
}

impl Grammar {
    /// The state before the first token of an answer; some microseconds.
    pub fn start(self: &Arc<Self>) -> GrammarState {
        let mut state = GrammarState {
            grammar: Arc::clone(self),
            matcher: None,
            fed: Vec::new(),
            accepted: 0,
            thought_end: (!self.thought).then_some(0),
            began: None,
            opened: 0,
        };
        state.begin_if_due();
        state
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammar(thought: {}, waits: {})", self.thought, self.waits)
    }
}

impl GrammarState {
    /// Writes which tokens may come next, bit `t % 32` of word `t / 32`, over zeros; `false` when every token may.
    /// Errors, in words for the client, when the grammar is too complex here.
    pub fn mask(&mut self, words: &mut [u32]) -> Result<bool, String> {
        let marks = &self.grammar.marks;
        let Some(matcher) = &mut self.matcher else {
            if self.thought_end.is_some() || self.grammar.waits {
                return Ok(false);
            }
            // An answer must come, so the thought may not be the end of it, and a call does not begin inside it.
            words.fill(u32::MAX);
            for token in [Some(marks.eos), marks.dsml].into_iter().flatten() {
                words[token as usize / 32] &= !(1 << (token % 32));
            }
            return Ok(true);
        };
        let mask = matcher.compute_mask().map_err(|error| message(&error.to_string()))?;
        let n = mask.as_slice().len().min(words.len());
        words[..n].copy_from_slice(&mask.as_slice()[..n]);
        Ok(true)
    }

    /// Takes the next token. One that is an error is not taken.
    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        let marks = &self.grammar.marks;
        if let Some(matcher) = &mut self.matcher {
            if let Err(error) = matcher.consume_token(token) {
                let error = message(&error.to_string());
                self.begin_again()?;
                return Err(error);
            }
            self.fed.push(token);
            self.accepted += 1;
        } else {
            self.accepted += 1;
            let in_thought = self.thought_end.is_none();
            if in_thought && token == marks.end_think {
                self.thought_end = Some(self.accepted);
            }
            // The marker alone is text; a tag opens with it.
            let tag = Some(token) == marks.dsml && self.opened & 1 == 1;
            if self.grammar.waits && !in_thought && tag {
                self.began = Some(self.accepted);
                self.matcher = Some(self.grammar.pristine.deep_clone());
            }
        }
        let opens = marks.opens.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1);
        self.opened = self.opened << 1 | u64::from(opens);
        self.begin_if_due();
        Ok(())
    }

    /// Takes the last `tokens` tokens back, also after an error; at most 63.
    pub fn roll_back(&mut self, tokens: u32) -> Result<(), String> {
        self.accepted -= tokens;
        self.opened >>= tokens;
        self.thought_end = self.thought_end.filter(|&at| at <= self.accepted);
        let Some(matcher) = &mut self.matcher else { return Ok(()) };
        if self.began.is_some_and(|at| at > self.accepted) {
            (self.matcher, self.began) = (None, None);
            self.fed.clear();
            return Ok(());
        }
        let back = (tokens as usize).min(self.fed.len());
        self.fed.truncate(self.fed.len() - back);
        if matcher.is_error() || matcher.rollback(back).is_err() {
            return self.begin_again();
        }
        Ok(())
    }

    /// Nothing may follow.
    pub fn is_complete(&self) -> bool {
        self.matcher.as_ref().is_some_and(|matcher| !matcher.is_error() && matcher.is_stopped())
    }

    /// Whether the grammar began and could end here.
    pub fn may_end(&mut self) -> bool {
        self.matcher.as_mut().is_some_and(|matcher| matcher.is_accepting().unwrap_or(false))
    }

    fn begin_if_due(&mut self) {
        if self.matcher.is_none() && self.thought_end.is_some() && !self.grammar.waits {
            self.began = Some(self.accepted);
            self.matcher = Some(self.grammar.pristine.deep_clone());
        }
    }

    /// A matcher that failed is of no use any more: another one takes the tokens again.
    fn begin_again(&mut self) -> Result<(), String> {
        let mut matcher = self.grammar.pristine.deep_clone();
        let taken = matcher.consume_tokens(&self.fed).map_err(|error| message(&error.to_string()));
        self.matcher = Some(matcher);
        taken
    }
}

/// The library's words without its notes on itself.
pub(super) fn message(error: &str) -> String {
    let why = super::schema::reason(error);
    format!("the grammar of this answer is too complex to follow here ({why}); simplify the schema or the grammar")
}
