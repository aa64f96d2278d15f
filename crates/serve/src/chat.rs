//! POST /v1/chat/completions: from a body to requests, and whole answers. `chat_stream.rs` has the streamed ones.
//!
//! Reading, rendering and encoding a long prompt takes a while and runs on the blocking pool. Reasoning appears under
//! `reasoning_content` (DeepSeek, SGLang) and `reasoning` (vLLM) with the same text: clients read one or the other.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use longwave_engine::request::Request;
use longwave_engine::step::ReturnLogits;
use longwave_text::{ChatPlan, ReplyEvent, ReplyFinish, ReplyOptions};
use serde_json::{Value, json};

use crate::answer::{Answer, Next, Part, Usage};
use crate::controls::Controls;
use crate::errors::{ApiError, json_object, whole_body};
use crate::generation::{Generation, fresh_number};
use crate::server::{App, unix_seconds};
use crate::{chat_stream, models, sse};

/// The handler.
pub(crate) async fn complete(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = whole_body(body, app.options.max_body_bytes)?;
    let preparing = {
        let app = app.clone();
        tokio::task::spawn_blocking(move || prepare(&app, &body))
    };
    let prepared = preparing.await.map_err(|_| ApiError::internal("reading the request failed"))??;

    let prompt_tokens = prepared.request.prompt.len();
    // The end of a turn stays out of the text even when the request goes on after it (ignore_eos).
    let mut silent = prepared.request.stop_tokens.clone();
    silent.extend(&app.stop_tokens);
    let mut answers = Vec::with_capacity(prepared.answers as usize);
    for index in 0..prepared.answers {
        let mut request = prepared.request.clone();
        request.sampling.seed = seed_of(request.sampling.seed, index);
        let generation = Generation::submit(&app.engine, request)?;
        let reply = ReplyOptions { call_seed: fresh_number(), ..prepared.reply.clone() };
        let (app, id, silent) = (app.clone(), prepared.head.id.clone(), silent.clone());
        answers.push(Answer::new(app, id, generation, reply, silent, prompt_tokens));
    }
    // All answers have one prompt: what refuses one refuses the first.
    answers[0].started().await?;
    let head = Arc::new(prepared.head);
    if head.stream {
        let (frames, response) = sse::channel();
        tokio::spawn(chat_stream::stream(head, answers, frames));
        Ok(response)
    } else {
        whole(&head, answers).await
    }
}

/// The noise of answer `index`: the first one has the seed of the request.
fn seed_of(seed: u64, index: u32) -> u64 {
    seed ^ u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// What the answer repeats in every object.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    thinking: bool,
    logprobs: bool,
    stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) prefix_report: bool,
    pub(crate) keep_alive: std::time::Duration,
}

struct Prepared {
    request: Request,
    answers: u32,
    reply: ReplyOptions,
    head: Head,
}

/// From bytes to a request for the engine.
fn prepare(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let body = json_object(body)?;
    let model = match body.get("model") {
        None | Some(Value::Null) => app.options.served_model_names[0].as_str(),
        Some(Value::String(name)) => models::resolve(app, name)?,
        Some(_) => return Err(ApiError::field("model", "expected a string")),
    };
    let controls = Controls::read(&body, &app.options.sampling, app.engine.limits.vocab)?;
    let plan = ChatPlan::from_body(&body, app.options.chat)?;
    let encoded = plan.prompt().encode(&app.tokenizer);
    let prompt = encoded.map_err(|error| ApiError::field("messages", error))?;

    let context = app.engine.limits.context;
    let left = (context as usize).saturating_sub(prompt.len()) as u32;
    // The default is ours, so it must not be what a small cache refuses; a number that was asked for is left alone.
    let possible = (app.engine.most_tokens)(prompt.len() as u32).min(left);
    let by_default = plan.default_max_tokens().max(controls.min_tokens).min(possible).max(1);
    let max_tokens = controls.max_tokens.unwrap_or(by_default);
    if max_tokens > left {
        return Err(ApiError::too_long(prompt.len(), controls.max_tokens.unwrap_or(1), context));
    }
    let mut stop_tokens = if controls.ignore_eos { Vec::new() } else { app.stop_tokens.clone() };
    stop_tokens.extend(controls.stop_tokens);
    let head = Head {
        id: format!("chatcmpl-{:016x}{:016x}", fresh_number(), fresh_number()),
        created: unix_seconds(),
        model: model.to_owned(),
        thinking: plan.thinking(),
        logprobs: controls.sampling.top_logprobs.is_some(),
        stream: controls.stream,
        include_usage: controls.include_usage,
        prefix_report: controls.prefix_report,
        keep_alive: app.options.keep_alive,
    };
    let request = Request {
        prompt,
        max_tokens,
        min_tokens: controls.min_tokens,
        stop_tokens,
        sampling: controls.sampling,
        priority: controls.priority,
        salt: controls.salt,
        logits: ReturnLogits::No,
    };
    Ok(Prepared { request, answers: controls.answers, reply: plan.reply, head })
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
        let mut message = Message::default();
        let finish = loop {
            match answer.next().await? {
                Next::Part(part) => message.add(part),
                Next::End(part, finish) => {
                    message.add(part);
                    break finish;
                }
            }
        };
        let logprobs = if head.logprobs {
            json!({"content": message.content_logprobs, "reasoning_content": message.reasoning_logprobs})
        } else {
            Value::Null
        };
        choices.push(json!({
            "index": index, "message": message.json(head), "logprobs": logprobs,
            "finish_reason": finish_reason(&finish), "stop_reason": stop_reason(&finish),
        }));
        if index == 0 { usage = answer.usage() } else { usage.add(answer.usage()) }
    }
    let mut body = json!({
        "id": head.id, "object": "chat.completion", "created": head.created, "model": head.model,
        "choices": choices, "usage": usage.json(),
    });
    if head.prefix_report {
        body["prefix_report"] = answers[0].prefix_report();
    }
    Ok(Json(body).into_response())
}

/// A message being put together.
#[derive(Default)]
struct Message {
    reasoning: String,
    content: String,
    calls: Vec<Value>,
    arguments: Vec<String>,
    content_logprobs: Vec<Value>,
    reasoning_logprobs: Vec<Value>,
}

impl Message {
    fn add(&mut self, mut part: Part) {
        self.content_logprobs.append(&mut part.content_logprobs);
        self.reasoning_logprobs.append(&mut part.reasoning_logprobs);
        for event in part.events {
            match event {
                ReplyEvent::Reasoning(text) => self.reasoning.push_str(&text),
                ReplyEvent::Content(text) => self.content.push_str(&text),
                ReplyEvent::ToolCallStart { id, name, .. } => {
                    self.calls.push(json!({"id": id, "type": "function", "function": {"name": name}}));
                    self.arguments.push(String::new());
                }
                ReplyEvent::ToolCallArguments { delta, .. } => {
                    if let Some(arguments) = self.arguments.last_mut() {
                        arguments.push_str(&delta);
                    }
                }
            }
        }
    }

    fn json(&mut self, head: &Head) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if head.thinking {
            message["reasoning_content"] = self.reasoning.as_str().into();
            message["reasoning"] = self.reasoning.as_str().into();
        }
        if !self.calls.is_empty() {
            for (call, arguments) in self.calls.iter_mut().zip(&self.arguments) {
                call["function"]["arguments"] = arguments.as_str().into();
            }
            message["tool_calls"] = std::mem::take(&mut self.calls).into();
        }
        message
    }
}
