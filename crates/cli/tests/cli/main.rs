//! The binary from outside: what its commands print, what they accept and what they refuse.
//!
//! Runs `longwave` itself, with nothing but the tiny checkpoint and a temporary folder. Every refusal must have exit
//! code 1, a message that helps, and no panic.

// The lint knows only functions marked #[test]; helpers may unwrap as well.
#![allow(clippy::unwrap_used)]

mod batches;
mod bench;
mod broken;
mod calculator;
mod configs;
mod deploy;
mod explore;
mod flags;
mod grammar;
mod guarded;
mod killed;
mod leaving;
mod manual;
mod program;
mod stopping;
mod talk;
mod tiers;
mod tiny;
mod tools;
