//! GET /health, /ready and /version.
//! Bad health means that the engine takes no more requests; it is asked at every call, nothing is cached.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::server::App;

/// 200 while the engine works, else 503.
pub(crate) async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Value>) {
    if (app.engine.alive)() {
        (StatusCode::OK, Json(json!({"status": "ok"})))
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "the engine has stopped"})))
    }
}

/// The version of this build.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}
