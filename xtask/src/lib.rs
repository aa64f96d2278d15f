//! Chores of the repository, run as `cargo xtask NAME`.
//!
//! Each chore is one module with one entry function, so that tests can call it as well. Nothing here is part of the
//! program that users run.

pub mod cuda_toolkit;
pub mod fuzz;
pub mod golden;
pub mod performance;
mod process;
pub mod test;
pub mod tidy;

use std::path::PathBuf;

/// Why a chore stopped: one sentence for the terminal.
pub type Failure = String;

/// The root of the repository.
pub fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}
