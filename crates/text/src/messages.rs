//! An Anthropic Messages body becomes a conversation and the way its answer will be read.
//!
//! Takes the fields that shape the prompt: system, messages, tools, tool_choice, the thinking switch, output_config,
//! stop_sequences. The vendor's conversion validates and normalises (it also drops the billing line that Claude Code
//! puts in front of the system text); before it, what it would refuse or lose is brought into its form. Refuses
//! Anthropic's own tools that no local model knows, except web search, which is left out.

use deepseek_recipe::anthropic::MessagesRequest;
use deepseek_recipe::request::{ConversionOptions, ProtocolRequest, WebSearchBehavior};
use deepseek_recipe_core::conversation::ResponseFormat;
use serde_json::{Map, Value, json};

use crate::body::{list, object, present, typed};
use crate::grammar::{Format, FormatRule};
use crate::plan::{ChatDefaults, ChatError, ChatPlan, VENDOR_MODEL, from_vendor};
use crate::thinking::thinking_switch;

impl ChatPlan {
    /// Reads the body of a Messages request.
    pub fn from_messages(body: &Map<String, Value>, defaults: ChatDefaults) -> Result<ChatPlan, ChatError> {
        let (thinking, effort) = thinking_switch(body, defaults)?;
        let mut tools = tools(body)?;
        let choice = tool_choice(body)?;
        let forced = matches!(choice, Some(Choice::Any | Choice::Tool(_)));
        if forced && tools.is_empty() {
            return Err(ChatError::field("tool_choice", "a forced tool call needs tools"));
        }
        // The vendor forces no call behind a thought. Here the grammar does, so for the prompt the choice is free.
        let forced = forced && thinking;
        if forced && let Some(Choice::Tool(name)) = &choice {
            tools.retain(|tool| tool["name"] == name.as_str());
            if tools.is_empty() {
                return Err(ChatError::field("tool_choice.name", format!("no tool named {name:?} is offered")));
            }
        }
        // The vendor takes "any" for "auto".
        let vendor_choice = match &choice {
            _ if forced => Value::Null,
            None | Some(Choice::Auto | Choice::Any) => Value::Null,
            Some(Choice::None) => json!({"type": "none"}),
            Some(Choice::Tool(name)) => json!({"type": "tool", "name": name}),
        };
        let request = json!({
            "model": VENDOR_MODEL,
            "messages": messages(body)?,
            "system": system(body)?,
            "stop_sequences": present(body, "stop_sequences"),
            "tools": (!tools.is_empty()).then_some(tools),
            "tool_choice": vendor_choice,
            "thinking": {"type": if thinking { "enabled" } else { "disabled" }},
        });
        let least = json!({"model": VENDOR_MODEL, "messages": []});
        let whole = ["system", "stop_sequences", "tool_choice"].map(|name| (name, name));
        let request: MessagesRequest = typed(request, &least, &whole, &["messages", "tools"])?;
        let options = ConversionOptions::new().with_messages_web_search(WebSearchBehavior::Drop);
        let mut converted = request.convert(options).map_err(from_vendor)?;
        if choice == Some(Choice::Any) && !forced && !converted.conversation.tools.is_empty() {
            converted.conversation.tool_choice = deepseek_recipe_core::tools::ToolChoice::Required;
            converted.parsing_options.starts_in_tool_calls = true;
        }
        let mut plan = ChatPlan::of(converted, thinking, effort, defaults.table).with_rules(body, forced)?;
        if let Some(FormatRule { format: Format::Schema(schema), .. }) = &plan.rules.format {
            plan.conversation.response_format = ResponseFormat::JsonSchema(schema.clone());
        }
        Ok(plan)
    }
}

/// Anthropic's tool choices.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    Auto,
    Any,
    None,
    Tool(String),
}

fn tool_choice(body: &Map<String, Value>) -> Result<Option<Choice>, ChatError> {
    let Some(choice) = object(body, "tool_choice")? else { return Ok(None) };
    match (choice.get("type").and_then(Value::as_str), choice.get("name").and_then(Value::as_str)) {
        (Some("auto"), _) => Ok(Some(Choice::Auto)),
        (Some("any"), _) => Ok(Some(Choice::Any)),
        (Some("none"), _) => Ok(Some(Choice::None)),
        (Some("tool"), Some(name)) => Ok(Some(Choice::Tool(name.to_owned()))),
        (Some("tool"), None) => Err(ChatError::field("tool_choice.name", "required for {\"type\": \"tool\"}")),
        _ => Err(ChatError::field("tool_choice.type", "expected one of auto, any, tool, none")),
    }
}

/// Client tools as they are; Anthropic's own are left out or refused.
fn tools(body: &Map<String, Value>) -> Result<Vec<Value>, ChatError> {
    let mut tools = Vec::new();
    for (index, tool) in list(body, "tools")?.unwrap_or(&[]).iter().enumerate() {
        let param = format!("tools[{index}]");
        let mut tool = tool.as_object().ok_or_else(|| ChatError::field(&param, "expected an object"))?.clone();
        match tool.get("type").and_then(Value::as_str) {
            None | Some("custom") => {
                tool.remove("type");
                if tool.get("input_schema").is_none_or(Value::is_null) {
                    return Err(ChatError::field(format!("{param}.input_schema"), "required, a JSON schema"));
                }
            }
            Some(kind) if kind.starts_with("web_search") => {}
            Some(kind) => {
                return Err(ChatError::field(
                    format!("{param}.type"),
                    format!(
                        "{kind:?} is a tool of Anthropic's models; declare it as a tool with a name and an input_schema"
                    ),
                ));
            }
        }
        tools.push(Value::Object(tool));
    }
    Ok(tools)
}

fn system(body: &Map<String, Value>) -> Result<Value, ChatError> {
    match present(body, "system") {
        None => Ok(Value::Null),
        Some(Value::Array(blocks)) => Ok(blocks.iter().map(in_vendor_block).collect()),
        Some(text) => Ok(text.clone()),
    }
}

fn messages(body: &Map<String, Value>) -> Result<Vec<Value>, ChatError> {
    let list = list(body, "messages")?.ok_or_else(|| ChatError::field("messages", "required, a list of messages"))?;
    if list.is_empty() {
        return Err(ChatError::field("messages", "empty; at least one message is needed"));
    }
    list.iter().enumerate().map(|(index, message)| in_vendor_form(message, index)).collect()
}

/// One message. Redacted thoughts go: nobody here can read them.
fn in_vendor_form(message: &Value, index: usize) -> Result<Value, ChatError> {
    let param = format!("messages[{index}]");
    let fields = message.as_object().ok_or_else(|| ChatError::field(&param, "expected an object"))?;
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err(ChatError::field(format!("{param}.role"), "required, \"user\" or \"assistant\""));
    }
    let mut message = message.clone();
    let Some(blocks) = message["content"].as_array() else { return Ok(message) };
    let mut kept = Vec::with_capacity(blocks.len());
    for block in blocks {
        match block.get("type").and_then(Value::as_str) {
            Some("redacted_thinking") => {}
            Some("tool_result") => {
                let mut block = block.clone();
                if let Some(parts) = block["content"].as_array() {
                    block["content"] = parts.iter().map(in_vendor_block).collect();
                }
                kept.push(block);
            }
            _ => kept.push(in_vendor_block(block)),
        }
    }
    message["content"] = if kept.is_empty() && !blocks.is_empty() { "".into() } else { kept.into() };
    Ok(message)
}

/// Documents that are text and search results as text blocks; all else unchanged.
fn in_vendor_block(block: &Value) -> Value {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let joined = |parts: &Value| {
        let parts = parts.as_array()?.iter().filter_map(|part| text(&part["text"]));
        Some(parts.collect::<Vec<_>>().join("\n\n"))
    };
    let content = match block.get("type").and_then(Value::as_str) {
        Some("document") => match block["source"]["type"].as_str() {
            Some("text") => text(&block["source"]["data"]),
            Some("content") => text(&block["source"]["content"]).or_else(|| joined(&block["source"]["content"])),
            _ => None,
        },
        Some("search_result") => joined(&block["content"]),
        _ => None,
    };
    let Some(content) = content else { return block.clone() };
    let heading = [&block["title"], &block["source"]].into_iter().filter_map(text).collect::<Vec<_>>().join("\n");
    let separator = if heading.is_empty() { "" } else { "\n\n" };
    json!({"type": "text", "text": format!("{heading}{separator}{content}")})
}
