//! An engine that plays a script instead of running a model: for tests of clients, agents and proxies.
//!
//! A script is a file of JSON lines. The first line whose `match` occurs in the last user message or tool result of a
//! prompt answers it: with the text in `reply` (what the model would write after the prompt, markers spelled out), or with a
//! failure in `error`. It behaves like an engine towards the server: limits, cancellation, one event per token, stop
//! tokens, and cached tokens as a cache without blocks would have them. Refuses lines with unknown fields.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longwave_engine::Status;
use longwave_engine::report::PrefixReport;
use longwave_engine::request::{Event, EventSink, FinishReason, Refusal, Request, RequestId};
use longwave_engine::step::{Limits, TokenLogprobs};
use longwave_text::Tokenizer;
use serde::Deserialize;
use tokio::sync::watch;

use crate::generation::EngineApi;

/// Prompts and answers that are remembered to tell how much of a prompt was seen before.
const REMEMBERED: usize = 64;
/// Most answers at once; more wait in no queue, because nothing is computed.
const SEATS: u32 = 1024;

/// One line of a script.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptLine {
    /// Answers prompts whose last user message or tool result holds this text; empty or left out, every prompt.
    #[serde(default, rename = "match")]
    matches: String,
    /// The model's output.
    #[serde(default)]
    reply: String,
    /// Before the first token.
    #[serde(default)]
    delay_ms: u64,
    /// Before each further token.
    #[serde(default)]
    token_delay_ms: u64,
    /// How the output ends.
    #[serde(default)]
    finish: ScriptFinish,
    /// Fail with this message instead of answering.
    error: Option<String>,
}

/// How a scripted output ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ScriptFinish {
    /// The model ends its turn.
    #[default]
    Stop,
    /// As if the token limit had been reached.
    Length,
}

/// Reads a script. An error names the line.
pub fn read_script(text: &str) -> Result<Vec<ScriptLine>, String> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let lines: Vec<ScriptLine> = lines
        .map(|(index, line)| serde_json::from_str(line).map_err(|error| format!("line {}: {error}", index + 1)))
        .collect::<Result<_, String>>()?;
    if lines.is_empty() { Err("it has no line; at least one is needed".to_owned()) } else { Ok(lines) }
}

struct Player {
    lines: Vec<ScriptLine>,
    tokenizer: Arc<Tokenizer>,
    context: u32,
    next: AtomicU64,
    running: Mutex<Vec<(RequestId, watch::Sender<bool>)>>,
    seen: Mutex<VecDeque<Vec<u32>>>,
}

/// An engine that answers from `lines`, with a context of `context` tokens. Its requests run on the async runtime from
/// whose tasks they are submitted.
pub fn scripted(lines: Vec<ScriptLine>, tokenizer: Arc<Tokenizer>, context: u32) -> EngineApi {
    let vocab = tokenizer.vocab_size();
    let limits = Limits { seats: SEATS, step_tokens: 4096, context, units: [0; 3], drafts: 0, in_flight: 1, vocab };
    let player = Arc::new(Player {
        lines,
        tokenizer,
        context,
        next: AtomicU64::new(1),
        running: Mutex::default(),
        seen: Mutex::default(),
    });
    let (submit, cancel, status, idle) =
        (player.clone(), player.clone(), player, Status { alive: true, ..Status::new(limits.clone()) });
    EngineApi {
        submit: Arc::new(move |request, sink| Ok(submit.clone().start(request, sink))),
        cancel: Arc::new(move |id| cancel.cancel(id)),
        limits,
        attention_layers: Vec::new(),
        most_tokens: Arc::new(move |prompt| context.saturating_sub(prompt)),
        look: Arc::new(drop),
        status: Arc::new(move || Status { running: lock(&status.running).len() as u32, ..idle.clone() }),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Player {
    fn start(self: Arc<Self>, request: Request, sink: EventSink) -> RequestId {
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        let (stop, stopped) = watch::channel(false);
        lock(&self.running).push((id, stop));
        tokio::spawn(async move {
            self.play(&request, stopped, sink).await;
            lock(&self.running).retain(|(running, _)| *running != id);
        });
        id
    }

    fn cancel(&self, id: RequestId) {
        if let Some((_, stop)) = lock(&self.running).iter().find(|(running, _)| *running == id) {
            stop.send_replace(true);
        }
    }

    async fn play(&self, request: &Request, mut stopped: watch::Receiver<bool>, mut sink: EventSink) {
        let prompt = request.prompt.len();
        let cached_tokens = self.cached(&request.prompt);
        let mut output_tokens = 0;
        let mut end = |reason| {
            sink(Event::Finished { reason, prompt_tokens: prompt as u32, cached_tokens, output_tokens: 0 });
        };
        if prompt as u64 + u64::from(request.max_tokens) > u64::from(self.context) {
            let refusal = Refusal::TooLong { prompt, max_tokens: request.max_tokens, context: self.context };
            return end(FinishReason::Refused(refusal));
        }
        let question = self.question(&request.prompt);
        let Some(line) = self.lines.iter().find(|line| question.contains(&line.matches)) else {
            let reason = format!("no line of the script matches the last message {question:?}");
            return end(FinishReason::Failed(reason));
        };
        if let Some(error) = &line.error {
            return end(FinishReason::Failed(error.clone()));
        }
        let mut output = match self.tokenizer.encode_output(&line.reply) {
            Ok(output) => output,
            Err(error) => return end(FinishReason::Failed(error.to_string())),
        };
        let mut reason = FinishReason::Length;
        if line.finish == ScriptFinish::Stop {
            output.push(self.tokenizer.markers().eos);
        }
        sink(Event::Scheduled { cached_tokens, prefix: PrefixReport { cached_tokens, ..PrefixReport::default() } });
        for (index, &token) in output.iter().enumerate() {
            if output_tokens == request.max_tokens {
                break;
            }
            let pause = Duration::from_millis(if index == 0 { line.delay_ms } else { line.token_delay_ms });
            tokio::select! {
                _ = stopped.wait_for(|stopped| *stopped) => {
                    reason = FinishReason::Cancelled;
                    break;
                }
                () = tokio::time::sleep(pause), if !pause.is_zero() => {}
                () = std::future::ready(()), if pause.is_zero() => {}
            }
            output_tokens += 1;
            let logprobs =
                request.sampling.top_logprobs.map(|_| TokenLogprobs { chosen: 0.0, top: vec![(token, 0.0)] });
            sink(Event::Tokens { tokens: vec![token], logprobs: logprobs.into_iter().collect() });
            if request.stop_tokens.contains(&token) {
                reason = FinishReason::Stop(token);
                break;
            }
        }
        let mut seen = lock(&self.seen);
        if seen.len() == REMEMBERED {
            seen.pop_front();
        }
        seen.push_back([request.prompt.as_slice(), &output[..output_tokens as usize]].concat());
        drop(seen);
        sink(Event::Finished { reason, prompt_tokens: prompt as u32, cached_tokens, output_tokens });
    }

    /// Tokens that an earlier prompt and its answer begin with as well; never the whole prompt.
    fn cached(&self, prompt: &[u32]) -> u32 {
        let common = |seen: &Vec<u32>| seen.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let most = lock(&self.seen).iter().map(common).max().unwrap_or(0);
        most.min(prompt.len().saturating_sub(1)) as u32
    }

    /// The text of the last user turn, which holds the results of tools too.
    fn question(&self, prompt: &[u32]) -> String {
        let markers = self.tokenizer.markers();
        let start = prompt.iter().rposition(|&token| token == markers.user).map_or(0, |at| at + 1);
        let turn = prompt[start..].iter().take_while(|&&token| token != markers.assistant);
        let bytes: Vec<u8> = turn.flat_map(|&token| self.tokenizer.token_bytes(token)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_names_the_line_that_is_wrong() {
        let lines = read_script("{\"match\": \"a\", \"reply\": \"b\"}\n\n{\"reply\": \"c\", \"finish\": \"length\"}\n")
            .unwrap();
        assert_eq!((lines.len(), lines[1].finish, lines[1].matches.as_str()), (2, ScriptFinish::Length, ""));
        assert!(read_script("{}\n{\"repl\": 1}").unwrap_err().starts_with("line 2: unknown field `repl`"));
        assert!(read_script("\n").unwrap_err().contains("no line"));
    }
}
