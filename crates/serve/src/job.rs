//! A request on its way to the engine, whatever protocol it came in, and the answers that it gets.
//!
//! Checks what a body and the limits of the engine say together. Reading and encoding a long prompt takes a while: the
//! handlers do it on the blocking pool.

use std::sync::Arc;

use longwave_engine::request::Request;
use longwave_engine::step::ReturnLogits;
use longwave_text::{ChatPlan, PlainReply, Reply, ReplyOptions, ReplyStart, prefix_key};
use serde_json::{Map, Value};

use crate::answer::{Answer, Reader};
use crate::caller::Caller;
use crate::controls::Controls;
use crate::errors::ApiError;
use crate::generation::{Generation, fresh_number};
use crate::models;
use crate::server::App;
use crate::turn_record::TurnRecord;

/// What is submitted.
pub(crate) struct Job {
    pub(crate) request: Request,
    /// Answers to the prompt, at least one.
    pub(crate) answers: u32,
    /// How they are read.
    pub(crate) reply: ReplyOptions,
    /// Read them as plain text instead.
    pub(crate) plain: Option<PlainReply>,
    /// Give ids of tokens out.
    pub(crate) token_ids: bool,
    /// Keep the turn for later prompts.
    pub(crate) recording: Option<Recording>,
}

/// What is needed to keep a turn.
#[derive(Debug, Clone)]
pub(crate) struct Recording {
    /// Who may find it again.
    pub(crate) owner: u64,
    /// Key of the prompt up to the turn.
    pub(crate) before: [u8; 32],
    /// Tokens of the turn that are part of the prompt.
    pub(crate) opening: Vec<u32>,
}

/// Runs `read` on the blocking pool.
pub(crate) async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    read: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let app = app.clone();
    let reading = tokio::task::spawn_blocking(move || read(&app));
    reading.await.map_err(|_| ApiError::internal("reading the request failed"))?
}

/// The served name that a body asks for; without one, the first.
pub(crate) fn model<'a>(app: &'a App, body: &Map<String, Value>) -> Result<&'a str, ApiError> {
    match body.get("model") {
        None | Some(Value::Null) => Ok(app.options.served_model_names[0].as_str()),
        Some(Value::String(name)) => models::resolve(app, name),
        Some(_) => Err(ApiError::field("model", "expected a string")),
    }
}

/// The job of a conversation; `messages` is the field that holds it.
pub(crate) fn of_plan(
    app: &App,
    caller: &Caller,
    plan: ChatPlan,
    controls: Controls,
    messages: &str,
) -> Result<Job, ApiError> {
    // What shares no cached prefix shares no turn either.
    let owner = caller.tenant ^ controls.salt.rotate_left(32);
    let prompt = plan.encode(&app.tokenizer, |key| app.replays.find(owner, key));
    let prompt = prompt.map_err(|error| ApiError::field(messages, error))?;
    let recording = recording(app, owner, &plan, &prompt);
    // Tokens after the end of a turn are not shown, so such a turn cannot come back.
    let recording = recording.filter(|_| !controls.ignore_eos && controls.stop_tokens.is_empty());
    let constraint = app.follow.constraint(&plan.rules)?;
    let mut job = of_prompt(app, prompt, plan.default_max_tokens(), plan.reply, controls, messages)?;
    job.request.constraint = constraint;
    job.recording = recording;
    Ok(job)
}

/// Where the model's turn begins; nothing when it goes on with a turn that the client began.
fn recording(app: &App, owner: u64, plan: &ChatPlan, prompt: &[u32]) -> Option<Recording> {
    let whole = matches!(plan.reply.start, ReplyStart::Reasoning | ReplyStart::Content | ReplyStart::ToolCalls);
    let marker = app.tokenizer.markers().assistant;
    let start = prompt.iter().rposition(|&token| token == marker)?;
    let (before, opening) = prompt.split_at(start + 1);
    whole.then(|| Recording { owner, before: prefix_key(before), opening: opening.to_vec() })
}

/// The job of prompt tokens; `field` is the one that holds them.
pub(crate) fn of_prompt(
    app: &App,
    prompt: Vec<u32>,
    default_max_tokens: u32,
    reply: ReplyOptions,
    controls: Controls,
    field: &str,
) -> Result<Job, ApiError> {
    let context = app.engine.limits.context;
    let left = (context as usize).saturating_sub(prompt.len()) as u32;
    // The default is ours, so it must not be what a small cache refuses; a number that was asked for is left alone.
    let possible = (app.engine.most_tokens)(prompt.len() as u32).min(left);
    let by_default = default_max_tokens.max(controls.min_tokens).min(possible).max(1);
    let max_tokens = controls.max_tokens.unwrap_or(by_default);
    if max_tokens > left {
        return Err(ApiError::too_long(field, prompt.len(), controls.max_tokens.unwrap_or(1), context));
    }
    let mut stop_tokens = if controls.ignore_eos { Vec::new() } else { app.stop_tokens.clone() };
    stop_tokens.extend(controls.stop_tokens);
    let request = Request {
        prompt,
        max_tokens,
        min_tokens: controls.min_tokens,
        stop_tokens,
        sampling: controls.sampling,
        priority: controls.priority,
        salt: controls.salt,
        constraint: None,
        logits: ReturnLogits::No,
        attention: None,
    };
    let (answers, token_ids) = (controls.answers, controls.token_ids);
    Ok(Job { request, answers, reply, plain: None, token_ids, recording: None })
}

/// Submits a job for `caller`; `id` is for the log.
pub(crate) fn submit(app: &Arc<App>, caller: &Caller, id: &str, job: Job) -> Result<Vec<Answer>, ApiError> {
    app.metrics.asked_for(job.answers);
    let prompt_tokens = job.request.prompt.len();
    // The end of a turn stays out of the text even when the request goes on after it (ignore_eos).
    let mut silent = job.request.stop_tokens.clone();
    silent.extend(&app.stop_tokens);
    let mut answers = Vec::with_capacity(job.answers as usize);
    for index in 0..job.answers {
        let mut request = job.request.clone();
        request.sampling.seed = seed_of(request.sampling.seed, index);
        let generation = Generation::submit(app, caller, request)?;
        let reader = match &job.plain {
            Some(plain) => Reader::Plain(plain.clone()),
            None => Reader::Reply(Reply::new(ReplyOptions { call_seed: fresh_number(), ..job.reply.clone() })),
        };
        let mut answer = Answer::new(app.clone(), id.to_owned(), generation, reader, silent.clone(), prompt_tokens);
        answer.token_ids = job.token_ids.then(Vec::new);
        answer.turn = job.recording.clone().map(TurnRecord::new);
        answers.push(answer);
    }
    Ok(answers)
}

/// Waits until the first answer runs, so that a refusal becomes a status. A stream waits no longer than the longest
/// silence that clients bear: what is refused later ends the stream.
pub(crate) async fn started(app: &App, answers: &mut [Answer], stream: bool) -> Result<(), ApiError> {
    // All answers have one prompt: what refuses one refuses the first.
    let started = answers[0].started();
    if !stream {
        return started.await;
    }
    tokio::time::timeout(app.options.keep_alive, started).await.unwrap_or(Ok(()))
}

/// The noise of answer `index`: the first one has the seed of the request.
fn seed_of(seed: u64, index: u32) -> u64 {
    seed ^ u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A fresh identity with a prefix of the protocol.
pub(crate) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", fresh_number(), fresh_number())
}
