//! `cargo xtask cuda-toolkit`: nvcc and its headers from PyPI into `target/cuda`, so that kernels can be compiled on a machine
//! without a CUDA installation.
//!
//! All five packages are pinned: nvcc's own requirements are not, and mixed versions do not work together. About 104 MB are
//! fetched and 271 MB unpacked. NVIDIA's licence allows to use it, not to pass it on: nothing of it is committed.

use std::process::Command;
use std::time::SystemTime;

use crate::process::run as run_command;
use crate::{Failure, root};

const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// Fetches what is missing; nothing when all of it is there.
pub fn run() -> Result<(), Failure> {
    let folder = root().join("target/cuda");
    let (stamp, wanted) = (folder.join("installed.txt"), PACKAGES.join("\n"));
    let nvcc = folder.join("nvidia/cu13/bin/nvcc");
    if nvcc.exists() && std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    println!("fetching nvcc 13.0 into {}", folder.display());
    let tools = root().join(".venv/cuda");
    run_command(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&tools))
        .map_err(|failure| format!("{failure}; Debian: apt-get install python3-venv"))?;
    let pip =
        ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--upgrade", "--target"];
    run_command(Command::new(tools.join("bin/python")).args(pip).arg(&folder).args(PACKAGES))?;
    std::fs::write(&stamp, wanted).map_err(|error| format!("cannot write {}: {error}", stamp.display()))?;
    // A build that found no nvcc does not watch for one: this lets the next one look again.
    let build = root().join("crates/cuda/build.rs");
    let touched = std::fs::File::options().append(true).open(&build).and_then(|f| f.set_modified(SystemTime::now()));
    touched.map_err(|error| format!("cannot touch {}: {error}", build.display()))
}
