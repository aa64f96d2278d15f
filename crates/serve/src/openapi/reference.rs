//! `docs/api-reference.md` is the OpenAPI document for people: a test writes it anew and compares.
//!
//! After a change of fields or routes: `LONGWAVE_WRITE_DOCS=1 cargo nextest run -p longwave-serve reference`.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;

use super::document;

const HEAD: &str = "\
# API reference

Every route, and every field of a request that means something here. Made from the server's own OpenAPI document
(`GET /openapi.json`) by a test; change `crates/serve/src/fields.rs` or `openapi.rs`, not this page. How the routes behave
is in [api.md](api.md), what errors mean in [errors.md](errors.md).

`null` is the same as leaving a field out. Fields that are not listed are ignored.

";

/// The page.
fn page() -> String {
    let document = document();
    let mut out = HEAD.to_owned();
    let operations = || {
        document["paths"].as_object().unwrap().iter().flat_map(|(path, methods)| {
            methods.as_object().unwrap().iter().map(move |(method, operation)| (path, method.to_uppercase(), operation))
        })
    };
    out.push_str("## Routes\n\n| route | what it does |\n|---|---|\n");
    for (path, method, operation) in operations() {
        writeln!(out, "| `{method} {path}` | {} |", operation["summary"].as_str().unwrap()).unwrap();
    }
    out.push_str("\n## Failures of requests with a body\n\n| status | why |\n|---|---|\n");
    let chat = &document["paths"]["/v1/chat/completions"]["post"];
    let failures = chat["responses"].as_object().unwrap().iter().filter(|(status, _)| status.starts_with(['4', '5']));
    for (status, response) in failures {
        writeln!(out, "| {status} | {} |", response["description"].as_str().unwrap()).unwrap();
    }
    let mut shown: Vec<(&String, &Value)> = Vec::new();
    for (path, method, operation) in operations() {
        let Some((kind, body)) = operation["requestBody"]["content"].as_object().and_then(|all| all.iter().next())
        else {
            continue;
        };
        let schema = &body["schema"];
        write!(out, "\n## `{method} {path}`\n\n").unwrap();
        if let Some((same, _)) = shown.iter().find(|(_, other)| *other == schema) {
            writeln!(out, "The fields of `{same}`.").unwrap();
            continue;
        }
        shown.push((path, schema));
        if kind != "application/json" {
            write!(out, "A form (`{kind}`).\n\n").unwrap();
        }
        fields(&mut out, schema);
    }
    out
}

fn fields(out: &mut String, schema: &Value) {
    out.push_str("| field | value | |\n|---|---|---|\n");
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, schema) in schema["properties"].as_object().unwrap() {
        let needed = if required.contains(&name.as_str()) { ", required" } else { "" };
        let about = schema["description"].as_str().unwrap_or("").replace('|', "\\|");
        writeln!(out, "| `{name}` | {}{needed} | {about} |", form(schema)).unwrap();
    }
}

/// The values that a schema takes, in words.
fn form(schema: &Value) -> String {
    let all = |list: &Value| list.as_array().unwrap().iter().filter(|v| !v.is_null()).cloned().collect::<Vec<_>>();
    if let Some(value) = schema.get("const") {
        return format!("`{value}`");
    }
    if let Some(list) = schema.get("enum") {
        return all(list).iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
    }
    if let Some(list) = schema.get("anyOf") {
        let forms: Vec<String> = all(list).iter().filter(|v| v["type"] != "null").map(form).collect();
        return forms.join(" or ");
    }
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.clone(),
        Value::Null => return "any".into(),
        one => vec![one.clone()],
    };
    let kind = kinds.iter().find_map(|kind| kind.as_str().filter(|kind| *kind != "null")).unwrap_or("null");
    let bound = |name: &str| schema.get(name).map(|value| value.to_string());
    match (kind, bound("minimum"), bound("exclusiveMinimum"), bound("maximum")) {
        ("array", ..) => format!("list of {}", schema.get("items").map_or("any".into(), form)),
        ("string", ..) => bound("pattern").map_or("text".into(), |pattern| format!("text like `{pattern}`")),
        ("boolean", ..) => "true or false".into(),
        ("integer" | "number", low, above, high) => {
            let whole = if kind == "integer" { "whole number" } else { "number" };
            // The largest that fits a machine word bounds nothing that anybody asks for.
            let high = high.filter(|high| high.len() < 10);
            match (low.filter(|low| low.len() < 10), above, high) {
                (Some(low), _, Some(high)) => format!("{whole}, {low} to {high}"),
                (Some(low), _, None) => format!("{whole}, {low} or more"),
                (None, Some(above), Some(high)) => format!("{whole} above {above}, up to {high}"),
                _ => whole.into(),
            }
        }
        (kind, ..) => kind.into(),
    }
}

#[test]
fn the_api_reference_is_the_openapi_document() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api-reference.md");
    let page = page();
    if std::env::var_os("LONGWAVE_WRITE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = page.lines().zip(written.lines()).find(|(now, then)| now != then);
    assert!(
        page == written,
        "docs/api-reference.md is of an older document (the first difference: {differs:?}); write it with \
         LONGWAVE_WRITE_DOCS=1 cargo nextest run -p longwave-serve reference"
    );
}
