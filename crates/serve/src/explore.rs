//! The explorer: a page that shows how V4's attention works, what its cache takes and what a running engine does.
//!
//! The files are part of the program and ask their own origin only, which their policy enforces. Numbers of memory come from
//! the program around the server, which knows models. Nothing here needs a key but what comes from the engine. Refuses names of files that
//! it does not have.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::Value;
use tokio::net::TcpListener;

use crate::errors::ApiError;
use crate::security::SecurityOptions;
use crate::server::App;
use crate::{attention, connections, live};

/// The page itself.
const INDEX: &str = include_str!("../explore/index.html");

/// The other files: name, content type, text.
const FILES: &[(&str, &str, &str)] = &[
    ("style.css", CSS, include_str!("../explore/style.css")),
    ("app.js", JS, include_str!("../explore/app.js")),
    ("dom.js", JS, include_str!("../explore/dom.js")),
    ("answer.js", JS, include_str!("../explore/answer.js")),
    ("rules.js", JS, include_str!("../explore/rules.js")),
    ("attention.js", JS, include_str!("../explore/attention.js")),
    ("attention_figure.js", JS, include_str!("../explore/attention_figure.js")),
    ("attention_lesson.js", JS, include_str!("../explore/attention_lesson.js")),
    ("attention_text.js", JS, include_str!("../explore/attention_text.js")),
    ("attention_mask.js", JS, include_str!("../explore/attention_mask.js")),
    ("words.js", JS, include_str!("../explore/words.js")),
    ("live.js", JS, include_str!("../explore/live.js")),
    ("live_figures.js", JS, include_str!("../explore/live_figures.js")),
    ("live_operators.js", JS, include_str!("../explore/live_operators.js")),
    ("live_source.js", JS, include_str!("../explore/live_source.js")),
    ("memory.js", JS, include_str!("../explore/memory.js")),
    ("memory_data.js", JS, include_str!("../explore/memory_data.js")),
    ("memory_figures.js", JS, include_str!("../explore/memory_figures.js")),
];
const JS: &str = "text/javascript; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";

/// Own files and data only, whatever a file may hold.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'self'";

/// Where the page finds its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Beside a running engine.
    Server,
    /// Beside a calculator, and a model for texts.
    Local,
    /// In files of its own.
    Files,
}

impl Place {
    fn name(self) -> &'static str {
        match self {
            Place::Server => "server",
            Place::Local => "local",
            Place::Files => "files",
        }
    }
}

/// A value of a query that is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Its name.
    pub field: String,
    /// What is accepted.
    pub message: String,
}

/// Counts from the values of a query.
pub type Counter = Box<dyn Fn(&HashMap<String, String>) -> Result<Value, Refused> + Send + Sync>;

/// What the program around the server counts.
pub struct Explorer {
    /// Models whose memory can be counted, as JSON.
    pub models: Value,
    /// One setting.
    pub memory: Counter,
    /// The same over contexts.
    pub table: Counter,
}

/// All files of the page, for a folder: name and text.
pub fn files(place: Place) -> Vec<(&'static str, String)> {
    let index = ("index.html", page(place));
    std::iter::once(index).chain(FILES.iter().map(|(name, _, text)| (*name, (*text).to_owned()))).collect()
}

fn page(place: Place) -> String {
    INDEX.replace("name=\"explorer\" content=\"server\"", &format!("name=\"explorer\" content=\"{}\"", place.name()))
}

/// Whether a path of the explorer is for everybody: it shows nothing of the requests.
pub(crate) fn is_open(path: &str) -> bool {
    let closed = ["/explore/api/live", "/explore/api/attention"];
    path == "/explore" || (path.starts_with("/explore/") && !closed.iter().any(|closed| path.starts_with(closed)))
}

/// The page and its data until `shutdown` resolves. Of a model in `app` it shows what tokens read, and nothing else.
pub async fn serve(
    listener: TcpListener,
    explorer: Explorer,
    app: Option<Arc<App>>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let of_model = match app {
        Some(app) => {
            let most = DefaultBodyLimit::max(app.options.max_body_bytes);
            attention::routes().layer(most).with_state(app)
        }
        None => Router::new().route("/explore/api/about", get(|| async { attention::nothing() })),
    };
    let routes = routes(Place::Local)
        .route("/", get(|| async { Redirect::temporary("explore/") }))
        .fallback(|| async { StatusCode::NOT_FOUND })
        .with_state(Arc::new(explorer))
        .merge(of_model);
    connections::serve(listener, routes, &SecurityOptions::default(), None, shutdown).await;
}

/// The same beside an engine; nothing when the explorer is off.
pub(crate) fn server_routes(app: &Arc<App>) -> Router<Arc<App>> {
    match &app.explorer {
        None => Router::new(),
        Some(explorer) => {
            let live = Router::new().route("/explore/api/live", get(live::live));
            live.merge(attention::routes()).merge(routes(Place::Server).with_state(explorer.clone()))
        }
    }
}

fn routes(place: Place) -> Router<Arc<Explorer>> {
    Router::new()
        .route("/explore", get(|| async { Redirect::permanent("explore/") }))
        .route("/explore/", get(move || async move { file(HTML, page(place)) }))
        .route("/explore/{name}", get(one))
        .route(
            "/explore/api/models",
            get(|State(explorer): State<Arc<Explorer>>| async move { Json(explorer.models.clone()) }),
        )
        .route("/explore/api/memory", get(memory))
        .route("/explore/api/table", get(table))
}

async fn one(Path(name): Path<String>) -> Result<Response, ApiError> {
    let found = FILES.iter().find(|(known, _, _)| *known == name);
    let (_, kind, text) = found.ok_or_else(|| ApiError::not_found(&format!("/explore/{name}")))?;
    Ok(file(kind, *text))
}

fn file(kind: &'static str, text: impl Into<String>) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, text.into()).into_response()
}

type Asked = Query<HashMap<String, String>>;

async fn memory(State(explorer): State<Arc<Explorer>>, Query(query): Asked) -> Result<Json<Value>, ApiError> {
    answer((explorer.memory)(&query))
}

async fn table(State(explorer): State<Arc<Explorer>>, Query(query): Asked) -> Result<Json<Value>, ApiError> {
    answer((explorer.table)(&query))
}

fn answer(counted: Result<Value, Refused>) -> Result<Json<Value>, ApiError> {
    counted.map(Json).map_err(|refused| ApiError::field(&refused.field, refused.message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_a_file_names_is_there_and_nothing_lies_elsewhere() {
        for (name, text) in files(Place::Files) {
            for rest in text.split("from \"./").skip(1).chain(text.split("src=\"").skip(1)) {
                let wanted = rest.split('"').next().unwrap();
                assert!(FILES.iter().any(|(known, _, _)| *known == wanted), "{name} asks for {wanted}");
            }
            let elsewhere = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!elsewhere.contains("http://") && !elsewhere.contains("https://"), "{name}");
        }
        assert!(page(Place::Local).contains("content=\"local\""));
    }

    #[test]
    fn only_what_comes_from_the_engine_needs_a_key() {
        assert!(["/explore", "/explore/", "/explore/app.js", "/explore/api/memory"].iter().all(|path| is_open(path)));
        assert!(
            ["/explore/api/live", "/explore/api/attention", "/explorer", "/v1/models"]
                .iter()
                .all(|path| !is_open(path))
        );
    }
}
