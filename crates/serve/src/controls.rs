//! The fields of a request body that steer sampling, length and transport.
//!
//! Values of known fields outside their range are an error that names the field and what is accepted. Unknown fields are
//! ignored and their names logged at debug level: clients rely on it. The fields that shape the prompt are read by
//! `longwave-text`.

use longwave_engine::request::salt_of;
use longwave_engine::step::Sampling;
use serde_json::{Map, Value};

use crate::errors::ApiError;
use crate::fields::is_known;
use crate::generation::fresh_number;
use crate::options::SamplingDefaults;

/// Whose spelling a body has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// OpenAI's Chat Completions.
    Chat,
    /// OpenAI's (legacy) Completions.
    Completions,
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
}

/// What was read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Controls {
    pub(crate) sampling: Sampling,
    /// As asked; `None` is what the context leaves.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) min_tokens: u32,
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) priority: i32,
    pub(crate) salt: u64,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Answers to one prompt, at least one.
    pub(crate) answers: u32,
    pub(crate) prefix_report: bool,
    /// Give ids of tokens out.
    pub(crate) token_ids: bool,
    pub(crate) include_reasoning: bool,
}

/// Levels of priority on each side of 0: each is worth some time of waiting, and nobody may buy for ever.
const MAX_PRIORITY: i64 = 16;
/// Most stop tokens; far from all there are, so that something is left to choose.
const MAX_STOP_TOKENS: usize = 1024;
/// Most answers to one prompt.
const MAX_ANSWERS: u64 = 128;
/// Most alternatives per token.
pub(crate) const MAX_TOP_LOGPROBS: u32 = 20;

impl Controls {
    pub(crate) fn read(
        body: &Map<String, Value>,
        protocol: Protocol,
        defaults: &SamplingDefaults,
        vocab: u32,
    ) -> Result<Controls, ApiError> {
        for name in body.keys().filter(|name| !is_known(protocol, name)) {
            tracing::debug!(field = %name.chars().take(64).collect::<String>(), "unknown field ignored");
        }
        let fields = Fields(body);
        let several = matches!(protocol, Protocol::Chat | Protocol::Completions);
        let n = if several { fields.whole("n", 1, u64::MAX)?.unwrap_or(1) } else { 1 };
        if n > MAX_ANSWERS {
            return Err(ApiError::field("n", format!("expected at most {MAX_ANSWERS} answers, got {n}")));
        }
        let repetition_penalty = fields.number("repetition_penalty", 0.01, 2.0)?.unwrap_or(1.0);
        fields.flag("parallel_tool_calls")?;

        let top_p = fields.number("top_p", 0.0, 1.0)?.unwrap_or(defaults.top_p);
        if top_p <= 0.0 {
            return Err(ApiError::field("top_p", "expected a number above 0 and at most 1"));
        }
        // -1 is another way to say off.
        let top_k = match body.get("top_k").and_then(Value::as_i64) {
            Some(-1) => 0,
            _ => fields.whole("top_k", 0, u64::from(u32::MAX))?.map_or(defaults.top_k, |top_k| top_k as u32),
        };
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(defaults.temperature),
            top_p,
            top_k,
            min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(defaults.min_p),
            seed: fields.seed()?.unwrap_or_else(fresh_number),
            top_logprobs: fields.logprobs(protocol)?,
            bias: fields.bias(vocab)?,
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            repetition_penalty,
            ..Sampling::default()
        };
        let stream = fields.flag("stream")?.unwrap_or(false);
        let include_usage = if several { fields.include_usage(stream)? } else { false };
        let most = u64::from(u32::MAX);
        let max_tokens = fields.whole("max_tokens", 1, most)?;
        let newer = match protocol {
            Protocol::Chat => fields.whole("max_completion_tokens", 1, most)?,
            Protocol::Responses => fields.whole("max_output_tokens", 1, most)?,
            Protocol::Completions | Protocol::Messages => None,
        };
        let max_tokens = newer.or(max_tokens).map(|count| count as u32);
        let min_tokens = fields.whole("min_tokens", 0, most)?.unwrap_or(0) as u32;
        if max_tokens.is_some_and(|max_tokens| min_tokens > max_tokens) {
            return Err(ApiError::field("min_tokens", "larger than max_tokens"));
        }
        let mut stop_tokens = fields.token_list("stop_token_ids", vocab)?;
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        if stop_tokens.len() > MAX_STOP_TOKENS {
            return Err(ApiError::field("stop_token_ids", format!("expected at most {MAX_STOP_TOKENS} different ids")));
        }
        Ok(Controls {
            sampling,
            max_tokens,
            min_tokens,
            stop_tokens,
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            priority: fields.priority()?,
            salt: fields.salt()?,
            stream,
            include_usage,
            answers: n as u32,
            prefix_report: fields.flag("prefix_report")?.unwrap_or(false),
            token_ids: several && fields.flag("return_token_ids")?.unwrap_or(false),
            include_reasoning: fields.flag("include_reasoning")?.unwrap_or(true),
        })
    }
}

/// Typed access; null counts as absent.
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| ApiError::field(name, "expected true or false"))
    }

    fn number(&self, name: &str, low: f32, high: f32) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64().map(|number| number as f32) {
            Some(number) if (low..=high).contains(&number) => Ok(Some(number)),
            _ => Err(ApiError::field(name, format!("expected a number from {low} to {high}, got {}", short(value)))),
        }
    }

    fn whole(&self, name: &str, low: u64, high: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64() {
            Some(number) if (low..=high).contains(&number) => Ok(Some(number)),
            _ => Err(ApiError::field(name, format!("expected a whole number of {low} or more, got {}", short(value)))),
        }
    }

    fn seed(&self) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get("seed") else { return Ok(None) };
        let seed = value.as_u64().or_else(|| value.as_i64().map(|seed| seed as u64));
        seed.map(Some).ok_or_else(|| ApiError::field("seed", format!("expected a whole number, got {}", short(value))))
    }

    fn priority(&self) -> Result<i32, ApiError> {
        let Some(value) = self.get("priority") else { return Ok(0) };
        let number = value.as_i64().filter(|number| (-MAX_PRIORITY..=MAX_PRIORITY).contains(number));
        let message =
            || format!("expected a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {}", short(value));
        number.map(|number| number as i32).ok_or_else(|| ApiError::field("priority", message()))
    }

    fn salt(&self) -> Result<u64, ApiError> {
        let Some(value) = self.get("cache_salt") else { return Ok(0) };
        let text = value.as_str().ok_or_else(|| ApiError::field("cache_salt", "expected a string"))?;
        Ok(salt_of(text))
    }

    fn logprobs(&self, protocol: Protocol) -> Result<Option<u32>, ApiError> {
        let most = u64::from(MAX_TOP_LOGPROBS);
        match protocol {
            Protocol::Messages => return Ok(None),
            Protocol::Completions => {
                let top = self.whole("logprobs", 0, u64::MAX)?;
                if top.is_some_and(|top| top > most) {
                    return Err(ApiError::field("logprobs", format!("expected at most {MAX_TOP_LOGPROBS}")));
                }
                return Ok(top.map(|top| top as u32));
            }
            Protocol::Responses => {
                let included = self.get("include").and_then(Value::as_array);
                let included =
                    included.is_some_and(|list| list.iter().any(|item| item == "message.output_text.logprobs"));
                let top = self.whole("top_logprobs", 0, u64::MAX)?;
                if top.is_some_and(|top| top > most) {
                    return Err(ApiError::field("top_logprobs", format!("expected at most {MAX_TOP_LOGPROBS}")));
                }
                return Ok(top.map(|top| top as u32).or(included.then_some(0)));
            }
            Protocol::Chat => {}
        }
        let wanted = self.flag("logprobs")?.unwrap_or(false);
        let top = self.whole("top_logprobs", 0, u64::MAX)?;
        if top.is_some_and(|top| top > most) {
            return Err(ApiError::field("top_logprobs", format!("expected at most {MAX_TOP_LOGPROBS}")));
        }
        if top.is_some_and(|top| top > 0) && !wanted {
            return Err(ApiError::field("top_logprobs", "needs \"logprobs\": true"));
        }
        Ok(wanted.then_some(top.unwrap_or(0) as u32))
    }

    fn bias(&self, vocab: u32) -> Result<Vec<(u32, f32)>, ApiError> {
        let Some(value) = self.get("logit_bias") else { return Ok(Vec::new()) };
        let bad = || {
            let message = format!("expected token ids below {vocab} as keys and numbers from -100 to 100 as values");
            ApiError::field("logit_bias", message)
        };
        let entries = value.as_object().ok_or_else(bad)?;
        let entry = |(key, value): (&String, &Value)| -> Option<(u32, f32)> {
            let token = key.parse::<u32>().ok().filter(|&token| token < vocab)?;
            let bias = value.as_f64().map(|bias| bias as f32).filter(|bias| (-100.0..=100.0).contains(bias))?;
            Some((token, bias))
        };
        let list: Vec<(u32, f32)> = entries.iter().map(|pair| entry(pair).ok_or_else(bad)).collect::<Result<_, _>>()?;
        // "5" and "05" are two keys and one token.
        let mut tokens: Vec<u32> = list.iter().map(|&(token, _)| token).collect();
        tokens.sort_unstable();
        match tokens.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(ApiError::field("logit_bias", format!("token {} is there twice", pair[0]))),
            None => Ok(list),
        }
    }

    fn token_list(&self, name: &str, vocab: u32) -> Result<Vec<u32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let bad = || ApiError::field(name, format!("expected a list of token ids below {vocab}"));
        let token = |value: &Value| value.as_u64().filter(|&token| token < u64::from(vocab)).map(|token| token as u32);
        value.as_array().ok_or_else(bad)?.iter().map(|value| token(value).ok_or_else(bad)).collect()
    }

    fn include_usage(&self, stream: bool) -> Result<bool, ApiError> {
        let Some(value) = self.get("stream_options") else { return Ok(false) };
        let options = value.as_object().ok_or_else(|| ApiError::field("stream_options", "expected an object"))?;
        if !stream {
            return Err(ApiError::field("stream_options", "needs \"stream\": true"));
        }
        match options.get("include_usage") {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(wanted)) => Ok(*wanted),
            Some(_) => Err(ApiError::field("stream_options.include_usage", "expected true or false")),
        }
    }
}

/// A value for an error text, cut to a line.
fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 40 {
        return text;
    }
    text.chars().take(40).chain("...".chars()).collect()
}
