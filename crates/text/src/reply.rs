//! The model's tokens become reasoning, content and tool calls.
//!
//! The vendor's stream parser does the reading. Around it: characters that are never split, control tokens recognised by
//! id (their spelling in ordinary tokens is text), a repeated opening think tag swallowed, call ids, arguments that are
//! always JSON. The parser is
//! asynchronous by nature but never waits for anything but input, so it is driven here by hand. The same text gives the
//! same events joined, wherever it is cut.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use deepseek_recipe::stream::{
    ChunkGenerator, FinishReason, InferenceChunk, InferenceFinishReason, OutputChunk, ParsingOptions, StreamError,
    StreamProcessor, StreamTokenizer, ThinkingInitialStage,
};
use futures_core::Stream;

use crate::arguments::{Arguments, hide, reveal};
use crate::detokenizer::Detokenizer;
use crate::tokenizer::Tokenizer;

/// What the prompt ended with, hence what the first token belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyStart {
    /// `<think>`.
    Reasoning,
    /// Reasoning that the client gave as a prefix.
    ReasoningContinuation,
    /// `</think>`.
    Content,
    /// Content that the client gave as a prefix.
    ContentContinuation,
    /// An opened tool-call block.
    ToolCalls,
}

/// How an answer is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyOptions {
    /// Where it starts.
    pub start: ReplyStart,
    /// Tools were offered; otherwise tool markup is text.
    pub parse_tool_calls: bool,
    /// Texts that end the content.
    pub stop: Vec<String>,
    /// Call ids are drawn from it: give every request another number.
    pub call_seed: u64,
}

/// A piece of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyEvent {
    /// Reasoning text.
    Reasoning(String),
    /// Content text.
    Content(String),
    /// A call begins; its arguments follow.
    ToolCallStart {
        /// Position among the calls, from 0.
        index: u32,
        /// Identity for the tool result.
        id: String,
        /// Function name, as the model wrote it.
        name: String,
    },
    /// A piece of the JSON arguments of the call.
    ToolCallArguments {
        /// Position of the call.
        index: u32,
        /// Text to append.
        delta: String,
    },
}

/// Why the tokens ended, as the engine sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyEnd {
    /// The model ended its turn.
    Stop,
    /// The token limit.
    Length,
}

/// Why the answer ended, as the client shall see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyFinish {
    /// The model ended its turn, or a stop text appeared (named).
    Stop(Option<String>),
    /// The token limit.
    Length,
    /// The turn ended with calls.
    ToolCalls,
}

/// Reads one answer.
pub struct Reply {
    parser: Pin<Box<dyn Stream<Item = Result<OutputChunk, StreamError>> + Send>>,
    input: Arc<Mutex<Input>>,
    detokenizer: Detokenizer,
    lead: Option<Lead>,
    calls: u32,
    /// Of the open call.
    arguments: Option<Arguments>,
    call_seed: u64,
    in_reasoning: bool,
    reasoning_tokens: u32,
    finish: Option<ReplyFinish>,
}

impl Reply {
    /// Starts reading.
    pub fn new(options: ReplyOptions) -> Reply {
        let input = Arc::new(Mutex::new(Input::default()));
        let stage = match options.start {
            ReplyStart::Reasoning => Some(ThinkingInitialStage::ReasoningStart),
            ReplyStart::ReasoningContinuation => Some(ThinkingInitialStage::ReasoningContinuation),
            ReplyStart::ContentContinuation => Some(ThinkingInitialStage::ContentContinuation),
            ReplyStart::Content | ReplyStart::ToolCalls => None,
        };
        let parsing = ParsingOptions {
            parse_tool_calls: options.parse_tool_calls,
            starts_in_tool_calls: options.start == ReplyStart::ToolCalls,
            thinking_initial_stage: stage,
            stop_sequences: options.stop.iter().map(|text| hide(text)).collect(),
            ..ParsingOptions::default()
        };
        let processor = StreamProcessor::new(AsIs, parsing).with_tokenizer(Spelled(input.clone()));
        Reply {
            parser: Box::pin(processor.into_protocol_stream(Queue(input.clone()))),
            input,
            detokenizer: Detokenizer::new(),
            lead: (options.start == ReplyStart::Reasoning).then(Lead::default),
            calls: 0,
            arguments: None,
            call_seed: options.call_seed,
            in_reasoning: matches!(options.start, ReplyStart::Reasoning | ReplyStart::ReasoningContinuation),
            reasoning_tokens: 0,
            finish: None,
        }
    }

    /// Takes one generated token. Leave out the token that ended the turn.
    pub fn push_token(&mut self, tokenizer: &Tokenizer, token: u32, events: &mut Vec<ReplyEvent>) {
        let mut text = String::new();
        if !tokenizer.is_added(token) {
            self.reasoning_tokens += u32::from(self.in_reasoning);
            self.detokenizer.push(tokenizer.token_bytes(token), &mut text);
            self.feed(text, Kind::Plain, events);
            return;
        }
        let markers = tokenizer.markers();
        if token == markers.end_think || Some(token) == markers.dsml {
            self.in_reasoning = false;
        }
        self.reasoning_tokens += u32::from(self.in_reasoning);
        self.detokenizer.finish(&mut text);
        self.feed(text, Kind::Plain, events);
        let spelling = String::from_utf8_lossy(tokenizer.token_bytes(token)).into_owned();
        self.feed(spelling, Kind::Marker, events);
    }

    /// Takes text without token boundaries; control tokens are then recognised by their spelling.
    pub fn push_text(&mut self, text: &str, events: &mut Vec<ReplyEvent>) {
        self.feed(text.to_owned(), Kind::Text, events);
    }

    /// A stop text appeared: further tokens are ignored.
    pub fn stopped(&self) -> bool {
        self.finish.is_some()
    }

    /// The end of the tokens; gives the last events and the reason.
    pub fn finish(&mut self, end: ReplyEnd, events: &mut Vec<ReplyEvent>) -> ReplyFinish {
        let mut text = String::new();
        self.detokenizer.finish(&mut text);
        self.feed(text, Kind::Plain, events);
        let finish_reason = match end {
            ReplyEnd::Stop => InferenceFinishReason::Stop,
            ReplyEnd::Length => InferenceFinishReason::Length,
        };
        locked(&self.input).chunks.push_back(InferenceChunk::Finish { finish_reason });
        self.drive(events);
        self.flush_lead(events);
        self.finish.clone().unwrap_or(ReplyFinish::Stop(None))
    }

    /// Tokens taken while reasoning (0 when fed with text).
    pub fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    fn feed(&mut self, text: String, kind: Kind, events: &mut Vec<ReplyEvent>) {
        if text.is_empty() || self.finish.is_some() {
            return;
        }
        let text = hide(&text);
        {
            let mut input = locked(&self.input);
            let chunk = if kind == Kind::Text {
                InferenceChunk::Text { content: text, token_count: 0 }
            } else {
                input.spelled = text;
                input.is_marker = kind == Kind::Marker;
                InferenceChunk::Tokens { token_ids: vec![0], logprobs: None }
            };
            input.chunks.push_back(chunk);
        }
        self.drive(events);
    }

    /// Polls the parser until it wants more input.
    fn drive(&mut self, events: &mut Vec<ReplyEvent>) {
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(chunk)) = self.parser.as_mut().poll_next(&mut context) {
            // The error kinds need a missing tokenizer, failed decoding or logprobs; none exists here.
            if let Ok(chunk) = chunk {
                self.take(chunk, events);
            }
            if self.finish.is_some() {
                break;
            }
        }
    }

    fn take(&mut self, chunk: OutputChunk, events: &mut Vec<ReplyEvent>) {
        match chunk {
            OutputChunk::Reasoning { content, .. } => {
                let content = reveal(&content);
                let Some(lead) = &mut self.lead else { return append(events, ReplyEvent::Reasoning(content)) };
                lead.text.push_str(&content);
                if !lead.swallowed
                    && let Some(rest) = lead.text.strip_prefix(THINK)
                {
                    lead.text = rest.to_owned();
                    lead.swallowed = true;
                }
                if lead.swallowed {
                    lead.text = lead.text.trim_start_matches('\n').to_owned();
                    if lead.text.is_empty() {
                        return;
                    }
                } else if THINK.starts_with(lead.text.as_str()) {
                    return;
                }
                self.flush_lead(events);
            }
            OutputChunk::Content { content, .. } => {
                self.flush_lead(events);
                append(events, ReplyEvent::Content(reveal(&content)));
            }
            OutputChunk::ToolCallNamed { tool_name } => {
                self.flush_lead(events);
                let index = self.calls;
                self.calls += 1;
                self.arguments = Some(Arguments::default());
                let id = call_id(self.call_seed, index);
                events.push(ReplyEvent::ToolCallStart { index, id, name: reveal(&tool_name) });
            }
            OutputChunk::ToolCallArgumentsDelta { arguments } => {
                let mut delta = String::new();
                if let Some(open) = &mut self.arguments {
                    open.push(&arguments, &mut delta);
                }
                self.give_arguments(delta, events);
            }
            OutputChunk::Finish { finish_reason, stop_sequence, .. } => {
                self.flush_lead(events);
                self.end_call(finish_reason != FinishReason::Length, events);
                self.finish = Some(match finish_reason {
                    FinishReason::Length => ReplyFinish::Length,
                    // The vendor looks before its last pieces are out, which would depend on the cuts.
                    _ if self.calls > 0 => ReplyFinish::ToolCalls,
                    _ => ReplyFinish::Stop(stop_sequence.as_deref().map(reveal)),
                });
            }
            OutputChunk::ToolCallBegin => self.end_call(true, events),
            OutputChunk::Start { .. } => {}
        }
    }

    /// Gives out what the open call held back.
    fn end_call(&mut self, complete: bool, events: &mut Vec<ReplyEvent>) {
        let mut delta = String::new();
        if let Some(mut open) = self.arguments.take() {
            open.finish(complete, &mut delta);
        }
        self.give_arguments(delta, events);
    }

    fn give_arguments(&mut self, delta: String, events: &mut Vec<ReplyEvent>) {
        if !delta.is_empty() {
            append(events, ReplyEvent::ToolCallArguments { index: self.calls - 1, delta });
        }
    }

    /// Gives out what was held at the start of the reasoning.
    fn flush_lead(&mut self, events: &mut Vec<ReplyEvent>) {
        if let Some(lead) = self.lead.take()
            && !lead.text.is_empty()
        {
            append(events, ReplyEvent::Reasoning(lead.text));
        }
    }
}

const THINK: &str = "<think>";

/// The first characters of the reasoning, held while they could be a repeated opening tag.
#[derive(Default)]
struct Lead {
    text: String,
    /// The tag came; only newlines are still dropped.
    swallowed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Plain,
    Marker,
}

/// Joins neighbours of one kind, so that a step gives few events.
fn append(events: &mut Vec<ReplyEvent>, event: ReplyEvent) {
    match (events.last_mut(), event) {
        (Some(ReplyEvent::Reasoning(text)), ReplyEvent::Reasoning(more))
        | (Some(ReplyEvent::Content(text)), ReplyEvent::Content(more)) => text.push_str(&more),
        (
            Some(ReplyEvent::ToolCallArguments { index, delta }),
            ReplyEvent::ToolCallArguments { index: next, delta: more },
        ) if *index == next => delta.push_str(&more),
        (_, event) => events.push(event),
    }
}

/// The vendor's style: `call_00_` and 20 characters.
fn call_id(seed: u64, index: u32) -> String {
    const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let mut state = seed ^ u64::from(index).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let mut id = format!("call_{index:02}_");
    for _ in 0..20 {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        id.push(char::from(ALPHABET[(z % 62) as usize]));
    }
    id
}

/// What the parser reads next.
#[derive(Default)]
struct Input {
    chunks: VecDeque<InferenceChunk>,
    spelled: String,
    is_marker: bool,
}

fn locked(input: &Mutex<Input>) -> MutexGuard<'_, Input> {
    // The data is plain; a panic elsewhere leaves nothing half done.
    input.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The input as the stream that the vendor's processor wants: pending when empty.
struct Queue(Arc<Mutex<Input>>);

impl Stream for Queue {
    type Item = InferenceChunk;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<InferenceChunk>> {
        match locked(&self.0).chunks.pop_front() {
            Some(chunk) => Poll::Ready(Some(chunk)),
            None => Poll::Pending,
        }
    }
}

/// Hands the vendor's decoder the text that was decoded here; the token id says nothing.
struct Spelled(Arc<Mutex<Input>>);

impl StreamTokenizer for Spelled {
    fn decode_ids(&self, _: &[u32], _: bool) -> Result<String, String> {
        Ok(locked(&self.0).spelled.clone())
    }

    fn is_special_token(&self, _: u32) -> bool {
        locked(&self.0).is_marker
    }
}

/// Chunks of the parser, unchanged.
struct AsIs;

impl ChunkGenerator for AsIs {
    type Chunk = OutputChunk;

    async fn generate(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        vec![chunk]
    }
}
