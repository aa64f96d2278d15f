//! Every HTTP request, by route, method and class of status, under the names of the instrumentator that vLLM uses.
//!
//! Routes are counted by their pattern (`/v1/models/{*name}`), unknown ones as `none`, so clients cannot make series.
//! Time runs to the last byte of the answer or to the client's leaving; a request that leaves before it has a status counts as 499.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use prometheus::{HistogramVec, IntCounterVec, Registry};

use super::buckets;
use super::families::Maker;
use crate::body_guard;
use crate::server::App;

/// Probes and scrapes would drown the rest.
const NOT_COUNTED: [&str; 6] = ["/metrics", "/health", "/ready", "/ping", "/load", "/version"];

/// Families over HTTP requests.
pub(super) struct HttpFamilies {
    requests: IntCounterVec,
    seconds: HistogramVec,
    request_bytes: HistogramVec,
    response_bytes: HistogramVec,
    /// Requests that make work and run now.
    load: Arc<AtomicI64>,
}

impl HttpFamilies {
    pub(super) fn new(registry: &Registry) -> HttpFamilies {
        let maker = Maker(registry);
        let sizes = [1e3, 1e4, 1e5, 1e6, 1e7];
        HttpFamilies {
            requests: maker.labelled("http_requests_total", "Requests.", &["handler", "method", "status"]),
            seconds: maker.histograms(
                "http_request_duration_seconds",
                "To the last byte of the answer.",
                &buckets::HTTP_S,
                &["handler", "method"],
            ),
            request_bytes: maker.histograms(
                "http_request_size_bytes",
                "Declared bodies of requests.",
                &sizes,
                &["handler"],
            ),
            response_bytes: maker.histograms(
                "http_response_size_bytes",
                "Declared bodies of answers; 0 for streams.",
                &sizes,
                &["handler"],
            ),
            load: Arc::default(),
        }
    }

    pub(super) fn load(&self) -> i64 {
        self.load.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
impl HttpFamilies {
    /// Makes every family appear.
    pub(super) fn touch(&self) {
        self.requests.with_label_values(&["/", "GET", "2xx"]);
        self.seconds.with_label_values(&["/", "GET"]);
        self.request_bytes.with_label_values(&["/"]);
        self.response_bytes.with_label_values(&["/"]);
    }
}

/// The middleware.
pub(crate) async fn measure(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    if path.as_deref().is_some_and(|path| NOT_COUNTED.contains(&path)) {
        return next.run(request).await;
    }
    let handler = path.unwrap_or_else(|| "none".to_owned());
    let http = &app.metrics.http;
    http.request_bytes.with_label_values(&[&handler]).observe(declared_bytes(request.headers()));
    let method = method_name(request.method());
    let work = (method == "POST").then(|| http.load.clone());
    if let Some(load) = &work {
        load.fetch_add(1, Ordering::Relaxed);
    }
    let mut running = Running { app: app.clone(), handler, method, started: Instant::now(), class: None, work };
    let response = next.run(request).await;
    running.class = Some(class_of(response.status().as_u16()));
    let bytes = declared_bytes(response.headers());
    app.metrics.http.response_bytes.with_label_values(&[&running.handler]).observe(bytes);
    body_guard::hold(response, running)
}

/// A request until its answer ends.
struct Running {
    app: Arc<App>,
    handler: String,
    method: &'static str,
    started: Instant,
    class: Option<&'static str>,
    work: Option<Arc<AtomicI64>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let http = &self.app.metrics.http;
        let seconds = self.started.elapsed().as_secs_f64();
        http.seconds.with_label_values(&[&self.handler, self.method]).observe(seconds);
        http.requests.with_label_values(&[&self.handler, self.method, self.class.unwrap_or("4xx")]).inc();
        if let Some(load) = &self.work {
            load.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn declared_bytes(headers: &HeaderMap) -> f64 {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    length.unwrap_or(0) as f64
}

/// Methods are made up by clients; those without a route share a name.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        _ => "other",
    }
}

fn class_of(status: u16) -> &'static str {
    match status / 100 {
        1 => "1xx",
        2 => "2xx",
        3 => "3xx",
        4 => "4xx",
        _ => "5xx",
    }
}
