//! POST /v1/completions: plain prompts, plain text. `completions_stream.rs` has the streamed answers.
//!
//! A prompt is a text, a list of texts, token ids or lists of them; a text gets the begin-of-sentence token in front and no
//! chat format. `suffix` makes it a fill-in-the-middle prompt where the tokenizer has the markers. `echo` repeats the
//! prompt. Refuses log-probabilities of the prompt, which are not kept.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use longwave_text::{AnswerRules, PlainReply, ReplyFinish, ReplyOptions, ReplyStart};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Usage};
use crate::caller::Caller;
use crate::chat::{finish_reason, stop_reason};
use crate::controls::{Controls, Fields, Protocol};
use crate::errors::{ApiError, json_object};
use crate::input::RawBody;
use crate::job::{self, Job, fresh_id};
use crate::message;
use crate::server::{App, unix_seconds};
use crate::{completions_stream, sse};

/// Tokens of an answer when the request says nothing, as the API has it.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Most prompts of one request.
const MAX_PROMPTS: usize = 256;

/// What the answer repeats in every object.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) logprobs: bool,
    pub(crate) include_usage: bool,
    pub(crate) keep_alive: std::time::Duration,
    /// The texts that `echo` repeats, one per answer.
    pub(crate) echoes: Vec<String>,
    /// Answers to each prompt; they lie side by side.
    pub(crate) per_prompt: usize,
    /// The prompts, when ids of tokens are asked for.
    pub(crate) prompt_ids: Option<Vec<Vec<u32>>>,
    stream: bool,
}

impl Head {
    /// Adds the ids of its prompt to the choice of an answer, where they are asked for.
    pub(crate) fn add_prompt_ids(&self, choice: &mut Value, index: usize) {
        if let Some(prompts) = &self.prompt_ids {
            choice["prompt_token_ids"] = prompts[index / self.per_prompt].as_slice().into();
        }
    }
}

/// The handler.
pub(crate) async fn complete(
    State(app): State<Arc<App>>,
    caller: Caller,
    RawBody(body): RawBody,
) -> Result<Response, ApiError> {
    let (jobs, head) = job::blocking(&app, move |app| prepare(app, &json_object(&body)?)).await?;
    let mut answers = Vec::new();
    for job in jobs {
        answers.append(&mut job::submit(&app, &caller, &head.id, job)?);
    }
    // The other prompts wait in the queue meanwhile; what refuses one of them fails its answer.
    job::started(&app, &mut answers, head.stream).await?;
    if head.stream {
        let (frames, response) = sse::channel();
        tokio::spawn(completions_stream::stream(Arc::new(head), answers, frames));
        return Ok(response);
    }
    whole(&head, answers).await
}

fn prepare(app: &App, body: &Map<String, Value>) -> Result<(Vec<Job>, Head), ApiError> {
    let model = job::model(app, body)?;
    let controls = Controls::read(body, Protocol::Completions, &app.options.sampling, app.engine.limits.vocab)?;
    let (echo, include_stop) = (
        Fields(body).flag("echo")?.unwrap_or(false),
        Fields(body).flag("include_stop_str_in_output")?.unwrap_or(false),
    );
    let logprobs = controls.sampling.top_logprobs.is_some();
    if echo && logprobs {
        let why = "log-probabilities of a prompt are not available; leave out echo, or logprobs";
        return Err(ApiError::field("echo", why));
    }
    if let Some(best_of) = body.get("best_of").and_then(Value::as_u64)
        && best_of != u64::from(controls.answers)
    {
        return Err(ApiError::field("best_of", "only the value of n is possible; ask for n answers and choose"));
    }
    let stop = stops(body)?;
    let prompts = prompts(app, body)?;
    let constraint = app.follow.constraint(&AnswerRules::of_plain(body)?)?;
    let mut echoes = Vec::new();
    let mut jobs = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let text = if echo { prompt.text(app) } else { String::new() };
        echoes.extend(std::iter::repeat_n(text, controls.answers as usize));
        let reply =
            ReplyOptions { start: ReplyStart::Content, parse_tool_calls: false, stop: Vec::new(), call_seed: 0 };
        let mut job = job::of_prompt(app, prompt.tokens, DEFAULT_MAX_TOKENS, reply, controls.clone(), "prompt")?;
        job.request.constraint.clone_from(&constraint);
        job.plain = Some(PlainReply::new(stop.clone(), include_stop));
        jobs.push(job);
    }
    let head = Head {
        id: fresh_id("cmpl-"),
        created: unix_seconds(),
        model: model.to_owned(),
        logprobs,
        include_usage: controls.include_usage,
        keep_alive: app.options.keep_alive,
        echoes,
        per_prompt: controls.answers as usize,
        prompt_ids: controls.token_ids.then(|| jobs.iter().map(|job| job.request.prompt.clone()).collect()),
        stream: controls.stream,
    };
    Ok((jobs, head))
}

/// A prompt in tokens.
struct Prompt {
    tokens: Vec<u32>,
    /// As the client wrote it.
    written: Option<String>,
}

impl Prompt {
    fn text(&self, app: &App) -> String {
        let decode = || {
            let bytes: Vec<u8> =
                self.tokens.iter().flat_map(|&token| app.tokenizer.token_bytes(token)).copied().collect();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        self.written.clone().unwrap_or_else(decode)
    }
}

fn prompts(app: &App, body: &Map<String, Value>) -> Result<Vec<Prompt>, ApiError> {
    let bad = || ApiError::field("prompt", "expected a text, a list of texts, a list of token ids or a list of those");
    let suffix = match body.get("suffix") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) if text.is_empty() => None,
        Some(Value::String(text)) => Some(text.as_str()),
        Some(_) => return Err(ApiError::field("suffix", "expected a string")),
    };
    let one = |value: &Value| match value {
        Value::String(text) => of_text(app, text, suffix),
        Value::Array(ids) => of_ids(app, ids, suffix).ok_or_else(bad)?,
        _ => Err(bad()),
    };
    let prompt = body.get("prompt").filter(|prompt| !prompt.is_null());
    let list = match prompt.ok_or_else(|| ApiError::field("prompt", "required"))? {
        Value::Array(list) if list.first().is_some_and(|first| !first.is_number()) => list.iter().map(one).collect(),
        prompt => one(prompt).map(|prompt| vec![prompt]),
    }?;
    match list.len() {
        0 => Err(bad()),
        count if count > MAX_PROMPTS => {
            Err(ApiError::field("prompt", format!("expected at most {MAX_PROMPTS} prompts, got {count}")))
        }
        _ => Ok(list),
    }
}

fn of_text(app: &App, text: &str, suffix: Option<&str>) -> Result<Prompt, ApiError> {
    let encode =
        |text: &str, param: &str| app.tokenizer.encode_text(text).map_err(|error| ApiError::field(param, error));
    let markers = app.tokenizer.markers();
    let mut tokens = vec![markers.bos];
    let text_tokens = encode(text, "prompt")?;
    match (suffix, markers.fim) {
        (None, _) => tokens.extend(text_tokens),
        (Some(suffix), Some([begin, hole, end])) => {
            tokens.push(begin);
            tokens.extend(text_tokens);
            tokens.push(hole);
            tokens.extend(encode(suffix, "suffix")?);
            tokens.push(end);
        }
        (Some(_), None) => {
            return Err(ApiError::field(
                "suffix",
                "this model's tokenizer has no fill-in-the-middle markers; leave it out",
            ));
        }
    }
    Ok(Prompt { tokens, written: Some(text.to_owned()) })
}

fn of_ids(app: &App, ids: &[Value], suffix: Option<&str>) -> Option<Result<Prompt, ApiError>> {
    let ids: Vec<u64> = ids.iter().map(Value::as_u64).collect::<Option<_>>()?;
    let vocab = u64::from(app.engine.limits.vocab);
    if suffix.is_some() {
        return Some(Err(ApiError::field("suffix", "needs a prompt of text")));
    }
    if ids.is_empty() {
        return Some(Err(ApiError::field("prompt", "empty; at least one token is needed")));
    }
    if let Some(id) = ids.iter().find(|&&id| id >= vocab) {
        return Some(Err(ApiError::field("prompt", format!("token {id} is not below the vocabulary size {vocab}"))));
    }
    Some(Ok(Prompt { tokens: ids.into_iter().map(|id| id as u32).collect(), written: None }))
}

fn stops(body: &Map<String, Value>) -> Result<Vec<String>, ApiError> {
    let bad = || ApiError::field("stop", "expected a text or a list of at most 16 texts");
    match body.get("stop") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text.clone()]),
        Some(Value::Array(list)) if list.len() <= 16 => list
            .iter()
            .map(|text| text.as_str().filter(|text| !text.is_empty()).map(str::to_owned).ok_or_else(bad))
            .collect(),
        Some(_) => Err(bad()),
    }
}

/// One element of `choices`.
pub(crate) fn choice(index: usize, text: &str, logprobs: Value, finish: Option<&ReplyFinish>) -> Value {
    json!({
        "index": index, "text": text, "logprobs": logprobs,
        "finish_reason": finish.map(finish_reason), "stop_reason": finish.map(stop_reason),
    })
}

/// Log-probabilities in the legacy form, from the entries of the chat form; `offset` is where the text begins.
pub(crate) fn legacy_logprobs(entries: &[Value], mut offset: usize) -> Value {
    let mut offsets = Vec::with_capacity(entries.len());
    for entry in entries {
        offsets.push(offset);
        offset += entry["token"].as_str().map_or(0, |text| text.chars().count());
    }
    let top = |entry: &Value| -> Value {
        let top = entry["top_logprobs"].as_array().into_iter().flatten();
        let map: Map<String, Value> =
            top.filter_map(|one| Some((one["token"].as_str()?.to_owned(), one["logprob"].clone()))).collect();
        map.into()
    };
    json!({
        "tokens": entries.iter().map(|entry| entry["token"].clone()).collect::<Value>(),
        "token_logprobs": entries.iter().map(|entry| entry["logprob"].clone()).collect::<Value>(),
        "top_logprobs": entries.iter().map(top).collect::<Value>(),
        "text_offset": offsets,
    })
}

async fn whole(head: &Head, mut answers: Vec<Answer>) -> Result<Response, ApiError> {
    let (mut choices, mut usage) = (Vec::with_capacity(answers.len()), Usage::default());
    for (index, answer) in answers.iter_mut().enumerate() {
        let (message, finish) = message::whole(answer).await?;
        let echo = &head.echoes[index];
        let logprobs = if head.logprobs { legacy_logprobs(&message.content_logprobs, 0) } else { Value::Null };
        choices.push(choice(index, &format!("{echo}{}", message.said.content), logprobs, Some(&finish)));
        head.add_prompt_ids(&mut choices[index], index);
        if head.prompt_ids.is_some() {
            choices[index]["token_ids"] = message.token_ids.into();
        }
        add_usage(&mut usage, answer.usage(), index % head.per_prompt == 0);
    }
    let body = json!({
        "id": head.id, "object": "text_completion", "created": head.created, "model": head.model,
        "choices": choices, "usage": usage.json(),
    });
    Ok(Json(body).into_response())
}

/// Adds an answer; a prompt counts with its first one.
pub(crate) fn add_usage(usage: &mut Usage, one: Usage, first_of_prompt: bool) {
    if first_of_prompt {
        usage.prompt_tokens += one.prompt_tokens;
        usage.cached_tokens += one.cached_tokens;
    }
    usage.add(one);
}
