//! Which forms one argument of a call may take, from its JSON schema.
//!
//! DSML writes strings raw and everything else as JSON, so a schema is split by the kinds of value that it admits. Strict
//! tools are held to their schema. Others are held to kinds, constants and enumerations of plain values; inside objects and
//! arrays any JSON may stand, because the library would fix the order of their fields. What is not understood admits all.

use serde_json::{Map, Value, json};

use super::formats::pattern_of;
use super::schema::{DATA, written_our_way};

/// References that are followed inside each other.
const MAX_DEPTH: usize = 16;

/// The forms of a value.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Forms {
    /// Raw strings.
    pub text: Vec<Text>,
    /// JSON that follows one of these schemas.
    pub json: Vec<Value>,
}

/// A form of a raw string.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Text {
    /// Anything.
    Any,
    /// This string.
    Exactly(String),
    /// What this pattern finds something in, as in JSON schemas, what this other one follows from end to end, and bounds on
    /// the number of characters.
    Bounded { pattern: Option<String>, whole: Option<String>, min: u64, max: Option<u64> },
}

/// The parameters of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Parameters {
    /// Name, forms and whether the parameter is required, in the order of the schema.
    pub named: Vec<(String, Forms, bool)>,
    /// Forms of parameters with other names; `None` when there must be none.
    pub others: Option<Forms>,
}

impl Forms {
    fn all() -> Forms {
        Forms { text: vec![Text::Any], json: vec![written_our_way(&Value::Bool(true), true)] }
    }

    fn add(&mut self, other: Forms) {
        let new: Vec<Text> = other.text.into_iter().filter(|text| !self.text.contains(text)).collect();
        self.text.extend(new);
        let new: Vec<Value> = other.json.into_iter().filter(|json| !self.json.contains(json)).collect();
        self.json.extend(new);
    }
}

/// Reads the schema of a tool's arguments.
pub(super) fn parameters(schema: &Value, strict: bool) -> Parameters {
    let root = schema;
    let object = schema.as_object().filter(|fields| {
        let plain = ["$ref", "anyOf", "oneOf", "allOf", "enum", "const", "if", "not"];
        fields.get("type").is_none_or(|kind| kind == "object") && !plain.iter().any(|name| fields.contains_key(*name))
    });
    let Some(fields) = object else { return Parameters { named: Vec::new(), others: Some(Forms::all()) } };
    let required = fields.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let properties = fields.get("properties").and_then(Value::as_object);
    let named = properties.into_iter().flatten().map(|(name, schema)| {
        (name.clone(), forms(schema, root, strict, 0), required.iter().any(|r| r == name.as_str()))
    });
    let mut named: Vec<_> = named.collect();
    for name in required.iter().filter_map(Value::as_str) {
        if !named.iter().any(|(known, ..)| known == name) {
            named.push((name.to_owned(), Forms::all(), true));
        }
    }
    let others = match fields.get("additionalProperties") {
        Some(Value::Bool(false)) => None,
        None | Some(Value::Bool(true)) => Some(Forms::all()),
        Some(schema) => Some(forms(schema, root, strict, 0)),
    };
    Parameters {
        named,
        others: others
            .filter(|_| !fields.contains_key("patternProperties"))
            .or_else(|| fields.contains_key("patternProperties").then(Forms::all)),
    }
}

fn forms(schema: &Value, root: &Value, strict: bool, depth: usize) -> Forms {
    let Some(fields) = schema.as_object() else {
        // `false` admits nothing; a model that was offered it may leave it out.
        return if schema == &Value::Bool(false) { Forms::default() } else { Forms::all() };
    };
    if depth > MAX_DEPTH {
        return Forms::all();
    }
    let deeper = |schema: &Value| forms(schema, root, strict, depth + 1);
    let asserts = |name: &&String| !ANNOTATIONS.contains(&name.as_str());
    let keywords: Vec<&str> = fields.keys().filter(asserts).map(String::as_str).collect();
    match keywords[..] {
        [] => return Forms::all(),
        ["$ref"] => {
            let target = fields["$ref"].as_str().and_then(|r| r.strip_prefix('#')).and_then(|at| root.pointer(at));
            return target.map_or_else(Forms::all, deeper);
        }
        ["anyOf"] | ["oneOf"] | ["allOf"] => {
            let alternatives = fields[keywords[0]].as_array().map_or(&[][..], Vec::as_slice);
            if keywords[0] != "allOf" || alternatives.len() == 1 {
                let mut union = Forms::default();
                alternatives.iter().for_each(|alternative| union.add(deeper(alternative)));
                return union;
            }
        }
        _ => {}
    }
    let constants = match (fields.get("const"), fields.get("enum").and_then(Value::as_array)) {
        (Some(constant), _) => Some(vec![constant.clone()]),
        (None, Some(list)) => Some(list.clone()),
        (None, None) => None,
    };
    if let Some(constants) = constants {
        let (strings, others): (Vec<Value>, Vec<Value>) = constants.into_iter().partition(Value::is_string);
        let text = strings.iter().filter_map(Value::as_str).map(|text| Text::Exactly(text.to_owned())).collect();
        let json = (!others.is_empty()).then(|| written_our_way(&json!({ "enum": others }), !strict));
        return Forms { text, json: json.into_iter().collect() };
    }
    let kinds: Vec<&str> = match fields.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ if strict => return Forms { text: vec![bounded(fields)], json: vec![exact(fields.clone(), root)] },
        _ => return Forms::all(),
    };
    let mut out = Forms::default();
    if kinds.contains(&"string") {
        out.text.push(if strict { bounded(fields) } else { Text::Any });
    }
    let others: Vec<&str> = kinds.into_iter().filter(|kind| *kind != "string").collect();
    if strict && !others.is_empty() {
        let mut fields = fields.clone();
        fields.insert("type".into(), json!(others));
        out.json.push(exact(fields, root));
    } else if !others.is_empty() {
        // Objects and arrays of any form, numbers within their bounds.
        let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
        let mut loose = Map::from_iter([("type".to_owned(), json!(others))]);
        let kept = bounds.iter().filter_map(|name| Some(((*name).to_owned(), fields.get(*name)?.clone())));
        loose.extend(kept.filter(|(_, bound)| bound.is_number()));
        out.json.push(written_our_way(&Value::Object(loose), true));
    }
    out
}

/// Keywords that hold nobody to anything.
const ANNOTATIONS: [&str; 14] = [
    "title",
    "description",
    "default",
    "examples",
    "example",
    "$comment",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$schema",
    "$id",
    "nullable",
    "$defs",
    "definitions",
];

/// A schema that is followed to the letter. What it refers to is in the schema of the tool, which comes along.
fn exact(mut fields: Map<String, Value>, root: &Value) -> Value {
    let mut schema = Value::Object(std::mem::take(&mut fields));
    if refers(&schema) {
        let mut root = root.clone();
        rebase(&mut schema);
        rebase(&mut root);
        if let Some(fields) = schema.as_object_mut() {
            fields.insert("$defs".into(), json!({ "tool": root }));
        }
    }
    written_our_way(&schema, false)
}

fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => fields.get("$ref").is_some_and(Value::is_string) || fields.values().any(refers),
        Value::Array(items) => items.iter().any(refers),
        _ => false,
    }
}

/// Makes local references those of a schema that holds this one under `$defs/tool`.
fn rebase(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(target)) = fields.get_mut("$ref")
                && let Some(at) = target.strip_prefix('#')
            {
                *target = format!("#/$defs/tool{at}");
            }
            let schemas = fields.iter_mut().filter(|(name, _)| !DATA.contains(&name.as_str()));
            schemas.for_each(|(_, value)| rebase(value));
        }
        Value::Array(items) => items.iter_mut().for_each(rebase),
        _ => {}
    }
}

/// What a schema says of a string.
fn bounded(fields: &Map<String, Value>) -> Text {
    let pattern = fields.get("pattern").and_then(Value::as_str).map(str::to_owned);
    let whole = fields.get("format").and_then(Value::as_str).and_then(pattern_of);
    let min = fields.get("minLength").and_then(Value::as_u64).unwrap_or(0);
    let max = fields.get("maxLength").and_then(Value::as_u64);
    match (&pattern, &whole, min, max) {
        (None, None, 0, None) => Text::Any,
        _ => Text::Bounded { pattern, whole, min, max },
    }
}
