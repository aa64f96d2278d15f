//! A validated request: what is rendered and how the answer is read, whatever protocol it came in.
//!
//! The three readers (`chat.rs`, `messages.rs`, `responses.rs`) bring a body into the vendor's form and let its conversion
//! validate and normalise; this file holds what they share. Calls are numbered by position before rendering, because the
//! renderer sorts by id and the model was trained on the order of the calls.

use std::collections::{HashMap, HashSet};

use deepseek_recipe::request::{ConversationRequest, ConversionError};
use deepseek_recipe::stream::{ParsingOptions, ThinkingInitialStage};
use deepseek_recipe_core::conversation::{Conversation, ReasoningEffort};
use deepseek_recipe_core::messages::InputMessage;
use serde_json::{Map, Value};
use thiserror::Error;

use crate::grammar::AnswerRules;
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
    pub(crate) fn field(param: impl Into<String>, message: impl std::fmt::Display) -> ChatError {
        let param = param.into();
        ChatError { message: format!("{param}: {message}"), param: Some(param) }
    }
}

/// Names under which a Responses client knows the functions that the model saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolNames {
    /// Custom tools: their only argument, `input`, is free text.
    pub custom: HashSet<String>,
    /// Tools of a namespace by the flat name in the prompt: namespace and local name.
    pub namespaces: HashMap<String, (String, String)>,
    /// The function `tool_search` is the client's search for tools.
    pub search: bool,
}

/// A validated chat request.
#[derive(Debug, Clone)]
pub struct ChatPlan {
    /// What is rendered.
    pub conversation: Conversation,
    /// How the answer is read.
    pub reply: ReplyOptions,
    /// For Responses: what the client calls the tools.
    pub tool_names: ToolNames,
    /// Ids of the calls of each assistant message, in order, as the client sent them; ids are never rendered.
    pub call_ids: Vec<Vec<String>>,
    /// What the answer must follow.
    pub rules: AnswerRules,
}

impl ChatPlan {
    /// Reads a body of the protocol `chat`, `responses` or `messages`; `None` for another name.
    pub fn of_protocol(
        protocol: &str,
        body: &Map<String, Value>,
        defaults: ChatDefaults,
    ) -> Option<Result<ChatPlan, ChatError>> {
        match protocol {
            "chat" => Some(ChatPlan::from_body(body, defaults)),
            "responses" => Some(ChatPlan::from_responses(body, defaults)),
            "messages" => Some(ChatPlan::from_messages(body, defaults)),
            _ => None,
        }
    }

    /// From the vendor's conversion; the effort of `thinking` replaces the one that the conversion chose.
    pub(crate) fn of(converted: ConversationRequest, thinking: bool, effort: Effort, table: EffortTable) -> ChatPlan {
        let mut conversation = converted.conversation;
        conversation.reasoning_effort = thinking.then_some(match table.rendered(effort) {
            Effort::Low => ReasoningEffort::Low,
            Effort::High => ReasoningEffort::High,
            Effort::Max => ReasoningEffort::Max,
        });
        let call_ids = number_calls_by_position(&mut conversation.messages);
        let reply = reply_options(&conversation, converted.parsing_options);
        let tool_names = ToolNames {
            custom: converted.response_options.custom_tool_names,
            namespaces: converted.response_options.namespace_tool_map.unwrap_or_default(),
            search: false,
        };
        let rules = AnswerRules::default();
        ChatPlan { conversation, reply, tool_names, call_ids, rules }
    }

    /// Adds what `body` asks of the answer; `forced` says that a call must come although the prompt does not open it.
    pub(crate) fn with_rules(mut self, body: &Map<String, Value>, forced: bool) -> Result<ChatPlan, ChatError> {
        let thought = matches!(self.reply.start, ReplyStart::Reasoning | ReplyStart::ReasoningContinuation);
        self.rules = AnswerRules::of(body, &self.conversation, thought, forced)?;
        Ok(self)
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
pub(crate) const VENDOR_MODEL: &str = "DeepSeek-V4-Pro";

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

/// The renderer sorts calls and results by id; the model was trained on the order of the calls. Ids are never rendered,
/// so they are replaced by positions here. Gives back the ids of each assistant message.
fn number_calls_by_position(messages: &mut [InputMessage]) -> Vec<Vec<String>> {
    let mut ids = Vec::new();
    let mut positions: HashMap<String, String> = HashMap::new();
    for message in messages {
        match message {
            InputMessage::Assistant { tool_calls, .. } => {
                let Some(calls) = tool_calls else {
                    ids.push(Vec::new());
                    continue;
                };
                positions.clear();
                ids.push(calls.iter().map(|call| call.id.clone()).collect());
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
    ids
}

/// An error of the conversion, with the field that it is about.
pub(crate) fn from_vendor(error: ConversionError) -> ChatError {
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
