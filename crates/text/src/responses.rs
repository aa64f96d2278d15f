//! A Responses body becomes a conversation and the way its answer will be read.
//!
//! Takes the fields that shape the prompt: instructions, input, tools, tool_choice, the thinking switch, text.format.
//! Earlier turns that the server kept are already part of `input`. The vendor's conversion validates and normalises;
//! before it, what it would refuse or lose is brought into its form: free-text tools of any name, thoughts that were
//! handed out sealed, searches for tools, `allowed_tools`, refusals, call ids (they are numbered, because it sorts by
//! them). Unknown types of items and tools are left out, as the vendor does: clients send more of them with every release.

use std::collections::HashMap;

use deepseek_recipe::openai::ResponsesRequest;
use deepseek_recipe::request::{ConversionError, ConversionOptions, ProtocolRequest};
use deepseek_recipe_core::conversation::ResponseFormat;
use serde_json::{Map, Value, json};

use crate::body::{object, present, typed};
use crate::plan::{ChatDefaults, ChatError, ChatPlan, VENDOR_MODEL, from_vendor};
use crate::responses_tools::{TOOL_SEARCH, Tools};
use crate::sealed;
use crate::thinking::thinking_switch;

impl ChatPlan {
    /// Reads the body of a Responses request.
    pub fn from_responses(body: &Map<String, Value>, defaults: ChatDefaults) -> Result<ChatPlan, ChatError> {
        let (thinking, effort) = thinking_switch(body, defaults)?;
        let mut gathered = Tools::of(body)?;
        let mut choice = tool_choice(body, &mut gathered.list)?;
        // A choice of a hosted tool is left out like the tool.
        let calls = choice == "required" || matches!(choice["type"].as_str(), Some("function" | "custom"));
        // The vendor forces no call behind a thought. Here the grammar does, so for the prompt the choice is free.
        let forced = thinking && !gathered.list.is_empty() && (choice == "required" || choice.is_object());
        if forced {
            if let Some(name) = choice.get("name").filter(|name| name.is_string()) {
                gathered.list.retain(|tool| tool["name"] == *name);
                if gathered.list.is_empty() {
                    return Err(ChatError::field("tool_choice.name", format!("no tool named {name} is offered")));
                }
            }
            choice = "auto".into();
        }
        let format = format(body)?;
        // The vendor insists on the word "json" in the input; a local server need not.
        let json_object = format["type"] == "json_object";
        let (input, ids) = input(body, &gathered)?;
        let request = json!({
            "model": VENDOR_MODEL,
            "input": input,
            "instructions": present(body, "instructions"),
            "reasoning": {"effort": if thinking { "high" } else { "none" }},
            "text": {"format": if json_object { json!({"type": "text"}) } else { format }},
            "tools": (!gathered.list.is_empty()).then_some(gathered.list),
            "tool_choice": choice,
        });
        let least = json!({"model": VENDOR_MODEL});
        let whole = [("instructions", "instructions"), ("text", "text.format"), ("tool_choice", "tool_choice")];
        let request: ResponsesRequest = typed(request, &least, &whole, &["input", "tools"])?;
        let refusal = |error: ConversionError| {
            let mut error = ids.original(from_vendor(error));
            // Its texts about calls in the history would be taken for texts about tools.
            if ["tool output", "call_id", "Input items"].iter().any(|word| error.message.contains(word)) {
                error.param = Some("input".to_owned());
            }
            error
        };
        let mut converted = request.convert(ConversionOptions::new()).map_err(refusal)?;
        if json_object {
            converted.conversation.response_format = ResponseFormat::JsonObject;
        }
        if calls && converted.conversation.tools.is_empty() {
            return Err(ChatError::field("tool_choice", "a forced tool call needs tools that the client runs"));
        }
        let mut plan = ChatPlan::of(converted, thinking, effort, defaults.table).with_rules(body, forced)?;
        plan.tool_names.custom.extend(gathered.custom);
        plan.tool_names.search = gathered.search;
        for id in plan.call_ids.iter_mut().flatten() {
            if let Some(original) = ids.names.get(id) {
                id.clone_from(original);
            }
        }
        Ok(plan)
    }
}

/// The choice for the vendor; `allowed_tools` leaves the other tools out.
fn tool_choice(body: &Map<String, Value>, tools: &mut Vec<Value>) -> Result<Value, ChatError> {
    let Some(choice) = present(body, "tool_choice") else { return Ok("auto".into()) };
    let Some(fields) = choice.as_object() else { return Ok(choice.clone()) };
    if fields.get("type").and_then(Value::as_str) != Some("allowed_tools") {
        return Ok(choice.clone());
    }
    let allowed = fields.get("tools").and_then(Value::as_array);
    let allowed = allowed.ok_or_else(|| ChatError::field("tool_choice.tools", "expected a list of tools"))?;
    let names: Vec<&str> = allowed.iter().filter_map(|tool| tool["name"].as_str()).collect();
    if let Some(missing) = names.iter().find(|name| !tools.iter().any(|tool| tool["name"] == **name)) {
        return Err(ChatError::field("tool_choice.tools", format!("no tool named {missing:?} is among the tools")));
    }
    tools.retain(|tool| tool["name"].as_str().is_none_or(|name| names.contains(&name)));
    match fields.get("mode").and_then(Value::as_str) {
        None | Some("auto") => Ok("auto".into()),
        Some("required") => Ok("required".into()),
        Some(_) => Err(ChatError::field("tool_choice.mode", "expected auto or required")),
    }
}

/// `text.format`, with the type always there.
fn format(body: &Map<String, Value>) -> Result<Value, ChatError> {
    let format = object(body, "text")?.and_then(|text| present(text, "format"));
    match format {
        None => Ok(json!({"type": "text"})),
        Some(Value::Object(format)) => {
            let mut format = format.clone();
            // The vendor would refuse what its own grammar cannot hold.
            format.remove("strict");
            Ok(format.into())
        }
        Some(_) => Err(ChatError::field("text.format", "expected an object")),
    }
}

/// Numbers that stand for call ids.
#[derive(Default)]
struct CallIds {
    numbers: HashMap<String, String>,
    names: HashMap<String, String>,
}

impl CallIds {
    fn number(&mut self, id: &str) -> String {
        let next = format!("call-{:06}", self.numbers.len());
        let number = self.numbers.entry(id.to_owned()).or_insert(next).clone();
        self.names.insert(number.clone(), id.to_owned());
        number
    }

    /// The error with the ids that the client sent.
    fn original(&self, mut error: ChatError) -> ChatError {
        for (number, name) in &self.names {
            error.message = error.message.replace(number, name);
        }
        error
    }
}

/// The input for the vendor.
fn input(body: &Map<String, Value>, tools: &Tools) -> Result<(Value, CallIds), ChatError> {
    let mut ids = CallIds::default();
    let items = match present(body, "input") {
        Some(Value::Array(items)) => items,
        Some(text @ Value::String(_)) => return Ok((text.clone(), ids)),
        None if present(body, "instructions").is_some() => return Ok((Value::Null, ids)),
        None => return Err(ChatError::field("input", "required, a string or a list of items")),
        Some(_) => return Err(ChatError::field("input", "expected a string or a list of items")),
    };
    if items.is_empty() {
        return Err(ChatError::field("input", "empty; at least one item is needed"));
    }
    let mut out = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let param = format!("input[{index}]");
        let mut item = item.as_object().ok_or_else(|| ChatError::field(&param, "expected an object"))?.clone();
        if let Some(Value::String(id)) = item.get("call_id")
            && !id.is_empty()
        {
            let number = ids.number(id);
            item.insert("call_id".into(), number.into());
        }
        match item.get("type").and_then(Value::as_str) {
            Some("reasoning") => thought(&mut item),
            Some("function_call") if item.get("arguments").is_some_and(Value::is_object) => {
                let arguments = item["arguments"].to_string();
                item.insert("arguments".into(), arguments.into());
            }
            Some("custom_tool_call") => {
                let name = item.get("name").and_then(Value::as_str).and_then(|name| tools.custom_name(name));
                if let Some(name) = name.map(str::to_owned) {
                    let arguments = json!({"input": item.get("input")}).to_string();
                    item.insert("type".into(), "function_call".into());
                    item.insert("name".into(), name.into());
                    item.insert("arguments".into(), arguments.into());
                }
            }
            Some("tool_search_call") => {
                let arguments = item.get("arguments").map_or("{}".to_owned(), Value::to_string);
                item.insert("type".into(), "function_call".into());
                item.insert("name".into(), TOOL_SEARCH.into());
                item.insert("arguments".into(), arguments.into());
            }
            Some("tool_search_output") => {
                let found = item.get("tools").map_or("[]".to_owned(), Value::to_string);
                item.insert("type".into(), "function_call_output".into());
                item.insert("output".into(), found.into());
            }
            Some("item_reference") => {
                let id = item.get("id").and_then(Value::as_str).unwrap_or_default();
                return Err(ChatError::field(
                    format!("{param}.id"),
                    format!("no stored item {id:?} is known here; send the item itself"),
                ));
            }
            None | Some("message") => {
                if let Some(parts) = item.get_mut("content").and_then(Value::as_array_mut) {
                    parts.iter_mut().for_each(plain_part);
                }
            }
            _ => {}
        }
        out.push(Value::Object(item));
    }
    Ok((out.into(), ids))
}

/// A reasoning item: its text, or what this server sealed when it handed the thought out.
fn thought(item: &mut Map<String, Value>) {
    let texts: Vec<Value> = item
        .get("content")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter(|part| part["text"].is_string())
        .cloned()
        .collect();
    let sealed = item.get("encrypted_content").and_then(Value::as_str).and_then(sealed::open);
    let content = match (texts.is_empty(), sealed) {
        (true, Some(text)) => json!([{"type": "reasoning_text", "text": text}]),
        _ => texts.into(),
    };
    item.insert("content".into(), content);
    item.remove("encrypted_content");
}

/// Parts of a message that other protocols write otherwise.
fn plain_part(part: &mut Value) {
    match part["type"].as_str() {
        Some("refusal") => *part = json!({"type": "output_text", "text": part["refusal"]}),
        Some("text") => part["type"] = "input_text".into(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_for_call_ids_in_order() {
        let mut ids = CallIds::default();
        assert_eq!(
            (ids.number("z"), ids.number("a"), ids.number("z")),
            ("call-000000".into(), "call-000001".into(), "call-000000".into())
        );
        let error = ids.original(ChatError { message: "no output for call-000001.".into(), param: None });
        assert_eq!(error.message, "no output for a.");
    }
}
