//! `cargo xtask golden`: makes vectors with transformers in an environment of its own and compares them with the
//! committed ones. Arguments go to `tools/golden/generate.py`. Downloads several gigabytes the first time.

use std::process::Command;

use crate::process;
use crate::{Failure, root};

/// Runs the generator; fails when the vectors disagree.
pub fn run(args: &[String]) -> Result<(), Failure> {
    let folder = root().join("tools/golden");
    let python = process::python("golden", &folder.join("requirements.txt"))?;
    process::run(Command::new(python).arg(folder.join("generate.py")).args(args))
}
