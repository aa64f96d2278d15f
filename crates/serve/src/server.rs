//! The server: shared state, routes, binding, shutdown.
//! Assumes an engine and a tokenizer that belong together. Refuses to start on a port that is taken.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, Uri};
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use longwave_text::Tokenizer;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::attention::Texts;
use crate::batch::{self, Batches};
use crate::errors::ApiError;
use crate::explore::{self, Explorer};
use crate::follow::Follow;
use crate::generation::EngineApi;
use crate::live::Pages;
use crate::metrics::{Metrics, log_line};
use crate::options::ServerOptions;
use crate::prefix::PrefixLog;
use crate::replays::Replays;
use crate::response_store::ResponseStore;
use crate::security::tls::{self, TlsError};
use crate::security::{self, Gate};
use crate::{
    chat, completions, connections, health, messages, metrics, models, openapi, prefix, responses, responses_kept,
    tokens,
};

/// Why the server does not run.
#[derive(Debug, Error)]
pub enum ServeError {
    /// Another program listens there.
    #[error("port {port} on {host} is in use already; stop the program that uses it or choose another with --port")]
    PortInUse {
        /// Address.
        host: String,
        /// Port.
        port: u16,
    },
    /// The address cannot be bound for another reason.
    #[error("cannot listen on {host}:{port}: {reason}; check --host and --port")]
    Bind {
        /// Address.
        host: String,
        /// Port.
        port: u16,
        /// What the system said.
        reason: io::Error,
    },
    /// TLS was asked for and cannot be had.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// What all requests share.
pub struct App {
    pub(crate) options: ServerOptions,
    pub(crate) engine: EngineApi,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Grammars that answers are held to.
    pub(crate) follow: Follow,
    /// Tokens that end a turn.
    pub(crate) stop_tokens: Vec<u32>,
    /// Unix seconds.
    pub(crate) started_at: u64,
    /// What the prefix cache did for the last requests.
    pub(crate) prefixes: PrefixLog,
    /// Responses for later requests.
    pub(crate) responses: ResponseStore,
    /// Turns of the model for later prompts.
    pub(crate) replays: Replays,
    pub(crate) metrics: Metrics,
    pub(crate) gate: Gate,
    /// Files and batches, where they are kept.
    pub(crate) batches: Option<Arc<Batches>>,
    /// Pages that look at the engine.
    pub(crate) pages: Pages,
    /// Texts whose attention is told.
    pub(crate) texts: Texts,
    /// What the explorer counts; without it there is no explorer.
    pub(crate) explorer: Option<Arc<Explorer>>,
}

impl App {
    /// Puts the parts together. At least one served name is needed.
    pub fn new(options: ServerOptions, engine: EngineApi, tokenizer: Arc<Tokenizer>) -> App {
        assert!(!options.served_model_names.is_empty(), "a served model needs a name");
        let stop_tokens = match options.stop_tokens.as_slice() {
            [] => vec![tokenizer.markers().eos],
            tokens => tokens.to_vec(),
        };
        App {
            metrics: Metrics::new(&options.served_model_names[0], engine.limits.context),
            gate: Gate::new(&options.security),
            options,
            engine,
            follow: Follow::new(tokenizer.clone()),
            tokenizer,
            stop_tokens,
            started_at: unix_seconds(),
            prefixes: PrefixLog::default(),
            responses: ResponseStore::default(),
            replays: Replays::default(),
            batches: None,
            pages: Pages::default(),
            texts: Texts::default(),
            explorer: None,
        }
    }
}

impl App {
    /// Turns files and batches on.
    pub fn with_batches(mut self, batches: Batches) -> App {
        self.batches = Some(Arc::new(batches));
        self
    }

    /// Turns the explorer on.
    pub fn with_explorer(mut self, explorer: Explorer) -> App {
        self.explorer = Some(Arc::new(explorer));
        self
    }

    /// What the address of the server begins with: `https` or `http`.
    pub fn scheme(&self) -> &'static str {
        if self.options.security.tls.is_some() { "https" } else { "http" }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The routes, behind the key check and the counters.
pub fn router(app: Arc<App>) -> Router {
    let checked = routes(&app).layer(from_fn_with_state(app.clone(), security::check));
    let router = match security::cors(&app.options.security.allowed_origins) {
        // Outside the check: a browser asks without a key whether it may send one.
        Some(cors) => checked.layer(cors),
        None => checked,
    };
    router.layer(from_fn_with_state(app.clone(), metrics::http::measure)).with_state(app)
}

/// The routes, for callers that were checked.
pub(crate) fn routes(app: &Arc<App>) -> Router<Arc<App>> {
    Router::new()
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses_kept::get).delete(responses_kept::delete))
        .route("/v1/responses/{id}/cancel", post(responses_kept::cancel))
        .route("/v1/responses/{id}/input_items", get(responses_kept::input_items))
        .route("/v1/models", get(models::list))
        // Names may hold slashes.
        .route("/v1/models/{*name}", get(models::one))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/render", post(tokens::render))
        .route("/openapi.json", get(openapi::serve))
        .route("/health", get(health::health))
        .route("/ready", get(health::health))
        .route("/ping", get(health::health))
        .route("/load", get(metrics::load))
        .route("/metrics", get(metrics::text))
        .route("/debug/prefix", get(prefix::debug))
        .route("/debug/engine", get(prefix::engine))
        .route("/version", get(health::version))
        .merge(batch::file_routes(app))
        .merge(batch::batch_routes())
        .merge(explore::server_routes(app))
        .fallback(|uri: Uri| async move { security::refusal(uri.path(), ApiError::not_found(uri.path())) })
        .method_not_allowed_fallback(|method: Method, uri: Uri| async move {
            security::refusal(uri.path(), ApiError::wrong_method(method.as_str(), uri.path()))
        })
        .layer(DefaultBodyLimit::max(app.options.max_body_bytes))
}

/// Binds the address of the options.
pub async fn bind(options: &ServerOptions) -> Result<TcpListener, ServeError> {
    if let Some(files) = &options.security.tls {
        // Read again when serving; here so that mistakes show before a model is loaded.
        tls::load(files)?;
    }
    let (host, port) = (options.host.clone(), options.port);
    TcpListener::bind((host.as_str(), port)).await.map_err(|reason| match reason.kind() {
        io::ErrorKind::AddrInUse => ServeError::PortInUse { host, port },
        _ => ServeError::Bind { host, port, reason },
    })
}

/// Serves until `shutdown` resolves, then finishes the requests that run.
pub async fn run(
    listener: TcpListener,
    app: Arc<App>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let options = &app.options;
    let tls = options.security.tls.as_ref().map(tls::load).transpose()?.map(TlsAcceptor::from);
    let log_line = options.log_stats.then(|| tokio::spawn(log_line::run(app.clone())));
    let batches = tokio::spawn(batch::serve(app.clone()));
    connections::serve(listener, router(app.clone()), &options.security, tls, shutdown).await;
    // What they were about to do is done after the next start.
    batches.abort();
    if let Some(log_line) = log_line {
        log_line.abort();
    }
    Ok(())
}
