//! A backend around another one that replaces its drafts by right, wrong or random ones, for proofs.
//!
//! Assumes that a request is known by the seed of its sampling and that nothing but drafts may change: results of the
//! inner backend pass through. The inner one needs no drafter. Refuses nothing itself.

use std::collections::{BTreeMap, VecDeque};

use longwave_model::CacheLayout;

use crate::attention::LayerKind;
use crate::proof::{Answer, Numbers};
use crate::request::Request;
use crate::step::{Backend, BackendError, BlockCopy, BlockId, Limits, SeqStep, Step, StepResult, Ticket, Token};

/// Which drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forced {
    /// The tokens that come: all must be accepted.
    Right,
    /// Each one more than the token that comes: none may be accepted.
    Wrong,
    /// Any tokens, by this seed.
    Random(u64),
}

/// What a sequence of a submitted step wants, by what names its request.
#[derive(Debug, Clone, Copy)]
struct Want {
    seed: u64,
    /// Position of the first sampled token.
    position: u32,
    drafts: u32,
}

/// The backend with replaced drafts.
pub struct ForcedDrafts<B: Backend> {
    inner: B,
    limits: Limits,
    forced: Forced,
    /// Prompt and answer of each request, by the seed of its sampling.
    texts: BTreeMap<u64, Vec<Token>>,
    /// Of steps that are submitted and not collected; at most `limits.in_flight`.
    wants: VecDeque<Vec<Option<Want>>>,
}

impl<B: Backend> ForcedDrafts<B> {
    /// `inner` with up to `depth` drafts per sequence and step; `answers` are those that `requests` must get.
    pub fn new(inner: B, forced: Forced, depth: u32, requests: &[Request], answers: &[Answer]) -> ForcedDrafts<B> {
        let limits = Limits { drafts: depth, ..inner.limits().clone() };
        let text = |(r, a): (&Request, &Answer)| (r.sampling.seed, [&r.prompt[..], &a.tokens].concat());
        let texts = requests.iter().zip(answers).map(text).collect();
        ForcedDrafts { inner, limits, forced, texts, wants: VecDeque::new() }
    }

    /// Drafts for the positions from `from` on; fewer where the text ends.
    fn drafts(&self, seed: u64, from: u32, count: u32) -> Vec<Token> {
        let vocab = self.limits.vocab;
        let coming = self.texts.get(&seed).and_then(|t| t.get(from as usize..)).unwrap_or(&[]);
        let coming = coming.iter().take(count as usize);
        match self.forced {
            Forced::Right => coming.copied().collect(),
            Forced::Wrong => coming.map(|t| (t + 1) % vocab).collect(),
            Forced::Random(with) => {
                let mut numbers = Numbers::new(with ^ seed ^ u64::from(from));
                (0..count).map(|_| numbers.below(u64::from(vocab)) as Token).collect()
            }
        }
    }
}

impl<B: Backend> Backend for ForcedDrafts<B> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn layout(&self) -> &CacheLayout {
        self.inner.layout()
    }

    fn fingerprint(&self) -> [u8; 32] {
        self.inner.fingerprint()
    }

    fn attention_layers(&self) -> &[LayerKind] {
        self.inner.attention_layers()
    }

    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        let want = |s: &SeqStep| {
            let position = s.start + s.tokens.len() as u32 - s.drafts;
            s.sample.as_ref().map(|how| Want { seed: how.seed, position, drafts: s.want_drafts })
        };
        let wants = step.seqs.iter().map(want).collect();
        // The inner backend drafts as far as it can, so that its drafter sees what becomes of the replaced drafts.
        let mut inner = step.clone();
        for seq in &mut inner.seqs {
            seq.want_drafts = seq.want_drafts.min(self.inner.limits().drafts);
        }
        let ticket = self.inner.submit(&inner)?;
        self.wants.push_back(wants);
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        let wants = self.wants.pop_front().unwrap_or_default();
        let mut result = self.inner.collect(ticket)?;
        for (seq, want) in result.seqs.iter_mut().zip(wants) {
            seq.drafts = match want {
                Some(w) => self.drafts(w.seed, w.position + seq.tokens.len() as u32, w.drafts),
                None => Vec::new(),
            };
        }
        Ok(result)
    }

    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError> {
        self.inner.copy(copies)
    }

    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError> {
        self.inner.read_unit(bucket, block, out)
    }

    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.inner.write_unit(bucket, block, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::options::EngineOptions;
    use crate::proof::{compare, serve, workload};
    use crate::sim::{DraftQuality, SimBackend, SimOptions};
    use crate::testing::tiny_layout;

    fn backend(drafts: u32, draft_quality: DraftQuality) -> SimBackend {
        let options = SimOptions { seed: 7, draft_quality, ..SimOptions::default() };
        let limits =
            Limits { seats: 4, step_tokens: 64, context: 4096, units: [900; 3], drafts, in_flight: 1, vocab: 1000 };
        SimBackend::new(tiny_layout(), limits, options)
    }

    /// Drafts verified and accepted in serving a set.
    fn counts(forced: Forced, inner: DraftQuality) -> (u64, u64) {
        let requests = workload(5, 20, 400, 24, 16, 1000);
        let plain = serve(&mut Engine::new(backend(0, DraftQuality::Off), EngineOptions::default()), &requests, 1);
        let forced = ForcedDrafts::new(backend(3, inner), forced, 3, &requests, &plain);
        let options = EngineOptions { drafts: 3, paranoid: true, ..EngineOptions::default() };
        let mut engine = Engine::new(forced, options);
        let comparison = compare(&plain, &serve(&mut engine, &requests, 2));
        assert!(comparison.is_equal() && comparison.tokens > 100, "{comparison:?}");
        (engine.status().drafts_proposed, engine.status().drafts_accepted)
    }

    #[test]
    fn right_drafts_are_all_accepted_wrong_ones_never_and_no_answer_changes() {
        for inner in [DraftQuality::Off, DraftQuality::Right] {
            let (proposed, accepted) = counts(Forced::Right, inner);
            assert!(proposed > 50 && accepted == proposed, "{accepted} of {proposed}");
            let (proposed, accepted) = counts(Forced::Wrong, inner);
            assert!(proposed > 100 && accepted == 0, "{accepted} of {proposed}");
            let (proposed, accepted) = counts(Forced::Random(1), inner);
            assert!(proposed > 100 && accepted < proposed / 10, "{accepted} of {proposed}");
        }
    }
}
