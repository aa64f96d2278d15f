//! Proof that a request gives the same tokens and logits however it is served.
//!
//! A seeded set of requests runs one by one, then all of them again in another way (chunks, batches, small pools, ...);
//! both sides are compared token by token and logit by logit. Assumes engines over the same model; knows no model itself.

use std::sync::mpsc;

use crate::engine::Engine;
use crate::request::{Event, FinishReason, Request};
use crate::step::{Backend, ReturnLogits, Sampling, Token};

/// What a request gave.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// Generated tokens.
    pub tokens: Vec<Token>,
    /// Logits of the generated tokens, `[tokens, vocab]`.
    pub logits: Vec<f32>,
    /// How it ended; anything but a stop token or a length is a difference.
    pub failure: Option<String>,
}

/// How one way of serving compares with plain serving.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Comparison {
    /// Requests compared.
    pub requests: usize,
    /// Tokens compared.
    pub tokens: usize,
    /// Tokens that differ, missing ones included, and requests that failed.
    pub differences: usize,
    /// Logits whose bits differ.
    pub logit_differences: usize,
    /// Largest absolute difference of a logit.
    pub max_logit_difference: f32,
}

impl Comparison {
    /// Whether nothing differs at all.
    pub fn is_equal(&self) -> bool {
        self.differences == 0 && self.logit_differences == 0
    }
}

/// Reproducible numbers for workloads (SplitMix64).
#[derive(Debug, Clone)]
pub struct Numbers(u64);

impl Numbers {
    /// From a seed.
    pub fn new(seed: u64) -> Numbers {
        Numbers(seed)
    }

    /// The next one below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// Lengths where blocks, windows and groups begin and end.
const EDGES: [usize; 16] = [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513];

/// `count` requests from `seed`: prompts of edge and random lengths up to `longest`, half greedy, half sampled, some with penalties. Tokens
/// are below `vocab` and not below `first`, so that control tokens can be left out.
pub fn workload(seed: u64, count: usize, longest: usize, outputs: u32, first: Token, vocab: u32) -> Vec<Request> {
    let mut r = Numbers::new(seed);
    (0..count)
        .map(|i| {
            let length = match EDGES.get(i / 2) {
                Some(&edge) if i % 2 == 0 => edge.min(longest),
                _ => 1 + r.below(longest as u64) as usize,
            };
            let temperature = if i % 2 == 0 { 0.0 } else { 0.9 };
            Request {
                prompt: (0..length).map(|_| first + r.below(u64::from(vocab - first)) as Token).collect(),
                max_tokens: 1 + r.below(u64::from(outputs)) as u32,
                min_tokens: 0,
                stop_tokens: Vec::new(),
                sampling: Sampling {
                    temperature,
                    top_p: 0.95,
                    seed: r.below(u64::MAX),
                    presence_penalty: if i % 5 == 3 { 0.5 } else { 0.0 },
                    repetition_penalty: if i % 5 == 4 { 1.2 } else { 1.0 },
                    ..Sampling::default()
                },
                priority: r.below(3) as i32 - 1,
                salt: 0,
                attention: None,
                constraint: None,
                logits: ReturnLogits::Sampled,
            }
        })
        .collect()
}

/// The same requests behind one text of `length` tokens, chosen as in [`workload`].
pub fn behind_one_text(requests: &[Request], seed: u64, length: usize, first: Token, vocab: u32) -> Vec<Request> {
    let mut r = Numbers::new(!seed);
    let text: Vec<Token> = (0..length).map(|_| first + r.below(u64::from(vocab - first)) as Token).collect();
    requests.iter().map(|q| Request { prompt: [&text[..], &q.prompt].concat(), ..q.clone() }).collect()
}

/// Runs `requests`, `arrivals` more of them before every step, to their end. Called once per set of requests that may
/// overlap; an engine can serve several sets.
pub fn serve<B: Backend>(engine: &mut Engine<B>, requests: &[Request], arrivals: usize) -> Vec<Answer> {
    serve_slowly(engine, requests, arrivals, 1)
}

/// [`serve`] with arrivals before every `every`th step, or when nothing else is left to do: later requests find earlier
/// ones at work and may push them aside.
pub fn serve_slowly<B: Backend>(
    engine: &mut Engine<B>,
    requests: &[Request],
    arrivals: usize,
    every: usize,
) -> Vec<Answer> {
    let (sender, events) = mpsc::channel();
    let mut answers = vec![Answer::default(); requests.len()];
    let mut coming = requests.iter().enumerate();
    let mut busy = false;
    for step in 0.. {
        let arrivals = if busy && step % every > 0 { 0 } else { arrivals };
        for (i, request) in coming.by_ref().take(arrivals) {
            let sender = sender.clone();
            if let Err(error) = engine.submit(request.clone(), Box::new(move |e| drop(sender.send((i, e))))) {
                answers[i].failure = Some(error.to_string());
            }
        }
        busy = engine.step();
        for (i, event) in events.try_iter() {
            take(&mut answers[i], event);
        }
        if !busy && coming.len() == 0 {
            break;
        }
    }
    answers
}

fn take(answer: &mut Answer, event: Event) {
    match event {
        Event::Tokens { tokens, .. } => answer.tokens.extend(tokens),
        Event::Logits { logits, .. } => answer.logits.extend(logits),
        Event::Finished { reason, .. } => match reason {
            FinishReason::Stop(_) | FinishReason::Complete | FinishReason::Length => {}
            other => answer.failure = Some(format!("{other:?}")),
        },
        Event::Scheduled { .. } | Event::Attention(_) => {}
    }
}

/// Compares answers to the same requests.
pub fn compare(plain: &[Answer], other: &[Answer]) -> Comparison {
    let mut c = Comparison { requests: plain.len(), ..Comparison::default() };
    for (a, b) in plain.iter().zip(other) {
        let longer = a.tokens.len().max(b.tokens.len());
        let equal = a.tokens.iter().zip(&b.tokens).filter(|t| t.0 == t.1).count();
        c.tokens += longer;
        c.differences += longer - equal + usize::from(a.failure != b.failure || a.failure.is_some());
        c.logit_differences += a.logits.len().abs_diff(b.logits.len());
        for (x, y) in a.logits.iter().zip(&b.logits) {
            if x.to_bits() != y.to_bits() {
                c.logit_differences += 1;
                c.max_logit_difference = c.max_logit_difference.max((x - y).abs());
            }
        }
    }
    c.differences += plain.len().abs_diff(other.len());
    c
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::EngineOptions;
    use crate::sim::{SimBackend, SimOptions};
    use crate::step::Limits;
    use crate::testing::tiny_layout;

    fn engine(seed: u64, step_tokens: u32, seats: u32) -> Engine<SimBackend> {
        let options = SimOptions { seed, ..SimOptions::default() };
        let limits =
            Limits { seats, step_tokens, context: 4096, units: [900; 3], drafts: 0, in_flight: 1, vocab: 1000 };
        Engine::new(SimBackend::new(tiny_layout(), limits, options), EngineOptions::default())
    }

    #[test]
    fn equal_models_are_equal_and_another_model_is_not() {
        let requests = workload(3, 24, 400, 20, 16, 1000);
        let plain: Vec<Answer> =
            requests.iter().map(|r| serve(&mut engine(7, 512, 1), std::slice::from_ref(r), 1).remove(0)).collect();
        assert!(plain.iter().all(|a| !a.tokens.is_empty() && a.failure.is_none()));
        let together = compare(&plain, &serve(&mut engine(7, 37, 8), &requests, 3));
        assert!(together.is_equal() && together.requests == 24 && together.tokens > 100, "{together:?}");
        let other = compare(&plain, &serve(&mut engine(8, 37, 8), &requests, 3));
        assert!(other.differences > 100, "a wrong backend must show: {other:?}");
    }

    #[test]
    fn prompts_behind_one_text_have_windows_to_rebuild() {
        let requests = behind_one_text(&workload(4, 6, 300, 8, 16, 1000), 4, 1024, 16, 1000);
        let plain = serve(&mut engine(7, 512, 4), &requests, 6);
        let mut other = engine(7, 512, 4);
        serve(&mut other, &requests, 2);
        let before = other.status().prefix.replays;
        other.drop_checkpoints();
        assert_eq!(other.status().prefix.checkpoints, 0);
        assert!(compare(&plain, &serve(&mut other, &requests, 2)).is_equal());
        assert!(other.status().prefix.replays > before);
    }

    #[test]
    fn a_missing_token_a_changed_logit_and_a_failure_are_differences() {
        let a = Answer { tokens: vec![1, 2], logits: vec![0.5, 1.0], failure: None };
        let less = Answer { tokens: vec![1], ..a.clone() };
        let nudged = Answer { logits: vec![0.5, f32::from_bits(1.0f32.to_bits() + 1)], ..a.clone() };
        let failed = Answer { failure: Some("x".into()), ..a.clone() };
        let of = |b: &Answer| compare(std::slice::from_ref(&a), std::slice::from_ref(b));
        assert!(of(&a).is_equal());
        assert_eq!(of(&less).differences, 1);
        assert!(of(&nudged).logit_differences == 1 && of(&nudged).max_logit_difference > 0.0);
        assert_eq!(of(&failed).differences, 1);
    }
}
