//! POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol. `messages_stream.rs` has the streamed answers.
//!
//! Errors have Anthropic's form. Tokens that came from the cache are counted apart from `input_tokens`, as clients of that
//! protocol add them up.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use longwave_text::{ChatPlan, ReplyCall, ReplyFinish, ReplyMessage};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Usage};
use crate::caller::Caller;
use crate::controls::{Controls, Protocol};
use crate::errors::{AnthropicError, ApiError, json_object};
use crate::input::RawBody;
use crate::job::{self, Job, fresh_id};
use crate::message;
use crate::server::App;
use crate::{messages_stream, sse};

/// What the answer repeats.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) thinking: bool,
    pub(crate) keep_alive: std::time::Duration,
    stream: bool,
}

/// The handler of /v1/messages.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    RawBody(body): RawBody,
) -> Result<Response, AnthropicError> {
    let (job, head) = job::blocking(&app, move |app| prepare(app, caller, &json_object(&body)?)).await?;
    let mut answers = job::submit(&app, &caller, &head.id, job)?;
    job::started(&app, &mut answers, head.stream).await?;
    let Some(mut answer) = answers.pop() else { return Err(ApiError::internal("no answer was begun").into()) };
    if head.stream {
        let (frames, response) = sse::channel();
        tokio::spawn(messages_stream::stream(head, answer, frames));
        return Ok(response);
    }
    let (message, finish) = message::whole(&mut answer).await?;
    Ok(Json(whole(&head, &message.said, &finish, &answer)).into_response())
}

/// The handler of /v1/messages/count_tokens.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    RawBody(body): RawBody,
) -> Result<Json<Value>, AnthropicError> {
    let count = job::blocking(&app, move |app| {
        let body = json_object(&body)?;
        job::model(app, &body)?;
        let plan = ChatPlan::from_messages(&body, app.options.chat)?;
        let prompt = plan.prompt().encode(&app.tokenizer);
        Ok(prompt.map_err(|error| ApiError::field("messages", error))?.len())
    });
    Ok(Json(json!({"input_tokens": count.await?})))
}

fn prepare(app: &App, caller: Caller, body: &Map<String, Value>) -> Result<(Job, Head), ApiError> {
    let model = job::model(app, body)?;
    let controls = Controls::read(body, Protocol::Messages, &app.options.sampling, app.engine.limits.vocab)?;
    let plan = ChatPlan::from_messages(body, app.options.chat)?;
    let head = Head {
        id: fresh_id("msg_"),
        model: model.to_owned(),
        thinking: plan.thinking(),
        keep_alive: app.options.keep_alive,
        stream: controls.stream,
    };
    Ok((job::of_plan(app, &caller, plan, controls, "messages")?, head))
}

/// Tokens in Anthropic's shape.
pub(crate) fn usage_json(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens as usize),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    })
}

/// Why the answer ended and the stop text that matched.
pub(crate) fn stop(finish: &ReplyFinish) -> (&'static str, Value) {
    match finish {
        ReplyFinish::Stop(None) => ("end_turn", Value::Null),
        ReplyFinish::Stop(Some(text)) => ("stop_sequence", text.as_str().into()),
        ReplyFinish::Length => ("max_tokens", Value::Null),
        ReplyFinish::ToolCalls => ("tool_use", Value::Null),
    }
}

/// Arguments as the object that the protocol wants. A call that the token limit cut shows what there is.
fn input(call: &ReplyCall) -> Value {
    match serde_json::from_str(&call.arguments) {
        Ok(Value::Object(input)) => input.into(),
        _ => json!({"INVALID_JSON": call.arguments}),
    }
}

fn whole(head: &Head, message: &ReplyMessage, finish: &ReplyFinish, answer: &Answer) -> Value {
    let mut content = Vec::new();
    if !message.reasoning.is_empty() {
        content.push(json!({"type": "thinking", "thinking": message.reasoning, "signature": head.id}));
    }
    if !message.content.is_empty() {
        content.push(json!({"type": "text", "text": message.content}));
    }
    for call in &message.calls {
        content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input(call)}));
    }
    let (stop_reason, stop_sequence) = stop(finish);
    json!({
        "id": head.id, "type": "message", "role": "assistant", "model": head.model, "content": content,
        "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage_json(&answer.usage()),
    })
}
