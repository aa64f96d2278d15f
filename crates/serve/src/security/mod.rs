//! Who may ask, how much, and over what: API keys, limits per key, sizes of heads, slow senders, other origins, TLS.
//!
//! Everything needs a key once there is one, but for [`OPEN`]: probes and scrapers have none. A request is refused before
//! its body is read. Keys and prompts are never logged here.

mod keys;
mod limits;
pub(crate) mod tls;

use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};
use tower_http::timeout::{TimeoutBody, TimeoutError};

use crate::body_guard;
use crate::caller::Caller;
use crate::errors::{AnthropicError, ApiError};
use crate::explore;
use crate::server::App;
use limits::{Limits, Over};

pub use keys::{ApiKeys, KeyError};
pub use tls::{TlsError, TlsFiles};

/// Paths that never need a key.
const OPEN: [&str; 6] = ["/health", "/ready", "/ping", "/version", "/load", "/metrics"];

/// What the server is told about who may ask.
#[derive(Debug, Clone, PartialEq)]
pub struct SecurityOptions {
    /// Accepted keys; none lets everybody in.
    pub keys: ApiKeys,
    /// Most requests of one key that run at once.
    pub max_concurrent_per_key: Option<u32>,
    /// Most requests of one key in a minute.
    pub requests_per_minute_per_key: Option<u32>,
    /// Keeps the cached prefixes of keys apart.
    pub tenant_isolation: bool,
    /// Web pages whose scripts may ask, as `https://host:port`; `*` is all. None by default.
    pub allowed_origins: Vec<String>,
    /// Serves TLS alone when set.
    pub tls: Option<TlsFiles>,
    /// Most bytes of names and values of a request's headers.
    pub max_header_bytes: usize,
    /// Longest time for the head of a request to arrive, and for a connection to be idle.
    pub header_timeout: Duration,
    /// Longest pause inside the body of a request.
    pub body_timeout: Duration,
}

impl Default for SecurityOptions {
    fn default() -> Self {
        SecurityOptions {
            keys: ApiKeys::default(),
            max_concurrent_per_key: None,
            requests_per_minute_per_key: None,
            tenant_isolation: false,
            allowed_origins: Vec::new(),
            tls: None,
            max_header_bytes: 32 << 10,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
        }
    }
}

/// What the check remembers between requests.
pub(crate) struct Gate {
    limits: Limits,
    started: Instant,
}

impl Gate {
    pub(crate) fn new(options: &SecurityOptions) -> Gate {
        let (most, per_minute) = (options.max_concurrent_per_key, options.requests_per_minute_per_key);
        Gate { limits: Limits::new(options.keys.len(), most, per_minute), started: Instant::now() }
    }
}

/// The middleware: refuses what may not ask, marks the rest with its [`Caller`].
pub(crate) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    match admit(&app, &path, request) {
        Err(error) => refusal(&path, error),
        Ok((mut request, permit)) => match permit {
            None => next.run(request).await,
            // A streamed answer holds its place until its last byte.
            Some(permit) => {
                let permit = Arc::new(permit);
                request.extensions_mut().insert(Place(Some(permit.clone())));
                body_guard::hold(next.run(request).await, permit)
            }
        },
    }
}

/// A place among the requests of a key, for what goes on after the answer.
#[derive(Clone, Default)]
pub(crate) struct Place(#[expect(dead_code, reason = "held for its drop")] Option<Arc<limits::Permit>>);

impl<S: Sync> FromRequestParts<S> for Place {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Place, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

fn admit(app: &App, path: &str, request: Request) -> Result<(Request, Option<limits::Permit>), ApiError> {
    let options = &app.options.security;
    let head_bytes = head_bytes(request.headers());
    if head_bytes > options.max_header_bytes {
        return Err(ApiError::head_too_large(head_bytes, options.max_header_bytes));
    }
    let mut request = request.map(|body| Body::new(TimeoutBody::new(options.body_timeout, body)));
    if OPEN.contains(&path) || explore::is_open(path) {
        return Ok((request, None));
    }
    let (number, tenant) = match options.keys.find(request.headers()) {
        Some(number) => (number, options.keys.tenant(number)),
        None if options.keys.is_empty() => (0, 0),
        None => return Err(ApiError::unauthorised()),
    };
    let mut permit = None;
    // Lists and states are read again and again by clients that wait; what makes work is posted.
    if request.method() == Method::POST {
        let entered = app.gate.limits.enter(number, app.gate.started.elapsed());
        permit = Some(entered.map_err(|over| {
            app.metrics.rejected(match over {
                Over::Concurrent(_) => "key_concurrency",
                Over::Rate { .. } => "key_rate",
            });
            too_many(over)
        })?);
    }
    request.extensions_mut().insert(Caller { tenant, isolated: options.tenant_isolation, batch: false });
    Ok((request, permit))
}

/// Names and values, with what separates them.
fn head_bytes(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum()
}

fn too_many(over: Over) -> ApiError {
    match over {
        Over::Concurrent(most) => {
            let message = format!("{most} requests of this API key run already; wait until one of them has ended");
            ApiError::rate_limited("concurrency_limit_exceeded", message, 1)
        }
        Over::Rate { per_minute, retry_after_s } => {
            let message =
                format!("this API key may send {per_minute} requests per minute; try again in {retry_after_s} s");
            ApiError::rate_limited("rate_limit_exceeded", message, retry_after_s)
        }
    }
}

/// The error in the form that the route's clients read.
pub(crate) fn refusal(path: &str, error: ApiError) -> Response {
    let is_messages = path == "/v1/messages" || path.starts_with("/v1/messages/");
    if is_messages { AnthropicError(error).into_response() } else { error.into_response() }
}

/// Whether a body ended because its sender was silent for too long.
pub(crate) fn is_slow_sender(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<TimeoutError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Lets scripts of other pages ask, when some may. Assumes origins that are header values.
pub(crate) fn cors(origins: &[String]) -> Option<CorsLayer> {
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|origin| origin.parse().ok()).collect();
    if origins.is_empty() {
        return None;
    }
    let everybody = origins.iter().any(|origin| origin == "*");
    let allowed = if everybody { AllowOrigin::any() } else { AllowOrigin::list(origins) };
    let shown = [header::RETRY_AFTER, HeaderName::from_static("x-request-id")];
    let layer = CorsLayer::new().allow_origin(allowed).allow_methods(AllowMethods::mirror_request());
    // Keys travel in headers that scripts set; no cookie is ever looked at.
    Some(layer.allow_headers(AllowHeaders::mirror_request()).expose_headers(shown))
}
