//! /v1/batches: making, listing, looking at and cancelling batches.
//!
//! Each caller sees its own batches only. Refuses unknown endpoints, windows and files before anything is kept.

use std::sync::Arc;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Map, Value};

use super::files::{find, storage, store};
use super::line::ENDPOINTS;
use super::record::{BatchRecord, State as Reached};
use super::run;
use super::store::{Batches, MAX_BATCHES};
use crate::caller::Caller;
use crate::errors::{ApiError, json_object};
use crate::input::{Name, RawBody};
use crate::job;
use crate::page::{Page, PageQuery};
use crate::server::App;

/// Longest completion window, hours.
const MAX_WINDOW_H: u64 = 14 * 24;
/// Most pairs of `metadata`, and their lengths in characters.
const METADATA: (usize, usize, usize) = (16, 64, 512);

/// The routes.
pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/batches", post(create).get(list))
        .route("/v1/batches/{id}", get(one))
        .route("/v1/batches/{id}/cancel", post(cancel))
}

fn found(store: &Batches, caller: &Caller, id: &str) -> Result<BatchRecord, ApiError> {
    let batch = store.index().batches.get(id).filter(|batch| batch.tenant == caller.tenant).cloned();
    batch.ok_or_else(|| ApiError::no_such("batch", id, "id"))
}

async fn create(State(app): State<Arc<App>>, caller: Caller, RawBody(body): RawBody) -> Result<Json<Value>, ApiError> {
    let store = store(&app)?.clone();
    let body = json_object(&body)?;
    let text = |name: &str| match body.get(name) {
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(_) => Err(ApiError::field(name, "expected a text")),
        None => Err(ApiError::field(name, "the field is required")),
    };
    let (input, endpoint) = (text("input_file_id")?, text("endpoint")?);
    if !ENDPOINTS.contains(&endpoint) {
        return Err(ApiError::field("endpoint", format!("expected one of {}", ENDPOINTS.join(", "))));
    }
    let window_h = text("completion_window")?.strip_suffix('h').and_then(|hours| hours.parse::<u64>().ok());
    let Some(window_h) = window_h.filter(|hours| (1..=MAX_WINDOW_H).contains(hours)) else {
        return Err(ApiError::field(
            "completion_window",
            format!("expected 24h, or any hours from 1h to {MAX_WINDOW_H}h"),
        ));
    };
    match find(&store, &caller, input) {
        Some(file) if file.purpose == "batch" => {}
        Some(_) => return Err(ApiError::field("input_file_id", "the file was not uploaded with purpose batch")),
        None => return Err(ApiError::no_such("file", input, "input_file_id")),
    }
    let mut batch = run::fresh(caller.tenant, endpoint, input, window_h * 3600);
    batch.metadata = metadata(body.get("metadata"))?;
    let shown = batch.json();
    job::blocking(&app, move |_| {
        make_room(&store, caller.tenant)?;
        store.add_batch(batch).map_err(storage)
    })
    .await?;
    Ok(Json(shown))
}

fn metadata(value: Option<&Value>) -> Result<Option<Map<String, Value>>, ApiError> {
    let (pairs, key_chars, value_chars) = METADATA;
    let good = |(key, value): (&String, &Value)| {
        let value = value.as_str().is_some_and(|value| value.chars().count() <= value_chars);
        value && key.chars().count() <= key_chars
    };
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(map)) if map.len() <= pairs && map.iter().all(good) => Ok(Some(map.clone())),
        Some(_) => Err(ApiError::field(
            "metadata",
            format!(
                "expected an object of at most {pairs} texts, names up to {key_chars} and values up to {value_chars} characters"
            ),
        )),
    }
}

/// Forgets the oldest finished batch of the tenant when there are too many: nobody loses one to another.
fn make_room(store: &Batches, tenant: u64) -> Result<(), ApiError> {
    let oldest = {
        let index = store.index();
        if index.batches.len() < MAX_BATCHES {
            return Ok(());
        }
        let finished = index.batches.values().filter(|batch| batch.tenant == tenant && batch.state.is_final());
        finished.min_by_key(|batch| batch.created_at).map(|batch| batch.id.clone())
    };
    match oldest {
        Some(id) => store.forget_batch(&id).map_err(storage),
        None => {
            let message = format!("{MAX_BATCHES} batches wait or run already; try again when one has ended");
            Err(ApiError::rate_limited("too_many_batches", message, 60))
        }
    }
}

async fn list(State(app): State<Arc<App>>, caller: Caller, query: PageQuery) -> Result<Json<Value>, ApiError> {
    let page = Page::read(query, 20, 100)?;
    let mut batches: Vec<BatchRecord> = {
        let index = store(&app)?.index();
        index.batches.values().filter(|batch| batch.tenant == caller.tenant).cloned().collect()
    };
    batches.sort_by(|a, b| (b.created_at, &b.id).cmp(&(a.created_at, &a.id)));
    Ok(Json(page.cut(batches.iter().map(|batch| (batch.id.as_str(), batch.json())))?))
}

async fn one(State(app): State<Arc<App>>, caller: Caller, Name(id): Name) -> Result<Json<Value>, ApiError> {
    Ok(Json(found(store(&app)?, &caller, &id)?.json()))
}

async fn cancel(State(app): State<Arc<App>>, caller: Caller, Name(id): Name) -> Result<Json<Value>, ApiError> {
    let store = store(&app)?.clone();
    let batch = found(&store, &caller, &id)?;
    if batch.state.is_final() && batch.state != Reached::Cancelled {
        let state = serde_json::to_value(batch.state).unwrap_or_default();
        let message = format!("the batch cannot be cancelled, it is {} already", state.as_str().unwrap_or("over"));
        return Err(ApiError::conflict("batch_is_over", message));
    }
    let cancelled = job::blocking(&app, move |_| store.cancel(&id).map_err(storage)).await?;
    Ok(Json(cancelled.unwrap_or(batch).json()))
}
