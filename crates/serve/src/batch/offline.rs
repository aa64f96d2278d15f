//! A batch without HTTP: one input file, one output file, good and bad answers together.
//!
//! For `longwave batch`. Started again with the same files it goes on where it was. Refuses an input file with faults before
//! anything runs, and an output file that is none.

use std::collections::HashMap;
use std::future::Future;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use tokio::sync::Semaphore;

use super::journal::Journal;
use super::line;
use super::lines::{self, Sink, Stopped, Work};
use super::record::LineError;
use super::validate;
use crate::caller::Caller;
use crate::server::{App, routes};

/// What is to be done.
#[derive(Debug, Clone)]
pub struct OfflineOptions {
    /// JSON lines with custom_id, method, url and body.
    pub input: PathBuf,
    /// Answers, a line each, in the order in which they came.
    pub output: PathBuf,
    /// Lines that run at once.
    pub concurrency: usize,
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OfflineResult {
    /// Requests in the input file.
    pub total: u64,
    /// Those with a good answer.
    pub completed: u64,
    /// Those with a bad one.
    pub failed: u64,
    /// Answers that an earlier run had written.
    pub found: u64,
}

/// Why it was not done.
#[derive(Debug, Error)]
pub enum OfflineError {
    /// The input file is none.
    #[error("{path}: {faults}")]
    Input {
        /// The file.
        path: PathBuf,
        /// The first faults with their lines.
        faults: String,
    },
    /// The output file holds something else.
    #[error("{0}: it exists and its first line is no answer of a batch; choose another name")]
    Output(PathBuf),
    /// The system refused something.
    #[error("{path}: {reason}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        reason: io::Error,
    },
}

/// Counts the requests of an input file, or lists its faults.
pub fn check_file(input: &Path, max_line_bytes: usize) -> Result<u64, OfflineError> {
    let path = input.to_owned();
    match validate::check(input, None, max_line_bytes, u64::MAX) {
        Ok(Ok(total)) => Ok(total),
        Ok(Err(faults)) => Err(OfflineError::Input { path, faults: listed(&faults) }),
        Err(reason) => Err(OfflineError::Io { path, reason }),
    }
}

/// Answers every request of the input file that has no answer yet, until `stop` resolves. `progress` gets the number of
/// answers, of bad ones among them, and of requests.
pub async fn run_file(
    app: Arc<App>,
    options: &OfflineOptions,
    stop: impl Future<Output = ()>,
    progress: impl Fn(u64, u64, u64) + Send + 'static,
) -> Result<OfflineResult, OfflineError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |reason| OfflineError::Io { path, reason }
    };
    let most = app.options.max_body_bytes;
    let checked = validate::check(&options.input, None, most, u64::MAX).map_err(failed(&options.input))?;
    let total =
        checked.map_err(|faults| OfflineError::Input { path: options.input.clone(), faults: listed(&faults) })?;
    refuse_foreign(&options.output)?;
    let mut answered = HashMap::new();
    let output = Journal::open(&options.output, &mut answered).map_err(failed(&options.output))?;
    let good = answered.values().filter(|good| **good).count() as u64;
    let (found, mut done, mut bad) = (answered.len() as u64, answered.len() as u64, answered.len() as u64 - good);
    progress(done, bad, total);
    let counted = move |good: bool| {
        done += 1;
        bad += u64::from(!good);
        progress(done, bad, total);
    };
    let mut sink = Sink { output, failures: None, answered, counted: Box::new(counted), unsynced: 0 };
    let work = Work {
        router: routes(&app).with_state(app.clone()),
        caller: Caller::default(),
        slots: Arc::new(Semaphore::new(options.concurrency.max(1))),
        max_line_bytes: most,
    };
    let stop = async {
        stop.await;
        Stopped::Cancelled
    };
    lines::answer(&work, &options.input, None, &mut sink, stop).await.map_err(failed(&options.output))?;
    sink.output.sync().map_err(failed(&options.output))?;
    let completed = sink.answered.values().filter(|good| **good).count() as u64;
    Ok(OfflineResult { total, completed, failed: sink.answered.len() as u64 - completed, found })
}

fn listed(faults: &[LineError]) -> String {
    let one = |fault: &LineError| {
        let line = fault.line.map(|line| format!("line {line}: ")).unwrap_or_default();
        let param = fault.param.as_deref().map(|param| format!("{param}: ")).unwrap_or_default();
        format!("{line}{param}{}", fault.message)
    };
    let shown: Vec<String> = faults.iter().take(3).map(one).collect();
    let more = faults.len().saturating_sub(shown.len());
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!("{}{more}", shown.join("; "))
}

/// Opening an output file cuts off what is no answer, so it must not be somebody's other file.
fn refuse_foreign(path: &Path) -> Result<(), OfflineError> {
    let Ok(file) = std::fs::File::open(path) else { return Ok(()) };
    let mut first = Vec::new();
    let read = BufReader::new(file).read_until(b'\n', &mut first);
    read.map_err(|reason| OfflineError::Io { path: path.to_owned(), reason })?;
    let whole = std::str::from_utf8(&first).ok().and_then(line::answers).is_some();
    // The beginning of a first answer that a crash cut off.
    let begun = !first.ends_with(b"\n") && first.starts_with(br#"{"id":"batch_req_"#);
    if first.is_empty() || whole || begun { Ok(()) } else { Err(OfflineError::Output(path.to_owned())) }
}
