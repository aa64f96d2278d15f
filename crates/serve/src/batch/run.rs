//! Running batches: the tasks behind `/v1/batches`.
//!
//! A few batches at once, their lines together bounded; a batch ends answered, cancelled or expired, and its files are
//! then there. Dropping the task loses nothing but what runs: the rest goes on after the next start.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

use super::journal::Journal;
use super::line;
use super::lines::{self, Sink, Stopped, Work};
use super::record::{BatchRecord, Counts, FileRecord, LineError, State};
use super::store::Batches;
use super::validate;
use crate::caller::Caller;
use crate::server::{App, routes, unix_seconds};

/// Batches that run at once.
const MAX_RUNNING: usize = 8;

/// Runs what waits and what comes, for ever.
pub(crate) async fn serve(app: Arc<App>) {
    let Some(store) = app.batches.clone() else { return };
    let waiting = store.waiting.lock().ok().and_then(|mut waiting| waiting.take());
    let Some(mut waiting) = waiting else { return };
    let seats = app.engine.limits.seats as usize;
    let concurrency = if store.options.concurrency > 0 { store.options.concurrency } else { (seats / 2).max(1) };
    let slots = Arc::new(Semaphore::new(concurrency));
    // Without the key check: whoever made the batch was checked.
    let router = routes(&app).with_state(app.clone());
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            Some(id) = waiting.recv(), if running.len() < MAX_RUNNING => {
                running.spawn(batch(app.clone(), store.clone(), router.clone(), slots.clone(), id));
            }
            Some(_) = running.join_next(), if !running.is_empty() => {}
            else => return,
        }
    }
}

/// One batch to its end.
async fn batch(app: Arc<App>, store: Arc<Batches>, router: Router, slots: Arc<Semaphore>, id: String) {
    let bell = Arc::new(Notify::new());
    let Some(batch) = store.begin(&id, bell.clone()) else { return };
    if let Err(error) = answer(&app, &store, router, slots, batch, &bell).await {
        tracing::error!("{id}: the batch cannot go on: {error}");
        let message = format!("the server could not read or write the files of the batch: {error}");
        let failed = |batch: &mut BatchRecord| {
            batch.errors.push(LineError { code: "storage".to_owned(), message, param: None, line: None });
            batch.reach(State::Failed);
        };
        if let Err(error) = store.change(&id, failed) {
            tracing::error!("{id}: nor can that be written down: {error}");
        }
    }
    store.end(&id);
}

async fn answer(
    app: &App,
    store: &Arc<Batches>,
    router: Router,
    slots: Arc<Semaphore>,
    mut batch: BatchRecord,
    bell: &Notify,
) -> io::Result<()> {
    let (id, input) = (batch.id.clone(), store.content(&batch.input_file_id));
    let most = app.options.max_body_bytes;
    if batch.state == State::Validating {
        let (store, checked, endpoint) = (store.clone(), input.clone(), batch.endpoint.clone());
        let begin = move || begin(&store, &id, validate::check(&checked, Some(&endpoint), most, validate::MAX_LINES)?);
        match aside(begin).await? {
            Some(begun) => batch = begun,
            None => return Ok(()),
        }
    }
    let mut sink = {
        let (store, batch) = (store.clone(), batch.clone());
        aside(move || sink(&store, &batch)).await?
    };
    let mut state = batch.state;
    if state == State::InProgress {
        let caller = Caller { tenant: batch.tenant, isolated: app.options.security.tenant_isolation, batch: true };
        let work = Work { router, caller, slots, max_line_bytes: most };
        let left = Duration::from_secs(batch.expires_at.saturating_sub(unix_seconds()));
        let stop = async {
            tokio::select! {
                () = bell.notified() => Stopped::Cancelled,
                () = tokio::time::sleep(left) => Stopped::Late,
            }
        };
        state = match lines::answer(&work, &input, Some(&batch.endpoint), &mut sink, stop).await? {
            None => State::Completed,
            Some(Stopped::Cancelled) => State::Cancelled,
            Some(Stopped::Late) => State::Expired,
        };
    }
    let end = match state {
        State::Cancelling => State::Cancelled,
        // It was writing its files when the server ended: all lines have answers.
        State::Finalizing => State::Completed,
        state => state,
    };
    let store = store.clone();
    let close = move || {
        if end == State::Expired {
            lines::expire(&input, most, &mut sink)?;
        }
        finish(&store, &batch, sink, end)
    };
    aside(close).await
}

/// Runs what waits for the disk on the blocking pool.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Moves a batch on after the check of its file; `None` when it has failed.
fn begin(store: &Batches, id: &str, checked: Result<u64, Vec<LineError>>) -> io::Result<Option<BatchRecord>> {
    match checked {
        Err(errors) => {
            store.change(id, |batch| {
                batch.errors = errors;
                batch.reach(State::Failed);
            })?;
            Ok(None)
        }
        Ok(total) => store.change(id, |batch| {
            batch.counts.total = total;
            // It may have been cancelled meanwhile.
            if batch.state == State::Validating {
                batch.reach(State::InProgress);
            }
        }),
    }
}

/// The files of answers, with what they hold already.
fn sink(store: &Arc<Batches>, batch: &BatchRecord) -> io::Result<Sink> {
    let mut answered = HashMap::new();
    let output = Journal::open(&store.content(&batch.output), &mut answered)?;
    let failures = Journal::open(&store.content(&batch.failures), &mut answered)?;
    let completed = answered.values().filter(|good| **good).count() as u64;
    let failed = answered.len() as u64 - completed;
    let total = batch.counts.total;
    store.count(&batch.id, |counts| *counts = Counts { total, completed, failed });
    let (store, id) = (store.clone(), batch.id.clone());
    let counted = move |good: bool| {
        store.count(&id, |counts| *(if good { &mut counts.completed } else { &mut counts.failed }) += 1);
    };
    Ok(Sink { output, failures: Some(failures), answered, counted: Box::new(counted), unsynced: 0 })
}

/// Makes the files of answers known and ends the batch.
fn finish(store: &Batches, batch: &BatchRecord, sink: Sink, end: State) -> io::Result<()> {
    sink.output.sync()?;
    store.change(&batch.id, |batch| {
        if !matches!(batch.state, State::Finalizing | State::Cancelling) {
            batch.reach(State::Finalizing);
        }
    })?;
    let mut known = [false; 2];
    let journals = [Some(sink.output), sink.failures];
    for (i, (id, journal)) in [&batch.output, &batch.failures].into_iter().zip(journals).enumerate() {
        let Some(journal) = journal else { continue };
        journal.sync()?;
        if journal.bytes() == 0 {
            std::fs::remove_file(store.content(id))?;
            continue;
        }
        known[i] = true;
        store.add_file(FileRecord {
            id: id.clone(),
            tenant: batch.tenant,
            bytes: journal.bytes(),
            created_at: unix_seconds(),
            filename: format!("{}_{}.jsonl", batch.id, ["output", "error"][i]),
            purpose: "batch_output".to_owned(),
        })?;
    }
    store.change(&batch.id, |batch| {
        (batch.has_output, batch.has_failures) = (known[0], known[1]);
        // A batch that was cancelled while its last line ended is cancelled.
        let end = if batch.state == State::Cancelling { State::Cancelled } else { end };
        batch.reach(end);
    })?;
    Ok(())
}

/// A batch that nothing was done of yet.
pub(super) fn fresh(tenant: u64, endpoint: &str, input: &str, window_s: u64) -> BatchRecord {
    let created_at = unix_seconds();
    BatchRecord {
        id: line::fresh_id("batch_"),
        tenant,
        endpoint: endpoint.to_owned(),
        input_file_id: input.to_owned(),
        completion_window: format!("{}h", window_s / 3600),
        metadata: None,
        state: State::Validating,
        counts: Counts::default(),
        errors: Vec::new(),
        output: line::fresh_id("file-"),
        failures: line::fresh_id("file-"),
        has_output: false,
        has_failures: false,
        created_at,
        expires_at: created_at + window_s,
        reached: Vec::new(),
    }
}
