//! What an answer must follow, as plain data, and how requests spell it.
//!
//! Reads `response_format`, `text.format`, `output_config.format` and the fields of vLLM (`guided_json`, ...,
//! `structured_outputs`). At most one of them may be given. Refuses GBNF grammars and structural tags by name; whether a
//! schema or a grammar can be followed is seen when it is compiled.

use deepseek_recipe_core::conversation::{Conversation, ResponseFormat};
use deepseek_recipe_core::tools::ToolChoice;
use serde_json::{Map, Value};

use crate::body::{object, present};
use crate::plan::ChatError;

/// The form of the content.
#[derive(Debug, Clone, PartialEq)]
pub enum Format {
    /// Any JSON object.
    Object,
    /// JSON that follows a schema.
    Schema(Value),
    /// Text that a regular expression matches as a whole (syntax of the Rust crate `regex`, without look-around).
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// A grammar in Lark's syntax, with the extensions of llguidance.
    Lark(String),
}

/// A format and the field that asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct FormatRule {
    /// The form.
    pub format: Format,
    /// Field that errors name.
    pub param: String,
}

/// A function that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolRule {
    /// Its name in the prompt.
    pub name: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// Arguments must follow the schema to the letter; otherwise they have the right names and kinds.
    pub strict: bool,
    /// Field that errors name.
    pub param: String,
}

/// How functions are called.
#[derive(Debug, Clone, PartialEq)]
pub struct CallRules {
    /// What may be called.
    pub tools: Vec<ToolRule>,
    /// The answer is a call.
    pub forced: bool,
    /// The prompt opened the block of calls.
    pub opened: bool,
    /// More than one call may come.
    pub parallel: bool,
}

/// What an answer must follow.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AnswerRules {
    /// It begins with a thought, which nothing is asked of.
    pub thought: bool,
    /// Form of the content.
    pub format: Option<FormatRule>,
    /// Its calls.
    pub calls: Option<CallRules>,
}

impl AnswerRules {
    /// The rules of an answer that is plain text from its first token: the fields of formats alone.
    pub fn of_plain(body: &Map<String, Value>) -> Result<AnswerRules, ChatError> {
        Ok(AnswerRules { format: format_of(body, &Conversation::default())?, ..AnswerRules::default() })
    }

    /// The rules of a body whose conversation was converted. `thought` says that the answer starts inside one, `forced`
    /// that a call must come although the prompt does not open it.
    pub(crate) fn of(
        body: &Map<String, Value>,
        conversation: &Conversation,
        thought: bool,
        forced: bool,
    ) -> Result<AnswerRules, ChatError> {
        let calls = (conversation.tool_choice != ToolChoice::None && !conversation.tools.is_empty()).then(|| {
            let opened = conversation.tool_choice == ToolChoice::Required;
            let tools = conversation.tools.iter().map(|tool| {
                let (param, strict) = declared(body, &tool.name);
                ToolRule { name: tool.name.clone(), parameters: tool.parameters.clone(), strict, param }
            });
            CallRules { tools: tools.collect(), forced: forced || opened, opened, parallel: parallel(body) }
        });
        Ok(AnswerRules { thought, format: format_of(body, conversation)?, calls })
    }
}

/// The field of a declared tool, and whether it is strict.
fn declared(body: &Map<String, Value>, name: &str) -> (String, bool) {
    let tools = body.get("tools").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    for (index, tool) in tools.iter().enumerate() {
        let (function, at) = match tool.get("function") {
            Some(function) => (function, ".function"),
            None => (tool, ""),
        };
        if function["name"] == name {
            let schema = if function.get("input_schema").is_some() { "input_schema" } else { "parameters" };
            return (format!("tools[{index}]{at}.{schema}"), function["strict"] == true || tool["strict"] == true);
        }
    }
    ("tools".into(), false)
}

fn parallel(body: &Map<String, Value>) -> bool {
    let anthropic = body.get("tool_choice").and_then(|choice| choice.get("disable_parallel_tool_use"));
    body.get("parallel_tool_calls") != Some(&Value::Bool(false)) && anthropic != Some(&Value::Bool(true))
}

/// The one format that a body asks for.
fn format_of(body: &Map<String, Value>, conversation: &Conversation) -> Result<Option<FormatRule>, ChatError> {
    let mut rules = Vec::new();
    for (holder, name) in [(None, "response_format"), (Some("text"), "format"), (Some("output_config"), "format")] {
        let (fields, at) = match holder {
            None => (Some(body), name.to_owned()),
            // A field of another protocol may be anything.
            Some(holder) => (body.get(holder).and_then(Value::as_object), format!("{holder}.{name}")),
        };
        if let Some(value) = fields.and_then(|fields| present(fields, name)) {
            rules.extend(typed_format(value, &at, conversation)?);
        }
    }
    if let Some(value) = present(body, "output_format") {
        rules.extend(typed_format(value, "output_format", conversation)?);
    }
    for name in ["json", "regex", "choice", "grammar"] {
        if let Some(value) = present(body, &format!("guided_{name}")) {
            rules.extend(guided(name, value, format!("guided_{name}"))?);
        }
    }
    if let Some(fields) = object(body, "structured_outputs")? {
        for name in ["json", "regex", "choice", "grammar", "json_object", "structural_tag"] {
            if let Some(value) = present(fields, name) {
                rules.extend(guided(name, value, format!("structured_outputs.{name}"))?);
            }
        }
    }
    if let [first, second, ..] = &rules[..] {
        let message = format!("one answer has one format; {} asks for another", first.param);
        return Err(ChatError::field(&second.param, message));
    }
    Ok(rules.pop())
}

/// `{"type": ...}` in the three protocols.
fn typed_format(value: &Value, at: &str, conversation: &Conversation) -> Result<Option<FormatRule>, ChatError> {
    let rule = |format, param: String| Ok(Some(FormatRule { format, param }));
    match value.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => rule(Format::Object, at.to_owned()),
        Some("json_schema") => {
            let (inner, param) = match value.get("json_schema") {
                Some(inner) => (inner, format!("{at}.json_schema.schema")),
                None => (value, format!("{at}.schema")),
            };
            match (inner.get("schema"), &conversation.response_format) {
                (Some(schema), _) if !schema.is_null() => rule(Format::Schema(schema.clone()), param),
                // A conversion that found it elsewhere.
                (_, ResponseFormat::JsonSchema(schema)) => rule(Format::Schema(schema.clone()), param),
                _ => Err(ChatError::field(param, "required, a JSON schema")),
            }
        }
        Some("regex") => match ["regex", "pattern"].iter().find_map(|name| value.get(*name)?.as_str()) {
            Some(regex) => rule(Format::Regex(regex.to_owned()), at.to_owned()),
            None => Err(ChatError::field(format!("{at}.pattern"), "required, a regular expression")),
        },
        Some("grammar") => {
            let grammar = ["grammar", "definition"].iter().find_map(|name| value.get(*name));
            guided("grammar", grammar.unwrap_or(&Value::Null), format!("{at}.grammar"))
        }
        Some("structural_tag") => guided("structural_tag", value, at.to_owned()),
        _ => {
            let message = "expected one of text, json_object, json_schema, regex, grammar";
            Err(ChatError::field(format!("{at}.type"), message))
        }
    }
}

/// vLLM's fields.
fn guided(name: &str, value: &Value, param: String) -> Result<Option<FormatRule>, ChatError> {
    let text = || value.as_str().filter(|text| !text.trim().is_empty()).map(str::to_owned);
    let wrong = |expected: &str| ChatError::field(&param, format!("expected {expected}"));
    let format = match name {
        "json" => Format::Schema(match value {
            Value::Object(_) | Value::Bool(_) => value.clone(),
            Value::String(text) => serde_json::from_str(text).map_err(|e| wrong(&format!("a JSON schema ({e})")))?,
            _ => return Err(wrong("a JSON schema, as an object or as text")),
        }),
        "json_object" => match value.as_bool() {
            Some(true) => Format::Object,
            Some(false) => return Ok(None),
            None => return Err(wrong("true or false")),
        },
        "regex" => Format::Regex(text().ok_or_else(|| wrong("a regular expression"))?),
        "choice" => {
            let list = value.as_array().filter(|list| !list.is_empty());
            let text = |item: &Value| item.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
            let choices = list.and_then(|list| list.iter().map(text).collect());
            Format::Choice(choices.ok_or_else(|| wrong("a list of texts that are not empty"))?)
        }
        "grammar" => {
            let grammar = text().ok_or_else(|| wrong("a grammar in Lark's syntax"))?;
            if grammar.contains("::=") {
                let message = "this looks like EBNF or GBNF (\"::=\"), which is not supported; write the grammar in Lark's syntax, with a rule named start";
                return Err(ChatError::field(&param, message));
            }
            Format::Lark(grammar)
        }
        _ => {
            let message = "structural tags are not supported; use tools, json, regex, choice or a Lark grammar";
            return Err(ChatError::field(&param, message));
        }
    };
    Ok(Some(FormatRule { format, param }))
}
