//! What the simulated backend answers: tokens, log-probabilities, logits and drafts, all from hashes of what a query reads.
//!
//! Assumes a scratch that ends at the position which is asked for. Refuses a mask that allows nothing, and says which row
//! of an earlier step is missing.

use super::layers::{Scratch, ratio};
use super::{DraftQuality, SimBackend, mix};
use crate::constraint::allows;
use crate::step::{ReturnLogits, Sampling, SeqResult, SeqStep, Token, TokenLogprobs};

impl SimBackend {
    /// Hash of what a query at the last position of the scratch reads: its streams and all closed entries.
    fn query(&self, scratch: &Scratch) -> Result<u64, String> {
        let mut hash = scratch.last()?;
        for group in self.layout.long_lived() {
            for n in 0..scratch.end() / ratio(&self.layout, group) {
                let own = scratch.entry(&self.layout, group, n);
                hash = mix(hash, own.map_or_else(|| self.entry(scratch.seat, group, n), Ok)?);
            }
        }
        Ok(hash)
    }

    /// The token after the last position of the scratch.
    pub(super) fn pick(&self, scratch: &Scratch, sampling: &Sampling, history: Option<u64>) -> Result<Token, String> {
        let hash = self.query(scratch)?;
        let hash = if sampling.has_penalties() { mix(hash, history.unwrap_or_default()) } else { hash };
        // The position is in the hash already; greedy choice ignores the seed of the request.
        let hash = if sampling.temperature > 0.0 { mix(hash, sampling.seed) } else { hash };
        Ok((hash % u64::from(self.limits.vocab)) as Token)
    }

    /// The first allowed token from `token` on, around the vocabulary.
    pub(super) fn masked(&self, token: Token, mask: Option<&[u32]>) -> Result<Token, String> {
        let vocab = self.limits.vocab;
        let allowed = (0..vocab).map(|i| (token + i) % vocab).find(|&t| allows(mask, t));
        allowed.ok_or_else(|| "a mask allows nothing".into())
    }

    pub(super) fn add_logits(
        &self,
        seq: &SeqStep,
        scratch: &Scratch,
        sampled: bool,
        result: &mut SeqResult,
    ) -> Result<(), String> {
        let wanted = match seq.logits {
            ReturnLogits::No => false,
            ReturnLogits::Sampled => sampled && seq.sample.is_some(),
            ReturnLogits::All => true,
        };
        if wanted {
            let hash = self.query(scratch)?;
            let best = hash % u64::from(self.limits.vocab);
            let logit = |v: u64| if v == best { 2.0 } else { (mix(hash, v) >> 40) as f32 / (1u64 << 24) as f32 };
            result.logits.extend((0..u64::from(self.limits.vocab)).map(logit));
        }
        Ok(())
    }

    /// Drafts for the positions after `last`, which was just sampled: continues the scratch without storing.
    pub(super) fn draft(
        &self,
        mut scratch: Scratch,
        sampling: &Sampling,
        last: Token,
        want: u32,
    ) -> Result<Vec<Token>, String> {
        let mut drafts = Vec::new();
        if self.options.draft_quality == DraftQuality::Off {
            return Ok(drafts);
        }
        let mut token = last;
        for _ in 0..want {
            self.extend(&mut scratch, token)?;
            // Drafts need not know the penalties.
            token = self.pick(&scratch, &Sampling { repetition_penalty: 1.0, ..sampling.clone() }, None)?;
            let wrong = match self.options.draft_quality {
                DraftQuality::Wrong => true,
                DraftQuality::Random => scratch.last()?.is_multiple_of(3),
                _ => false,
            };
            drafts.push(if wrong { (token + 1) % self.limits.vocab } else { token });
        }
        Ok(drafts)
    }
}

/// Made-up log-probabilities: the chosen token first, then those after it.
pub(super) fn logprobs(sampling: &Sampling, token: Token, vocab: u32) -> Option<TokenLogprobs> {
    let top = |n: u32| (0..n.min(vocab)).map(|i| ((token + i) % vocab, -0.25 - i as f32)).collect();
    sampling.top_logprobs.map(|n| TokenLogprobs { chosen: -0.25, top: top(n) })
}

/// What a token adds to the hash of a history: its place counts only as prompt or answer.
pub(super) fn count(seq: &SeqStep, position: u32, token: Token) -> u64 {
    let answer = seq.sample.as_ref().is_some_and(|s| position >= s.answer_from);
    // The place makes equal tokens differ, so that none cancels another out; a wrong place is noticed as well.
    mix(mix(u64::from(token), u64::from(answer)), u64::from(position))
}
