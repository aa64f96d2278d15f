//! GET /health, /ready, /ping and /version.
//! Bad health means that the engine takes no requests now; it is asked at every call, nothing is cached.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::server::App;

/// 200 while the engine works, else 503 with the reason.
pub(crate) async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Value>) {
    let status = (app.engine.status)();
    let (code, text) = match (status.alive, status.stalled) {
        (true, false) => (StatusCode::OK, "ok"),
        (true, true) => (StatusCode::SERVICE_UNAVAILABLE, "no step of the engine has completed for too long"),
        (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "the engine has stopped"),
    };
    (code, Json(json!({"status": text})))
}

/// The version of this build.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}
