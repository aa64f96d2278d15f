//! The lines of an input file through the server's routes, many at a time, and their answers into files.
//!
//! Assumes a file that was checked. A line that the server has no room for now is asked again; every other answer is
//! written down once. Skips lines that have an answer.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fs::File;
use std::future::Future;
use std::io::{self, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, header};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};
use tower::ServiceExt;

use super::journal::Journal;
use super::line::{self, Line};
use super::validate::next_line;
use crate::caller::Caller;

/// Largest answer.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// First and longest pause before a line is asked again that the server had no room for.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(30)];

/// Lines between two flushes to the disk.
const SYNC_EVERY: u32 = 64;

/// What answers lines.
pub(super) struct Work {
    pub(super) router: Router,
    pub(super) caller: Caller,
    /// Lines that run at once.
    pub(super) slots: Arc<Semaphore>,
    pub(super) max_line_bytes: usize,
}

/// Why not all lines were answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopped {
    Cancelled,
    Late,
}

/// Where answers go.
pub(super) struct Sink {
    pub(super) output: Journal,
    /// Bad answers; together with the good ones when there is no such file.
    pub(super) failures: Option<Journal>,
    /// Requests that have an answer, and whether it is a good one.
    pub(super) answered: HashMap<String, bool>,
    /// Called for each answer with whether it is a good one.
    pub(super) counted: Box<dyn FnMut(bool) + Send>,
    /// Answers that a loss of power would take.
    pub(super) unsynced: u32,
}

impl Sink {
    fn record(&mut self, answer: Answered) -> io::Result<()> {
        let journal = match &mut self.failures {
            Some(failures) if !answer.good => failures,
            _ => &mut self.output,
        };
        journal.append(&answer.text)?;
        self.answered.insert(answer.custom_id, answer.good);
        (self.counted)(answer.good);
        self.unsynced += 1;
        Ok(())
    }

    /// Flushes the files now and then. A disk may take its time, so a thread of the blocking pool waits for it.
    async fn flush(&mut self) -> io::Result<()> {
        if self.unsynced < SYNC_EVERY {
            return Ok(());
        }
        self.unsynced = 0;
        let files = [Some(&self.output), self.failures.as_ref()].into_iter().flatten();
        let files = files.map(Journal::handle).collect::<io::Result<Vec<File>>>()?;
        let flush = move || files.iter().try_for_each(File::sync_data);
        tokio::task::spawn_blocking(flush).await.map_err(io::Error::other)?
    }
}

struct Answered {
    custom_id: String,
    text: String,
    good: bool,
}

/// Answers all lines without an answer, until `stop` says to stop; what runs then is dropped.
pub(super) async fn answer(
    work: &Work,
    input: &Path,
    endpoint: Option<&str>,
    sink: &mut Sink,
    stop: impl Future<Output = Stopped>,
) -> io::Result<Option<Stopped>> {
    let mut reader = BufReader::new(File::open(input)?);
    let mut next = |answered: &HashMap<String, bool>| next_unanswered(&mut reader, work, endpoint, answered);
    let mut pending = next(&sink.answered)?;
    let mut running: JoinSet<Answered> = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    while pending.is_some() || !running.is_empty() {
        tokio::select! {
            biased;
            why = &mut stop => {
                // Answers that are there already are kept.
                while let Some(ended) = running.try_join_next() {
                    sink.record(ended.map_err(panicked)?)?;
                }
                return Ok(Some(why));
            }
            Some(ended) = running.join_next(), if !running.is_empty() => {
                sink.record(ended.map_err(panicked)?)?;
                sink.flush().await?;
            }
            slot = work.slots.clone().acquire_owned(), if pending.is_some() => {
                if let Some(line) = pending.take() {
                    let (router, caller) = (work.router.clone(), work.caller);
                    running.spawn(async move {
                        let answered = one(router, caller, line).await;
                        drop(slot);
                        answered
                    });
                }
                pending = next(&sink.answered)?;
            }
        }
    }
    Ok(None)
}

fn panicked(error: JoinError) -> io::Error {
    io::Error::other(format!("answering a line failed: {error}"))
}

/// The next line without an answer. Reading is quick: lines come from the disk's cache and are read one at a time.
fn next_unanswered(
    reader: &mut BufReader<File>,
    work: &Work,
    endpoint: Option<&str>,
    answered: &HashMap<String, bool>,
) -> io::Result<Option<Line>> {
    let changed = |why: &str| io::Error::other(format!("the input file has changed: {why}"));
    while let Some(text) = next_line(reader, work.max_line_bytes)? {
        let text = text.ok_or_else(|| changed("a line is too long or not UTF-8"))?;
        if text.trim().is_empty() {
            continue;
        }
        match line::parse(&text, endpoint) {
            Ok(line) if answered.contains_key(&line.custom_id) => {}
            Ok(line) => return Ok(Some(line)),
            Err(fault) => return Err(changed(&fault.message)),
        }
    }
    Ok(None)
}

/// Says of every line without an answer that it came too late.
pub(super) fn expire(input: &Path, max_line_bytes: usize, sink: &mut Sink) -> io::Result<()> {
    let mut reader = BufReader::new(File::open(input)?);
    let message = "the completion window of the batch ended before this request was answered";
    while let Some(text) = next_line(&mut reader, max_line_bytes)? {
        let Ok(line) = line::parse(&text.unwrap_or_default(), None) else { continue };
        if !sink.answered.contains_key(&line.custom_id) {
            let text = line::unanswered(&line.custom_id, "batch_expired", message);
            sink.record(Answered { custom_id: line.custom_id, text, good: false })?;
        }
    }
    Ok(())
}

/// Whether to ask again. An engine that has stopped stays so.
fn is_later(status: StatusCode, answer: &[u8]) -> bool {
    let code = || serde_json::from_slice::<Value>(answer).ok().map(|answer| answer["error"]["code"].clone());
    match status {
        StatusCode::TOO_MANY_REQUESTS => true,
        StatusCode::SERVICE_UNAVAILABLE => code().is_some_and(|code| code != "engine_stopped"),
        _ => false,
    }
}

/// Asks until there is an answer that is not "later".
async fn one(router: Router, caller: Caller, line: Line) -> Answered {
    let body = Value::Object(line.body).to_string();
    let [mut pause, longest] = PAUSES;
    loop {
        let mut request = Request::new(Body::from(body.clone()));
        *request.method_mut() = axum::http::Method::POST;
        // Only known routes pass the check of the file.
        *request.uri_mut() = line.url.parse().unwrap_or_default();
        request.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        request.extensions_mut().insert(caller);
        let answer: Result<_, Infallible> = router.clone().oneshot(request).await;
        let Ok(response) = answer;
        let status = response.status();
        let custom_id = line.custom_id.clone();
        return match to_bytes(response.into_body(), MAX_ANSWER_BYTES).await {
            Ok(bytes) if is_later(status, &bytes) => {
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(longest);
                continue;
            }
            Ok(bytes) => {
                let body = serde_json::from_slice(&bytes)
                    .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
                let text = line::answered(&custom_id, status.as_u16(), &body);
                Answered { custom_id, text, good: status == StatusCode::OK }
            }
            Err(error) => {
                let text = line::unanswered(&custom_id, "answer_lost", &error.to_string());
                Answered { custom_id, text, good: false }
            }
        };
    }
}
