//! Choosing tokens from logits: the CPU backend's rules and noise, one block per row.
//! Assumes a vocabulary of at most 2^22 tokens and ids below it. A row's token depends on the row alone.

use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Log-probabilities reported at most.
pub const MOST_TOP: u32 = 20;
/// `u32`s of a row's parameters.
pub const ROW_WORDS: usize = 20;

/// The kernel.
pub struct Sample {
    kernel: Kernel,
}

/// How the token of one row is chosen. Lists are in one `u32` array on the GPU; places are indices into it.
#[derive(Debug, Clone, Copy)]
pub struct SampleRow {
    /// Whether the row is there; of a padded one nothing is read.
    pub active: bool,
    /// Seed of the request.
    pub seed: u64,
    /// Position of the token.
    pub position: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// How many of the best log-probabilities to report with the chosen token's own, at most [`MOST_TOP`].
    pub logprobs: Option<u32>,
    /// Subtracted from logits of tokens of the answer.
    pub presence_penalty: f32,
    /// Subtracted from them once per occurrence.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of counted tokens.
    pub repetition_penalty: f32,
    /// Place and number of pairs of token and bits of a float; tokens differ.
    pub bias: (u32, u32),
    /// Place and number of tokens that are not chosen here.
    pub forbidden: (u32, u32),
    /// Place and number of pairs of token and occurrences in the answer; tokens differ.
    pub counts: (u32, u32),
    /// Place of `vocab / 32` words, rounded up: only tokens whose bit is set are chosen.
    pub mask: Option<u32>,
}

impl Default for SampleRow {
    /// Greedy, nothing reported.
    fn default() -> Self {
        SampleRow {
            active: true,
            seed: 0,
            position: 0,
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            top_k: 0,
            logprobs: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            bias: (0, 0),
            forbidden: (0, 0),
            counts: (0, 0),
            mask: None,
        }
    }
}

impl SampleRow {
    /// A row that is not there.
    pub fn padded() -> SampleRow {
        SampleRow { active: false, ..SampleRow::default() }
    }

    /// As the kernel reads it.
    pub fn words(&self) -> [u32; ROW_WORDS] {
        [
            self.seed as u32,
            (self.seed >> 32) as u32,
            u32::from(self.active),
            self.position,
            self.temperature.to_bits(),
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            self.top_k,
            self.logprobs.map_or(u32::MAX, |n| n.min(MOST_TOP)),
            self.presence_penalty.to_bits(),
            self.frequency_penalty.to_bits(),
            self.repetition_penalty.to_bits(),
            self.bias.0,
            self.bias.1,
            self.forbidden.0,
            self.forbidden.1,
            self.counts.0,
            self.counts.1,
            self.mask.unwrap_or(u32::MAX),
            0,
        ]
    }
}

/// Rows of logits and where their tokens go; addresses.
#[derive(Debug, Clone, Copy)]
pub struct SampleBatch {
    /// float `[count, vocab]`; not changed.
    pub logits: u64,
    /// float `[count, vocab]`, scratch.
    pub changed: u64,
    /// `u32 [count, ROW_WORDS]`: [`SampleRow::words`].
    pub rows: u64,
    /// `u32`, the lists of all rows.
    pub lists: u64,
    /// Chosen tokens, `u32 [count]`; UNMAPPED for a padded row.
    pub tokens: u64,
    /// First token whose logit is not finite, `u32 [count]`; UNMAPPED where all are.
    pub bad: u64,
    /// Log-probability of the chosen token, float `[count]`; as the next two, written where a row asks for it.
    pub chosen: u64,
    /// The most likely tokens, best first, `u32 [count, MOST_TOP]`.
    pub top_tokens: u64,
    /// Their log-probabilities, float `[count, MOST_TOP]`.
    pub top: u64,
    /// Rows.
    pub count: u32,
    /// Vocabulary.
    pub vocab: u32,
}

impl Sample {
    /// Loads the kernel.
    pub fn new(context: &Context) -> Result<Sample, DriverError> {
        Ok(Sample { kernel: Module::load(context, "sample")?.kernel("sample", 0)? })
    }

    /// Bytes of scratch for `count` rows.
    pub fn scratch_bytes(count: u32, vocab: u32) -> u64 {
        4 * u64::from(count) * u64::from(vocab)
    }

    /// Launches it.
    pub fn launch(&self, stream: &Stream, b: &SampleBatch) -> Result<(), DriverError> {
        assert!(b.vocab <= 1 << 22, "a vocabulary of {}", b.vocab);
        if b.count == 0 {
            return Ok(());
        }
        let pointers = [b.logits, b.changed, b.rows, b.lists, b.tokens, b.bad, b.chosen, b.top_tokens, b.top];
        let [logits, changed, rows, lists, tokens, bad, chosen, top_tokens, top] = pointers.map(Argument::Pointer);
        let arguments = [logits, changed, rows, lists, tokens, bad, chosen, top_tokens, top, b.vocab.into()];
        stream.launch(&self.kernel, Grid::new(b.count, 512), &arguments)
    }
}
