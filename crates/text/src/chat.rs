//! A Chat Completions body becomes a conversation and the way its answer will be read.
//!
//! Takes the fields that shape the prompt: messages, tools, tool_choice, the thinking switch, response_format, stop.
//! The vendor's conversion validates and normalises; before it, habits of real clients are brought into its form
//! (developer role, `reasoning`, null content, argument objects). Refuses unknown values of these fields with an error
//! that names the field; unknown fields are not looked at. Transport and sampling fields are the server's.

use std::collections::HashMap;

use deepseek_recipe::openai::chat_completion::request as vendor;
use deepseek_recipe::openai::chat_completion::request::ChatCompletionToolChoiceOption as Choice;
use deepseek_recipe::request::{ConversionError, ConversionOptions, ProtocolRequest};
use deepseek_recipe::stream::{ParsingOptions, ThinkingInitialStage};
use deepseek_recipe_core::conversation::{Conversation, ReasoningEffort, ResponseFormat};
use deepseek_recipe_core::messages::InputMessage;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use thiserror::Error;

use crate::prompt::Prompt;
use crate::reply::{ReplyOptions, ReplyStart};

/// How much the model shall think; the prompt says it in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// No text in the prompt.
    Low,
    /// The vendor's default.
    High,
    /// Wants a context of at least 384K.
    Max,
}

/// Which texts the efforts put into the prompt: a property of the checkpoint (model.md 9.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EffortTable {
    /// The first release: only max effort has a text, the one that high effort has today.
    April,
    /// The 0731 release and later: a text for high and one for max.
    July,
}

impl EffortTable {
    /// The effort whose text is rendered for a request of `effort`.
    fn rendered(self, effort: Effort) -> Effort {
        match (self, effort) {
            (EffortTable::July, effort) => effort,
            (EffortTable::April, Effort::Max) => Effort::High,
            (EffortTable::April, _) => Effort::Low,
        }
    }
}

/// What a request that says nothing gets, and how efforts are rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatDefaults {
    /// Thinking on.
    pub thinking: bool,
    /// Effort while thinking.
    pub effort: Effort,
    /// The served checkpoint's texts.
    pub table: EffortTable,
}

impl Default for ChatDefaults {
    /// Thinking with high effort, as the vendor's servers do.
    fn default() -> Self {
        ChatDefaults { thinking: true, effort: Effort::High, table: EffortTable::July }
    }
}

/// A request that cannot be answered as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct ChatError {
    /// What is wrong and what would be accepted.
    pub message: String,
    /// The field, as `messages[2]` or `tool_choice`.
    pub param: Option<String>,
}

impl ChatError {
    fn field(param: impl Into<String>, message: impl std::fmt::Display) -> ChatError {
        let param = param.into();
        ChatError { message: format!("{param}: {message}"), param: Some(param) }
    }
}

/// A validated chat request.
#[derive(Debug, Clone)]
pub struct ChatPlan {
    /// What is rendered.
    pub conversation: Conversation,
    /// How the answer is read.
    pub reply: ReplyOptions,
}

impl ChatPlan {
    /// Reads a request body.
    pub fn from_body(body: &Map<String, Value>, defaults: ChatDefaults) -> Result<ChatPlan, ChatError> {
        let (thinking, effort) = thinking_switch(body, defaults)?;
        let mut tools = tools(body)?;
        let tool_choice = optional(body, "tool_choice")?;
        let forced = matches!(tool_choice, Some(Choice::Required | Choice::Named { .. }));
        if forced && thinking && !tools.is_empty() {
            return Err(ChatError::field(
                "tool_choice",
                "a forced tool call is not possible while thinking; use \"auto\", or add \"thinking\": {\"type\": \"disabled\"}",
            ));
        }
        if body.get("response_format").and_then(|f| f.get("type")).and_then(Value::as_str) == Some("regex") {
            let why =
                "regex is not supported: output is not constrained; use json_schema, which is put into the prompt";
            return Err(ChatError::field("response_format", why));
        }
        let (response_format, json_object) = match optional(body, "response_format")? {
            // The vendor insists on the word "json" in the messages; a local server need not.
            Some(vendor::ChatCompletionResponseFormat::JsonObject) => (None, true),
            Some(vendor::ChatCompletionResponseFormat::Text) | None => (None, false),
            other => (other, false),
        };
        in_vendor_tools(&mut tools, response_format.is_some());
        let kind = if thinking { "enabled" } else { "disabled" };
        let request = vendor::ChatCompletionRequest {
            messages: messages(body)?,
            model: VENDOR_MODEL.to_owned(),
            frequency_penalty: None,
            logprobs: None,
            top_logprobs: None,
            max_tokens: None,
            n: None,
            presence_penalty: None,
            seed: None,
            stop: optional(body, "stop")?,
            stream: None,
            stream_options: None,
            temperature: None,
            top_p: None,
            response_format,
            tools: (!tools.is_empty()).then_some(tools),
            tool_choice,
            reasoning_effort: None,
            thinking: Some(read(&serde_json::json!({ "type": kind }), || "thinking".to_owned())?),
            parallel_tool_calls: None,
        };
        let converted = request.convert(ConversionOptions::new()).map_err(from_vendor)?;

        let mut conversation = converted.conversation;
        if json_object {
            conversation.response_format = ResponseFormat::JsonObject;
        }
        conversation.reasoning_effort = thinking.then_some(match defaults.table.rendered(effort) {
            Effort::Low => ReasoningEffort::Low,
            Effort::High => ReasoningEffort::High,
            Effort::Max => ReasoningEffort::Max,
        });
        number_calls_by_position(&mut conversation.messages);
        let reply = reply_options(&conversation, converted.parsing_options);
        Ok(ChatPlan { conversation, reply })
    }

    /// Whether the answer starts with reasoning.
    pub fn thinking(&self) -> bool {
        self.conversation.thinking_mode
    }

    /// Most tokens of an answer when the request names none: the vendor's limits, 8,192 without thinking, 65,536 with,
    /// 131,072 at max effort. A bound matters, because the engine keeps room in the cache for what may be generated.
    pub fn default_max_tokens(&self) -> u32 {
        match (self.thinking(), self.conversation.reasoning_effort) {
            (false, _) => 8_192,
            (true, Some(ReasoningEffort::Max)) => 131_072,
            (true, _) => 65_536,
        }
    }

    /// Renders the prompt.
    pub fn prompt(&self) -> Prompt {
        Prompt::render(&self.conversation)
    }
}

/// The name under which the vendor's conversion knows V4; Flash and Pro share one prompt format.
const VENDOR_MODEL: &str = "DeepSeek-V4-Pro";

fn read<T: DeserializeOwned>(value: &Value, param: impl Fn() -> String) -> Result<T, ChatError> {
    T::deserialize(value).map_err(|error| ChatError::field(param(), error))
}

/// A field that is present and not null.
fn present<'a>(body: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    body.get(name).filter(|value| !value.is_null())
}

fn optional<T: DeserializeOwned>(body: &Map<String, Value>, name: &str) -> Result<Option<T>, ChatError> {
    present(body, name).map(|value| read(value, || name.to_owned())).transpose()
}

fn list<'a>(body: &'a Map<String, Value>, name: &str) -> Result<Option<&'a [Value]>, ChatError> {
    let Some(value) = present(body, name) else { return Ok(None) };
    value.as_array().map(|list| Some(list.as_slice())).ok_or_else(|| ChatError::field(name, "expected a list"))
}

fn object<'a>(body: &'a Map<String, Value>, name: &str) -> Result<Option<&'a Map<String, Value>>, ChatError> {
    let Some(value) = present(body, name) else { return Ok(None) };
    value.as_object().map(Some).ok_or_else(|| ChatError::field(name, "expected an object"))
}

/// One precedence for all spellings: an explicit switch wins, else effort `none` means off and any other effort on,
/// else the default.
fn thinking_switch(body: &Map<String, Value>, defaults: ChatDefaults) -> Result<(bool, Effort), ChatError> {
    let kwargs = object(body, "chat_template_kwargs")?;
    let reasoning = object(body, "reasoning")?;
    let mut switch = None;
    if let Some(thinking) = present(body, "thinking") {
        let kind = thinking.get("type").and_then(Value::as_str);
        switch = Some(match (thinking, kind) {
            (Value::Bool(on), _) => *on,
            (_, Some("enabled" | "adaptive")) => true,
            (_, Some("disabled")) => false,
            _ => {
                return Err(ChatError::field(
                    "thinking",
                    "expected {\"type\": \"enabled\"}, {\"type\": \"adaptive\"} or {\"type\": \"disabled\"}",
                ));
            }
        });
    }
    for (holder, at, name) in [
        (kwargs, "chat_template_kwargs", "thinking"),
        (kwargs, "chat_template_kwargs", "enable_thinking"),
        (reasoning, "reasoning", "enabled"),
    ] {
        let Some(value) = holder.and_then(|holder| present(holder, name)) else { continue };
        let on = value.as_bool().ok_or_else(|| ChatError::field(format!("{at}.{name}"), "expected true or false"))?;
        switch = switch.or(Some(on));
    }
    let mut effort = None;
    for (holder, at, name) in [
        (Some(body), "", "reasoning_effort"),
        (kwargs, "chat_template_kwargs.", "reasoning_effort"),
        (reasoning, "reasoning.", "effort"),
    ] {
        let Some(value) = holder.and_then(|holder| present(holder, name)) else { continue };
        let parsed = match value.as_str() {
            Some("none") => None,
            Some("minimal" | "low") => Some(Effort::Low),
            Some("medium" | "high" | "xhigh") => Some(Effort::High),
            Some("max" | "ultra") => Some(Effort::Max),
            _ => {
                return Err(ChatError::field(
                    format!("{at}{name}"),
                    "expected one of none, minimal, low, medium, high, xhigh, max, ultra",
                ));
            }
        };
        effort = effort.or(Some(parsed));
    }
    let thinking = switch.unwrap_or(match effort {
        Some(None) => false,
        Some(Some(_)) => true,
        None => defaults.thinking,
    });
    Ok((thinking, effort.flatten().unwrap_or(defaults.effort)))
}

fn tools(body: &Map<String, Value>) -> Result<Vec<vendor::ChatCompletionTool>, ChatError> {
    let tools = list(body, "tools")?.unwrap_or(&[]);
    tools.iter().enumerate().map(|(index, tool)| read(tool, || format!("tools[{index}]"))).collect()
}

/// How the answer to a converted conversation is read.
fn reply_options(conversation: &Conversation, parsing: ParsingOptions) -> ReplyOptions {
    let continues = matches!(conversation.messages.last(), Some(InputMessage::Assistant { prefix: true, .. }));
    let start = match parsing.thinking_initial_stage {
        _ if parsing.starts_in_tool_calls => ReplyStart::ToolCalls,
        Some(ThinkingInitialStage::ReasoningStart) => ReplyStart::Reasoning,
        Some(ThinkingInitialStage::ReasoningContinuation) => ReplyStart::ReasoningContinuation,
        Some(ThinkingInitialStage::ContentContinuation) => ReplyStart::ContentContinuation,
        None if continues => ReplyStart::ContentContinuation,
        None => ReplyStart::Content,
    };
    ReplyOptions { start, parse_tool_calls: parsing.parse_tool_calls, stop: parsing.stop_sequences, call_seed: 0 }
}

fn messages(body: &Map<String, Value>) -> Result<Vec<vendor::ChatCompletionRequestMessage>, ChatError> {
    let list = list(body, "messages")?.ok_or_else(|| ChatError::field("messages", "required, a list of messages"))?;
    if list.is_empty() {
        return Err(ChatError::field("messages", "empty; at least one message is needed"));
    }
    list.iter()
        .enumerate()
        .map(|(index, message)| {
            let param = || format!("messages[{index}]");
            let message = message.as_object().ok_or_else(|| ChatError::field(param(), "expected an object"))?;
            match message.get("role") {
                Some(Value::String(_)) => {}
                Some(_) => return Err(ChatError::field(format!("{}.role", param()), "expected a string")),
                None => return Err(ChatError::field(format!("{}.role", param()), "required")),
            }
            read(&Value::Object(in_vendor_form(message)), param)
        })
        .collect()
}

/// What clients send and the vendor's conversion would refuse or lose.
fn in_vendor_form(message: &Map<String, Value>) -> Map<String, Value> {
    let mut message = message.clone();
    let is_null = |message: &Map<String, Value>, name: &str| message.get(name).is_none_or(Value::is_null);
    match message.get("role").and_then(Value::as_str) {
        Some("developer") => {
            message.insert("role".into(), "system".into());
        }
        Some("assistant") => {
            if is_null(&message, "reasoning_content")
                && let Some(reasoning) = message.get("reasoning").filter(|reasoning| reasoning.is_string()).cloned()
            {
                message.insert("reasoning_content".into(), reasoning);
            }
            if message.get("tool_calls").is_some_and(|calls| calls.as_array().is_some_and(Vec::is_empty)) {
                message.remove("tool_calls");
            }
            if is_null(&message, "content") && is_null(&message, "tool_calls") {
                message.insert("content".into(), "".into());
            }
            for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                let Some(call) = call.as_object_mut() else { continue };
                call.entry("type").or_insert_with(|| "function".into());
                let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else { continue };
                let arguments = match function.get("arguments") {
                    Some(Value::Object(arguments)) => Value::Object(arguments.clone()).to_string(),
                    Some(Value::String(text)) if !text.trim().is_empty() => continue,
                    Some(Value::String(_) | Value::Null) | None => "{}".to_owned(),
                    Some(_) => continue,
                };
                function.insert("arguments".into(), arguments.into());
            }
        }
        Some("tool") if message.get("content").is_some_and(Value::is_null) => {
            message.insert("content".into(), "".into());
        }
        _ => {}
    }
    message
}

/// Agents mix strict tools with others and with a response format, which the vendor refuses because its grammar cannot;
/// the prompt can. A tool without parameters may say so with an empty schema.
fn in_vendor_tools(tools: &mut [vendor::ChatCompletionTool], has_response_format: bool) {
    let all_strict = tools.iter().all(|tool| tool.function.strict == Some(true));
    for tool in tools {
        let function = &mut tool.function;
        if has_response_format || !all_strict {
            function.strict = None;
        }
        if function.parameters.as_ref().is_some_and(|schema| schema.as_object().is_some_and(Map::is_empty)) {
            function.parameters = None;
        }
    }
}

/// The renderer sorts calls and results by id; the model was trained on the order of the calls. Ids are never rendered,
/// so they are replaced by positions here.
fn number_calls_by_position(messages: &mut [InputMessage]) {
    let mut positions: HashMap<String, String> = HashMap::new();
    for message in messages {
        match message {
            InputMessage::Assistant { tool_calls: Some(calls), .. } => {
                positions.clear();
                for (position, call) in calls.iter_mut().enumerate() {
                    let number = format!("{position:06}");
                    positions.insert(std::mem::replace(&mut call.id, number.clone()), number);
                }
            }
            InputMessage::Tool { tool_call_id: Some(id), .. } => {
                if let Some(number) = positions.get(id) {
                    id.clone_from(number);
                }
            }
            _ => {}
        }
    }
}

fn from_vendor(error: ConversionError) -> ChatError {
    let message = error.to_string();
    // The vendor's errors carry no field; its texts name one for most of them.
    let lower = message.to_lowercase();
    let param = [
        ("message", "messages"),
        ("tool_call'", "tool_choice"),
        ("tool", "tools"),
        ("function '", "tools"),
        ("stop", "stop"),
        ("schema", "response_format"),
        ("response_format", "response_format"),
    ]
    .iter()
    .find(|(word, _)| lower.contains(word))
    .map(|(_, param)| (*param).to_owned());
    ChatError { message, param }
}
