//! Tool calls in DSML (model.md 9.6) as a Lark grammar.
//!
//! Names are those that were offered. Parameters come in any order; the required ones are counted off where there are few
//! enough of them, else, for strict tools, the order is that of the schema. A raw string ends at `</` before the marker
//! token, which no string contains; other added tokens may stand in it, as a model that quotes them writes them.

use std::collections::HashMap;
use std::fmt::Write as _;

use llguidance::regex_to_lark;
use serde_json::Value;

use super::parameters::{Forms, Text, parameters};
use super::rules::{CallRules, ToolRule};
use crate::tokenizer::Tokenizer;

/// Required parameters that are counted off in any order: a rule for every subset of them.
const MAX_COUNTED: usize = 6;

/// Writes the rules of a set of tools.
pub(super) struct Dsml {
    /// `<[id]>` of the marker.
    marker: String,
    /// `<[ids]>` of the added tokens that a raw string may contain.
    quoted: String,
    rules: String,
    /// Rules of values that were written, by their text.
    values: HashMap<String, String>,
}

/// Where the grammar of calls begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opening {
    /// With the empty line before the block.
    Whole,
    /// Behind `<` and the marker.
    Marker,
    /// Inside the block, behind its first line.
    Inside,
}

impl Dsml {
    /// For a vocabulary; `None` when it lacks the marker.
    pub fn new(tokenizer: &Tokenizer) -> Option<Dsml> {
        let marks = tokenizer.markers();
        let dsml = marks.dsml?;
        let ends = [marks.bos, marks.eos, dsml];
        let added: Vec<u32> =
            (0..tokenizer.vocab_size()).filter(|&id| tokenizer.is_added(id) && !ends.contains(&id)).collect();
        let ranges = added.chunk_by(|a, b| a + 1 == *b).filter_map(|run| Some((run.first()?, run.last()?)));
        let ranges: Vec<String> = ranges.map(|(from, to)| format!("{from}-{to}")).collect();
        let quoted = format!("<[{}]>", ranges.join(","));
        Some(Dsml { marker: format!("<[{dsml}]>"), quoted, rules: String::new(), values: HashMap::new() })
    }

    /// The rules of calls, from a rule named `calls`.
    pub fn write(mut self, calls: &CallRules, opening: Opening) -> String {
        let m = self.marker.clone();
        let open = match opening {
            Opening::Whole => format!("\"\\n\\n<\" {m} \"tool_calls>\\n\" "),
            Opening::Marker => "\"tool_calls>\\n\" ".to_owned(),
            Opening::Inside => String::new(),
        };
        let names: Vec<String> = (0..calls.tools.len()).map(|tool| format!("t{tool}")).collect();
        // A lexeme is as long as it can be: the line break must not be the beginning of two.
        let more = if calls.parallel { " | \"<\" {m} tool rest" } else { "" }.replace("{m}", &m);
        let mut rules = format!("calls: {open}\"<\" {m} tool rest\n");
        let _ = writeln!(rules, "rest: \"\\n\" (\"</\" {m} \"tool_calls>\"{more})");
        let _ = writeln!(rules, "tool: {}", names.join(" | "));
        for (tool, name) in calls.tools.iter().zip(&names) {
            self.tool(tool, name);
        }
        let _ = writeln!(rules, "raw: (CHUNK quoted)* TAIL {m} \"parameter>\\n\"");
        let _ = writeln!(rules, "quoted: {}", self.quoted);
        rules.push_str("CHUNK: /(?s:.*)/\nTAIL: /(?s:.*)<\\//\n");
        rules + &self.rules
    }

    fn tool(&mut self, tool: &ToolRule, name: &str) {
        let parameters = parameters(&tool.parameters, tool.strict);
        let m = self.marker.clone();
        let head = literal(&format!("invoke name=\"{}\">\n", tool.name));
        let close = format!("\"</\" {m} \"invoke>\"");
        let values: Vec<String> =
            parameters.named.iter().map(|(key, forms, _)| self.parameter(&literal_key(key), forms)).collect();
        let others = parameters.others.as_ref().map(|forms| {
            let known: Vec<&str> = parameters.named.iter().map(|(key, ..)| key.as_str()).collect();
            let terminal = format!("{}_OTHER", name.to_uppercase());
            let _ = writeln!(self.rules, "{terminal}: {}", other_keys(&known));
            self.parameter(&format!("{terminal} \"\\\" string=\\\"\""), forms)
        });
        let required: Vec<usize> = (0..values.len()).filter(|&i| parameters.named[i].2).collect();
        // An empty list may be written with an empty line.
        let empty = if required.is_empty() { format!(" | \"\\n\" {close}") } else { String::new() };
        let _ = writeln!(self.rules, "{name}: {head} ({name}_0{empty})");
        if required.len() > MAX_COUNTED && tool.strict {
            let _ = write!(self.rules, "{name}_0:");
            for (value, (.., required)) in values.iter().zip(&parameters.named) {
                let _ = write!(self.rules, " {value}{}", if *required { "" } else { "?" });
            }
            let _ = writeln!(self.rules, " {}{close}", others.map_or(String::new(), |o| format!("{o}* ")));
            return;
        }
        let counted = if required.len() > MAX_COUNTED { &[][..] } else { &required[..] };
        for seen in 0..1usize << counted.len() {
            let mut alternatives = Vec::new();
            if seen + 1 == 1 << counted.len() {
                alternatives.push(close.clone());
            }
            for (i, value) in values.iter().enumerate() {
                let next = match counted.iter().position(|&c| c == i) {
                    Some(bit) if seen >> bit & 1 == 1 => continue,
                    Some(bit) => seen | 1 << bit,
                    None => seen,
                };
                alternatives.push(format!("{value} {name}_{next}"));
            }
            alternatives.extend(others.iter().map(|value| format!("{value} {name}_{seen}")));
            let _ = writeln!(self.rules, "{name}_{seen}: {}", alternatives.join(" | "));
        }
    }

    /// A rule of one parameter from its opening tag to the line break behind its closing tag; `head` is what stands from
    /// the name to the quote before the value of the attribute `string`.
    fn parameter(&mut self, head: &str, forms: &Forms) -> String {
        let m = self.marker.clone();
        let mut alternatives = Vec::new();
        for text in &forms.text {
            alternatives.push(format!("\"true\\\">\" {}", self.text(text)));
        }
        for schema in &forms.json {
            let value = self.rule(&format!("%json {schema}"));
            alternatives.push(format!("\"false\\\">\" {value} \"</\" {m} \"parameter>\\n\""));
        }
        if alternatives.is_empty() {
            alternatives.push("\"true\\\">\" raw".to_owned());
        }
        let alternatives = alternatives.join(" | ");
        self.rule(&format!("\"<\" {m} \"parameter name=\\\"\" {head} ({alternatives})"))
    }

    fn text(&mut self, text: &Text) -> String {
        let m = &self.marker;
        match text {
            Text::Any => "raw".to_owned(),
            Text::Exactly(text) => format!("{} {m} \"parameter>\\n\"", literal(&format!("{text}</"))),
            Text::Bounded { pattern, whole, min, max } => {
                let max = max.map_or(String::new(), |max| max.to_string());
                let length = format!("/(?s:.{{{min},{max}}})<\\//");
                let pattern = pattern.as_deref().map(found);
                let whole = whole.as_deref().map(|whole| format!("({})<\\/", regex_to_lark(whole, "")));
                let also = [pattern, whole].into_iter().flatten().map(|pattern| format!(" & /{pattern}/"));
                let all = length + &also.collect::<String>();
                let terminal = format!("TEXT{}", self.values.len());
                self.values.insert(terminal.clone(), terminal.clone());
                let _ = writeln!(self.rules, "{terminal}: {all}");
                format!("{terminal} {m} \"parameter>\\n\"")
            }
        }
    }

    /// The name of a rule with this body; equal bodies share one.
    fn rule(&mut self, body: &str) -> String {
        if let Some(name) = self.values.get(body) {
            return name.clone();
        }
        let name = format!("v{}", self.values.len());
        let _ = writeln!(self.rules, "{name}: {body}");
        self.values.insert(body.to_owned(), name.clone());
        name
    }
}

/// Text that a pattern of a JSON schema finds something in, with the end of a raw string behind it.
fn found(pattern: &str) -> String {
    let (start, rest) = match pattern.strip_prefix('^') {
        Some(rest) => ("", rest),
        None => ("(?s:.*)", pattern),
    };
    let (rest, end) = match rest.strip_suffix('$').filter(|rest| !rest.ends_with('\\')) {
        Some(rest) => (rest, ""),
        None => (rest, "(?s:.*)"),
    };
    format!("{start}({}){end}<\\/", regex_to_lark(rest, "dw"))
}

/// A string of a Lark grammar.
pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

fn literal_key(key: &str) -> String {
    literal(&format!("{key}\" string=\""))
}

/// A terminal for names that are none of these.
fn other_keys(known: &[&str]) -> String {
    let any = r#"/[^"\n<>]+/"#;
    match known {
        [] => any.to_owned(),
        known => {
            let known: Vec<String> = known.iter().map(|key| literal(key)).collect();
            format!("{any} & ~({})", known.join(" | "))
        }
    }
}
