//! GET /metrics in Prometheus' text form, GET /load, and what feeds them.
//!
//! vLLM's names and labels where it has a metric, `longwave:` for ours, the instrumentator's for HTTP. Three sources:
//! requests, counted as they run; the engine's status, read at a scrape; the process. Shows counts, never text.

mod buckets;
#[cfg(test)]
mod dashboard;
mod engine;
mod families;
pub(crate) mod http;
pub(crate) mod log_line;
mod process;
mod recent;
mod request;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use longwave_engine::request::Request;
use prometheus::{Histogram, IntCounterVec, Registry, TextEncoder};
use serde_json::{Value, json};

use crate::errors::ApiError;
use crate::server::App;
use families::{Maker, Sheet};
use http::HttpFamilies;
use request::RequestFamilies;

pub(crate) use request::RequestWatch;

/// Version 0.0.4 of the text form is what every scraper reads.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Everything that is counted.
pub(crate) struct Metrics {
    /// About the model; every series carries its name.
    of_model: Registry,
    /// About HTTP.
    of_server: Registry,
    model_name: String,
    requests: Arc<RequestFamilies>,
    rejections: IntCounterVec,
    answers: Histogram,
    http: HttpFamilies,
}

impl Metrics {
    pub(crate) fn new(model_name: &str, context: u32) -> Metrics {
        let labels = [("model_name", model_name), ("engine", "0")];
        let labels: HashMap<String, String> = labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let of_model = Registry::new_custom(None, Some(labels)).expect("no prefix is a good prefix");
        let of_server = Registry::new();
        let maker = Maker(&of_model);
        let requests = Arc::new(RequestFamilies::new(&maker, context));
        let rejections =
            maker.counters("vllm:admission_rejections_total", "Requests that were turned away, by reason.", "reason");
        for reason in ["queue_full", "stalled", "stopped", "key_concurrency", "key_rate"] {
            // From 0 on, so that the first one is seen as a rise.
            rejections.with_label_values(&[reason]);
        }
        let answers = maker.histogram("vllm:request_params_n", "Answers asked for to one prompt.", &buckets::ANSWERS);
        let http = HttpFamilies::new(&of_server);
        Metrics { of_model, of_server, model_name: model_name.to_owned(), requests, rejections, answers, http }
    }

    /// Follows a request that is about to be handed to the engine.
    pub(crate) fn watch(&self, request: &Request) -> RequestWatch {
        RequestWatch::new(self.requests.clone(), request)
    }

    /// Latencies of the last minute.
    pub(crate) fn latencies(&self) -> Value {
        self.requests.recent.summary(Instant::now())
    }

    /// Counts a request that was turned away.
    pub(crate) fn rejected(&self, reason: &str) {
        self.rejections.with_label_values(&[reason]).inc();
    }

    /// Counts how many answers a request asked for.
    pub(crate) fn asked_for(&self, answers: u32) {
        self.answers.observe(f64::from(answers));
    }
}

/// GET /metrics.
pub(crate) async fn text(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let metrics = &app.metrics;
    let mut sheet = Sheet::new(&[("engine", "0"), ("model_name", &metrics.model_name)]);
    engine::fill(&mut sheet, &(app.engine.status)());
    let mut families = metrics.of_model.gather();
    families.extend(sheet.families());
    families.extend(metrics.of_server.gather());
    let mut sheet = Sheet::new(&[]);
    process::fill(&mut sheet);
    families.extend(sheet.families());
    let text = TextEncoder::new().encode_to_string(&families);
    let text = text.map_err(|error| ApiError::internal(format!("writing the metrics failed: {error}")))?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}

/// GET /load: how many requests that make work run now.
pub(crate) async fn load(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"server_load": app.metrics.http.load()}))
}
