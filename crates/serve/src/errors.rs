//! Error objects in OpenAI's form: message, type, param, code.
//!
//! Every failure of a request becomes one of these, before the answer as a status, in the middle of a stream as an event.

use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use longwave_engine::request::{FinishReason, Refusal, SubmitError};
use longwave_text::ChatError;
use serde_json::{Map, Value, json};

use crate::security;

/// A failed request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) kind: &'static str,
    pub(crate) param: Option<String>,
    pub(crate) code: &'static str,
    pub(crate) retry_after_s: Option<u32>,
}

const BAD_REQUEST: &str = "invalid_request_error";
const SERVER_ERROR: &str = "server_error";

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), kind, param: None, code, retry_after_s: None }
    }

    /// A field with a value that is not accepted.
    pub(crate) fn field(param: &str, message: impl std::fmt::Display) -> ApiError {
        let mut error =
            ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, "invalid_value", format!("{param}: {message}"));
        error.param = Some(param.to_owned());
        error
    }

    /// The same of a request whose prompt is this field.
    pub(crate) fn of_prompt(mut self, param: &str) -> ApiError {
        if self.param.as_deref() == Some("messages") {
            self.param = Some(param.to_owned());
        }
        self
    }

    /// A name under which nothing is served.
    pub(crate) fn unknown_model(name: &str, served: &[String]) -> ApiError {
        let name: String = name.chars().take(100).collect();
        let message = format!("the model {name:?} is not served here; served: {}", served.join(", "));
        let mut error = ApiError::new(StatusCode::NOT_FOUND, BAD_REQUEST, "model_not_found", message);
        error.param = Some("model".to_owned());
        error
    }

    /// Prompt and answer do not fit into the context.
    pub(crate) fn too_long(param: &str, prompt: usize, completion: u32, context: u32) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens. However, you requested {} tokens ({prompt} in \
             the messages, {completion} in the completion). Please reduce the length of the messages or completion.",
            prompt as u64 + u64::from(completion)
        );
        let mut error = ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, "context_length_exceeded", message);
        error.param = Some(param.to_owned());
        error
    }

    pub(crate) fn not_found(path: &str) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, BAD_REQUEST, "not_found", format!("there is no route {path}"))
    }

    /// A response that is not kept, or not any more.
    pub(crate) fn no_response(param: &str, id: &str) -> ApiError {
        let message = format!(
            "no response {id:?} is kept here; responses are kept in memory until newer ones need the room or the server \
             restarts; send the whole conversation as input"
        );
        let mut error = ApiError::new(StatusCode::NOT_FOUND, BAD_REQUEST, "response_not_found", message);
        error.param = Some(param.to_owned());
        error
    }

    pub(crate) fn wrong_method(method: &str, path: &str) -> ApiError {
        let message = format!("{path} does not answer {method}");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, BAD_REQUEST, "method_not_allowed", message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER_ERROR, "internal_error", message)
    }

    pub(crate) fn stopped(reason: &str) -> ApiError {
        let message = format!("the engine has stopped: {reason}");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SERVER_ERROR, "engine_stopped", message)
    }

    /// No step completed for `seconds`.
    pub(crate) fn stalled(seconds: u32) -> ApiError {
        let message = SubmitError::Stalled { seconds }.to_string();
        let mut error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SERVER_ERROR, "engine_stalled", message);
        error.retry_after_s = Some(seconds);
        error
    }

    pub(crate) fn cancelled() -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SERVER_ERROR, "cancelled", "the request was cancelled")
    }

    /// A request that ended badly.
    pub(crate) fn of_end(reason: FinishReason) -> ApiError {
        match reason {
            FinishReason::Cancelled => ApiError::cancelled(),
            FinishReason::Refused(refusal) => refusal.into(),
            FinishReason::Constraint(why) => ApiError::grammar(&why),
            FinishReason::Failed(reason) => ApiError::internal(reason),
            FinishReason::Stalled { seconds } => ApiError::stalled(seconds),
            FinishReason::Stop(_) | FinishReason::Complete | FinishReason::Length => {
                ApiError::internal("the answer ended well")
            }
        }
    }

    /// An answer whose grammar grew beyond the limits of a step.
    pub(crate) fn grammar(why: &str) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, "grammar_too_complex", why)
    }

    /// No key, or one that is not accepted; the same words for both.
    pub(crate) fn unauthorised() -> ApiError {
        let message =
            "an API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY` with a key of this server";
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
    }

    /// Too much of one key.
    pub(crate) fn rate_limited(code: &'static str, message: String, retry_after_s: u32) -> ApiError {
        let mut error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", code, message);
        error.retry_after_s = Some(retry_after_s);
        error
    }

    /// Headers over the limit.
    pub(crate) fn head_too_large(bytes: usize, most: usize) -> ApiError {
        let message = format!("the headers have {bytes} bytes, this server takes {most} (--max-header-bytes)");
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        ApiError::new(status, BAD_REQUEST, "headers_too_large", message)
    }

    /// Files and batches were asked for where there are none.
    pub(crate) fn no_batches() -> ApiError {
        let message = "files and batches are off on this server; start it with --batch-dir DIR";
        ApiError::new(StatusCode::NOT_FOUND, BAD_REQUEST, "batches_off", message)
    }

    /// Something that the caller does not have.
    pub(crate) fn no_such(what: &str, id: &str, param: &str) -> ApiError {
        let message = format!("there is no {what} {:?}", id.chars().take(100).collect::<String>());
        let mut error = ApiError::new(StatusCode::NOT_FOUND, BAD_REQUEST, "not_found", message);
        error.param = Some(param.to_owned());
        error
    }

    /// Not possible in the state that something is in.
    pub(crate) fn conflict(code: &'static str, message: String) -> ApiError {
        ApiError::new(StatusCode::CONFLICT, BAD_REQUEST, code, message)
    }

    /// An upload over the limit.
    pub(crate) fn file_too_large(most: u64) -> ApiError {
        let message =
            format!("the file is larger than the {most} bytes that this server takes (--batch-max-file-bytes)");
        let mut error = ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, BAD_REQUEST, "file_too_large", message);
        error.param = Some("file".to_owned());
        error
    }

    /// No room for another file.
    pub(crate) fn files_full(most_bytes: u64, most_files: usize) -> ApiError {
        let message = format!(
            "the server keeps {most_bytes} bytes (--batch-max-bytes) in {most_files} files at most; delete some first"
        );
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, BAD_REQUEST, "storage_full", message)
    }

    fn response(self, body: Value) -> Response {
        let mut response = (self.status, axum::Json(body)).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// The error object.
    pub(crate) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> ApiError {
        let mut api = ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, "invalid_value", error.message);
        api.param = error.param;
        api
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        match error {
            SubmitError::QueueFull { retry_after_s, .. } => {
                let status = StatusCode::TOO_MANY_REQUESTS;
                let mut api = ApiError::new(status, "rate_limit_error", "queue_full", error.to_string());
                api.retry_after_s = Some(retry_after_s);
                api
            }
            SubmitError::Stalled { seconds } => ApiError::stalled(seconds),
            SubmitError::Stopped(reason) => ApiError::stopped(&reason),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        match refusal {
            Refusal::TooLong { prompt, max_tokens, context } => {
                ApiError::too_long("messages", prompt, max_tokens, context)
            }
            Refusal::NeverFits { .. } => {
                let code = "context_length_exceeded";
                let mut api = ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, code, refusal.to_string());
                api.param = Some("messages".to_owned());
                api
            }
            Refusal::NoAttention { .. } => ApiError::field("layer", refusal),
            Refusal::EmptyPrompt | Refusal::BadToken { .. } => ApiError::field("messages", refusal),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.body();
        self.response(body)
    }
}

/// The same failure in the form of Anthropic's protocol.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AnthropicError(pub(crate) ApiError);

impl AnthropicError {
    /// The error object.
    pub(crate) fn body(&self) -> Value {
        let kind = match self.0.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            400..500 => "invalid_request_error",
            _ => "api_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.0.message}})
    }
}

impl<E: Into<ApiError>> From<E> for AnthropicError {
    fn from(error: E) -> AnthropicError {
        AnthropicError(error.into())
    }
}

impl IntoResponse for AnthropicError {
    fn into_response(self) -> Response {
        let body = self.body();
        self.0.response(body)
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> ApiError {
        let message = format!("the path: {}", rejection.body_text());
        ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, "invalid_path", message)
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> ApiError {
        let message = format!("the query: {}", rejection.body_text());
        ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, "invalid_query", message)
    }
}

/// The bytes of a body, or why there are none.
pub(crate) fn whole_body(body: Result<Bytes, BytesRejection>, max_bytes: usize) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            let message = format!("the body is larger than the {max_bytes} bytes that this server takes");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, BAD_REQUEST, "request_too_large", message)
        } else if security::is_slow_sender(&rejection) {
            let message = "the body came to a halt for too long; send it again, without pauses";
            ApiError::new(StatusCode::REQUEST_TIMEOUT, BAD_REQUEST, "body_timeout", message)
        } else {
            ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, "invalid_body", rejection.body_text())
        }
    })
}

/// The JSON object of a body.
pub(crate) fn json_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let bad = |message: String| ApiError::new(StatusCode::BAD_REQUEST, BAD_REQUEST, "invalid_json", message);
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(bad("the body must be a JSON object".to_owned())),
        // The parser's text ends with line and column.
        Err(error) => Err(bad(format!("the body is not valid JSON: {error}"))),
    }
}
