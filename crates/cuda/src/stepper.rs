//! One step from its data to its result: lists to the GPU, the forward pass, the head and the choice of tokens in pieces
//! of rows, tokens back to the host.
//!
//! Assumes a checked step whose table changes come along. What an earlier step still has under way, rows of the MTP module,
//! comes first in the stream and reads no list that is written here.

use longwave_engine::step::{SeqResult, SeqStep, Step, StepResult, Token};
use longwave_engine::tables::SeatTables;
use longwave_model::geometry::CacheKind;
use longwave_model::{CacheLayout, ModelConfig};

use crate::batch::Batch;
use crate::choices::{Choices, Chosen};
use crate::drafts::Drafter;
use crate::driver::{Arena, Argument, Context, DriverError, Grid, Kernel, Module, Stream};
use crate::forward::{self, Model};
use crate::graphs::Graphs;
use crate::lists::Lists;
use crate::ops::attend::Job;
use crate::ops::{BatchRow, UNMAPPED};
use crate::pools::Changes;
use crate::scratch::StepSizes;

/// Table changes that are written at once.
const CHANGES: usize = 1 << 16;
/// Tokens of a job in layers that attend to the same entries with neighbouring tokens.
const JOB_TOKENS: u32 = 4;

/// What steps need besides the model.
pub struct Stepper {
    lists: Lists,
    changes: Lists,
    write_tables: Kernel,
    choices: Choices,
    drafter: Option<Drafter>,
    /// Decode steps by the numbers of sequences and of rows of each.
    graphs: Graphs<(usize, u32)>,
    /// Token sampled last at each seat.
    last: Vec<Token>,
    /// Tables as the GPU has them, and how changes of them are told.
    tables: SeatTables,
    table_changes: Changes,
}

impl Stepper {
    /// Takes the memory for steps of `sizes` in contexts of at most `longest`.
    pub fn new(
        context: &Context,
        arena: &mut Arena,
        config: &ModelConfig,
        layout: &CacheLayout,
        longest: u32,
        sizes: StepSizes,
    ) -> Result<Stepper, DriverError> {
        let (t, seats) = (sizes.tokens, sizes.seats as u32);
        let (layers, vocab) = (config.num_hidden_layers, config.vocab_size);
        let drafter = || Drafter::new(context, arena, config, layout, longest, sizes);
        let drafter = (sizes.drafts > 0).then(drafter).transpose()?;
        // Two lists of rows, ids, jobs for each layer and long ones, sequences, rows of the head.
        let words = t * (4 + 4 + 1 + 8 * layers + 8 + 1) + sizes.seats * (8 + 2) + 64;
        Ok(Stepper {
            drafter,
            graphs: Graphs::default(),
            lists: Lists::new(context, arena, words)?,
            changes: Lists::new(context, arena, 2 * CHANGES)?,
            write_tables: Module::load(context, "tables")?.kernel("write_tables", 0)?,
            choices: Choices::new(context, arena, sizes.heads, vocab, sizes.seats)?,
            last: vec![0; sizes.seats],
            tables: SeatTables::new(layout, seats),
            table_changes: Changes::new(layout, seats, longest),
        })
    }

    /// Computes a step.
    pub fn step(&mut self, stream: &Stream, model: &Model, step: &Step) -> Result<StepResult, DriverError> {
        // These tables are what the GPU has: steps that were refused never came here.
        let mut changes = self.table_changes.of(step, model.pools.layout(), &self.tables);
        for seq in &step.seqs {
            let applied = self.tables.apply(step, seq);
            debug_assert_eq!(applied, Ok(()), "the step was checked");
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
            let out = self.choices.accept(step, seq, batch.tokens_of(rows), own);
            if let Some(&token) = out.tokens.last() {
                self.last[seq.seat.0 as usize] = token;
            }
            result.seqs.push(out);
        }
        self.draft(stream, model, step, &batch, &mut result.seqs)?;
        Ok(result)
    }

    /// Brings the MTP module up to date and adds drafts for the next step.
    fn draft(
        &mut self,
        stream: &Stream,
        model: &Model,
        step: &Step,
        batch: &Batch,
        results: &mut [SeqResult],
    ) -> Result<(), DriverError> {
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let turn = drafter.turn(model, step, batch, &self.tables, results);
        let mut changes = Vec::new();
        model.pools.give_local(Drafter::parts(&turn), &mut changes);
        self.write_tables(stream, model, &changes)?;
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let drafts = drafter.run(stream, model, &self.choices, step, &turn)?;
        for (result, drafts) in results.iter_mut().zip(drafts) {
            result.drafts = drafts;
        }
        Ok(())
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
            self.choices.count(step, seq, batch.tokens_of(rows));
        }
        // Sequence and place among its wanted rows.
        let wanted: Vec<(usize, usize)> =
            (0..).zip(&step.seqs).flat_map(|(s, seq)| (0..Batch::wanted(seq)).map(move |i| (s, i))).collect();
        let mut out = Vec::with_capacity(wanted.len());
        let mut first = true;
        while out.len() < wanted.len() {
            let from = out.len();
            let n = self.choices.list(stream, step, batch, &wanted[from..])?;
            let whole = first && model.timers.is_none() && n == wanted.len() && n == batch.rows.len();
            match batch.uniform().filter(|_| whole) {
                Some(rows) => self.decode(stream, model, lists, heads, n, (batch.sequences.len(), rows))?,
                None => {
                    if first {
                        model.trunk(stream, lists)?;
                    }
                    model.logits(stream, heads + 4 * from as u64, n as u32)?;
                    self.choices.launch(stream, model, n)?;
                    model.mark(stream, "sampling")?;
                }
            }
            first = false;
            self.choices.fetch(stream)?;
            for (i, &(s, _)) in wanted[from..from + n].iter().enumerate() {
                out.push(self.choices.chosen(stream, model, &step.seqs[s], i)?);
            }
        }
        if first {
            model.trunk(stream, lists)?;
            stream.synchronize()?;
        }
        Ok(out)
    }

    /// A step in which every sequence has as many rows, all of them sampled: launched one by one the first time that there
    /// are so many, then as a graph. Addresses depend on the numbers of sequences and rows alone.
    fn decode(
        &mut self,
        stream: &Stream,
        model: &Model,
        lists: &forward::Lists,
        heads: u64,
        n: usize,
        shape: (usize, u32),
    ) -> Result<(), DriverError> {
        let choices = &self.choices;
        self.graphs.run(stream, shape, |stream| {
            model.trunk(stream, lists)?;
            model.logits(stream, heads, n as u32)?;
            choices.launch(stream, model, n)
        })
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
            // Uniform steps are replayed as graphs.
            most_seen: batch
                .uniform()
                .is_none()
                .then(|| batch.rows.iter().map(|r| (r.position + 1) / 4).max().unwrap_or(0)),
            starts,
            jobs,
            job_stride,
            long_jobs,
            long_job_count,
            long_job_tokens: JOB_TOKENS,
            local: batch.local,
            unstored: false,
            replays,
        })
    }
}
