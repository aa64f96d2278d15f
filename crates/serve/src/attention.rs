//! GET /explore/api/about and POST /explore/api/attention: what every token of a text reads in one layer of the served model.
//!
//! The text runs as an ordinary request that stands behind others: it waits for a seat, its prompt is computed in the same steps,
//! and it ends when the page goes away. Few run at once. So nothing runs outside the engine's own rules, and no second copy of
//! the model is needed. Weights are the backend's own, in millionths. Refuses texts of more than [`MOST_TOKENS`] tokens and says
//! what to run where a backend cannot tell.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use longwave_engine::attention::Reads;
use longwave_engine::request::{Event, FinishReason, Request};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use crate::caller::Caller;
use crate::errors::{ApiError, json_object};
use crate::generation::Generation;
use crate::input::RawBody;
use crate::job;
use crate::server::App;

/// Tokens of a text, the begin-of-sentence token included: what a picture can show.
const MOST_TOKENS: usize = 512;
/// Behind interactive requests; batches that do not ask to wait longer stand before it as well.
const PRIORITY: i32 = 16;
/// Texts that run at once: what they take cannot be taken back before they end.
const AT_ONCE: usize = 2;
/// A weight of 1.
const WHOLE: f32 = 1e6;
/// Where a backend cannot tell.
const UNTOLD: &str = "The backend of this server computes attention without telling what it reads. \
                      `longwave explore MODEL` runs the same model on the CPU, which tells.";

/// Places for texts.
pub(crate) struct Texts(Semaphore);

impl Default for Texts {
    fn default() -> Texts {
        Texts(Semaphore::new(AT_ONCE))
    }
}

/// Both routes.
pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new().route("/explore/api/about", get(about)).route("/explore/api/attention", post(attention))
}

/// The first of them where there is no model.
pub(crate) fn nothing() -> Json<Value> {
    Json(json!({"attention": null, "why": "No model runs here."}))
}

async fn about(State(app): State<Arc<App>>) -> Json<Value> {
    let layers: Vec<&str> = app.engine.attention_layers.iter().map(|kind| kind.name()).collect();
    if layers.is_empty() {
        return Json(json!({"attention": null, "why": UNTOLD}));
    }
    let most = most_tokens(&app);
    let model = &app.options.served_model_names[0];
    Json(json!({"attention": {"model": model, "layers": layers, "most_tokens": most}}))
}

/// Tokens of a text, with room for the one that follows.
fn most_tokens(app: &App) -> usize {
    MOST_TOKENS.min(app.engine.limits.context as usize - 1)
}

/// A text in tokens and the layer to look at.
fn read(app: &App, body: &Map<String, Value>) -> Result<(Vec<u32>, u32), ApiError> {
    let layers = app.engine.attention_layers.len();
    if layers == 0 {
        return Err(ApiError::field("layer", UNTOLD));
    }
    let layer = body.get("layer").and_then(Value::as_u64).filter(|&layer| layer < layers as u64);
    let layer = layer.ok_or_else(|| ApiError::field("layer", format!("expected a layer from 0 to {}", layers - 1)))?;
    let text = body.get("text").and_then(Value::as_str);
    let text = text.ok_or_else(|| ApiError::field("text", "expected a text"))?;
    let ids = app.tokenizer.encode_text(text).map_err(|error| ApiError::field("text", error))?;
    let tokens: Vec<u32> = std::iter::once(app.tokenizer.markers().bos).chain(ids).collect();
    let (count, most) = (tokens.len(), most_tokens(app));
    if count > most {
        let message =
            format!("{count} tokens with the one that begins a text, and {most} can be shown at most; shorten it");
        return Err(ApiError::field("text", message));
    }
    Ok((tokens, layer as u32))
}

async fn attention(State(app): State<Arc<App>>, caller: Caller, RawBody(body): RawBody) -> Result<Response, ApiError> {
    let _place = app.texts.0.try_acquire().map_err(|_| {
        ApiError::rate_limited("too_many_texts", format!("{AT_ONCE} texts are being read already; try again"), 1)
    })?;
    let (tokens, layer) = job::blocking(&app, move |app| read(app, &json_object(&body)?)).await?;
    let request = Request { attention: Some(layer), priority: PRIORITY, ..Request::greedy(tokens.clone(), 1) };
    let mut generation =
        Generation::submit(&app, &caller, request).map_err(|error| ApiError::from(error).of_prompt("text"))?;
    let (mut reads, mut next) = (Vec::new(), None);
    loop {
        let event = generation.next().await.ok_or_else(|| ApiError::stopped("it dropped the running request"))?;
        match event {
            Event::Attention(mut more) => reads.append(&mut more),
            Event::Tokens { tokens, .. } => next = tokens.first().copied(),
            Event::Scheduled { .. } | Event::Logits { .. } => {}
            Event::Finished { reason, .. } => match reason {
                FinishReason::Stop(_) | FinishReason::Complete | FinishReason::Length => break,
                bad => return Err(ApiError::of_end(bad)),
            },
        }
    }
    let token = |&id: &u32| json!({"id": id, "text": String::from_utf8_lossy(app.tokenizer.token_bytes(id))});
    Ok(Json(json!({
        "layer": layer, "kind": app.engine.attention_layers[layer as usize].name(),
        "tokens": tokens.iter().map(token).collect::<Value>(),
        "next": next.as_ref().map(token),
        "reads": reads.iter().map(query).collect::<Value>(),
    }))
    .into_response())
}

/// What one query read.
fn query(reads: &Reads) -> Value {
    let millionths = |weights: &[f32]| -> Vec<u32> { weights.iter().map(|w| (w * WHOLE).round() as u32).collect() };
    json!({
        "from": reads.window_from, "window": millionths(&reads.window),
        "entries": reads.entries, "weights": millionths(&reads.entry_weights),
        "sink": millionths(&[reads.sink])[0],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_sent_in_millionths() {
        let reads = Reads {
            position: 4,
            window_from: 3,
            window: vec![0.25, 0.125],
            entries: vec![0],
            entry_weights: vec![0.5],
            sink: 0.125,
        };
        let wanted =
            json!({"from": 3, "window": [250_000, 125_000], "entries": [0], "weights": [500_000], "sink": 125_000});
        assert_eq!(query(&reads), wanted);
    }
}
