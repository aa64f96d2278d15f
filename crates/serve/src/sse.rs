//! Server-sent events: frames from a task to a response body.
//!
//! The queue between them is short, so a slow client slows its task and nothing else. When the client goes away the body
//! is dropped and the sender sees its channel closed.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_core::Stream;
use serde_json::Value;
use tokio::sync::mpsc;

/// Frames that may wait for the client.
const QUEUE: usize = 64;

/// The end of a stream.
pub(crate) const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// A comment: clients skip it.
pub(crate) const KEEP_ALIVE: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// Pieces of a body.
pub(crate) struct Frames(pub(crate) mpsc::Receiver<Bytes>);

impl Stream for Frames {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}

/// A response and the sender of its frames.
pub(crate) fn channel() -> (mpsc::Sender<Bytes>, Response) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // Reverse proxies would collect the stream otherwise.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (sender, (headers, Body::from_stream(Frames(receiver))).into_response())
}

/// An unnamed event.
pub(crate) fn data(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

/// An event with a name.
pub(crate) fn named(name: &str, value: &Value) -> Bytes {
    format!("event: {name}\ndata: {value}\n\n").into()
}

/// An event whose name is its `type`.
pub(crate) fn typed(value: &Value) -> Bytes {
    named(value["type"].as_str().unwrap_or("message"), value)
}
