//! Requests on an engine in this process, with the times of their tokens.
//!
//! Prompts are random tokens that end nowhere, so answers have their full length. Assumes an idle engine. A request that is
//! refused or fails is an error: nothing would be measured.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use longwave_engine::EngineHandle;
use longwave_engine::proof::Numbers;
use longwave_engine::request::{Event, FinishReason, Request, SubmitError};

use crate::load::Loaded;

/// Longest time without any event.
const SILENCE: Duration = Duration::from_secs(3600);
/// Ids below are control tokens in V4's vocabulary.
const FIRST_TOKEN: u64 = 16;

/// When the tokens of one request came.
#[derive(Debug, Clone, Default)]
pub struct Timing {
    /// Seconds since the first request was handed over, and how many tokens came then.
    pub tokens: Vec<(f64, u32)>,
}

impl Timing {
    /// When the first token came.
    pub fn first_s(&self) -> f64 {
        self.tokens.first().map_or(0.0, |(at_s, _)| *at_s)
    }

    /// When the last one came.
    pub fn last_s(&self) -> f64 {
        self.tokens.last().map_or(0.0, |(at_s, _)| *at_s)
    }
}

/// A random prompt; another `index` gives another one.
pub fn prompt(model: &Loaded, seed: u64, index: u64, tokens: u32) -> Vec<u32> {
    let vocab = u64::from(model.tokenizer.vocab_size().min(model.engine.limits().vocab));
    let mut numbers = Numbers::new(seed.wrapping_mul(0x9e37_79b9).wrapping_add(index));
    let first = FIRST_TOKEN.min(vocab - 1);
    (0..tokens).map(|_| (first + numbers.below(vocab - first)) as u32).collect()
}

/// Serves `requests` together and waits for all; `done` is told how many have ended.
pub fn serve(engine: &EngineHandle, requests: Vec<Request>, mut done: impl FnMut(u64)) -> Result<Vec<Timing>> {
    let (sender, events) = mpsc::channel();
    let mut timings = vec![Timing::default(); requests.len()];
    let (began, mut ended) = (Instant::now(), 0);
    for (index, request) in requests.into_iter().enumerate() {
        loop {
            match engine.submit(request.clone(), sink(&sender, index)) {
                Ok(_) => break,
                // The queue is long; what ends makes room.
                Err(SubmitError::QueueFull { .. }) => {
                    ended += u64::from(take(&events, began, &mut timings)?);
                    done(ended);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    while ended < timings.len() as u64 {
        ended += u64::from(take(&events, began, &mut timings)?);
        done(ended);
    }
    Ok(timings)
}

type Message = (usize, Instant, Event);

fn sink(sender: &Sender<Message>, index: usize) -> Box<dyn FnMut(Event) + Send> {
    let sender = sender.clone();
    Box::new(move |event| drop(sender.send((index, Instant::now(), event))))
}

/// One event; whether it was a request's last.
fn take(events: &Receiver<Message>, began: Instant, timings: &mut [Timing]) -> Result<bool> {
    let (index, at, event) = events.recv_timeout(SILENCE).context("the engine gave no token for an hour")?;
    match event {
        Event::Tokens { tokens, .. } => {
            timings[index].tokens.push(((at - began).as_secs_f64(), tokens.len() as u32));
            Ok(false)
        }
        Event::Finished { reason: FinishReason::Length, .. } => Ok(true),
        Event::Finished { reason: FinishReason::Refused(refusal), .. } => {
            bail!("{refusal}; ask for less, or raise --max-model-len or --kv-cache-memory-bytes")
        }
        Event::Finished { reason, .. } => bail!("a request ended early: {reason:?}"),
        _ => Ok(false),
    }
}
