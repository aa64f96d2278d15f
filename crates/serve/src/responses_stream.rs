//! A Responses answer from its first to its last event: streamed, whole, or in the background.
//!
//! One way to the items for all three. An answer that fails ends with `response.failed`; one that the token limit cut with
//! `response.incomplete`. What was asked to be kept is kept before its last event is sent, so that a client that goes on at
//! once finds it.

use std::sync::Arc;

use bytes::Bytes;
use longwave_text::ReplyFinish;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::answer::{Answer, Next};
use crate::errors::ApiError;
use crate::pump::{self, Broken};
use crate::response_items::Items;
use crate::responses::{Head, usage_json};
use crate::security::Place;
use crate::server::{App, unix_seconds};
use crate::sse;

/// Writes the answer until it ends or the client is gone.
pub(crate) async fn stream(app: Arc<App>, head: Head, mut answer: Answer, frames: mpsc::Sender<Bytes>) {
    let mut run = Run::new(head);
    let mut events = Vec::new();
    for kind in ["response.created", "response.in_progress"] {
        let response = run.head.response.clone();
        events.push(run.items.event(kind, json!({"response": response})));
    }
    loop {
        let ended = run.ended;
        if pump::send(&frames, events.drain(..).map(|event| sse::typed(&event))).await.is_err() || ended {
            return;
        }
        match pump::next(&mut answer, &frames, run.head.keep_alive).await {
            Ok(next) => run.take(&app, next, &answer, &mut events),
            Err(Broken::Gone) => return,
            Err(Broken::Failed(error)) => {
                run.fail(&error);
                let response = run.head.response.clone();
                events.push(run.items.event("response.failed", json!({"response": response})));
            }
        }
    }
}

/// Reads the answer to its end and gives the response object.
pub(crate) async fn whole(app: &App, head: Head, mut answer: Answer) -> Result<Value, ApiError> {
    let mut run = Run::new(head);
    while !run.ended {
        let next = answer.next().await?;
        run.take(app, next, &answer, &mut Vec::new());
    }
    Ok(run.head.response)
}

/// Reads the answer in a task of its own; it is found in the store meanwhile.
pub(crate) fn in_background(app: Arc<App>, head: Head, mut answer: Answer, place: Place) {
    let (stop, mut stopped) = watch::channel(false);
    let limit_bytes = app.options.response_store_bytes;
    app.responses.begin(head.tenant, &head.response, stop, limit_bytes);
    tokio::spawn(async move {
        // The place among the requests of its key is taken until it has ended.
        let _place = place;
        let mut run = Run::new(head);
        while !run.ended {
            let next = tokio::select! {
                next = answer.next() => Some(next),
                _ = stopped.wait_for(|stopped| *stopped) => None,
            };
            match next {
                Some(Ok(next)) => run.take(&app, next, &answer, &mut Vec::new()),
                Some(Err(error)) => run.fail(&error),
                None => run.close("cancelled"),
            }
        }
        // One that was deleted meanwhile stays deleted; a finished one was kept where it ended.
        let id = run.head.response["id"].as_str().unwrap_or_default();
        let cut_off = matches!(run.head.response["status"].as_str(), Some("failed" | "cancelled"));
        if cut_off && app.responses.get(run.head.tenant, id).is_some() {
            app.responses.keep(run.head.tenant, &run.head.response, run.head.input, run.head.before, limit_bytes);
        }
    });
}

/// An answer on its way.
struct Run {
    head: Head,
    items: Items,
    ended: bool,
}

impl Run {
    fn new(head: Head) -> Run {
        let id = head.response["id"].as_str().unwrap_or_default();
        let items = Items::new(id, head.names.clone(), head.seal);
        Run { head, items, ended: false }
    }

    fn take(&mut self, app: &App, next: Next, answer: &Answer, events: &mut Vec<Value>) {
        match next {
            Next::Started => {}
            Next::Part(part) => self.items.add(part, events),
            Next::End(part, finish) => {
                self.items.add(part, events);
                let complete = finish != ReplyFinish::Length;
                self.items.end(complete, events);
                self.head.response["usage"] = usage_json(&answer.usage());
                if !complete {
                    self.head.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
                }
                self.close(if complete { "completed" } else { "incomplete" });
                if self.head.store {
                    let (input, before) = (std::mem::take(&mut self.head.input), self.head.before.take());
                    let limit_bytes = app.options.response_store_bytes;
                    app.responses.keep(self.head.tenant, &self.head.response, input, before, limit_bytes);
                }
                let kind = if complete { "response.completed" } else { "response.incomplete" };
                let response = self.head.response.clone();
                events.push(self.items.event(kind, json!({"response": response})));
            }
        }
    }

    fn fail(&mut self, error: &ApiError) {
        self.head.response["error"] = json!({"code": error.code, "message": error.message});
        self.close("failed");
    }

    fn close(&mut self, status: &str) {
        self.head.response["status"] = status.into();
        self.head.response["completed_at"] = unix_seconds().into();
        self.head.response["output"] = std::mem::take(&mut self.items.output).into();
        self.ended = true;
    }
}
