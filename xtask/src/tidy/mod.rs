//! The rules of the source tree: sizes, words, first lines, `unsafe`, dependency directions, licences.
//!
//! Looks at the files that git tracks and at `cargo metadata`. Every fault is one line that says where, what, and what
//! to do. A rule that needs an exception gets it in the table beside the rule, with the reason.

mod crates;
mod files;
mod licences;
mod source;
mod unsafe_code;

use std::fmt;
use std::path::Path;
use std::process::Command;

use crate::process::{cargo, output};
use crate::{Failure, root};

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// From the root of the repository.
    pub path: String,
    /// From 1.
    pub line: usize,
    /// What is wrong, and what to do.
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// What was found.
#[derive(Debug, Default)]
pub struct Report {
    /// Broken rules.
    pub faults: Vec<Fault>,
    /// Worth knowing, not wrong.
    pub notes: Vec<String>,
}

impl Report {
    fn fault(&mut self, path: &str, line: usize, what: impl Into<String>) {
        self.faults.push(Fault { path: path.to_owned(), line, what: what.into() });
    }
}

/// A tracked file.
struct TrackedFile {
    path: String,
    bytes: u64,
    /// `None` when it is not UTF-8.
    text: Option<String>,
}

/// Checks everything.
pub fn check() -> Result<Report, Failure> {
    let files = tracked_files(&root())?;
    let mut report = Report::default();
    files::check(&files, &mut report);
    unsafe_code::check(&files, &mut report);
    let metadata = metadata()?;
    crates::check(&files, &metadata, &mut report);
    licences::check(&metadata, &mut report);
    report.faults.sort();
    Ok(report)
}

/// `cargo xtask tidy`: prints the report.
pub fn run() -> Result<(), Failure> {
    let report = check()?;
    for note in &report.notes {
        println!("note: {note}");
    }
    for fault in &report.faults {
        println!("{fault}");
    }
    match report.faults.len() {
        0 => Ok(()),
        count => Err(format!("{count} faults")),
    }
}

fn tracked_files(root: &Path) -> Result<Vec<TrackedFile>, Failure> {
    // A checkout that belongs to another user (a CI container) is fine: only names are read.
    let list = output(Command::new("git").args(["-c", "safe.directory=*", "ls-files", "-z"]).current_dir(root))?;
    let list = String::from_utf8(list).map_err(|_| "a tracked file's name is not UTF-8".to_owned())?;
    let mut files = Vec::new();
    for path in list.split('\0').filter(|path| !path.is_empty()) {
        // A file that was removed and not yet committed is no longer ours to check.
        let Ok(bytes) = std::fs::read(root.join(path)) else { continue };
        files.push(TrackedFile {
            path: path.to_owned(),
            bytes: bytes.len() as u64,
            text: String::from_utf8(bytes).ok(),
        });
    }
    Ok(files)
}

/// `cargo metadata` for the platforms we support. Other platforms' crates are never built.
fn metadata() -> Result<serde_json::Value, Failure> {
    let mut command = cargo();
    command.args(["metadata", "--locked", "--format-version", "1"]);
    command.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    serde_json::from_slice(&output(&mut command)?).map_err(|error| format!("cargo metadata is not JSON: {error}"))
}
