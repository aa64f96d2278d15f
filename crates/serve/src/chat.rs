//! POST /v1/chat/completions: from a body to requests, and whole answers. `chat_stream.rs` has the streamed ones.
//!
//! Reasoning appears under `reasoning_content` (DeepSeek, SGLang) and `reasoning` (vLLM) with the same text: clients read
//! one or the other.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use longwave_text::{ChatPlan, ReplyFinish};
use serde_json::{Value, json};

use crate::answer::{Answer, Usage};
use crate::caller::Caller;
use crate::controls::{Controls, Protocol};
use crate::errors::{ApiError, json_object};
use crate::input::RawBody;
use crate::job::{self, Job, fresh_id};
use crate::message;
use crate::server::{App, unix_seconds};
use crate::{chat_stream, sse};

/// The handler.
pub(crate) async fn complete(
    State(app): State<Arc<App>>,
    caller: Caller,
    RawBody(body): RawBody,
) -> Result<Response, ApiError> {
    let (job, head) = job::blocking(&app, move |app| prepare(app, caller, &body)).await?;
    let mut answers = job::submit(&app, &caller, &head.id, job)?;
    job::started(&app, &mut answers, head.stream).await?;
    let head = Arc::new(head);
    if head.stream {
        let (frames, response) = sse::channel();
        tokio::spawn(chat_stream::stream(head, answers, frames));
        Ok(response)
    } else {
        whole(&head, answers).await
    }
}

/// What the answer repeats in every object.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    /// Give the thought out.
    pub(crate) reasoning: bool,
    logprobs: bool,
    stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) prefix_report: bool,
    /// The prompt, when ids of tokens are asked for.
    pub(crate) prompt_ids: Option<Vec<u32>>,
    pub(crate) keep_alive: std::time::Duration,
}

/// From bytes to a request for the engine.
fn prepare(app: &App, caller: Caller, body: &[u8]) -> Result<(Job, Head), ApiError> {
    let body = json_object(body)?;
    let model = job::model(app, &body)?;
    for old in ["functions", "function_call"] {
        if body.get(old).is_some_and(|value| !value.is_null()) {
            return Err(ApiError::field(old, "replaced by tools and tool_choice, which are to be used"));
        }
    }
    let controls = Controls::read(&body, Protocol::Chat, &app.options.sampling, app.engine.limits.vocab)?;
    let plan = ChatPlan::from_body(&body, app.options.chat)?;
    let mut head = Head {
        id: fresh_id("chatcmpl-"),
        created: unix_seconds(),
        model: model.to_owned(),
        reasoning: plan.thinking() && controls.include_reasoning,
        logprobs: controls.sampling.top_logprobs.is_some(),
        stream: controls.stream,
        include_usage: controls.include_usage,
        prefix_report: controls.prefix_report,
        prompt_ids: None,
        keep_alive: app.options.keep_alive,
    };
    let job = job::of_plan(app, &caller, plan, controls, "messages")?;
    head.prompt_ids = job.token_ids.then(|| job.request.prompt.clone());
    Ok((job, head))
}

pub(crate) fn finish_reason(finish: &ReplyFinish) -> &'static str {
    match finish {
        ReplyFinish::Stop(_) => "stop",
        ReplyFinish::Length => "length",
        ReplyFinish::ToolCalls => "tool_calls",
    }
}

/// The stop text that matched: a field that vLLM's clients read.
pub(crate) fn stop_reason(finish: &ReplyFinish) -> Value {
    match finish {
        ReplyFinish::Stop(Some(text)) => text.as_str().into(),
        _ => Value::Null,
    }
}

/// All answers as one object.
async fn whole(head: &Head, mut answers: Vec<Answer>) -> Result<Response, ApiError> {
    let (mut choices, mut usage) = (Vec::with_capacity(answers.len()), Usage::default());
    for (index, answer) in answers.iter_mut().enumerate() {
        let (message, finish) = message::whole(answer).await?;
        let logprobs = if head.logprobs {
            json!({"content": message.content_logprobs, "reasoning_content": message.reasoning_logprobs})
        } else {
            Value::Null
        };
        let mut said = message.said.chat_json();
        if head.reasoning {
            said["reasoning_content"] = message.said.reasoning.as_str().into();
            said["reasoning"] = message.said.reasoning.into();
        }
        choices.push(json!({
            "index": index, "message": said, "logprobs": logprobs,
            "finish_reason": finish_reason(&finish), "stop_reason": stop_reason(&finish),
        }));
        if head.prompt_ids.is_some() {
            choices[index]["token_ids"] = message.token_ids.into();
        }
        if index == 0 { usage = answer.usage() } else { usage.add(answer.usage()) }
    }
    let mut body = json!({
        "id": head.id, "object": "chat.completion", "created": head.created, "model": head.model,
        "choices": choices, "usage": usage.json(),
    });
    if let Some(ids) = &head.prompt_ids {
        body["prompt_token_ids"] = ids.as_slice().into();
    }
    if head.prefix_report {
        body["prefix_report"] = answers[0].prefix_report();
    }
    Ok(Json(body).into_response())
}
