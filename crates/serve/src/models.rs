//! GET /v1/models and the names under which the model answers.
//! Names match in any case and with a `[1m]` suffix; an unknown name is a 404 that lists the served ones.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::errors::ApiError;
use crate::input::Name;
use crate::server::App;

/// Every served name.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let data: Vec<Value> = app.options.served_model_names.iter().map(|name| model(&app, name)).collect();
    Json(json!({"object": "list", "data": data}))
}

/// One name.
pub(crate) async fn one(State(app): State<Arc<App>>, Name(name): Name) -> Result<Json<Value>, ApiError> {
    Ok(Json(model(&app, resolve(&app, &name)?)))
}

fn model(app: &App, name: &str) -> Value {
    json!({
        "id": name, "object": "model", "created": app.started_at, "owned_by": "longwave",
        "root": app.options.served_model_names.first(), "parent": null, "max_model_len": app.engine.limits.context,
    })
}

/// The served name that a client means: any case, without the `[1m]` that some clients append.
pub(crate) fn resolve<'a>(app: &'a App, name: &str) -> Result<&'a str, ApiError> {
    let plain = |name: &str| {
        let name = name.trim().to_lowercase();
        name.strip_suffix("[1m]").map(str::to_owned).unwrap_or(name)
    };
    let wanted = plain(name);
    let served = &app.options.served_model_names;
    let found = served.iter().find(|served| plain(served) == wanted);
    found.map(String::as_str).ok_or_else(|| ApiError::unknown_model(name, served))
}
