//! The routes over kept responses: read, list the input, cancel, delete.
//! One that is unknown, forgotten or another tenant's is a 404 that says how long responses are kept.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::errors::ApiError;
use crate::server::App;
use crate::sse;
use crate::tenant::Tenant;

/// How a kept response is read.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Form {
    #[serde(default)]
    stream: Option<String>,
}

/// GET /v1/responses/{id}; with `?stream=true` the last event of a finished one.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    id: Result<Path<String>, PathRejection>,
    form: Result<Query<Form>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Path(id) = id?;
    let Query(form) = form?;
    let kept = app.responses.get(tenant.0, &id).ok_or_else(|| ApiError::no_response("response_id", &id))?;
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
    tenant: Tenant,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id?;
    let items = app.responses.input(tenant.0, &id).ok_or_else(|| ApiError::no_response("response_id", &id))?;
    let with_id = |(index, mut item): (usize, Value)| {
        if item.get("id").is_none_or(Value::is_null) && item.is_object() {
            item["id"] = format!("item_{}_{index}", id.trim_start_matches("resp_")).into();
        }
        item
    };
    let mut data: Vec<Value> = items.into_iter().enumerate().map(with_id).collect();
    data.reverse();
    let ends = [data.first(), data.last()].map(|item| item.map(|item| item["id"].clone()));
    Ok(Json(json!({
        "object": "list", "data": data, "first_id": ends[0], "last_id": ends[1], "has_more": false,
    })))
}

/// POST /v1/responses/{id}/cancel.
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id?;
    match app.responses.cancel(tenant.0, &id) {
        None => Err(ApiError::no_response("response_id", &id)),
        Some(false) => Err(ApiError::field("response_id", format!("{id} does not run in the background"))),
        Some(true) => {
            let mut response = app.responses.get(tenant.0, &id).unwrap_or_default();
            response["status"] = "cancelled".into();
            Ok(Json(response))
        }
    }
}

/// DELETE /v1/responses/{id}; one that runs is stopped.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id?;
    if !app.responses.delete(tenant.0, &id) {
        return Err(ApiError::no_response("response_id", &id));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}
