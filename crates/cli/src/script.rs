//! The script of `longwave serve --script`: read from its file, played by the server crate.
//! Refuses a file that cannot be read or has a wrong line, before the server starts.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use longwave_serve::{EngineApi, read_script, scripted};
use longwave_text::Tokenizer;

/// An engine that answers from `file`.
pub fn engine(file: &Path, tokenizer: Arc<Tokenizer>, context: u32) -> Result<EngineApi> {
    let name = file.display();
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read the script {name}"))?;
    let lines = read_script(&text).map_err(|error| anyhow!("the script {name}: {error}"))?;
    tracing::info!("answering from the script {name} of {} lines: no model runs", lines.len());
    Ok(scripted(lines, tokenizer, context))
}
