//! Running other programs, and Python environments for those that need one.
//!
//! A program that fails is an error that names it; its own output has already told why.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Failure, root};

/// The cargo that runs this program.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Runs to the end.
pub(crate) fn run(command: &mut Command) -> Result<(), Failure> {
    let words: Vec<_> =
        std::iter::once(command.get_program()).chain(command.get_args()).map(|w| w.to_string_lossy()).collect();
    let line = words.join(" ");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{line}` failed ({status})")),
        Err(error) => Err(format!("cannot run `{line}`: {error}")),
    }
}

/// Runs to the end and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>, Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("cannot run `{name}`: {error}"))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(format!("`{name}` failed: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// Python of the environment `.venv/NAME`, made from a requirements file when it is missing or the file has changed.
pub(crate) fn python(name: &str, requirements: &Path) -> Result<PathBuf, Failure> {
    let folder = root().join(".venv").join(name);
    let (python, stamp) = (folder.join("bin/python"), folder.join("installed.txt"));
    let wanted =
        std::fs::read(requirements).map_err(|error| format!("cannot read {}: {error}", requirements.display()))?;
    if python.exists() && std::fs::read(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    println!("making the Python environment {}", folder.display());
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        .map_err(|failure| format!("{failure}; Debian: apt-get install python3-venv"))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"])
        .arg(requirements))?;
    std::fs::write(&stamp, wanted).map_err(|error| format!("cannot write {}: {error}", stamp.display()))?;
    Ok(python)
}
