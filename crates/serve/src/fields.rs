//! The fields of request bodies that mean something here: which protocol has them, their form, what they do.
//!
//! The OpenAPI document is made of this table, and fields that are not in it are told from known ones by it. The values are
//! checked where they are read (`controls.rs`, `longwave-text`).

use crate::controls::Protocol::{self, Chat, Completions, Messages, Responses};

/// One field.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) of: &'static [Protocol],
    /// JSON Schema.
    pub(crate) schema: &'static str,
    pub(crate) about: &'static str,
}

const ALL: &[Protocol] = &[Chat, Completions, Responses, Messages];
const OPENAI: &[Protocol] = &[Chat, Completions, Responses];
const CHOICES: &[Protocol] = &[Chat, Completions];
const TALK: &[Protocol] = &[Chat, Responses, Messages];

const TEXT: &str = r#"{"type": "string"}"#;
const FLAG: &str = r#"{"type": ["boolean", "null"]}"#;
const COUNT: &str = r#"{"type": ["integer", "null"], "minimum": 1, "maximum": 4294967295}"#;
const OBJECT: &str = r#"{"type": ["object", "null"]}"#;
const ANY: &str = "{}";
const PENALTY: &str = r#"{"type": ["number", "null"], "minimum": -2, "maximum": 2}"#;
const TEXTS: &str = r#"{"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 16}, {"type": "null"}]}"#;
const TOOLS: &str = r#"{"type": ["array", "null"], "items": {"type": "object"}}"#;

const fn field(name: &'static str, of: &'static [Protocol], schema: &'static str, about: &'static str) -> Field {
    Field { name, of, schema, about }
}

/// All of them.
pub(crate) const FIELDS: &[Field] = &[
    field("model", ALL, r#"{"type": ["string", "null"]}"#, "A served name, in any case; the first one without it."),
    field(
        "messages",
        &[Chat, Messages],
        r#"{"type": "array", "minItems": 1, "items": {"type": "object", "properties": {"role": {"enum": ["system", "user", "assistant", "tool", "developer"]}, "content": {"type": "string"}}, "required": ["role", "content"]}}"#,
        "The conversation.",
    ),
    field(
        "prompt",
        &[Completions],
        r#"{"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "integer", "minimum": 0}}, {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}}]}"#,
        "A text, token ids, or a list of either.",
    ),
    field("suffix", &[Completions], r#"{"type": ["string", "null"]}"#, "Text after the answer: fill in the middle."),
    field("echo", &[Completions], FLAG, "Repeat the prompt in front of the answer."),
    field("best_of", &[Completions], ANY, "Only the value of n."),
    field(
        "input",
        &[Responses],
        r#"{"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}"#,
        "A text or a list of items.",
    ),
    field("instructions", &[Responses], r#"{"type": ["string", "null"]}"#, "System text."),
    field("previous_response_id", &[Responses], r#"{"type": ["string", "null"]}"#, "Go on after a kept response."),
    field("store", &[Chat, Responses], FLAG, "Keep the response for later requests (Responses)."),
    field("background", &[Responses], FLAG, "Answer at once and run on; read the response with GET."),
    field(
        "include",
        &[Responses],
        r#"{"type": ["array", "null"], "items": {"type": "string"}}"#,
        "reasoning.encrypted_content, message.output_text.logprobs.",
    ),
    field("text", &[Responses], OBJECT, "The form of the answer, under format."),
    field("max_output_tokens", &[Responses], COUNT, "Most tokens of the answer."),
    field("max_tool_calls", &[Responses], ANY, "Repeated in the response."),
    field("conversation", &[Responses], r#"{"type": "null"}"#, "Not kept here."),
    field("truncation", &[Responses], ANY, "Nothing is ever cut silently."),
    field("prompt_cache_key", OPENAI, ANY, "Not needed: prefixes are found by their tokens."),
    field("prompt_cache_retention", OPENAI, ANY, "Not needed."),
    field("client_metadata", &[Responses], ANY, "Ignored."),
    field(
        "system",
        &[Messages],
        r#"{"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}"#,
        "System text.",
    ),
    field(
        "stop_sequences",
        &[Messages],
        r#"{"type": ["array", "null"], "items": {"type": "string"}, "maxItems": 16}"#,
        "Texts that end the answer.",
    ),
    field("output_config", &[Messages], OBJECT, "effort; the form of the answer under format."),
    field("context_management", &[Messages], ANY, "Ignored: the client sends what it wants to keep."),
    field("tools", TALK, TOOLS, "Functions that the model may call."),
    field("tool_choice", TALK, ANY, "Whether it may, must or must not call them."),
    field("parallel_tool_calls", &[Chat, Responses], FLAG, "More than one call in an answer."),
    field(
        "thinking",
        TALK,
        ANY,
        r#"{"type": "enabled" | "adaptive" | "disabled"}, or a flag. Wins over every other switch."#,
    ),
    field(
        "reasoning_effort",
        TALK,
        r#"{"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra", null]}"#,
        "none switches thinking off.",
    ),
    field("reasoning", TALK, OBJECT, "effort and enabled."),
    field("include_reasoning", &[Chat], FLAG, "false leaves the thought out of the answer."),
    field("chat_template_kwargs", TALK, OBJECT, "thinking, enable_thinking, reasoning_effort."),
    field(
        "response_format",
        &[Chat],
        OBJECT,
        "text, json_object, json_schema, regex or grammar: the answer keeps to it.",
    ),
    field("output_format", &[Messages], OBJECT, "The same as output_config.format."),
    field("guided_json", CHOICES, ANY, "A JSON schema that the answer keeps to."),
    field("guided_regex", CHOICES, r#"{"type": ["string", "null"]}"#, "A regular expression for the whole answer."),
    field(
        "guided_choice",
        CHOICES,
        r#"{"type": ["array", "null"], "items": {"type": "string"}}"#,
        "The answers to choose from.",
    ),
    field("guided_grammar", CHOICES, r#"{"type": ["string", "null"]}"#, "A Lark grammar of the answer."),
    field("structured_outputs", CHOICES, OBJECT, "One of json, regex, choice, grammar and json_object."),
    field("stop", CHOICES, TEXTS, "Texts that end the answer."),
    field("include_stop_str_in_output", &[Completions], FLAG, "Keep the stop text."),
    field("stream", ALL, FLAG, "Server-sent events."),
    field("stream_options", CHOICES, OBJECT, "include_usage."),
    field(
        "temperature",
        ALL,
        r#"{"type": ["number", "null"], "minimum": 0, "maximum": 2}"#,
        "0 takes the likeliest token.",
    ),
    field(
        "top_p",
        ALL,
        r#"{"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}"#,
        "Keep the likeliest tokens up to this sum.",
    ),
    field(
        "top_k",
        ALL,
        r#"{"type": ["integer", "null"], "minimum": -1, "maximum": 4294967295}"#,
        "Keep this many; 0 or -1 is all.",
    ),
    field(
        "min_p",
        ALL,
        r#"{"type": ["number", "null"], "minimum": 0, "maximum": 1}"#,
        "Keep those with this share of the likeliest.",
    ),
    field(
        "seed",
        OPENAI,
        r#"{"type": ["integer", "null"], "minimum": -9223372036854775808, "maximum": 9223372036854775807}"#,
        "The same request gives the same answer.",
    ),
    field("presence_penalty", OPENAI, PENALTY, "Against tokens that were used."),
    field("frequency_penalty", OPENAI, PENALTY, "Against tokens that were used often."),
    field(
        "repetition_penalty",
        OPENAI,
        r#"{"type": ["number", "null"], "minimum": 0.01, "maximum": 2}"#,
        "Divides the scores of used tokens.",
    ),
    field(
        "logit_bias",
        OPENAI,
        r#"{"type": ["object", "null"], "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}"#,
        "Added to scores, by token id.",
    ),
    field("logprobs", CHOICES, ANY, "Log-probabilities: a flag in chats, a number in completions."),
    field(
        "top_logprobs",
        &[Chat, Responses],
        r#"{"type": ["integer", "null"], "minimum": 0, "maximum": 20}"#,
        "Alternatives per token.",
    ),
    field("n", CHOICES, r#"{"type": ["integer", "null"], "minimum": 1, "maximum": 128}"#, "Answers to the prompt."),
    field("max_tokens", &[Chat, Completions, Messages], COUNT, "Most tokens of the answer."),
    field("max_completion_tokens", &[Chat], COUNT, "The same; wins."),
    field(
        "min_tokens",
        ALL,
        r#"{"type": ["integer", "null"], "minimum": 0, "maximum": 4294967295}"#,
        "Fewest tokens of the answer.",
    ),
    field(
        "stop_token_ids",
        OPENAI,
        r#"{"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}}"#,
        "Tokens that end the answer.",
    ),
    field("ignore_eos", OPENAI, FLAG, "Go on after the end of the turn."),
    field("priority", ALL, r#"{"type": ["integer", "null"], "minimum": -16, "maximum": 16}"#, "Lower runs earlier."),
    field("cache_salt", ALL, r#"{"type": ["string", "null"]}"#, "Share cached prefixes with this salt only."),
    field(
        "return_token_ids",
        CHOICES,
        FLAG,
        "Give prompt_token_ids, token_ids of each choice (all of them, the last one included), and token_id beside each log-probability.",
    ),
    field("prefix_report", &[Chat], FLAG, "Say in the answer what the prefix cache did."),
    field("user", OPENAI, ANY, "Ignored."),
    field("metadata", ALL, OBJECT, "Ignored; repeated by Responses."),
    field("service_tier", ALL, ANY, "Ignored."),
    field("safety_identifier", OPENAI, TEXT, "Ignored; repeated by Responses."),
];

/// Whether a protocol has a field of that name.
pub(crate) fn is_known(protocol: Protocol, name: &str) -> bool {
    FIELDS.iter().any(|field| field.name == name && field.of.contains(&protocol))
}
