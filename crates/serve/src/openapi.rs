//! GET /openapi.json: what the server takes and gives, as an OpenAPI 3.1 document.
//!
//! Bodies come from the table in `fields.rs`; unknown fields are allowed, as the server ignores them.

use axum::Json;
use serde_json::{Map, Value, json};

use crate::controls::Protocol;
use crate::fields::FIELDS;

#[cfg(test)]
mod reference;

/// Method, path, what it does, the body.
type Route = (&'static str, &'static str, &'static str, Body);

/// What a route takes.
#[derive(Clone, Copy)]
enum Body {
    Nothing,
    Of(Protocol, &'static [&'static str]),
    Schema(&'static str),
    /// multipart/form-data.
    Form(&'static str),
}

/// All routes.
const ROUTES: &[Route] = &[
    ("post", "/v1/chat/completions", "Chat Completions", Body::Of(Protocol::Chat, &["messages"])),
    ("post", "/v1/completions", "Completions", Body::Of(Protocol::Completions, &["prompt"])),
    ("post", "/v1/responses", "Responses", Body::Of(Protocol::Responses, &["input"])),
    ("get", "/v1/responses/{id}", "A kept response", Body::Nothing),
    ("delete", "/v1/responses/{id}", "Forget a kept response", Body::Nothing),
    ("post", "/v1/responses/{id}/cancel", "Stop a response in the background", Body::Nothing),
    ("get", "/v1/responses/{id}/input_items", "The input of a kept response", Body::Nothing),
    ("post", "/v1/messages", "Messages", Body::Of(Protocol::Messages, &["messages"])),
    ("post", "/v1/messages/count_tokens", "Tokens of a Messages prompt", Body::Of(Protocol::Messages, &["messages"])),
    ("get", "/v1/models", "Served names", Body::Nothing),
    ("get", "/v1/models/{id}", "One served name", Body::Nothing),
    ("post", "/tokenize", "Token ids of a text or of a chat", Body::Schema(TOKENIZE)),
    ("post", "/detokenize", "The text of token ids", Body::Schema(DETOKENIZE)),
    ("post", "/render", "The prompt of a chat, as text and token ids", Body::Of(Protocol::Chat, &["messages"])),
    ("post", "/v1/files", "Upload a file for a batch", Body::Form(FILE)),
    ("get", "/v1/files", "Uploaded files and files of answers", Body::Nothing),
    ("get", "/v1/files/{id}", "One file", Body::Nothing),
    ("delete", "/v1/files/{id}", "Delete a file", Body::Nothing),
    ("get", "/v1/files/{id}/content", "The contents of a file", Body::Nothing),
    ("post", "/v1/batches", "Run the requests of a file in the background", Body::Schema(BATCH)),
    ("get", "/v1/batches", "Batches", Body::Nothing),
    ("get", "/v1/batches/{id}", "One batch", Body::Nothing),
    ("post", "/v1/batches/{id}/cancel", "Cancel a batch", Body::Nothing),
    ("get", "/health", "Whether requests are answered", Body::Nothing),
    ("get", "/ready", "The same", Body::Nothing),
    ("get", "/ping", "The same", Body::Nothing),
    ("get", "/load", "How many requests run", Body::Nothing),
    ("get", "/metrics", "Counters for Prometheus", Body::Nothing),
    ("get", "/version", "The version of the server", Body::Nothing),
    ("get", "/debug/prefix", "What the prefix cache did for the last requests", Body::Nothing),
    ("get", "/debug/engine", "What the engine does", Body::Nothing),
    ("get", "/openapi.json", "This document", Body::Nothing),
];

const TOKENIZE: &str = r#"{"type": "object", "properties": {"prompt": {"type": "string"}, "messages": {"type": "array", "items": {"type": "object"}}, "add_special_tokens": {"type": "boolean"}, "return_token_strs": {"type": "boolean"}}}"#;
const DETOKENIZE: &str = r#"{"type": "object", "properties": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}, "required": ["tokens"]}"#;

const FILE: &str = r#"{"type": "object", "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "contentMediaType": "application/jsonl"}}, "required": ["purpose", "file"]}"#;
const BATCH: &str = r#"{"type": "object", "properties": {"input_file_id": {"type": "string"}, "endpoint": {"enum": ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]}, "completion_window": {"type": "string", "pattern": "^[0-9]+h$"}, "metadata": {"type": ["object", "null"], "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}}}, "required": ["input_file_id", "endpoint", "completion_window"]}"#;

/// Routes that do not answer with JSON, and the type of what they answer with.
const OTHER_TYPES: [(&str, &str); 2] =
    [("/metrics", "text/plain"), ("/v1/files/{id}/content", "application/octet-stream")];

/// The document.
pub(crate) fn document() -> Value {
    let mut paths = Map::new();
    for &(method, path, about, body) in ROUTES {
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[method] = operation(path, about, body);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Longwave",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "DeepSeek-V4 behind the APIs of OpenAI and Anthropic. Unknown fields are ignored.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": error(), "AnthropicError": anthropic_error()}},
    })
}

/// The handler.
pub(crate) async fn serve() -> Json<Value> {
    Json(document())
}

fn operation(path: &str, about: &str, body: Body) -> Value {
    let anthropic = path.starts_with("/v1/messages");
    let error = if anthropic { "AnthropicError" } else { "Error" };
    let failure = |about: &str| {
        let schema = json!({"$ref": format!("#/components/schemas/{error}")});
        json!({"description": about, "content": {"application/json": {"schema": schema}}})
    };
    let mut content = json!({"application/json": {"schema": {"type": "object"}}});
    if let Some((_, kind)) = OTHER_TYPES.iter().find(|(other, _)| *other == path) {
        content = json!({*kind: {"schema": {"type": "string"}}});
    }
    let kind = if matches!(body, Body::Form(_)) { "multipart/form-data" } else { "application/json" };
    let schema = match body {
        Body::Nothing => None,
        Body::Of(protocol, required) => {
            if !path.ends_with("count_tokens") && path != "/render" {
                content["text/event-stream"] = json!({});
            }
            Some(body_schema(protocol, required))
        }
        Body::Schema(schema) | Body::Form(schema) => Some(parsed(schema)),
    };
    let mut operation = json!({
        "summary": about,
        "responses": {
            "200": {"description": "Done", "content": content},
            "default": failure("Refused or failed"),
        },
    });
    if let Some(schema) = schema {
        operation["requestBody"] = json!({"required": true, "content": {kind: {"schema": schema}}});
        for (status, about) in [
            ("400", "A field is wrong; it is named"),
            ("404", "No such model or response"),
            ("413", "The body is too large"),
            ("429", "Too many requests wait; Retry-After says when to come back"),
            ("503", "The engine does not answer"),
        ] {
            operation["responses"][status] = failure(about);
        }
    }
    if path.contains("{id}") {
        let id = json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string"}});
        operation["parameters"] = json!([id]);
        operation["responses"]["404"] = failure("There is none of that name");
    }
    operation
}

fn body_schema(protocol: Protocol, required: &[&str]) -> Value {
    let mut properties = Map::new();
    for field in FIELDS.iter().filter(|field| field.of.contains(&protocol)) {
        let mut schema = parsed(field.schema);
        schema["description"] = field.about.into();
        properties.insert(field.name.to_owned(), schema);
    }
    json!({"type": "object", "properties": properties, "required": required})
}

fn parsed(schema: &str) -> Value {
    serde_json::from_str(schema).expect("a constant schema, parsed by a test")
}

fn error() -> Value {
    let fields = json!({
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    });
    let inner = json!({"type": "object", "properties": fields, "required": ["message", "type", "param", "code"]});
    json!({"type": "object", "properties": {"error": inner}, "required": ["error"]})
}

fn anthropic_error() -> Value {
    let fields = json!({"type": {"type": "string"}, "message": {"type": "string"}});
    let inner = json!({"type": "object", "properties": fields, "required": ["type", "message"]});
    json!({
        "type": "object", "properties": {"type": {"const": "error"}, "error": inner}, "required": ["type", "error"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_has_a_schema_and_is_in_the_document() {
        let document = document();
        let schema = &document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"];
        let properties = schema["schema"]["properties"].as_object().unwrap();
        for field in FIELDS {
            assert!(parsed(field.schema).is_object(), "{}", field.name);
            assert_eq!(properties.contains_key(field.name), field.of.contains(&Protocol::Chat), "{}", field.name);
        }
        let paths: std::collections::BTreeSet<&str> = ROUTES.iter().map(|(_, path, ..)| *path).collect();
        let operations = document["paths"].as_object().unwrap().values().map(|path| path.as_object().unwrap().len());
        assert_eq!((document["paths"].as_object().unwrap().len(), operations.sum()), (paths.len(), ROUTES.len()));
    }
}
