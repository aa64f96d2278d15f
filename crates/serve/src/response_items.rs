//! The output of a Responses answer: items, and the events that tell of them as they grow.
//!
//! Reasoning, a message and calls are items one after the other, each added, filled and done. Calls of custom tools give
//! their text instead of arguments, calls of a namespace their local name. A whole answer goes through the same steps and
//! leaves the events out.

use longwave_text::{ReplyEvent, ToolNames, sealed};
use serde_json::{Map, Value, json};

use crate::answer::Part;

/// Items of one answer.
pub(crate) struct Items {
    response_id: String,
    names: ToolNames,
    /// Hand thoughts out sealed as well.
    seal: bool,
    /// The items so far; the last one may still grow.
    pub(crate) output: Vec<Value>,
    open: Option<Open>,
    sequence: u64,
}

enum Open {
    Reasoning(String),
    Message { text: String, logprobs: Vec<Value> },
    Call(String),
    Search(String),
    Custom { arguments: String, input: FreeText },
}

impl Items {
    pub(crate) fn new(response_id: &str, names: ToolNames, seal: bool) -> Items {
        Items { response_id: response_id.to_owned(), names, seal, output: Vec::new(), open: None, sequence: 0 }
    }

    /// An event with the next number.
    pub(crate) fn event(&mut self, kind: &str, fields: Value) -> Value {
        let mut event = Map::new();
        event.insert("type".into(), kind.into());
        event.insert("sequence_number".into(), self.sequence.into());
        self.sequence += 1;
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        event.into()
    }

    /// Takes a part of the answer.
    pub(crate) fn add(&mut self, mut part: Part, events: &mut Vec<Value>) {
        for event in std::mem::take(&mut part.events) {
            match event {
                ReplyEvent::Reasoning(delta) => self.reasoning(delta, events),
                ReplyEvent::Content(delta) => {
                    let logprobs = std::mem::take(&mut part.content_logprobs);
                    self.content(delta, logprobs, events);
                }
                ReplyEvent::ToolCallStart { id, name, .. } => self.call(&id, name, events),
                ReplyEvent::ToolCallArguments { delta, .. } => self.arguments(delta, events),
            }
        }
    }

    /// Closes the last item; `complete` unless the token limit cut it.
    pub(crate) fn end(&mut self, complete: bool, events: &mut Vec<Value>) {
        let Some(open) = self.open.take() else { return };
        let index = self.output.len() - 1;
        let id = self.output[index]["id"].clone();
        let at = |fields: Value| {
            let mut all = json!({"item_id": id, "output_index": index});
            if let (Value::Object(all), Value::Object(fields)) = (&mut all, fields) {
                all.extend(fields);
            }
            all
        };
        match open {
            Open::Reasoning(text) => {
                let part = json!({"type": "reasoning_text", "text": text});
                let done = at(json!({"content_index": 0, "text": text}));
                events.push(self.event("response.reasoning_text.done", done));
                events.push(self.event("response.content_part.done", at(json!({"content_index": 0, "part": part}))));
                self.output[index]["content"] = json!([part]);
                if self.seal {
                    self.output[index]["encrypted_content"] = sealed::seal(&text).into();
                }
            }
            Open::Message { text, logprobs } => {
                let part = json!({"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text});
                let done = at(json!({"content_index": 0, "text": text, "logprobs": logprobs}));
                events.push(self.event("response.output_text.done", done));
                events.push(self.event("response.content_part.done", at(json!({"content_index": 0, "part": part}))));
                self.output[index]["content"] = json!([part]);
            }
            Open::Call(arguments) => {
                let done = at(json!({"arguments": arguments, "name": self.output[index]["name"]}));
                events.push(self.event("response.function_call_arguments.done", done));
                self.output[index]["arguments"] = arguments.into();
            }
            Open::Search(arguments) => {
                let arguments: Option<Value> = serde_json::from_str(&arguments).ok();
                self.output[index]["arguments"] = arguments.filter(Value::is_object).unwrap_or_else(|| json!({}));
            }
            Open::Custom { arguments, input } => {
                let rest = input.rest(&arguments);
                if !rest.is_empty() {
                    events.push(self.event("response.custom_tool_call_input.delta", at(json!({"delta": rest}))));
                }
                let input = input.text + &rest;
                events.push(self.event("response.custom_tool_call_input.done", at(json!({"input": input}))));
                self.output[index]["input"] = input.into();
            }
        }
        self.output[index]["status"] = if complete { "completed" } else { "incomplete" }.into();
        let item = self.output[index].clone();
        events.push(self.event("response.output_item.done", json!({"output_index": index, "item": item})));
    }

    fn begin(&mut self, open: Open, item: Value, part: Option<Value>, events: &mut Vec<Value>) {
        self.end(true, events);
        let index = self.output.len();
        self.output.push(item.clone());
        self.open = Some(open);
        let id = item["id"].clone();
        events.push(self.event("response.output_item.added", json!({"output_index": index, "item": item})));
        if let Some(part) = part {
            let fields = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            events.push(self.event("response.content_part.added", fields));
        }
    }

    fn id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.response_id.trim_start_matches("resp_"), self.output.len())
    }

    /// Where the open item is, for a delta.
    fn delta(&mut self, kind: &str, fields: Value) -> Value {
        let index = self.output.len() - 1;
        let mut all = json!({"item_id": self.output[index]["id"], "output_index": index});
        if let (Value::Object(all), Value::Object(fields)) = (&mut all, fields) {
            all.extend(fields);
        }
        self.event(kind, all)
    }

    fn reasoning(&mut self, delta: String, events: &mut Vec<Value>) {
        if !matches!(self.open, Some(Open::Reasoning(_))) {
            let item = json!({
                "id": self.id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": [],
            });
            let part = json!({"type": "reasoning_text", "text": ""});
            self.begin(Open::Reasoning(String::new()), item, Some(part), events);
        }
        if let Some(Open::Reasoning(text)) = &mut self.open {
            text.push_str(&delta);
        }
        events.push(self.delta("response.reasoning_text.delta", json!({"content_index": 0, "delta": delta})));
    }

    fn content(&mut self, delta: String, new: Vec<Value>, events: &mut Vec<Value>) {
        if !matches!(self.open, Some(Open::Message { .. })) {
            let item = json!({
                "id": self.id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": [],
            });
            let part = json!({"type": "output_text", "annotations": [], "logprobs": [], "text": ""});
            self.begin(Open::Message { text: String::new(), logprobs: Vec::new() }, item, Some(part), events);
        }
        if let Some(Open::Message { text, logprobs }) = &mut self.open {
            text.push_str(&delta);
            logprobs.extend_from_slice(&new);
        }
        let fields = json!({"content_index": 0, "delta": delta, "logprobs": new});
        events.push(self.delta("response.output_text.delta", fields));
    }

    fn call(&mut self, call_id: &str, name: String, events: &mut Vec<Value>) {
        if self.names.search && name == "tool_search" {
            let item = json!({
                "id": self.id("tsc"), "type": "tool_search_call", "status": "in_progress", "call_id": call_id,
                "execution": "client", "arguments": {},
            });
            return self.begin(Open::Search(String::new()), item, None, events);
        }
        if self.names.custom.contains(&name) {
            let local = self.names.namespaces.get(&name).map_or(&name, |(_, local)| local);
            let item = json!({
                "id": self.id("ctc"), "type": "custom_tool_call", "status": "in_progress", "call_id": call_id,
                "name": local, "input": "",
            });
            let open = Open::Custom { arguments: String::new(), input: FreeText::default() };
            return self.begin(open, item, None, events);
        }
        let mut item = json!({
            "id": self.id("fc"), "type": "function_call", "status": "in_progress", "call_id": call_id, "name": name,
            "arguments": "",
        });
        if let Some((namespace, local)) = self.names.namespaces.get(&name) {
            item["name"] = local.as_str().into();
            item["namespace"] = namespace.as_str().into();
        }
        self.begin(Open::Call(String::new()), item, None, events);
    }

    fn arguments(&mut self, delta: String, events: &mut Vec<Value>) {
        match &mut self.open {
            Some(Open::Call(arguments)) => {
                arguments.push_str(&delta);
                events.push(self.delta("response.function_call_arguments.delta", json!({"delta": delta})));
            }
            Some(Open::Search(arguments)) => arguments.push_str(&delta),
            Some(Open::Custom { arguments, input }) => {
                arguments.push_str(&delta);
                let text = input.push(arguments);
                if !text.is_empty() {
                    events.push(self.delta("response.custom_tool_call_input.delta", json!({"delta": text})));
                }
            }
            _ => {}
        }
    }
}

/// The text inside `{"input": "..."}`, decoded as it comes.
#[derive(Default)]
struct FreeText {
    /// Decoded so far.
    text: String,
    /// Bytes of the arguments that are read.
    read: usize,
    ended: bool,
}

const OPENING: &str = "{\"input\": \"";

impl FreeText {
    /// What the longer `arguments` add.
    fn push(&mut self, arguments: &str) -> String {
        let mut new = String::new();
        if self.read == 0 {
            if !arguments.starts_with(OPENING) {
                return new;
            }
            self.read = OPENING.len();
        }
        while !self.ended {
            let rest = &arguments[self.read..];
            let Some(first) = rest.chars().next() else { break };
            let length = match first {
                '"' => {
                    self.ended = true;
                    break;
                }
                '\\' => match rest.as_bytes().get(1) {
                    // A pair of surrogates is one character.
                    Some(b'u') if rest.len() >= 6 && is_high_surrogate(&rest[2..6]) => 12,
                    Some(b'u') => 6,
                    Some(_) => 2,
                    None => break,
                },
                ch => ch.len_utf8(),
            };
            let Some(piece) = rest.get(..length) else { break };
            match serde_json::from_str::<String>(&format!("\"{piece}\"")) {
                Ok(text) => new.push_str(&text),
                Err(_) => new.push_str(piece),
            }
            self.read += length;
        }
        self.text.push_str(&new);
        new
    }

    /// What is left to say when the arguments have another form.
    fn rest(&self, arguments: &str) -> String {
        if self.read > 0 {
            return String::new();
        }
        let json: Option<Value> = serde_json::from_str(arguments).ok();
        match json.as_ref().and_then(|json| json["input"].as_str()) {
            Some(input) => input.to_owned(),
            None => arguments.to_owned(),
        }
    }
}

fn is_high_surrogate(digits: &str) -> bool {
    u32::from_str_radix(digits, 16).is_ok_and(|unit| (0xd800..0xdc00).contains(&unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_text_is_decoded_wherever_it_is_cut() {
        let input = "*** Begin Patch\n+ \"a\\b\"\t\u{1f600}\u{e9}\n*** End";
        let escaped = format!("{{\"input\": {}}}", Value::from(input)).replace('\u{1f600}', "\\ud83d\\ude00");
        for at in (0..=escaped.len()).filter(|&at| escaped.is_char_boundary(at)) {
            let mut text = FreeText::default();
            let pieces = [text.push(&escaped[..at]), text.push(&escaped), text.rest(&escaped)];
            assert_eq!(pieces.concat(), input, "{at}");
        }
        let mut other = FreeText::default();
        assert_eq!(other.push("{\"patch\": 1}"), "");
        assert_eq!(other.rest("{\"patch\": 1}"), "{\"patch\": 1}");
        assert_eq!(other.rest("{\"x\": 1, \"input\": \"y\"}"), "y");
    }
}
