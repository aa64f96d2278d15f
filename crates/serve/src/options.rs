//! Options of the server. Plain data, filled by the command line.
//! Assumes values that were checked where they were typed; the defaults serve on this machine only.

use std::time::Duration;

use longwave_text::ChatDefaults;

use crate::security::SecurityOptions;

/// What a request that says nothing about sampling gets; from the checkpoint's generation_config.json.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingDefaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        SamplingDefaults { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }
}

/// Everything the server is told at its start.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerOptions {
    /// Address to bind.
    pub host: String,
    /// Port to bind; 0 lets the system choose.
    pub port: u16,
    /// Names under which the model is served, any case; the first one is the model's own.
    pub served_model_names: Vec<String>,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Sampling of requests that say nothing.
    pub sampling: SamplingDefaults,
    /// Thinking of requests that say nothing.
    pub chat: ChatDefaults,
    /// Longest silence of a stream: then a comment is sent, so that no proxy takes a long prefill for a dead server.
    pub keep_alive: Duration,
    /// Most bytes of responses that are kept for later requests (`store`), in memory.
    pub response_store_bytes: usize,
    /// Most bytes of the model's turns that are kept to be recognised in later prompts, in memory.
    pub replay_bytes: usize,
    /// Tokens that end a turn; empty means the tokenizer's end of sentence.
    pub stop_tokens: Vec<u32>,
    /// Who may ask, how much, and over what.
    pub security: SecurityOptions,
    /// Logs a line about the engine every ten seconds while it has work.
    pub log_stats: bool,
    /// Logs prompts, this many characters of each at most. Off by default: they are the users'.
    pub log_requests: Option<usize>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            served_model_names: vec!["longwave".to_owned()],
            max_body_bytes: 64 << 20,
            sampling: SamplingDefaults::default(),
            chat: ChatDefaults::default(),
            keep_alive: Duration::from_secs(15),
            response_store_bytes: 256 << 20,
            replay_bytes: 64 << 20,
            stop_tokens: Vec::new(),
            security: SecurityOptions::default(),
            log_stats: true,
            log_requests: None,
        }
    }
}
