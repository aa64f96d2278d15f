//! Choosing tokens of a step: how each row's is chosen as words for the kernel, what it chose, which drafts that accepts.
//!
//! Assumes that pieces of rows are listed, launched and fetched one after the other. A row whose logits are not finite, or
//! for which every token is forbidden, fails its sequence alone.

use std::borrow::Cow;

use longwave_engine::constraint::allows;
use longwave_engine::counts::Counts;
use longwave_engine::step::{ReturnLogits, Sampling, SeqResult, SeqStep, Step, Token, TokenLogprobs};

use crate::batch::Batch;
use crate::driver::{Arena, Context, DeviceSlice, DriverError, Pinned, Stream};
use crate::forward::Model;
use crate::lists::Lists;
use crate::ops::UNMAPPED;
use crate::ops::sample::{MOST_TOP, ROW_WORDS, Sample, SampleBatch, SampleRow};

/// Words of a row's result: token, first bad logit, log-probabilities.
const RESULT_WORDS: usize = 3 + 2 * MOST_TOP as usize;

/// The kernel, its lists and results, and what it must know of earlier steps.
pub struct Choices {
    kernel: Sample,
    lists: Lists,
    changed: DeviceSlice<f32>,
    results: DeviceSlice<u32>,
    host_results: Pinned,
    /// Where the rows and lists of the piece are.
    rows: u64,
    words: u64,
    /// Words of lists after which a piece of rows ends; a row more still fits.
    most_words: usize,
    /// Rows of a piece at most.
    heads: usize,
    /// Tokens so far at each seat that chooses with penalties.
    counts: Vec<Counts>,
}

/// What was chosen after one row.
pub struct Chosen {
    token: Token,
    bad: Option<Token>,
    logprobs: TokenLogprobs,
    logits: Vec<f32>,
}

impl Choices {
    /// For pieces of `heads` rows.
    pub fn new(
        context: &Context,
        arena: &mut Arena,
        heads: usize,
        vocab: usize,
        seats: usize,
    ) -> Result<Choices, DriverError> {
        let most_words = heads * (vocab.div_ceil(32) + 4096);
        Ok(Choices {
            kernel: Sample::new(context)?,
            lists: Lists::new(context, arena, heads * ROW_WORDS + most_words + 8 * vocab + 64)?,
            changed: arena.slice(heads * vocab)?,
            results: arena.slice(heads * RESULT_WORDS)?,
            host_results: Pinned::new(context, 4 * heads * RESULT_WORDS)?,
            rows: 0,
            words: 0,
            most_words,
            heads,
            counts: vec![Counts::default(); seats],
        })
    }

    /// Brings the results of a piece to the host and waits.
    pub fn fetch(&mut self, stream: &Stream) -> Result<(), DriverError> {
        self.results.read_pinned(stream, &mut self.host_results)?;
        stream.synchronize()
    }

    /// Lists how the tokens of as many of these rows as fit are chosen; how many that are.
    pub fn list(
        &mut self,
        stream: &Stream,
        step: &Step,
        batch: &Batch,
        wanted: &[(usize, usize)],
    ) -> Result<usize, DriverError> {
        let (mut rows, mut words) = (Vec::new(), Vec::new());
        let mut n = 0;
        for &(s, i) in wanted.iter().take(self.heads) {
            if n > 0 && words.len() > self.most_words {
                break;
            }
            let seq = &step.seqs[s];
            let first_sampled = Batch::wanted(seq).saturating_sub(1 + seq.drafts as usize);
            let row = match (&seq.sample, i.checked_sub(first_sampled)) {
                (Some(_), Some(sampled)) => {
                    self.row(step, seq, batch.tokens_of(&batch.sequences[s]), sampled, &mut words)
                }
                _ => SampleRow::padded(),
            };
            rows.extend(row.words());
            n += 1;
        }
        self.lists.clear();
        self.rows = self.lists.push(rows.into_iter())?;
        self.words = self.lists.push(words.into_iter())?;
        self.lists.upload(stream)?;
        Ok(n)
    }

    /// Chooses tokens after the first `n` rows of logits.
    pub fn launch(&self, stream: &Stream, model: &Model, n: usize) -> Result<(), DriverError> {
        self.kernel.launch(stream, &SampleBatch { count: n as u32, ..self.batch(model) })
    }

    /// The logits of a piece and where its results go.
    fn batch(&self, model: &Model) -> SampleBatch {
        let at = |word: usize| self.results.address() + 4 * (word * self.heads) as u64;
        SampleBatch {
            logits: model.scratch.logits.address(),
            changed: self.changed.address(),
            rows: self.rows,
            lists: self.words,
            tokens: at(0),
            bad: at(1),
            chosen: at(2),
            top_tokens: at(3),
            top: at(3 + MOST_TOP as usize),
            count: 0,
            vocab: model.config.vocab_size as u32,
        }
    }

    /// What came of row `i` of the results, with its logits where they are asked for.
    pub fn chosen(&self, stream: &Stream, model: &Model, seq: &SeqStep, i: usize) -> Result<Chosen, DriverError> {
        let word = |i: usize| {
            let b = &self.host_results.bytes()[4 * i..4 * i + 4];
            u32::from_le_bytes([b[0], b[1], b[2], b[3]])
        };
        let (heads, most, vocab) = (self.heads, MOST_TOP as usize, model.config.vocab_size);
        let reported = seq.sample.as_ref().and_then(|how| how.top_logprobs);
        let top = (0..reported.unwrap_or(0).min(MOST_TOP) as usize).map(|j| {
            let at = i * most + j;
            (word(3 * heads + at), f32::from_bits(word((3 + most) * heads + at)))
        });
        let logits = match seq.logits {
            ReturnLogits::No => Vec::new(),
            _ => model.scratch.logits.part(i * vocab..(i + 1) * vocab).read(stream)?,
        };
        Ok(Chosen {
            token: word(i),
            bad: Some(word(heads + i)).filter(|&token| token != UNMAPPED),
            logprobs: TokenLogprobs { chosen: f32::from_bits(word(2 * heads + i)), top: top.collect() },
            logits,
        })
    }

    /// Counts the committed tokens of a sequence that chooses with penalties.
    pub fn count(&mut self, step: &Step, seq: &SeqStep, tokens: &[Token]) {
        let Some(how) = seq.sample.as_ref().filter(|how| how.has_penalties()) else { return };
        let seen = &mut self.counts[seq.seat.0 as usize];
        if let Some(history) = step.history_of(seq) {
            seen.clear();
            seen.add(history, 0, how.answer_from);
        }
        seen.add(&tokens[..tokens.len() - seq.drafts as usize], seq.start, how.answer_from);
    }

    /// Chooses drafts after `n` rows of logits as the rows and lists at these addresses say; they go to `tokens`.
    pub fn draft(
        &self,
        stream: &Stream,
        model: &Model,
        rows: u64,
        lists: u64,
        tokens: u64,
        n: u32,
    ) -> Result<(), DriverError> {
        self.kernel.launch(stream, &SampleBatch { rows, lists, tokens, count: n, ..self.batch(model) })
    }

    /// How the token after sampled row `i` of a sequence is chosen; its lists go to the end of `words`.
    fn row(&self, step: &Step, seq: &SeqStep, tokens: &[Token], i: usize, words: &mut Vec<u32>) -> SampleRow {
        let Some(how) = &seq.sample else { return SampleRow::padded() };
        let drafts = seq.drafts as usize;
        let position = seq.start + (tokens.len() - drafts + i) as u32;
        let row = self::row(how, position, words);
        let counts = match how.has_penalties() {
            false => (0, 0),
            true => {
                let mut seen = Cow::Borrowed(&self.counts[seq.seat.0 as usize]);
                if i > 0 {
                    let accepted = &tokens[tokens.len() - drafts..][..i];
                    seen.to_mut().add(accepted, position - i as u32, how.answer_from);
                }
                list(words, &mut seen.iter().flat_map(|(token, times)| [token, times]), 2)
            }
        };
        let mask = step.mask_of(seq, i as u32).map(|mask| list(words, &mut mask.iter().copied(), 1).0);
        SampleRow {
            logprobs: how.top_logprobs,
            presence_penalty: how.presence_penalty,
            frequency_penalty: how.frequency_penalty,
            repetition_penalty: how.repetition_penalty,
            counts,
            mask,
            ..row
        }
    }

    /// Accepts drafts as long as they are what was chosen, then adds one token.
    pub fn accept(&mut self, step: &Step, seq: &SeqStep, tokens: &[Token], chosen: Vec<Chosen>) -> SeqResult {
        let mut out = SeqResult::default();
        if seq.logits == ReturnLogits::All {
            out.logits = chosen.iter().flat_map(|row| &row.logits).copied().collect();
        }
        let Some(how) = &seq.sample else { return out };
        let drafts = seq.drafts as usize;
        let first = chosen.len() - 1 - drafts;
        for (i, row) in chosen[first..].iter().enumerate() {
            let position = seq.start + (tokens.len() - drafts + i) as u32;
            if let Some(bad) = row.bad {
                let failed = Some(format!("the logit of token {bad} at position {position} is not finite"));
                return SeqResult { failed, ..SeqResult::default() };
            }
            let mask = step.mask_of(seq, i as u32);
            if position < how.forbidden_before && how.forbidden.contains(&row.token) || !allows(mask, row.token) {
                let failed = Some(format!("every token is forbidden at position {position}"));
                return SeqResult { failed, ..SeqResult::default() };
            }
            out.tokens.push(row.token);
            if how.top_logprobs.is_some() {
                out.logprobs.push(row.logprobs.clone());
            }
            if seq.logits == ReturnLogits::Sampled {
                out.logits.extend_from_slice(&row.logits);
            }
            if i < drafts {
                let draft = tokens[tokens.len() - drafts + i];
                if row.token != draft {
                    break;
                }
                if how.has_penalties() {
                    self.counts[seq.seat.0 as usize].add(&[draft], position, how.answer_from);
                }
            }
        }
        out
    }
}

/// How the token at `position` is chosen when nothing is known of those before it: no penalties, no mask. Its lists go to
/// the end of `words`.
pub fn row(how: &Sampling, position: u32, words: &mut Vec<u32>) -> SampleRow {
    let bias = list(words, &mut how.bias.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]), 2);
    let forbidden = match position < how.forbidden_before {
        true => list(words, &mut how.forbidden.iter().copied(), 1),
        false => (0, 0),
    };
    SampleRow {
        seed: how.seed,
        position,
        temperature: how.temperature,
        top_p: how.top_p,
        min_p: how.min_p,
        top_k: how.top_k,
        bias,
        forbidden,
        ..SampleRow::default()
    }
}

/// Adds a list of items of `width` words to `words`; its place and how many items it has.
fn list(words: &mut Vec<u32>, items: &mut dyn Iterator<Item = u32>, width: u32) -> (u32, u32) {
    let from = words.len() as u32;
    words.extend(items);
    (from, (words.len() as u32 - from) / width)
}
