//! A Chat Completions body becomes a conversation and the way its answer will be read.
//!
//! Takes the fields that shape the prompt: messages, tools, tool_choice, the thinking switch, response_format, stop.
//! The vendor's conversion validates and normalises; before it, habits of real clients are brought into its form
//! (developer role, `reasoning`, null content, argument objects). Refuses unknown values of these fields with an error
//! that names the field; unknown fields are not looked at. Transport and sampling fields are the server's.

use deepseek_recipe::openai::chat_completion::request as vendor;
use deepseek_recipe::openai::chat_completion::request::ChatCompletionToolChoiceOption as Choice;
use deepseek_recipe::request::{ConversionOptions, ProtocolRequest};
use deepseek_recipe_core::conversation::ResponseFormat;
use serde_json::{Map, Value};

use crate::body::{list, optional, read};
use crate::plan::{ChatDefaults, ChatError, ChatPlan, VENDOR_MODEL, from_vendor};
use crate::thinking::thinking_switch;

impl ChatPlan {
    /// Reads a request body.
    pub fn from_body(body: &Map<String, Value>, defaults: ChatDefaults) -> Result<ChatPlan, ChatError> {
        let (thinking, effort) = thinking_switch(body, defaults)?;
        let mut tools = tools(body)?;
        let mut tool_choice = optional(body, "tool_choice")?;
        // The vendor forces no call behind a thought. Here the grammar does, so for the prompt the choice is free.
        if tools.is_empty() && matches!(tool_choice, Some(Choice::Required | Choice::Named { .. })) {
            return Err(ChatError::field("tool_choice", "a forced tool call needs tools"));
        }
        let forced =
            thinking && !tools.is_empty() && matches!(tool_choice, Some(Choice::Required | Choice::Named { .. }));
        if forced && let Some(Choice::Named { function, .. }) = tool_choice.take() {
            tools.retain(|tool| tool.function.name == function.name);
            if tools.is_empty() {
                return Err(ChatError::field("tool_choice", format!("no tool named {:?} is offered", function.name)));
            }
        }
        // The prompt says nothing of other formats; the grammar holds the answer to them.
        let kind = body.get("response_format").and_then(|format| format.get("type")).and_then(Value::as_str);
        let grammar_only = matches!(kind, Some("regex" | "grammar" | "structural_tag"));
        let format = if grammar_only { None } else { optional(body, "response_format")? };
        let (response_format, json_object) = match format {
            // The vendor insists on the word "json" in the messages; a local server need not.
            Some(vendor::ChatCompletionResponseFormat::JsonObject) => (None, true),
            Some(vendor::ChatCompletionResponseFormat::Text) | None => (None, false),
            // As with tools: the grammar holds the schema as it was written.
            Some(vendor::ChatCompletionResponseFormat::JsonSchema { mut json_schema }) => {
                json_schema.strict = None;
                (Some(vendor::ChatCompletionResponseFormat::JsonSchema { json_schema }), false)
            }
            other => (other, false),
        };
        in_vendor_tools(&mut tools);
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
        let mut converted = request.convert(ConversionOptions::new()).map_err(from_vendor)?;
        if json_object {
            converted.conversation.response_format = ResponseFormat::JsonObject;
        }
        ChatPlan::of(converted, thinking, effort, defaults.table).with_rules(body, forced)
    }
}

fn tools(body: &Map<String, Value>) -> Result<Vec<vendor::ChatCompletionTool>, ChatError> {
    let tools = list(body, "tools")?.unwrap_or(&[]);
    tools.iter().enumerate().map(|(index, tool)| read(tool, || format!("tools[{index}]"))).collect()
}

fn messages(body: &Map<String, Value>) -> Result<Vec<vendor::ChatCompletionRequestMessage>, ChatError> {
    let list = list(body, "messages")?.ok_or_else(|| ChatError::field("messages", "required, a list of messages"))?;
    if list.is_empty() {
        return Err(ChatError::field("messages", "empty; at least one message is needed"));
    }
    // vLLM's way to say what the vendor's `prefix` says.
    let continues: Option<bool> = optional(body, "continue_final_message")?;
    let continues = continues == Some(true);
    if continues && list.last().is_some_and(|message| message["role"] != "assistant") {
        return Err(ChatError::field("continue_final_message", "the last message is no assistant message"));
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
            let mut message = in_vendor_form(message);
            if continues && index + 1 == list.len() {
                message.insert("prefix".into(), true.into());
            }
            read(&Value::Object(message), param)
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

/// The vendor would refuse strict tools beside others, and rewrites the schemas of strict ones to what its own grammar can
/// hold. Here the grammar holds them as they were declared, so the conversion hears nothing of it; the prompt never says it.
/// A tool without parameters may say so with an empty schema.
fn in_vendor_tools(tools: &mut [vendor::ChatCompletionTool]) {
    for tool in tools {
        let function = &mut tool.function;
        function.strict = None;
        if function.parameters.as_ref().is_some_and(|schema| schema.as_object().is_some_and(Map::is_empty)) {
            function.parameters = None;
        }
    }
}
