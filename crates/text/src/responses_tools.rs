//! The tools of a Responses request, as functions that the prompt can hold.
//!
//! They come in three places: the field `tools`, items of type `additional_tools`, and the results of a search for tools.
//! A custom tool becomes a function with one string, also inside a namespace, where the vendor's conversion has none; the
//! search itself becomes a function. What hosted services would run (web search, files, images) is left out.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use crate::body::{list, present};
use crate::plan::ChatError;

/// The function that searches for tools.
pub(crate) const TOOL_SEARCH: &str = "tool_search";

/// Tools for the vendor's conversion, and what they were.
#[derive(Default)]
pub(crate) struct Tools {
    pub(crate) list: Vec<Value>,
    /// Names in the prompt of the custom tools that were made functions here.
    pub(crate) custom: HashSet<String>,
    /// Their names in the prompt by the names that calls in the history have.
    flat: HashMap<String, String>,
    /// The client searches for tools.
    pub(crate) search: bool,
    seen: HashSet<String>,
}

impl Tools {
    /// Gathers the tools of a body.
    pub(crate) fn of(body: &Map<String, Value>) -> Result<Tools, ChatError> {
        let mut tools = Tools::default();
        for (index, tool) in list(body, "tools")?.unwrap_or(&[]).iter().enumerate() {
            tools.add(tool, &format!("tools[{index}]"), true)?;
        }
        for (index, item) in present(body, "input").and_then(Value::as_array).into_iter().flatten().enumerate() {
            if !matches!(item["type"].as_str(), Some("additional_tools" | "tool_search_output")) {
                continue;
            }
            for (inner, tool) in item["tools"].as_array().into_iter().flatten().enumerate() {
                tools.add(tool, &format!("input[{index}].tools[{inner}]"), false)?;
            }
        }
        Ok(tools)
    }

    /// The name in the prompt of a custom tool that a call in the history names.
    pub(crate) fn custom_name(&self, name: &str) -> Option<&str> {
        self.flat.get(name).map(String::as_str)
    }

    /// Adds one; those that were found may repeat what is known.
    fn add(&mut self, tool: &Value, param: &str, declared: bool) -> Result<(), ChatError> {
        let fields = tool.as_object().ok_or_else(|| ChatError::field(param, "expected an object"))?;
        let kind = fields.get("type").and_then(Value::as_str);
        let kind =
            kind.ok_or_else(|| ChatError::field(format!("{param}.type"), "required, for example \"function\""))?;
        let name = fields.get("name").and_then(Value::as_str);
        let mut tool = match (kind, name) {
            // The form of Chat Completions, which some clients send here.
            ("function", None) if fields.get("function").is_some_and(Value::is_object) => {
                let mut flat = fields["function"].clone();
                flat["type"] = "function".into();
                flat
            }
            // Its description is the vendor's own.
            ("custom", Some("apply_patch")) => tool.clone(),
            ("custom", Some(name)) => {
                self.custom.insert(name.to_owned());
                self.flat.insert(name.to_owned(), name.to_owned());
                free_text(name, fields)
            }
            ("namespace", Some(name)) => self.namespace(name, fields),
            (TOOL_SEARCH, _) if fields.get("execution").and_then(Value::as_str) == Some("client") => {
                self.search = true;
                json!({
                    "type": "function", "name": TOOL_SEARCH, "description": fields.get("description"),
                    "parameters": fields.get("parameters"),
                })
            }
            _ => tool.clone(),
        };
        let name = tool["name"].as_str().map(str::to_owned);
        if let Some(name) = name
            && !self.seen.insert(name)
            && !declared
        {
            return Ok(());
        }
        if let Some(fields) = tool.as_object_mut() {
            fields.remove("defer_loading");
            // The vendor would rewrite the schema, or refuse it beside others; the grammar reads the request itself.
            fields.remove("strict");
            // A tool without parameters may say so with an empty schema.
            if fields.get("parameters").is_some_and(|schema| schema.as_object().is_some_and(Map::is_empty)) {
                fields.remove("parameters");
            }
        }
        self.list.push(tool);
        Ok(())
    }

    /// A namespace without custom tools inside.
    fn namespace(&mut self, namespace: &str, fields: &Map<String, Value>) -> Value {
        let mut fields = fields.clone();
        for tool in fields.get_mut("tools").and_then(Value::as_array_mut).into_iter().flatten() {
            let name = tool["name"].as_str().unwrap_or_default().to_owned();
            if let Some(inner) = tool.as_object_mut() {
                inner.remove("strict");
            }
            if tool["type"] == "custom"
                && let Some(inner) = tool.as_object()
            {
                // As the conversion joins them.
                let joint = if namespace.ends_with('_') || name.starts_with('_') { "" } else { "__" };
                let flat = format!("{namespace}{joint}{name}");
                self.custom.insert(flat.clone());
                self.flat.entry(name.clone()).or_insert(flat);
                *tool = free_text(&name, inner);
            }
        }
        fields.into()
    }
}

/// A tool whose input is free text, as a function with one string.
fn free_text(name: &str, fields: &Map<String, Value>) -> Value {
    let description = fields.get("description").and_then(Value::as_str).unwrap_or_default();
    let format = fields.get("format").and_then(Value::as_object);
    let grammar =
        format.and_then(|format| Some((format.get("syntax")?.as_str()?, format.get("definition")?.as_str()?)));
    let grammar = match grammar {
        Some((syntax, definition)) => format!("\n\nThe input follows this {syntax} grammar:\n{definition}"),
        None => String::new(),
    };
    json!({
        "type": "function",
        "name": name,
        "description": format!("{description}{grammar}").trim(),
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string", "description": "The input of the tool, as plain text."}},
            "required": ["input"],
            "additionalProperties": false,
        },
    })
}
