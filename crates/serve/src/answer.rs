//! A running generation as the parts of an answer: text events, log-probabilities, usage, the end.
//!
//! Shared by the streamed and the whole answer, so both say the same. The token that ends a turn never reaches the text.

use std::sync::Arc;

use longwave_engine::report::PrefixReport;
use longwave_engine::request::{Event, FinishReason};
use longwave_engine::step::TokenLogprobs;
use longwave_text::{PlainReply, Reply, ReplyEnd, ReplyEvent, ReplyFinish, Tokenizer};
use serde_json::{Value, json};

use crate::errors::ApiError;
use crate::generation::Generation;
use crate::prefix;
use crate::server::App;
use crate::turn_record::TurnRecord;

/// What a step added to the answer.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) events: Vec<ReplyEvent>,
    pub(crate) content_logprobs: Vec<Value>,
    pub(crate) reasoning_logprobs: Vec<Value>,
    /// All tokens since the last part, when they are asked for.
    pub(crate) token_ids: Vec<u32>,
}

/// What comes next.
pub(crate) enum Next {
    /// It runs: the prompt's part of the usage is known.
    Started,
    /// More of the answer.
    Part(Part),
    /// The end, with the last of the answer.
    End(Part, ReplyFinish),
}

/// Tokens of a request so far.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) cached_tokens: u32,
    pub(crate) output_tokens: u64,
    pub(crate) reasoning_tokens: u64,
}

impl Usage {
    /// Another answer to the same prompt, which is counted once.
    pub(crate) fn add(&mut self, other: Usage) {
        self.output_tokens += other.output_tokens;
        self.reasoning_tokens += other.reasoning_tokens;
    }

    /// In OpenAI's and DeepSeek's shape.
    pub(crate) fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens as u64 + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens.saturating_sub(self.cached_tokens as usize),
        })
    }
}

/// How tokens become text.
pub(crate) enum Reader {
    /// Reasoning, content and calls.
    Reply(Reply),
    /// Content only.
    Plain(PlainReply),
}

impl Reader {
    fn push_token(&mut self, tokenizer: &Tokenizer, token: u32, events: &mut Vec<ReplyEvent>) {
        match self {
            Reader::Reply(reply) => reply.push_token(tokenizer, token, events),
            Reader::Plain(plain) => {
                let mut text = String::new();
                plain.push_token(tokenizer, token, &mut text);
                events.extend((!text.is_empty()).then_some(ReplyEvent::Content(text)));
            }
        }
    }

    fn stopped(&self) -> bool {
        match self {
            Reader::Reply(reply) => reply.stopped(),
            Reader::Plain(plain) => plain.stopped().is_some(),
        }
    }

    fn finish(&mut self, end: ReplyEnd, events: &mut Vec<ReplyEvent>) -> ReplyFinish {
        match self {
            Reader::Reply(reply) => reply.finish(end, events),
            Reader::Plain(plain) => {
                let mut text = String::new();
                plain.finish(&mut text);
                events.extend((!text.is_empty()).then_some(ReplyEvent::Content(text)));
                match (plain.stopped(), end) {
                    (None, ReplyEnd::Length) => ReplyFinish::Length,
                    (stop, _) => ReplyFinish::Stop(stop.map(str::to_owned)),
                }
            }
        }
    }

    fn reasoning_tokens(&self) -> u32 {
        match self {
            Reader::Reply(reply) => reply.reasoning_tokens(),
            Reader::Plain(_) => 0,
        }
    }
}

/// An answer being read.
pub(crate) struct Answer {
    app: Arc<App>,
    /// For the log.
    id: String,
    generation: Generation,
    reader: Reader,
    report: Option<PrefixReport>,
    /// Tokens that are counted and not shown.
    silent: Vec<u32>,
    prompt_tokens: usize,
    cached_tokens: u32,
    output_tokens: u32,
    /// Log-probabilities of tokens whose text is not out yet.
    held: Vec<Value>,
    /// Tokens that no part has yet; `None` when nobody asks for them.
    pub(crate) token_ids: Option<Vec<u32>>,
    /// The turn, where it is kept for later prompts.
    pub(crate) turn: Option<TurnRecord>,
}

impl Answer {
    pub(crate) fn new(
        app: Arc<App>,
        id: String,
        generation: Generation,
        reader: Reader,
        silent: Vec<u32>,
        prompt_tokens: usize,
    ) -> Answer {
        Answer {
            app,
            id,
            generation,
            reader,
            report: None,
            silent,
            prompt_tokens,
            cached_tokens: 0,
            output_tokens: 0,
            held: Vec::new(),
            token_ids: None,
            turn: None,
        }
    }

    /// Waits until the request runs, so that a refusal becomes a status and not the end of a stream.
    pub(crate) async fn started(&mut self) -> Result<(), ApiError> {
        match self.generation.peek().await {
            None => Err(ApiError::stopped("it dropped the request")),
            Some(Event::Finished { reason, .. }) => match reason.clone() {
                FinishReason::Refused(refusal) => Err(refusal.into()),
                FinishReason::Constraint(why) => Err(ApiError::grammar(&why)),
                FinishReason::Failed(reason) => Err(ApiError::internal(reason)),
                FinishReason::Stalled { seconds } => Err(ApiError::stalled(seconds)),
                _ => Ok(()),
            },
            Some(_) => Ok(()),
        }
    }

    pub(crate) async fn next(&mut self) -> Result<Next, ApiError> {
        let mut next = self.read().await?;
        if let (Some(ids), Next::Part(part) | Next::End(part, _)) = (&mut self.token_ids, &mut next) {
            part.token_ids.append(ids);
        }
        if let (Some(turn), Next::Part(part) | Next::End(part, _)) = (&mut self.turn, &next) {
            turn.events(&part.events);
        }
        if let Next::End(_, finish) = &next
            && let Some(turn) = self.turn.take()
        {
            turn.keep(&self.app, finish);
        }
        Ok(next)
    }

    async fn read(&mut self) -> Result<Next, ApiError> {
        loop {
            let event =
                self.generation.next().await.ok_or_else(|| ApiError::stopped("it dropped the running request"))?;
            match event {
                Event::Scheduled { cached_tokens, prefix } => {
                    self.app.prefixes.add(&self.id, self.prompt_tokens, &prefix);
                    (self.cached_tokens, self.report) = (cached_tokens, Some(prefix));
                    return Ok(Next::Started);
                }
                Event::Logits { .. } | Event::Attention(_) => {}
                Event::Tokens { tokens, logprobs } => {
                    let mut part = Part::default();
                    for (index, &token) in tokens.iter().enumerate() {
                        self.take(token, logprobs.get(index), &mut part);
                        if self.reader.stopped() {
                            // A stop text: the rest of the generation is of no use.
                            self.generation.cancel();
                            let finish = self.reader.finish(ReplyEnd::Stop, &mut part.events);
                            return Ok(Next::End(part, finish));
                        }
                    }
                    if !part.events.is_empty() {
                        return Ok(Next::Part(part));
                    }
                }
                Event::Finished { reason, cached_tokens, .. } => {
                    self.cached_tokens = cached_tokens;
                    let end = match reason {
                        FinishReason::Stop(_) | FinishReason::Complete => ReplyEnd::Stop,
                        FinishReason::Length => ReplyEnd::Length,
                        bad => return Err(ApiError::of_end(bad)),
                    };
                    let mut part = Part::default();
                    let finish = self.reader.finish(end, &mut part.events);
                    if part.events.iter().any(|event| matches!(event, ReplyEvent::Content(_))) {
                        part.content_logprobs.append(&mut self.held);
                    }
                    return Ok(Next::End(part, finish));
                }
            }
        }
    }

    fn take(&mut self, token: u32, logprobs: Option<&TokenLogprobs>, part: &mut Part) {
        self.output_tokens += 1;
        if let Some(ids) = &mut self.token_ids {
            ids.push(token);
        }
        if self.silent.contains(&token) {
            return;
        }
        if let Some(turn) = &mut self.turn {
            turn.token(token);
        }
        let Some(logprobs) = logprobs else {
            return self.reader.push_token(&self.app.tokenizer, token, &mut part.events);
        };
        let mut events = Vec::new();
        self.reader.push_token(&self.app.tokenizer, token, &mut events);
        self.held.push(self.logprobs_json(token, logprobs));
        match events.last() {
            Some(ReplyEvent::Content(_)) => part.content_logprobs.append(&mut self.held),
            Some(ReplyEvent::Reasoning(_)) => part.reasoning_logprobs.append(&mut self.held),
            // Tokens of tool markup are not reported.
            Some(_) => self.held.clear(),
            // A marker (the end of the thought) belongs to neither; other tokens wait for the rest of a character.
            None if self.app.tokenizer.is_added(token) => self.held.clear(),
            None => {}
        }
        part.events.append(&mut events);
    }

    fn logprobs_json(&self, token: u32, logprobs: &TokenLogprobs) -> Value {
        let one = |token: u32, logprob: f32| {
            let bytes = self.app.tokenizer.token_bytes(token);
            // JSON has no infinity; the API's own stand-in for "never" is -9999.
            let logprob = if logprob.is_finite() { logprob } else { -9999.0 };
            let mut value = json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes});
            if self.token_ids.is_some() {
                value["token_id"] = token.into();
            }
            value
        };
        let mut value = one(token, logprobs.chosen);
        value["top_logprobs"] = logprobs.top.iter().map(|&(token, logprob)| one(token, logprob)).collect();
        value
    }

    /// Token counts so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            output_tokens: u64::from(self.output_tokens),
            reasoning_tokens: u64::from(self.reader.reasoning_tokens()),
        }
    }

    /// What the prefix cache did, once the request runs.
    pub(crate) fn prefix_report(&self) -> Value {
        self.report.as_ref().map_or(Value::Null, prefix::json)
    }
}
