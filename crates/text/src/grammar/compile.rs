//! From rules to a compiled grammar, and the grammars that are kept.
//!
//! The text of the grammar is its key: requests with equal rules share one compiled grammar, whoever sent them; it holds
//! no text of an answer. What a tool that is not strict asks for and the library cannot do is left out; the same of a
//! strict tool or a format is an error that names the field.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use serde_json::{Value, json};

use super::dsml::{Dsml, Opening, literal};
use super::rules::{AnswerRules, CallRules, Format, FormatRule};
use super::schema::{complaint, reason, written_our_way};
use super::state::{Grammar, Marks};
use super::vocabulary::token_trie;
use crate::plan::ChatError;
use crate::tokenizer::Tokenizer;

/// Most bytes of one grammar's text, schemas included.
const MAX_BYTES: usize = 1 << 20;
/// Compiled grammars that are kept; each takes memory in the order of its text, some megabytes at most.
const KEPT: usize = 64;
/// States of one answer's lexer, 1 to 2 KB each.
const MAX_LEXER_STATES: usize = 20_000;

/// Compiles grammars over one vocabulary and keeps them. Safe to share.
pub struct Grammars {
    factory: ParserFactory,
    tokenizer: Arc<Tokenizer>,
    marks: Marks,
    /// The ones used last at the end, with what they were made from.
    kept: Mutex<Vec<(String, Arc<Grammar>)>>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammars over {:?}", self.tokenizer)
    }
}

impl Grammars {
    /// For a vocabulary; takes some hundred milliseconds.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Grammars {
        let trie = token_trie(&tokenizer);
        let mut factory = ParserFactory::new_simple(&trie).expect("the library's own slices are regular expressions");
        factory.quiet();
        *factory.limits_mut() =
            ParserLimits { verbose_errors: false, max_lexer_states: MAX_LEXER_STATES, ..ParserLimits::default() };
        let mut opens = vec![0; tokenizer.vocab_size().div_ceil(32) as usize];
        for id in (0..tokenizer.vocab_size()).filter(|&id| tokenizer.token_bytes(id).ends_with(b"<")) {
            opens[id as usize / 32] |= 1 << (id % 32);
        }
        let markers = tokenizer.markers();
        let marks = Marks { end_think: markers.end_think, eos: markers.eos, dsml: markers.dsml, opens: opens.into() };
        Grammars { factory, tokenizer, marks, kept: Mutex::new(Vec::new()) }
    }

    /// The grammar of an answer; `None` when nothing is asked of it. Takes milliseconds. Errors name the field.
    pub fn compile(&self, rules: &AnswerRules) -> Result<Option<Arc<Grammar>>, ChatError> {
        // A forced call leaves no room for a content.
        let forced = rules.calls.as_ref().filter(|calls| calls.forced);
        let format = rules.format.as_ref().filter(|_| forced.is_none());
        match (&rules.calls, format) {
            (None, None) => Ok(None),
            (None, Some(format)) => self.content(rules.thought, format).map(Some),
            (Some(calls), _) => self.calls(rules.thought, calls, format),
        }
    }

    fn content(&self, thought: bool, format: &FormatRule) -> Result<Arc<Grammar>, ChatError> {
        let grammar = content_grammar(format)?;
        let compiled = self.grammar(vec![grammar], thought, false);
        compiled.map_err(|error| refusal(format, &error))
    }

    fn calls(
        &self,
        thought: bool,
        calls: &CallRules,
        format: Option<&FormatRule>,
    ) -> Result<Option<Arc<Grammar>>, ChatError> {
        if self.marks.dsml.is_none() {
            return match (format, calls.forced) {
                (Some(format), _) => self.content(thought, format).map(Some),
                (None, true) => Err(ChatError::field("tool_choice", "this tokenizer has no token for tool calls")),
                (None, false) => Ok(None),
            };
        }
        // A format must be sound by itself, so that errors name the right field.
        let content = format.map(|format| self.content(thought, format).and_then(|_| content_grammar(format)));
        let content = content.transpose()?;
        let waits = !calls.forced && content.is_none();
        let opening = match (calls.opened, waits) {
            (true, _) => Opening::Inside,
            (false, true) => Opening::Marker,
            (false, false) => Opening::Whole,
        };
        let build = |calls: &CallRules| {
            let dsml = Dsml::new(&self.tokenizer).ok_or("no marker")?;
            let start = if content.is_some() { "start: @content | calls\n" } else { "start: calls\n" };
            let mut grammars = vec![GrammarWithLexer::from_lark(start.to_owned() + &dsml.write(calls, opening))];
            grammars.extend(content.clone());
            self.grammar(grammars, thought, waits)
        };
        let Err(error) = build(calls) else { return build(calls).map(Some).map_err(|e| whole(&e)) };
        // One strict tool that cannot be followed is an error; of the others, those that cannot go without their schemas.
        let mut calls = calls.clone();
        for tool in 0..calls.tools.len() {
            let one = CallRules { tools: vec![calls.tools[tool].clone()], ..calls.clone() };
            let Err(error) = build(&one) else { continue };
            let tool = &mut calls.tools[tool];
            if tool.strict {
                return Err(ChatError::field(&tool.param, complaint(&error)));
            }
            tool.parameters = json!({});
        }
        if let Ok(grammar) = build(&calls) {
            return Ok(Some(grammar));
        }
        if calls.tools.iter().any(|tool| tool.strict) {
            return Err(whole(&error));
        }
        calls.tools.iter_mut().for_each(|tool| tool.parameters = json!({}));
        match build(&calls) {
            Ok(grammar) => Ok(Some(grammar)),
            Err(error) if calls.forced || content.is_some() => Err(whole(&error)),
            // Free calls were never held to anything before there were grammars.
            Err(_) => Ok(None),
        }
    }

    /// Compiles, or finds what was compiled.
    fn grammar(&self, grammars: Vec<GrammarWithLexer>, thought: bool, waits: bool) -> Result<Arc<Grammar>, String> {
        let grammar = TopLevelGrammar { grammars, max_tokens: None };
        let key = serde_json::to_string(&grammar).map_err(|error| error.to_string())?;
        if key.len() > MAX_BYTES {
            return Err(format!("it takes {} bytes as a grammar, the limit is {MAX_BYTES}", key.len()));
        }
        let key = format!("{thought} {waits} {key}");
        {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(at) = kept.iter().position(|(of, _)| *of == key) {
                let entry = kept.remove(at);
                let grammar = Arc::clone(&entry.1);
                kept.push(entry);
                return Ok(grammar);
            }
        }
        let parser = self.factory.create_parser(grammar).map_err(|error| format!("{error:#}"))?;
        let pristine = Matcher::new(Ok(parser));
        // What cannot begin must not be found out by the engine.
        pristine.deep_clone().compute_mask().map_err(|error| error.to_string())?;
        if let Some(error) = pristine.get_error() {
            return Err(error);
        }
        let grammar = Arc::new(Grammar { pristine, thought, waits, marks: self.marks.clone() });
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT {
            kept.remove(0);
        }
        kept.push((key, Arc::clone(&grammar)));
        Ok(grammar)
    }
}

/// The grammar of a content, named `content`.
fn content_grammar(rule: &FormatRule) -> Result<GrammarWithLexer, ChatError> {
    let lark = |text: String| GrammarWithLexer { name: Some("content".into()), ..GrammarWithLexer::from_lark(text) };
    let json = |schema: &Value| GrammarWithLexer {
        name: Some("content".into()),
        ..GrammarWithLexer::from_json_schema(written_our_way(schema, false))
    };
    Ok(match &rule.format {
        Format::Object => json(&json!({"type": "object"})),
        Format::Schema(schema) if schema.is_object() || schema.is_boolean() => json(schema),
        Format::Schema(_) => return Err(ChatError::field(&rule.param, "expected a JSON schema: an object")),
        Format::Regex(regex) => {
            // It matches the whole text anyway.
            let inner = regex.strip_prefix('^').unwrap_or(regex);
            let inner = inner.strip_suffix('$').filter(|inner| !inner.ends_with('\\')).unwrap_or(inner);
            lark(format!("start: /{}/", regex_to_lark(inner, "")))
        }
        Format::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
            lark(format!("start: {}", texts.join(" | ")))
        }
        Format::Lark(text) => lark(text.clone()),
    })
}

/// What the library says of a format.
fn refusal(rule: &FormatRule, error: &str) -> ChatError {
    match &rule.format {
        Format::Object | Format::Schema(_) => ChatError::field(&rule.param, complaint(error)),
        _ => ChatError::field(&rule.param, format!("the answer cannot be held to this: {}", reason(error))),
    }
}

fn whole(error: &str) -> ChatError {
    ChatError::field("tools", complaint(error))
}
