//! POST /v1/responses: OpenAI's Responses. `responses_stream.rs` runs the answer, `response_items.rs` has its items,
//! `response_store.rs` what is kept; the routes over kept responses are in `responses_kept.rs`.
//!
//! Refuses server-side conversations and prompt templates, which live in OpenAI's cloud, and streams in the background.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use longwave_text::{ChatPlan, ToolNames};
use serde_json::{Map, Value, json};

use crate::answer::Usage;
use crate::caller::Caller;
use crate::controls::{Controls, Fields, Protocol};
use crate::errors::{ApiError, json_object};
use crate::input::RawBody;
use crate::job::{self, Job, fresh_id};
use crate::response_store::Turn;
use crate::security::Place;
use crate::server::{App, unix_seconds};
use crate::{responses_stream, sse};

/// What the answer repeats and what becomes of it.
pub(crate) struct Head {
    /// The response object before anything was generated.
    pub(crate) response: Value,
    pub(crate) names: ToolNames,
    pub(crate) seal: bool,
    pub(crate) keep_alive: std::time::Duration,
    /// Keep it for later requests.
    pub(crate) store: bool,
    pub(crate) tenant: u64,
    /// Input items of this turn.
    pub(crate) input: Vec<Value>,
    pub(crate) before: Option<Arc<Turn>>,
    stream: bool,
    background: bool,
}

/// The handler.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    place: Place,
    caller: Caller,
    RawBody(body): RawBody,
) -> Result<Response, ApiError> {
    let (job, head) = job::blocking(&app, move |app| prepare(app, caller, json_object(&body)?)).await?;
    let id = head.response["id"].as_str().unwrap_or_default().to_owned();
    let mut answers = job::submit(&app, &caller, &id, job)?;
    job::started(&app, &mut answers, head.stream || head.background).await?;
    let Some(answer) = answers.pop() else { return Err(ApiError::internal("no answer was begun")) };
    if head.stream {
        let (frames, response) = sse::channel();
        tokio::spawn(responses_stream::stream(app, head, answer, frames));
        return Ok(response);
    }
    if head.background {
        let queued = head.response.clone();
        responses_stream::in_background(app, head, answer, place);
        return Ok(Json(queued).into_response());
    }
    Ok(Json(responses_stream::whole(&app, head, answer).await?).into_response())
}

fn prepare(app: &App, caller: Caller, mut body: Map<String, Value>) -> Result<(Job, Head), ApiError> {
    let model = job::model(app, &body)?.to_owned();
    for (name, why) in [
        ("conversation", "conversations are not kept here; send the items, or previous_response_id"),
        ("prompt", "prompt templates are not kept here; send instructions and input"),
    ] {
        if body.get(name).is_some_and(|value| !value.is_null()) {
            return Err(ApiError::field(name, why));
        }
    }
    let fields = Fields(&body);
    let (store, background) = (fields.flag("store")?.unwrap_or(true), fields.flag("background")?.unwrap_or(false));
    let controls = Controls::read(&body, Protocol::Responses, &app.options.sampling, app.engine.limits.vocab)?;
    let stream = controls.stream;
    if background && stream {
        return Err(ApiError::field("stream", "a response in the background is not streamed; read it with GET"));
    }
    if background && !store {
        return Err(ApiError::field("store", "a response in the background must be kept; leave store out"));
    }
    let seal = body.get("include").and_then(Value::as_array);
    let seal = seal.is_some_and(|list| list.iter().any(|item| item == "reasoning.encrypted_content"));
    let (input, before) = with_history(app, caller, &mut body)?;
    let plan = ChatPlan::from_responses(&body, app.options.chat)?;
    let names = plan.tool_names.clone();
    let response = echo(&body, &model, background, store, plan.thinking());
    let job = job::of_plan(app, &caller, plan, controls, "input")?;
    let keep_alive = app.options.keep_alive;
    Ok((
        job,
        Head { response, names, seal, keep_alive, store, tenant: caller.tenant, input, before, stream, background },
    ))
}

/// Puts the turns before this one in front of its input. Gives the items of this turn and the turn before.
fn with_history(
    app: &App,
    caller: Caller,
    body: &mut Map<String, Value>,
) -> Result<(Vec<Value>, Option<Arc<Turn>>), ApiError> {
    let own = match body.get("input") {
        Some(Value::Array(items)) => items.clone(),
        Some(Value::String(text)) => vec![json!({"type": "message", "role": "user", "content": text})],
        // A wrong type is refused where the input is read.
        _ => Vec::new(),
    };
    let id = match body.get("previous_response_id") {
        None | Some(Value::Null) => return Ok((own, None)),
        Some(Value::String(id)) => id,
        Some(_) => return Err(ApiError::field("previous_response_id", "expected a string")),
    };
    let found = app.responses.history(caller.tenant, id);
    let (mut items, turn) = found.ok_or_else(|| ApiError::no_response("previous_response_id", id))?;
    items.extend(own.iter().cloned());
    body.insert("input".into(), items.into());
    Ok((own, Some(turn)))
}

/// The response object with what the request said.
fn echo(body: &Map<String, Value>, model: &str, background: bool, store: bool, thinking: bool) -> Value {
    let or = |name: &str, default: Value| body.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(default);
    let reasoning = or("reasoning", json!({}));
    let effort = match reasoning.get("effort").filter(|effort| !effort.is_null()) {
        Some(effort) => effort.clone(),
        None => if thinking { "high" } else { "none" }.into(),
    };
    let mut text = or("text", json!({}));
    if text.get("format").is_none_or(Value::is_null) {
        text["format"] = json!({"type": "text"});
    }
    json!({
        "id": fresh_id("resp_"),
        "object": "response",
        "created_at": unix_seconds(),
        "status": if background { "queued" } else { "in_progress" },
        "background": background,
        "completed_at": null,
        "error": null,
        "incomplete_details": null,
        "instructions": or("instructions", Value::Null),
        "max_output_tokens": or("max_output_tokens", Value::Null),
        "max_tool_calls": or("max_tool_calls", Value::Null),
        "model": model,
        "output": [],
        "parallel_tool_calls": or("parallel_tool_calls", true.into()),
        "previous_response_id": or("previous_response_id", Value::Null),
        "prompt_cache_key": or("prompt_cache_key", Value::Null),
        "reasoning": {"effort": effort, "summary": reasoning.get("summary").cloned().unwrap_or_default()},
        "safety_identifier": or("safety_identifier", Value::Null),
        "service_tier": "default",
        "store": store,
        "temperature": or("temperature", 1.0.into()),
        "text": text,
        "tool_choice": or("tool_choice", "auto".into()),
        "tools": or("tools", json!([])),
        "top_logprobs": or("top_logprobs", 0.into()),
        "top_p": or("top_p", 1.0.into()),
        "truncation": "disabled",
        "usage": null,
        "user": or("user", Value::Null),
        "metadata": or("metadata", json!({})),
    })
}

/// Tokens in the shape of Responses.
pub(crate) fn usage_json(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens as u64 + usage.output_tokens,
    })
}
