//! Rules that an answer must follow token by token, seen from the engine: a grammar, without its library.
//!
//! A [`Constraint`] is the state of one answer. The engine asks which tokens may come next, tells it each token that
//! came, and looks ahead along drafts and back. Backends never see it, only the masks that it gives
//! ([`crate::step::Step::masks`]). It runs on the engine thread between steps, so every call must be bounded; an error is
//! the end of its request alone.

use std::fmt;
use std::sync::Arc;

use crate::step::Token;

/// The state of one answer.
pub trait Constraint: Send {
    /// Writes which tokens may come next, bit `t % 32` of word `t / 32`, into words that arrive as zeros. `false`, and
    /// nothing is written, when every token may. Errors when it cannot go on, in words for the client.
    fn mask(&mut self, words: &mut [u32]) -> Result<bool, String>;
    /// Takes the next token; one that [`Constraint::mask`] allowed is an error only when a limit is exceeded, and then it
    /// is not taken.
    fn accept(&mut self, token: Token) -> Result<(), String>;
    /// Takes the last `tokens` accepted tokens back, exactly, also after an error; at most `MAX_DRAFTS` of them.
    fn roll_back(&mut self, tokens: u32) -> Result<(), String>;
    /// Nothing may follow: the answer is whole.
    fn is_complete(&self) -> bool;
}

/// Makes the initial state of a constraint, on the engine thread and in no time: compiling happens before.
#[derive(Clone)]
pub struct ConstraintSource(Arc<dyn Fn() -> Box<dyn Constraint> + Send + Sync>);

impl ConstraintSource {
    /// A source that calls `start` for every answer.
    pub fn new(start: impl Fn() -> Box<dyn Constraint> + Send + Sync + 'static) -> ConstraintSource {
        ConstraintSource(Arc::new(start))
    }

    /// The state before the first token.
    pub fn start(&self) -> Box<dyn Constraint> {
        (self.0)()
    }
}

impl fmt::Debug for ConstraintSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConstraintSource")
    }
}

impl PartialEq for ConstraintSource {
    /// Whether both are clones of one source.
    fn eq(&self, other: &ConstraintSource) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Words of a mask over `vocab` tokens.
pub fn mask_words(vocab: u32) -> usize {
    vocab.div_ceil(32) as usize
}

/// Whether a mask allows a token; no mask allows all.
pub fn allows(mask: Option<&[u32]>, token: Token) -> bool {
    mask.is_none_or(|mask| mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1))
}

/// The constraint of a running request, with the masks of its next step.
pub(crate) struct Constrained {
    state: Box<dyn Constraint>,
    /// Masks of the tokens after the last known one and after each draft; none when all tokens may follow all of them.
    masks: Vec<u32>,
    /// Masks are those of the known tokens and drafts.
    ready: bool,
}

impl Constrained {
    /// Before the first token of the answer.
    pub fn new(source: &ConstraintSource) -> Constrained {
        Constrained { state: source.start(), masks: Vec::new(), ready: false }
    }

    /// Computes the masks of the next step, over `words` words each, and cuts the drafts before the first that is not
    /// allowed or after which nothing may follow: the step's own token takes its place.
    pub fn prepare(&mut self, drafts: &mut Vec<Token>, words: usize) -> Result<(), String> {
        if std::mem::replace(&mut self.ready, true) {
            return Ok(());
        }
        self.masks.clear();
        let mut accepted = 0;
        let looked = self.look_ahead(drafts, words, &mut accepted);
        self.state.roll_back(accepted)?;
        looked
    }

    fn look_ahead(&mut self, drafts: &mut Vec<Token>, words: usize, accepted: &mut u32) -> Result<(), String> {
        for row in 0..=drafts.len() {
            let before = self.masks.len();
            // Rows before the first mask stand for all tokens.
            let at = if before == 0 { row * words } else { before };
            self.masks.resize(at, u32::MAX);
            self.masks.resize(at + words, 0);
            let limited = self.state.mask(&mut self.masks[at..]).and_then(|limited| {
                let nothing = limited && self.masks[at..].iter().all(|&word| word == 0);
                if nothing { Err("no token can follow here".into()) } else { Ok(limited) }
            });
            match limited {
                Ok(true) => {}
                Ok(false) if before == 0 => self.masks.clear(),
                Ok(false) => self.masks[at..].fill(u32::MAX),
                Err(why) => {
                    self.masks.truncate(before);
                    // Behind a draft it is not known yet whether the answer comes this way.
                    if row == 0 {
                        return Err(why);
                    }
                    drafts.truncate(row - 1);
                    break;
                }
            }
            let Some(&draft) = drafts.get(row) else { break };
            let allowed = limited == Ok(false) || allows(Some(&self.masks[at..]), draft);
            let accepted_it = allowed && self.state.accept(draft).is_ok();
            *accepted += u32::from(accepted_it);
            if !accepted_it || self.state.is_complete() {
                drafts.truncate(row);
                break;
            }
        }
        Ok(())
    }

    /// Masks of the first `rows` sampled positions, for a step; nothing when all tokens may follow.
    pub fn masks(&self, rows: u32, words: usize) -> &[u32] {
        &self.masks[..(rows as usize * words).min(self.masks.len())]
    }

    /// Takes a token of the answer; `true` when the answer is whole.
    pub fn accept(&mut self, token: Token) -> Result<bool, String> {
        self.ready = false;
        self.state.accept(token)?;
        Ok(self.state.is_complete())
    }

    /// The drafts were replaced.
    pub fn forget_masks(&mut self) {
        self.ready = false;
    }
}
