//! JSON schemas on their way into the grammar library.
//!
//! Sets how JSON is written: between tokens nothing, one space, or a line break with up to 64 characters of indentation,
//! so that a model can print it nicely and cannot go on with white space for ever. Names the keyword in errors.

use serde_json::{Map, Value, json};

/// White space between two tokens of JSON.
const WHITESPACE: &str = r"[ ]|\r?\n[ \t]{0,64}";

/// The schema with our way of writing JSON. `lenient` leaves out what the library cannot hold the model to, where
/// otherwise it is an error.
pub(super) fn written_our_way(schema: &Value, lenient: bool) -> Value {
    let mut schema = schema.clone();
    forget_unknown_formats(&mut schema);
    let mut schema = match schema {
        Value::Object(fields) => fields,
        Value::Bool(false) => Map::from_iter([("enum".to_owned(), json!([]))]),
        _ => Map::new(),
    };
    // A field of the library, which a request has no say in.
    schema.insert(
        "x-guidance".into(),
        json!({
            "whitespace_pattern": WHITESPACE,
            "json_allow_general_unicode_escapes": true,
            "coerce_one_of": lenient,
            "lenient": lenient,
        }),
    );
    Value::Object(schema)
}

/// Formats that a text is held to.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Other formats (`int32`, `password`, `uri-reference`, ...) only describe, as the specification has it.
fn forget_unknown_formats(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if fields.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
                fields.remove("format");
            }
            let schemas = fields.iter_mut().filter(|(name, _)| !DATA.contains(&name.as_str()));
            schemas.for_each(|(_, value)| forget_unknown_formats(value));
        }
        Value::Array(items) => items.iter_mut().for_each(forget_unknown_formats),
        _ => {}
    }
}

/// Keywords whose values are data, not schemas.
pub(super) const DATA: [&str; 4] = ["enum", "const", "default", "examples"];

/// What is wrong with a schema, from the library's error.
pub(super) fn complaint(error: &str) -> String {
    let error = reason(error);
    match error.split_once("Unimplemented keys: [") {
        Some((_, rest)) => {
            let keys = rest.split(']').next().unwrap_or(rest);
            format!("the schema uses {keys}, which output cannot be held to here; leave it out")
        }
        None if error.contains("oneOf") => {
            "the schema uses \"oneOf\" with alternatives that may overlap, which output cannot be held to here; use \
             \"anyOf\", or give every alternative a constant of its own"
                .to_owned()
        }
        None => format!("output cannot be held to this schema: {error}"),
    }
}

/// The sentence of a library's error that says why, without the text around it.
pub(super) fn reason(error: &str) -> &str {
    let why = error.lines().find_map(|line| line.strip_prefix("error: "));
    let first = why.or(error.lines().next()).unwrap_or(error).trim();
    // "at 3(14): ": a place in a grammar that the client never saw, or saw otherwise.
    let place = first.strip_prefix("at ").unwrap_or(first);
    match place.split_once("): ") {
        Some((at, rest)) if at.bytes().all(|b| b.is_ascii_digit() || b == b'(') => rest,
        _ => first,
    }
}
