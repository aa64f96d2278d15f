//! One running request in the engine, seen from an async task.
//!
//! The only place that talks to the engine. Events arrive on the engine thread and wait in a queue that holds at most
//! what the request may generate. Dropping a [`Generation`] that has not finished cancels it, so a client that goes away
//! frees its blocks whatever the server was doing.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use longwave_engine::Status;
use longwave_engine::attention::LayerKind;
use longwave_engine::handle::EngineHandle;
use longwave_engine::request::{Event, EventSink, Request, RequestId, SubmitError};
use longwave_engine::step::Limits;
use longwave_engine::view::Look;
use tokio::sync::mpsc;

use crate::caller::Caller;
use crate::server::App;

/// What the server needs of an engine.
#[derive(Clone)]
pub struct EngineApi {
    /// Hands a request over; must not block.
    pub submit: Arc<dyn Fn(Request, EventSink) -> Result<RequestId, SubmitError> + Send + Sync>,
    /// Ends a request; unknown and finished ones are ignored.
    pub cancel: Arc<dyn Fn(RequestId) + Send + Sync>,
    /// Bounds of every request.
    pub limits: Limits,
    /// Most tokens that a prompt of so many tokens can be answered with.
    pub most_tokens: Arc<dyn Fn(u32) -> u32 + Send + Sync>,
    /// What it is doing; asked at every call.
    pub status: Arc<dyn Fn() -> Status + Send + Sync>,
    /// Kinds of the layers whose attention requests may ask for; none where that cannot be told.
    pub attention_layers: Vec<LayerKind>,
    /// Shows everything to a looker, soon; drops it when there is nothing to show.
    pub look: Arc<dyn Fn(Look) + Send + Sync>,
}

impl EngineApi {
    /// An engine in this process.
    pub fn of(engine: &EngineHandle) -> EngineApi {
        let (submit, cancel, status, most) = (engine.clone(), engine.clone(), engine.clone(), engine.clone());
        let look = engine.clone();
        EngineApi {
            submit: Arc::new(move |request, sink| submit.submit(request, sink)),
            cancel: Arc::new(move |id| cancel.cancel(id)),
            limits: engine.limits().clone(),
            attention_layers: engine.attention_layers().to_vec(),
            most_tokens: Arc::new(move |prompt| most.most_tokens(prompt)),
            status: Arc::new(move || status.status()),
            look: Arc::new(move |looker| look.look(looker)),
        }
    }
}

/// A request in the engine.
pub(crate) struct Generation {
    events: mpsc::UnboundedReceiver<Event>,
    first: Option<Event>,
    id: RequestId,
    engine: EngineApi,
    finished: bool,
    /// Tells the metrics that the answer was complete.
    complete: Arc<AtomicBool>,
}

impl Generation {
    /// Hands a request over for `caller`, whose salt and priority it gets.
    pub(crate) fn submit(app: &App, caller: &Caller, mut request: Request) -> Result<Generation, SubmitError> {
        request.salt = caller.salt(request.salt);
        request.priority = caller.priority(request.priority);
        log_prompt(app, &request);
        let mut watch = app.metrics.watch(&request);
        let complete = watch.complete();
        // Unbounded in form only: a request gives at most max_tokens token events and three others, and the sink must
        // never block the engine thread.
        let (sender, events) = mpsc::unbounded_channel();
        // A closed channel means the client is gone; the drop below has cancelled already.
        let sink: EventSink = Box::new(move |event| {
            watch.see(&event);
            drop(sender.send(event));
        });
        let id = (app.engine.submit)(request, sink).inspect_err(|error| {
            app.metrics.rejected(match error {
                SubmitError::QueueFull { .. } => "queue_full",
                SubmitError::Stalled { .. } => "stalled",
                SubmitError::Stopped(_) => "stopped",
            });
        })?;
        Ok(Generation { events, first: None, id, engine: app.engine.clone(), finished: false, complete })
    }

    /// Waits for the first event and leaves it in place.
    pub(crate) async fn peek(&mut self) -> Option<&Event> {
        if self.first.is_none() {
            self.first = self.events.recv().await;
        }
        self.first.as_ref()
    }

    /// The next event; `None` when the engine dropped the request without an end, which it must not.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        let event = match self.first.take() {
            Some(event) => Some(event),
            None => self.events.recv().await,
        };
        self.finished |= matches!(event, None | Some(Event::Finished { .. }));
        event
    }

    /// Ends the request early because its answer is complete, as at a stop text.
    pub(crate) fn cancel(&mut self) {
        self.complete.store(true, Ordering::Relaxed);
        self.abort();
    }

    /// Ends the request early because nobody waits for it any more.
    fn abort(&mut self) {
        if !self.finished {
            self.finished = true;
            (self.engine.cancel)(self.id);
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Writes the prompt to the log, if that was asked for.
fn log_prompt(app: &App, request: &Request) {
    let Some(most) = app.options.log_requests else { return };
    let text = app.tokenizer.decode(&request.prompt);
    let shown: String = text.chars().take(most).collect();
    let (tokens, max_tokens) = (request.prompt.len(), request.max_tokens);
    tracing::info!(tokens, max_tokens, temperature = request.sampling.temperature, "prompt: {shown:?}");
}

/// A number that no other request of this process gets, hard to guess from outside.
pub(crate) fn fresh_number() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    RandomState::new().hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}
