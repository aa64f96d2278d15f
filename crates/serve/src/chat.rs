//! POST /v1/chat/completions, streamed and whole.
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
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use crate::answer::{Answer, Next, Part};
use crate::controls::Controls;
use crate::errors::{ApiError, json_object, whole_body};
use crate::generation::{Generation, fresh_number};
use crate::server::{App, unix_seconds};
use crate::{models, sse};

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
    let generation = Generation::submit(&app.engine, prepared.request)?;
    let mut answer = Answer::new(generation, prepared.reply, app.tokenizer.clone(), silent, prompt_tokens);
    answer.started().await?;
    if prepared.stream {
        let (frames, response) = sse::channel();
        tokio::spawn(stream(prepared.head, answer, prepared.include_usage, frames));
        Ok(response)
    } else {
        whole(prepared.head, answer).await
    }
}

/// What the answer repeats in every object.
struct Head {
    id: String,
    created: u64,
    model: String,
    thinking: bool,
    logprobs: bool,
}

struct Prepared {
    request: Request,
    reply: ReplyOptions,
    head: Head,
    stream: bool,
    include_usage: bool,
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
    let mut plan = ChatPlan::from_body(&body, app.options.chat)?;
    plan.reply.call_seed = fresh_number();
    let encoded = plan.prompt().encode(&app.tokenizer);
    let prompt = encoded.map_err(|error| ApiError::field("messages", error))?;

    let context = app.engine.limits.context;
    let left = (context as usize).saturating_sub(prompt.len()) as u32;
    let by_default = plan.default_max_tokens().max(controls.min_tokens).min(left).max(1);
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
    Ok(Prepared { request, reply: plan.reply, head, stream: controls.stream, include_usage: controls.include_usage })
}

fn finish_reason(finish: &ReplyFinish) -> &'static str {
    match finish {
        ReplyFinish::Stop(_) => "stop",
        ReplyFinish::Length => "length",
        ReplyFinish::ToolCalls => "tool_calls",
    }
}

/// The stop text that matched: a field that vLLM's clients read.
fn stop_reason(finish: &ReplyFinish) -> Value {
    match finish {
        ReplyFinish::Stop(Some(text)) => text.as_str().into(),
        _ => Value::Null,
    }
}

/// The answer as one object.
async fn whole(head: Head, mut answer: Answer) -> Result<Response, ApiError> {
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
    let choice = json!({
        "index": 0, "message": message.json(&head), "logprobs": logprobs,
        "finish_reason": finish_reason(&finish), "stop_reason": stop_reason(&finish),
    });
    let body = json!({
        "id": head.id, "object": "chat.completion", "created": head.created, "model": head.model,
        "choices": [choice], "usage": answer.usage(),
    });
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

/// Writes the answer as events until it ends or the client is gone.
async fn stream(head: Head, mut answer: Answer, include_usage: bool, frames: mpsc::Sender<Bytes>) {
    let chunks = Chunks { head, include_usage };
    let mut ready = vec![chunks.chunk(json!({"role": "assistant", "content": ""}), Value::Null, Value::Null)];
    loop {
        for chunk in ready.drain(..) {
            if frames.send(sse::data(&chunk)).await.is_err() {
                return;
            }
        }
        let next = tokio::select! {
            // Dropping the answer cancels the request in the engine.
            () = frames.closed() => return,
            next = answer.next() => next,
        };
        match next {
            Ok(Next::Part(part)) => ready = chunks.deltas(part),
            Ok(Next::End(part, finish)) => {
                ready = chunks.deltas(part);
                ready.push(chunks.chunk(json!({}), finish_reason(&finish).into(), Value::Null));
                if let Some(last) = ready.last_mut() {
                    last["choices"][0]["stop_reason"] = stop_reason(&finish);
                }
                if include_usage {
                    ready.push(chunks.usage(answer.usage()));
                }
                break;
            }
            Err(error) => {
                ready.push(error.body());
                break;
            }
        }
    }
    for frame in ready.iter().map(sse::data).chain([sse::DONE]) {
        if frames.send(frame).await.is_err() {
            return;
        }
    }
}

struct Chunks {
    head: Head,
    include_usage: bool,
}

impl Chunks {
    fn envelope(&self, choices: Value) -> Value {
        let mut object = Map::new();
        object.insert("id".into(), self.head.id.as_str().into());
        object.insert("object".into(), "chat.completion.chunk".into());
        object.insert("created".into(), self.head.created.into());
        object.insert("model".into(), self.head.model.as_str().into());
        object.insert("choices".into(), choices);
        if self.include_usage {
            object.insert("usage".into(), Value::Null);
        }
        object.into()
    }

    fn chunk(&self, delta: Value, finish: Value, logprobs: Value) -> Value {
        self.envelope(json!([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]))
    }

    fn usage(&self, usage: Value) -> Value {
        let mut chunk = self.envelope(json!([]));
        chunk["usage"] = usage;
        chunk
    }

    fn deltas(&self, mut part: Part) -> Vec<Value> {
        let events = std::mem::take(&mut part.events);
        let delta = |event| match event {
            ReplyEvent::Reasoning(text) => {
                let logprobs = std::mem::take(&mut part.reasoning_logprobs);
                let logprobs = if logprobs.is_empty() {
                    Value::Null
                } else {
                    json!({"content": null, "reasoning_content": logprobs})
                };
                self.chunk(json!({"reasoning_content": text, "reasoning": text}), Value::Null, logprobs)
            }
            ReplyEvent::Content(text) => {
                let logprobs = std::mem::take(&mut part.content_logprobs);
                let logprobs = if logprobs.is_empty() { Value::Null } else { json!({"content": logprobs}) };
                self.chunk(json!({"content": text}), Value::Null, logprobs)
            }
            ReplyEvent::ToolCallStart { index, id, name } => {
                let function = json!({"name": name, "arguments": ""});
                let call = json!({"index": index, "id": id, "type": "function", "function": function});
                self.chunk(json!({"tool_calls": [call]}), Value::Null, Value::Null)
            }
            ReplyEvent::ToolCallArguments { index, delta } => {
                let call = json!({"index": index, "function": {"arguments": delta}});
                self.chunk(json!({"tool_calls": [call]}), Value::Null, Value::Null)
            }
        };
        events.into_iter().map(delta).collect()
    }
}
