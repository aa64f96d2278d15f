//! Grammars that hold an answer to a format, and tool calls to their syntax and schemas.
//!
//! A request's wishes are plain data ([`AnswerRules`]); they become one grammar of the library `llguidance`, over the
//! served vocabulary ([`Grammars::compile`]), and one [`GrammarState`] per answer, which gives token masks. Compiling takes
//! milliseconds and belongs on a thread that may wait; compiled grammars are kept. Bounds: a megabyte of grammar, and the
//! library's limits on what a step may cost (some 15 ms at worst, some 50 µs as a rule).

mod compile;
mod dsml;
mod formats;
mod parameters;
mod rules;
mod schema;
mod state;
mod vocabulary;

pub use compile::Grammars;
pub use rules::{AnswerRules, CallRules, Format, FormatRule, ToolRule};
pub use state::{Grammar, GrammarState};
