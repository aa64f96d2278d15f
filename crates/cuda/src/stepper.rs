//! One step from its data to its result: lists to the GPU, the forward pass, the head and the choice of tokens in pieces
//! of rows, tokens back to the host.
//!
//! Assumes a checked step whose table changes come along, and that nothing of an earlier step is under way.

use std::collections::{HashMap, HashSet};

use longwave_engine::constraint::allows;
use longwave_engine::counts::Counts;
use longwave_engine::step::{ReturnLogits, SeqResult, SeqStep, Step, StepResult, Token, TokenLogprobs};
use longwave_engine::tables::SeatTables;
use longwave_model::geometry::CacheKind;

use crate::batch::Batch;
use crate::driver::{Arena, Argument, Context, DeviceSlice, DriverError, Graph, Grid, Kernel, Module, Pinned, Stream};
use crate::forward::{self, Model};
use crate::lists::Lists;
use crate::ops::attend::Job;
use crate::ops::sample::{MOST_TOP, ROW_WORDS, Sample, SampleBatch, SampleRow};
use crate::ops::{BatchRow, UNMAPPED};
use crate::scratch::StepSizes;

/// Table changes that are written at once.
const CHANGES: usize = 1 << 16;
/// Words of a row's result: token, first bad logit, log-probabilities.
const RESULT_WORDS: usize = 3 + 2 * MOST_TOP as usize;
/// Tokens of a job in layers that attend to the same entries with neighbouring tokens.
const JOB_TOKENS: u32 = 4;

/// What steps need besides the model.
pub struct Stepper {
    lists: Lists,
    changes: Lists,
    choice: Lists,
    write_tables: Kernel,
    sample: Sample,
    changed_logits: DeviceSlice<f32>,
    results: DeviceSlice<u32>,
    host_results: Pinned,
    /// Where the rows and lists of the choices are.
    rows: u64,
    words: u64,
    /// Words of lists after which a piece of rows ends; a row more still fits.
    most_words: usize,
    /// Decode steps by the number of sequences, and the numbers that were seen once.
    graphs: HashMap<usize, Graph>,
    seen: HashSet<usize>,
    /// Token sampled last at each seat.
    last: Vec<Token>,
    /// Tokens so far at each seat that chooses with penalties.
    counts: Vec<Counts>,
    /// Tables as the engine has them.
    tables: SeatTables,
    sizes: StepSizes,
}

/// How one row's token is chosen, and in which sequence of the step.
struct Chosen {
    token: Token,
    bad: Option<Token>,
    logprobs: TokenLogprobs,
    logits: Vec<f32>,
}

impl Stepper {
    /// Takes the memory for steps of `sizes` of `model`.
    pub fn new(
        context: &Context,
        arena: &mut Arena,
        layers: usize,
        vocab: usize,
        tables: SeatTables,
        sizes: StepSizes,
    ) -> Result<Stepper, DriverError> {
        let (t, n) = (sizes.tokens, sizes.heads);
        // Two lists of rows, ids, jobs for each layer and long ones, sequences, rows of the head.
        let words = t * (4 + 4 + 1 + 8 * layers + 8 + 1) + sizes.seats * (8 + 2) + 64;
        let most_words = n * (vocab.div_ceil(32) + 4096);
        Ok(Stepper {
            rows: 0,
            words: 0,
            most_words,
            graphs: HashMap::new(),
            seen: HashSet::new(),
            lists: Lists::new(context, arena, words)?,
            changes: Lists::new(context, arena, 2 * CHANGES)?,
            choice: Lists::new(context, arena, n * ROW_WORDS + most_words + 8 * vocab + 64)?,
            write_tables: Module::load(context, "tables")?.kernel("write_tables", 0)?,
            sample: Sample::new(context)?,
            changed_logits: arena.slice(n * vocab)?,
            results: arena.slice(n * RESULT_WORDS)?,
            host_results: Pinned::new(context, 4 * n * RESULT_WORDS)?,
            last: vec![0; sizes.seats],
            counts: vec![Counts::default(); sizes.seats],
            tables,
            sizes,
        })
    }

    /// Computes a step.
    pub fn step(
        &mut self,
        stream: &Stream,
        model: &Model,
        step: &Step,
        changes: &[[u32; 2]],
    ) -> Result<StepResult, DriverError> {
        for seq in &step.seqs {
            // The checked twin of these tables took the same changes.
            let _ = self.tables.apply(step, seq);
        }
        let layout = model.pools.layout();
        let (window, _) = layout.find(CacheKind::Window, 0).expect("every layer has a window");
        let windows: Vec<usize> =
            (0..layout.groups.len()).filter(|&g| layout.groups[g].kind == CacheKind::Window).collect();
        let block_tokens = layout.groups[window].block_tokens;
        let mapped = |seq: &SeqStep, position: u32| {
            windows.iter().all(|&g| self.tables.table(seq.seat, g).get(position / block_tokens).is_some())
        };
        let batch = Batch::new(step, &self.last, mapped);
        let mut changes = changes.to_vec();
        if batch.local {
            let parts = batch.sequences.iter().map(|s| (s.seat, s.start, s.start + s.rows));
            model.pools.give_local(parts, &mut changes);
        }
        self.write_tables(stream, model, &changes)?;
        let lists = self.list(step, &batch, model)?;
        let heads = self.lists.push(batch.heads.iter().copied())?;
        self.lists.upload(stream)?;
        let mut chosen = self.compute(stream, model, step, &batch, &lists, heads)?.into_iter();
        let mut result = StepResult { number: step.number, seqs: Vec::with_capacity(step.seqs.len()) };
        for (seq, rows) in step.seqs.iter().zip(&batch.sequences) {
            let own: Vec<Chosen> = chosen.by_ref().take(Batch::wanted(seq)).collect();
            let out = self.accept(step, seq, batch.tokens_of(rows), own);
            if let Some(&token) = out.tokens.last() {
                self.last[seq.seat.0 as usize] = token;
            }
            result.seqs.push(out);
        }
        Ok(result)
    }

    /// The forward pass, logits of all rows that are wanted (their places at `heads`) and the tokens that are chosen after
    /// them, in pieces of rows.
    fn compute(
        &mut self,
        stream: &Stream,
        model: &Model,
        step: &Step,
        batch: &Batch,
        lists: &forward::Lists,
        heads: u64,
    ) -> Result<Vec<Chosen>, DriverError> {
        for (seq, rows) in step.seqs.iter().zip(&batch.sequences) {
            self.count(step, seq, batch.tokens_of(rows));
        }
        // Sequence and place among its wanted rows.
        let wanted: Vec<(usize, usize)> =
            (0..).zip(&step.seqs).flat_map(|(s, seq)| (0..Batch::wanted(seq)).map(move |i| (s, i))).collect();
        let mut out = Vec::with_capacity(wanted.len());
        let mut first = true;
        while out.len() < wanted.len() {
            let from = out.len();
            let n = self.list_choices(step, batch, &wanted[from..])?;
            self.choice.upload(stream)?;
            let graphed =
                first && model.timers.is_none() && batch.is_decode() && n == wanted.len() && n == batch.rows.len();
            match graphed {
                true => self.decode(stream, model, lists, heads, n)?,
                false => {
                    if first {
                        model.trunk(stream, lists)?;
                    }
                    model.logits(stream, heads + 4 * from as u64, n as u32)?;
                    self.sample(stream, model, n)?;
                    model.mark(stream, "sampling")?;
                }
            }
            first = false;
            self.results.read_pinned(stream, &mut self.host_results)?;
            stream.synchronize()?;
            for (i, &(s, _)) in wanted[from..from + n].iter().enumerate() {
                out.push(self.chosen(stream, model, &step.seqs[s], i)?);
            }
        }
        if first {
            model.trunk(stream, lists)?;
            stream.synchronize()?;
        }
        Ok(out)
    }

    /// A step in which every sequence has one row that is sampled: launched one by one the first time that there are so
    /// many, then as a graph. Addresses depend on the number alone.
    fn decode(
        &mut self,
        stream: &Stream,
        model: &Model,
        lists: &forward::Lists,
        heads: u64,
        n: usize,
    ) -> Result<(), DriverError> {
        let all = |stream: &Stream| {
            model.trunk(stream, lists)?;
            model.logits(stream, heads, n as u32)?;
            self.sample(stream, model, n)
        };
        if let Some(graph) = self.graphs.get(&n) {
            return graph.launch(stream);
        }
        if !self.seen.contains(&n) {
            // Code that is not on the GPU yet cannot be brought there inside a capture.
            all(stream)?;
            self.seen.insert(n);
            return Ok(());
        }
        let graph = Graph::capture(stream, all)?;
        graph.launch(stream)?;
        self.graphs.insert(n, graph);
        Ok(())
    }

    /// Changes the block tables.
    fn write_tables(&mut self, stream: &Stream, model: &Model, changes: &[[u32; 2]]) -> Result<(), DriverError> {
        for part in changes.chunks(CHANGES) {
            self.changes.clear();
            let words: Vec<u32> = part.as_flattened().to_vec();
            let address = self.changes.push(words.into_iter())?;
            self.changes.upload(stream)?;
            let count = part.len() as u32;
            let arguments = [Argument::from(model.pools.tables()), Argument::Pointer(address), count.into()];
            stream.launch(&self.write_tables, Grid::new(count.div_ceil(256), 256), &arguments)?;
            if part.len() == CHANGES {
                // The next part uses the same memory.
                stream.synchronize()?;
            }
        }
        Ok(())
    }

    /// Lists of a step, not yet uploaded.
    fn list(&mut self, step: &Step, batch: &Batch, model: &Model) -> Result<forward::Lists, DriverError> {
        let replay = |row: &BatchRow| step.seqs.iter().find(|s| s.seat.0 == row.seat).and_then(|s| s.replay);
        let replays = step.seqs.iter().any(|s| s.replay.is_some());
        let reach = model.config.sliding_window - 1;
        let lists = &mut self.lists;
        lists.clear();
        let words = |rows: &[BatchRow]| -> Vec<u32> {
            rows.iter().flat_map(|r| [r.seat, r.position, r.start, r.start_row]).collect()
        };
        let rows = lists.push(words(&batch.rows).into_iter())?;
        let closing = match replays {
            false => rows,
            true => {
                let hide = |row: &BatchRow| BatchRow { seat: replay(row).map_or(row.seat, |_| UNMAPPED), ..*row };
                lists.push(words(&batch.rows.iter().map(hide).collect::<Vec<_>>()).into_iter())?
            }
        };
        let ids = lists.push(batch.tokens.iter().copied())?;
        let mut sequences = Vec::with_capacity(8 * batch.sequences.len());
        for (seq, s) in step.seqs.iter().zip(&batch.sequences) {
            let seat = if seq.replay.is_some() { UNMAPPED } else { s.seat };
            sequences.extend([seat, s.start, s.start_row, s.rows, s.drafts, 0, 0, 0]);
        }
        let sequences = lists.push(sequences.into_iter())?;
        let starts: Vec<u32> = batch.sequences.iter().flat_map(|s| [s.seat, s.start]).collect();
        let starts = lists.push(starts.into_iter())?;

        let word = |job: Job| [job.seat, job.row, job.tokens, job.position, job.oldest, 0, 0, 0];
        let mut jobs = Vec::new();
        for layer in 0..if replays { model.config.num_hidden_layers as u32 } else { 1 } {
            for (row, r) in (0..).zip(&batch.rows) {
                // Rows that the layer need not compute see what is there: themselves.
                let oldest = replay(r).map_or(0, |replay| replay.first(layer, reach).min(r.position));
                jobs.extend(word(Job { seat: r.seat, row, tokens: 1, position: r.position, oldest, unused: [0; 3] }));
            }
        }
        let job_stride = if replays { 32 * batch.rows.len() as u64 } else { 0 };
        let jobs = lists.push(jobs.into_iter())?;
        let mut long = Vec::new();
        if !replays && batch.rows.len() > batch.sequences.len() {
            for s in &batch.sequences {
                for first in (0..s.rows).step_by(JOB_TOKENS as usize) {
                    let (row, tokens) = (s.start_row + first, JOB_TOKENS.min(s.rows - first));
                    let position = s.start + first;
                    long.extend(word(Job { seat: s.seat, row, tokens, position, oldest: 0, unused: [0; 3] }));
                }
            }
        }
        let long_job_count = long.len() as u32 / 8;
        let long_jobs = lists.push(long.into_iter())?;
        Ok(forward::Lists {
            tokens: batch.rows.len() as u32,
            rows,
            ids,
            closing,
            sequences,
            sequence_count: batch.sequences.len() as u32,
            most_rows: batch.sequences.iter().map(|s| s.rows).max().unwrap_or(0),
            starts,
            jobs,
            job_stride,
            long_jobs,
            long_job_count,
            long_job_tokens: JOB_TOKENS,
            local: batch.local,
            replays,
        })
    }

    /// Lists how the tokens of as many of these rows as fit are chosen; how many that are.
    fn list_choices(&mut self, step: &Step, batch: &Batch, wanted: &[(usize, usize)]) -> Result<usize, DriverError> {
        let (mut rows, mut words) = (Vec::new(), Vec::new());
        let mut n = 0;
        for &(s, i) in wanted.iter().take(self.sizes.heads) {
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
        self.choice.clear();
        self.rows = self.choice.push(rows.into_iter())?;
        self.words = self.choice.push(words.into_iter())?;
        Ok(n)
    }

    /// Chooses tokens after the first `n` rows of logits.
    fn sample(&self, stream: &Stream, model: &Model, n: usize) -> Result<(), DriverError> {
        let at = |word: usize| self.results.address() + 4 * (word * self.sizes.heads) as u64;
        let batch = SampleBatch {
            logits: model.scratch.logits.address(),
            changed: self.changed_logits.address(),
            rows: self.rows,
            lists: self.words,
            tokens: at(0),
            bad: at(1),
            chosen: at(2),
            top_tokens: at(3),
            top: at(3 + MOST_TOP as usize),
            count: n as u32,
            vocab: model.config.vocab_size as u32,
        };
        self.sample.launch(stream, &batch)
    }

    /// What came of row `i` of the results, with its logits where they are asked for.
    fn chosen(&self, stream: &Stream, model: &Model, seq: &SeqStep, i: usize) -> Result<Chosen, DriverError> {
        let word = |i: usize| {
            let b = &self.host_results.bytes()[4 * i..4 * i + 4];
            u32::from_le_bytes([b[0], b[1], b[2], b[3]])
        };
        let (heads, most, vocab) = (self.sizes.heads, MOST_TOP as usize, model.config.vocab_size);
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
    fn count(&mut self, step: &Step, seq: &SeqStep, tokens: &[Token]) {
        let Some(how) = seq.sample.as_ref().filter(|how| how.has_penalties()) else { return };
        let seen = &mut self.counts[seq.seat.0 as usize];
        if let Some(history) = step.history_of(seq) {
            seen.clear();
            seen.add(history, 0, how.answer_from);
        }
        seen.add(&tokens[..tokens.len() - seq.drafts as usize], seq.start, how.answer_from);
    }

    /// How the token after sampled row `i` of a sequence is chosen; its lists go to the end of `words`.
    fn row(&self, step: &Step, seq: &SeqStep, tokens: &[Token], i: usize, words: &mut Vec<u32>) -> SampleRow {
        let Some(how) = &seq.sample else { return SampleRow::padded() };
        let drafts = seq.drafts as usize;
        let position = seq.start + (tokens.len() - drafts + i) as u32;
        let mut list = |items: &mut dyn Iterator<Item = u32>, width: u32| {
            let from = words.len() as u32;
            words.extend(items);
            (from, (words.len() as u32 - from) / width)
        };
        let bias = list(&mut how.bias.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]), 2);
        let forbidden = match position < how.forbidden_before {
            true => list(&mut how.forbidden.iter().copied(), 1),
            false => (0, 0),
        };
        let counts = match how.has_penalties() {
            false => (0, 0),
            true => {
                let mut seen = self.counts[seq.seat.0 as usize].clone();
                let accepted = &tokens[tokens.len() - drafts..][..i];
                seen.add(accepted, position - i as u32, how.answer_from);
                list(&mut seen.iter().flat_map(|(token, times)| [token, times]), 2)
            }
        };
        let mask = step.mask_of(seq, i as u32).map(|mask| list(&mut mask.iter().copied(), 1).0);
        SampleRow {
            active: true,
            seed: how.seed,
            position,
            temperature: how.temperature,
            top_p: how.top_p,
            min_p: how.min_p,
            top_k: how.top_k,
            logprobs: how.top_logprobs,
            presence_penalty: how.presence_penalty,
            frequency_penalty: how.frequency_penalty,
            repetition_penalty: how.repetition_penalty,
            bias,
            forbidden,
            counts,
            mask,
        }
    }

    /// Accepts drafts as long as they are what was chosen, then adds one token.
    fn accept(&mut self, step: &Step, seq: &SeqStep, tokens: &[Token], chosen: Vec<Chosen>) -> SeqResult {
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
