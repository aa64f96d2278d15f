//! Requests, blocks and time: the scheduler and the hybrid cache manager of Longwave.
//!
//! This crate decides what is computed when and where its cache rows live. It holds no tensor, opens no socket and no file
//! but the records of its `tier` module, knows no async runtime and no CUDA type; it builds and tests in seconds. Computing is a [`step::Backend`].

pub mod attention;
pub mod constraint;
pub mod counts;
pub mod engine;
pub mod forced;
pub mod handle;
pub mod operators;
pub mod phases;
pub mod pool;
pub mod proof;
pub mod replay;
pub mod report;
pub mod request;
pub mod sim;
pub mod step;
pub mod step_check;
pub mod tables;
pub mod tier;
pub mod view;

mod admission;
mod blocks;
mod check;
mod evict;
mod ghosts;
mod hash;
mod lookup;
mod options;
mod prefix;
mod publish;
mod reuse;
mod scheduler;
mod seating;
mod sequence;
mod spill;
mod status;
mod watchdog;
mod watched;

#[cfg(test)]
mod testing;

pub use engine::Engine;
pub use handle::{EngineHandle, start};
pub use options::EngineOptions;
pub use status::Status;
