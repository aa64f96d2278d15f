//! Text on both sides of the model: a chat request becomes prompt tokens, tokens become reasoning, content and calls.
//!
//! The prompt format and the output grammar are the vendor's; its crate `deepseek-recipe` renders and parses, and this
//! crate wraps it where a local server needs more: text that can never turn into a control token, characters that are
//! never split, request habits of real clients. No HTTP, no async, no clock, no random numbers.

mod arguments;
mod body;
mod chat;
pub mod detokenizer;
pub mod grammar;
mod messages;
pub mod plain;
pub mod plan;
pub mod prompt;
pub mod replay;
pub mod reply;
pub mod reply_message;
mod responses;
mod responses_tools;
pub mod sealed;
mod thinking;
pub mod tokenizer;

pub use detokenizer::Detokenizer;
pub use grammar::{AnswerRules, Grammar, GrammarState, Grammars};
pub use plain::PlainReply;
pub use plan::{ChatDefaults, ChatError, ChatPlan, Effort, EffortTable, ToolNames};
pub use prompt::Prompt;
pub use replay::{Turn, TurnKey, prefix_key};
pub use reply::{Reply, ReplyEnd, ReplyEvent, ReplyFinish, ReplyOptions, ReplyStart};
pub use reply_message::{ReplyCall, ReplyMessage};
pub use tokenizer::{Markers, Tokenizer, TokenizerError};
