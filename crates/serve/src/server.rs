//! The server: shared state, routes, binding, shutdown.
//! Assumes an engine and a tokenizer that belong together. Refuses to start on a port that is taken.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, Uri};
use axum::routing::{get, post};
use longwave_text::Tokenizer;
use thiserror::Error;
use tokio::net::TcpListener;

use crate::errors::ApiError;
use crate::follow::Follow;
use crate::generation::EngineApi;
use crate::options::ServerOptions;
use crate::prefix::PrefixLog;
use crate::replays::Replays;
use crate::response_store::ResponseStore;
use crate::{chat, completions, health, messages, models, openapi, prefix, responses, responses_kept, tokens};

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
    /// Accepting connections failed.
    #[error("the server stopped: {0}")]
    Stopped(io::Error),
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
            options,
            engine,
            follow: Follow::new(tokenizer.clone()),
            tokenizer,
            stop_tokens,
            started_at: unix_seconds(),
            prefixes: PrefixLog::default(),
            responses: ResponseStore::default(),
            replays: Replays::default(),
        }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The routes.
pub fn router(app: Arc<App>) -> Router {
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
        .route("/debug/prefix", get(prefix::debug))
        .route("/debug/engine", get(prefix::engine))
        .route("/version", get(health::version))
        .fallback(|uri: Uri| async move { ApiError::not_found(uri.path()) })
        .method_not_allowed_fallback(|method: Method, uri: Uri| async move {
            ApiError::wrong_method(method.as_str(), uri.path())
        })
        .layer(DefaultBodyLimit::max(app.options.max_body_bytes))
        .with_state(app)
}

/// Binds the address of the options.
pub async fn bind(options: &ServerOptions) -> Result<TcpListener, ServeError> {
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
    axum::serve(listener, router(app)).with_graceful_shutdown(shutdown).await.map_err(ServeError::Stopped)
}
