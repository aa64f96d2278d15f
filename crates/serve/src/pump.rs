//! The pump of every stream: from an answer to frames, with comments while it is silent.
//!
//! A client that goes away is noticed at once and its request cancelled, also while nothing is written.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::answer::{Answer, Next};
use crate::errors::ApiError;
use crate::sse;

/// Why an answer is not written to its end.
pub(crate) enum Broken {
    /// The client is gone.
    Gone,
    /// The answer failed.
    Failed(ApiError),
}

/// A client that has read nothing for so long is gone: it must not keep its place for ever.
const STUCK: Duration = Duration::from_secs(120);

/// Sends frames, or says that nobody reads them.
pub(crate) async fn send(frames: &mpsc::Sender<Bytes>, ready: impl IntoIterator<Item = Bytes>) -> Result<(), Broken> {
    for frame in ready {
        let sent = tokio::time::timeout(STUCK, frames.send(frame)).await;
        sent.map_err(|_| Broken::Gone)?.map_err(|_| Broken::Gone)?;
    }
    Ok(())
}

/// Waits for what comes next and sends a comment after each `keep_alive` of silence.
pub(crate) async fn next(
    answer: &mut Answer,
    frames: &mpsc::Sender<Bytes>,
    keep_alive: Duration,
) -> Result<Next, Broken> {
    loop {
        let silence = tokio::time::sleep(keep_alive);
        tokio::select! {
            // Dropping the answer cancels the request in the engine.
            () = frames.closed() => return Err(Broken::Gone),
            next = answer.next() => return next.map_err(Broken::Failed),
            () = silence => send(frames, [sse::KEEP_ALIVE]).await?,
        }
    }
}
