//! The thinking switch in all its spellings, the same for every protocol.
//!
//! `thinking` (OpenAI-compatible and Anthropic), `chat_template_kwargs` (vLLM, SGLang), `reasoning_effort`, `reasoning`
//! (Responses, OpenRouter) and `output_config` (Anthropic). Refuses values that it does not know.

use serde_json::{Map, Value};

use crate::body::{object, present};
use crate::plan::{ChatDefaults, ChatError, Effort};

/// One precedence for all spellings: an explicit switch wins, else effort `none` means off and any other effort on,
/// else the default.
pub(crate) fn thinking_switch(body: &Map<String, Value>, defaults: ChatDefaults) -> Result<(bool, Effort), ChatError> {
    let kwargs = object(body, "chat_template_kwargs")?;
    let reasoning = object(body, "reasoning")?;
    let output = object(body, "output_config")?;
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
        (output, "output_config.", "effort"),
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
