//! The HTTP server of Longwave: OpenAI-compatible routes over an engine.
//!
//! Plain functions on axum. Assumes an engine behind [`EngineApi`] and a loaded tokenizer; holds no model code. Refuses
//! bad input with an error object that names the field, never with a 500, and stops the engine's work on a request when
//! its client goes away.

mod answer;
mod attention;
mod batch;
mod body_guard;
mod caller;
mod chat;
mod chat_stream;
mod completions;
mod completions_stream;
mod connections;
mod controls;
mod errors;
pub mod explore;
mod fields;
mod follow;
mod generation;
mod health;
mod input;
mod job;
mod live;
mod message;
mod messages;
mod messages_stream;
mod metrics;
mod models;
mod openapi;
mod options;
mod page;
mod prefix;
mod pump;
mod replays;
mod response_items;
mod response_store;
mod responses;
mod responses_kept;
mod responses_stream;
mod script;
mod security;
mod server;
mod sse;
mod tokens;
mod turn_record;

pub use batch::{BatchError, BatchOptions, Batches, OfflineError, OfflineOptions, OfflineResult, check_file, run_file};
pub use follow::followed;
pub use generation::EngineApi;
pub use options::{SamplingDefaults, ServerOptions};
pub use script::{ScriptLine, read_script, scripted};
pub use security::{ApiKeys, KeyError, SecurityOptions, TlsError, TlsFiles};
pub use server::{App, ServeError, bind, router, run};
