//! The server from outside: real sockets, a scripted engine that plays tokens from a thread.

// The lint knows only functions marked #[test]; helpers may unwrap as well.
#![allow(clippy::unwrap_used)]

mod batch;
mod client;
mod many;
mod scripted;

mod answers;
mod completions;
mod errors;
mod explore;
mod lifecycle;
mod messages;
mod metrics;
mod replay;
mod responses;
mod security;
mod tokens;
