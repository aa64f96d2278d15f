//! Reports on standard output. A reader that has seen enough (`longwave inspect pro | head`) is no error.
//! Assumes UTF-8 terminals and pipes; any other failure to write is an error.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};

/// Writes `text` whole.
pub fn text(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Writes `value` as indented JSON.
pub fn json(value: &serde_json::Value) -> Result<()> {
    text(&format!("{}\n", serde_json::to_string_pretty(value)?))
}
