//! The routes over kept responses: read, list the input, cancel, delete.
//! One that is unknown, forgotten or another tenant's is a 404 that says how long responses are kept.

use std::collections::HashSet;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::caller::Caller;
use crate::errors::ApiError;
use crate::input::{Asked, Name};
use crate::page::{Page, PageQuery};
use crate::server::App;
use crate::sse;

/// How a kept response is read.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Form {
    #[serde(default)]
    stream: Option<String>,
}

/// GET /v1/responses/{id}; with `?stream=true` the last event of a finished one.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(id): Name,
    Asked(form): Asked<Form>,
) -> Result<Response, ApiError> {
    let kept = app.responses.get(caller.tenant, &id).ok_or_else(|| ApiError::no_response("response_id", &id))?;
    if form.stream.as_deref() != Some("true") {
        return Ok(Json(kept).into_response());
    }
    let kind = match kept["status"].as_str() {
        Some(status @ ("completed" | "incomplete" | "failed")) => format!("response.{status}"),
        _ => return Err(ApiError::field("stream", format!("{id} has not ended; read it without stream until it has"))),
    };
    let (frames, response) = sse::channel();
    let event = json!({"type": kind, "sequence_number": 0, "response": kept});
    // The queue is longer than one frame.
    let _ = frames.try_send(sse::typed(&event));
    Ok(response)
}

/// GET /v1/responses/{id}/input_items, newest first as the API has it.
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(id): Name,
    query: PageQuery,
) -> Result<Json<Value>, ApiError> {
    let page = Page::read(query, 20, 100)?;
    let items = app.responses.input(caller.tenant, &id).ok_or_else(|| ApiError::no_response("response_id", &id))?;
    let mut seen = HashSet::new();
    let named = |(index, mut item): (usize, Value)| {
        let made = format!("item_{}_{index}", id.trim_start_matches("resp_"));
        // Pages go on behind a name, so it must be there once; clients choose names themselves.
        let name = item["id"].as_str().filter(|name| seen.insert((*name).to_owned())).map_or(made, str::to_owned);
        if item.is_object() {
            item["id"] = name.as_str().into();
        }
        (name, item)
    };
    let items: Vec<(String, Value)> = items.into_iter().enumerate().map(named).collect();
    Ok(Json(page.cut(items.iter().rev().map(|(name, item)| (name.as_str(), item.clone())))?))
}

/// POST /v1/responses/{id}/cancel.
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(id): Name,
) -> Result<Json<Value>, ApiError> {
    match app.responses.cancel(caller.tenant, &id) {
        None => Err(ApiError::no_response("response_id", &id)),
        Some(false) => Err(ApiError::field("response_id", format!("{id} does not run in the background"))),
        Some(true) => {
            let mut response = app.responses.get(caller.tenant, &id).unwrap_or_default();
            response["status"] = "cancelled".into();
            Ok(Json(response))
        }
    }
}

/// DELETE /v1/responses/{id}; one that runs is stopped.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(id): Name,
) -> Result<Json<Value>, ApiError> {
    if !app.responses.delete(caller.tenant, &id) {
        return Err(ApiError::no_response("response_id", &id));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}
