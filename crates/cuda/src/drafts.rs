//! Drafting with the MTP module: fills its window as sequences advance and proposes the tokens after the sampled one.
//!
//! As on the CPU: the module's row for (streams of position `p - 1`, token at `p`) is kept at position `p`, so a step
//! writes positions of its own alone and a cached prefix is complete; position 0 has no row. Between steps a seat keeps the
//! streams of its last committed position; where they are not known, zeros stand in, which can cost a draft and never
//! changes a result. Rows of drafted positions are written to the step's own pages. Draws with the noise of the position
//! that a draft would take. At most as many sequences draft in a step as the head computes rows at once.

use longwave_engine::operators::START;
use longwave_engine::step::{SeqResult, Step, Token};
use longwave_engine::tables::SeatTables;
use longwave_model::geometry::CacheKind;
use longwave_model::{CacheLayout, ModelConfig};

use crate::batch::Batch;
use crate::choices::{self, Choices};
use crate::driver::{Arena, Context, DeviceSlice, DriverError, Pinned, Stream};
use crate::forward::{self, Model};
use crate::graphs::Graphs;
use crate::lists::Lists;
use crate::mtp::MtpRows;
use crate::ops::attend::Job;
use crate::ops::mtp::KEPT;
use crate::ops::sample::{ROW_WORDS, SampleRow};
use crate::ops::{BatchRow, UNMAPPED};
use crate::scratch::StepSizes;

/// Rows of the module at once, unless more sequences draft.
const ROWS: usize = 512;
/// Words of lists of one row's choice on average.
const CHOICE_WORDS: usize = 1024;

/// What drafting keeps between steps, and its buffers.
pub struct Drafter {
    /// Most drafts per sequence and step.
    depth: u32,
    /// Largest context.
    context: u32,
    /// Rows of the module at once.
    rows: usize,
    /// Sequences that draft in a step.
    most: usize,
    /// Streams of the last committed position of each seat, bf16 `[seats, 4, D]`.
    kept: DeviceSlice<u16>,
    /// The position after it; 0 when they are not known.
    next: Vec<u32>,
    /// The module's own streams, bf16 `[rows, 4, D]`.
    streams: DeviceSlice<u16>,
    /// Drafts, `u32 [depth, most]`.
    drafts: DeviceSlice<u32>,
    host_drafts: Pinned,
    lists: Lists,
    /// Words of lists of all choices.
    words: usize,
    /// Window group of the module.
    group: usize,
    /// Positions of one of its blocks.
    block_tokens: u32,
    /// Work of uniform steps.
    graphs: Graphs<Shape>,
}

/// A step whose sequences all have as many rows and want as many drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    sequences: usize,
    rows: u32,
    rounds: u32,
}

/// What drafting does after a step.
pub struct Turn {
    /// Rows whose window rows are stored, their sources and tokens.
    fill: Vec<(BatchRow, u32, Token)>,
    /// Row of the streams and seat, for each sequence.
    keep: Vec<[u32; 2]>,
    /// Those that want most first, so that the sequences of every round are the first ones of the round before.
    proposals: Vec<Proposal>,
    /// Set when a graph can do it.
    shape: Option<Shape>,
}

/// A sequence that drafts.
#[derive(Debug, Clone, Copy)]
struct Proposal {
    /// Its place in the step.
    sequence: usize,
    seat: u32,
    /// Position of the sampled token.
    committed: u32,
    sampled: Token,
    rounds: u32,
}

/// Addresses of a turn's lists.
struct Places {
    rows: u64,
    sources: u64,
    ids: u64,
    keep: u64,
    starts: u64,
    seats: u64,
    identity: u64,
    sampled: u64,
    /// Rows, jobs and choices of every round.
    rounds: Vec<[u64; 3]>,
    words: u64,
}

impl Drafter {
    /// A drafter that proposes at most `depth` tokens in contexts of at most `context`.
    pub fn new(
        device: &Context,
        arena: &mut Arena,
        config: &ModelConfig,
        layout: &CacheLayout,
        context: u32,
        sizes: StepSizes,
    ) -> Result<Drafter, DriverError> {
        let (depth, width) = (sizes.drafts, 4 * config.hidden_size);
        let (group, _) = layout.find(CacheKind::Window, config.num_hidden_layers).expect("the module has a window");
        let rows = sizes.tokens.min(ROWS.max(sizes.seats));
        let most = sizes.heads.min(sizes.seats);
        // All rows of a step: row, source, token; sequences: keep, first position, seat, place, token; a round: row, job,
        // choice.
        let words = sizes.tokens * 6 + sizes.seats * 8 + most * depth as usize * (4 + 8 + ROW_WORDS) + 256;
        let choice_words = most * depth as usize * CHOICE_WORDS;
        Ok(Drafter {
            depth,
            context,
            rows,
            most,
            kept: arena.slice(sizes.seats * width)?,
            next: vec![0; sizes.seats],
            streams: arena.slice(rows * width)?,
            drafts: arena.slice(depth as usize * most)?,
            host_drafts: Pinned::new(device, 4 * depth as usize * most)?,
            lists: Lists::new(device, arena, words + choice_words)?,
            words: choice_words,
            group,
            block_tokens: layout.groups[group].block_tokens,
            graphs: Graphs::default(),
        })
    }

    /// What to do after a step with these results.
    pub fn turn(
        &mut self,
        model: &Model,
        step: &Step,
        batch: &Batch,
        tables: &SeatTables,
        results: &[SeqResult],
    ) -> Turn {
        let (layers, reach) = (model.config.num_hidden_layers as u32, model.config.sliding_window - 1);
        let mut turn = Turn { fill: Vec::new(), keep: Vec::new(), proposals: Vec::new(), shape: None };
        // Positions of every sequence whose rows count, and from where on they do.
        let mut spans = Vec::with_capacity(step.seqs.len());
        for (i, ((seq, rows), result)) in step.seqs.iter().zip(&batch.sequences).zip(results).enumerate() {
            let accepted = result.tokens.len().saturating_sub(1) as u32;
            let committed = rows.start + rows.rows - seq.drafts + accepted;
            // A replay has no streams before the last layer's outputs are exact.
            let exact = seq.replay.map_or(0, |replay| replay.first(layers, reach));
            spans.push((exact.saturating_add(1).max(rows.start.max(1)), committed));
            if let (Some(&sampled), Some(_)) = (result.tokens.last(), &seq.sample) {
                let rounds = seq.want_drafts.min(self.depth).min(self.context - committed);
                if rounds > 0 {
                    turn.proposals.push(Proposal { sequence: i, seat: rows.seat, committed, sampled, rounds });
                }
            }
            let known = committed > exact;
            let row = if known { rows.start_row + (committed - 1 - rows.start) } else { UNMAPPED };
            turn.keep.push([row, rows.seat]);
        }
        turn.proposals.sort_by_key(|p| std::cmp::Reverse(p.rounds));
        turn.proposals.truncate(self.most);
        turn.shape = self.shape(batch, &turn.proposals);
        for ((seq, rows), &(first, committed)) in step.seqs.iter().zip(&batch.sequences).zip(&spans) {
            let known = !seq.fresh && self.next[rows.seat as usize] == rows.start;
            for (p, &token) in (rows.start..).zip(batch.tokens_of(rows)) {
                let counts = (first..committed).contains(&p);
                let row = |seat| BatchRow { seat, position: p, start: rows.start, start_row: rows.start_row };
                let source = match p.checked_sub(rows.start + 1) {
                    Some(before) => rows.start_row + before,
                    None if known => KEPT | rows.seat,
                    None => UNMAPPED,
                };
                let stored = || tables.table(seq.seat, self.group).get(p / self.block_tokens).is_some();
                match turn.shape {
                    Some(_) if counts => turn.fill.push((row(rows.seat), source, token)),
                    Some(_) => turn.fill.push((row(UNMAPPED), UNMAPPED, token)),
                    None if counts && stored() => turn.fill.push((row(rows.seat), source, token)),
                    None => {}
                }
            }
        }
        for (keep, &(_, committed)) in turn.keep.iter().zip(&spans) {
            self.next[keep[1] as usize] = if keep[0] == UNMAPPED { 0 } else { committed };
        }
        turn
    }

    /// The shape of a step that a graph can draft for.
    fn shape(&self, batch: &Batch, proposals: &[Proposal]) -> Option<Shape> {
        let (sequences, rounds) = (batch.sequences.len(), proposals.first()?.rounds);
        let rows = batch.uniform()?;
        let all = proposals.len() == sequences && proposals.iter().all(|p| p.rounds == rounds);
        (all && batch.rows.len() <= self.rows).then_some(Shape { sequences, rows, rounds })
    }

    /// Seat, first position and end of the window pages that a turn needs for itself.
    pub fn parts(turn: &Turn) -> impl Iterator<Item = (u32, u32, u32)> {
        turn.proposals.iter().map(|p| (p.seat, p.committed, p.committed + p.rounds))
    }

    /// Does it; the drafts of each sequence of the step. Its window pages are mapped.
    pub fn run(
        &mut self,
        stream: &Stream,
        model: &Model,
        choices: &Choices,
        step: &Step,
        turn: &Turn,
    ) -> Result<Vec<Vec<Token>>, DriverError> {
        let places = self.list(step, turn)?;
        self.lists.upload(stream)?;
        match turn.shape.filter(|_| model.timers.is_none()) {
            None => self.all(stream, model, choices, turn, &places)?,
            Some(shape) => {
                let mut graphs = std::mem::take(&mut self.graphs);
                let ran = graphs.run(stream, shape, |stream| self.all(stream, model, choices, turn, &places));
                self.graphs = graphs;
                ran?;
            }
        }
        let mut drafts = vec![Vec::new(); step.seqs.len()];
        if turn.proposals.is_empty() {
            return Ok(drafts);
        }
        self.drafts.read_pinned(stream, &mut self.host_drafts)?;
        stream.synchronize()?;
        let words = self.host_drafts.bytes().as_chunks::<4>().0;
        for (at, p) in turn.proposals.iter().enumerate() {
            let draft = |round: usize| u32::from_le_bytes(words[round * self.most + at]);
            // Logits that are not finite choose nothing.
            let chosen = (0..p.rounds as usize).map(draft).take_while(|&d| d < model.config.vocab_size as u32);
            drafts[p.sequence].extend(chosen);
        }
        Ok(drafts)
    }

    /// All launches of a turn: rows to store, streams to keep, rounds.
    fn all(
        &self,
        stream: &Stream,
        model: &Model,
        choices: &Choices,
        turn: &Turn,
        places: &Places,
    ) -> Result<(), DriverError> {
        let (main, width) = (&model.scratch.streams, model.config.hidden_size as u32);
        model.mark(stream, START)?;
        for from in (0..turn.fill.len()).step_by(self.rows) {
            let at = from as u64;
            let lists = forward::Lists {
                tokens: self.rows.min(turn.fill.len() - from) as u32,
                rows: places.rows + 16 * at,
                ids: places.ids + 4 * at,
                ..forward::Lists::default()
            };
            let sources = places.sources + 4 * at;
            let rows = MtpRows { sources, streams: main, kept: &self.kept, out: &self.streams };
            model.mtp_keys(stream, &rows, &lists)?;
        }
        let n = turn.keep.len() as u32;
        model.ops.mtp.keep(stream, places.keep, main.address(), self.kept.address(), width, n)?;
        model.mark(stream, "MTP streams kept")?;
        for (round, &[rows, jobs, how]) in places.rounds.iter().enumerate() {
            let n = drafting(&turn.proposals, round as u32).count() as u32;
            let draft = |round: usize| self.drafts.address() + 4 * (round * self.most) as u64;
            let lists = forward::Lists {
                tokens: n,
                rows,
                ids: if round == 0 { places.sampled } else { draft(round - 1) },
                closing: rows,
                // Once the rows before are in the step's pages they stay there.
                sequence_count: if round == 0 { n } else { 0 },
                most_rows: 1,
                starts: places.starts,
                jobs,
                local: true,
                unstored: true,
                ..forward::Lists::default()
            };
            let (sources, streams) = if round == 0 { (places.seats, main) } else { (places.identity, &self.streams) };
            let module = MtpRows { sources, streams, kept: &self.kept, out: &self.streams };
            model.mtp(stream, &module, &lists)?;
            model.mtp_logits(stream, &self.streams, places.identity, n)?;
            choices.draft(stream, model, how, places.words, draft(round), n)?;
            model.mark(stream, "sampling of drafts")?;
        }
        Ok(())
    }

    /// Lists of a turn, not yet uploaded. What has another length from step to step comes last.
    fn list(&mut self, step: &Step, turn: &Turn) -> Result<Places, DriverError> {
        let (lists, proposals) = (&mut self.lists, &turn.proposals);
        lists.clear();
        let words = |r: &BatchRow| [r.seat, r.position, r.start, r.start_row];
        let rows: Vec<u32> = turn.fill.iter().flat_map(|(row, _, _)| words(row)).collect();
        let rows = lists.push(rows.into_iter())?;
        let sources = lists.push(turn.fill.iter().map(|&(_, source, _)| source))?;
        let ids = lists.push(turn.fill.iter().map(|&(_, _, token)| token))?;
        let keep: Vec<u32> = turn.keep.as_flattened().to_vec();
        let keep = lists.push(keep.into_iter())?;
        let starts: Vec<u32> = proposals.iter().flat_map(|p| [p.seat, p.committed]).collect();
        let starts = lists.push(starts.into_iter())?;
        let seats = lists.push(proposals.iter().map(|p| KEPT | p.seat))?;
        let identity = lists.push(0..proposals.len() as u32)?;
        let sampled = lists.push(proposals.iter().map(|p| p.sampled))?;
        let (mut rounds, mut bias) = (Vec::new(), Vec::new());
        for round in 0..proposals.first().map_or(0, |p| p.rounds) {
            let n = drafting(proposals, round).count();
            let drafting = || drafting(proposals, round).map(|p| (p, p.committed + round));
            let row = |(p, position): (&Proposal, u32)| [p.seat, position, position, 0];
            let rows: Vec<u32> = drafting().flat_map(row).collect();
            let job = |(row, (p, position)): (u32, (&Proposal, u32))| {
                let job = Job { seat: p.seat, row, tokens: 1, position, oldest: 1, unused: [0; 3] };
                [job.seat, job.row, job.tokens, job.position, job.oldest, 0, 0, 0]
            };
            let jobs: Vec<u32> = (0..).zip(drafting()).flat_map(job).collect();
            let how: Vec<u32> = drafting()
                .flat_map(|(p, position)| {
                    let how = step.seqs[p.sequence].sample.as_ref().expect("only sampled sequences are drafted");
                    let before = bias.len();
                    let mut row = choices::row(how, position + 1, &mut bias);
                    if bias.len() > self.words {
                        // Without its lists a draft is worse at most.
                        bias.truncate(before);
                        row = SampleRow { bias: (0, 0), forbidden: (0, 0), ..row };
                    }
                    row.words()
                })
                .collect();
            debug_assert_eq!(rows.len(), 4 * n);
            rounds.push([lists.push(rows.into_iter())?, lists.push(jobs.into_iter())?, lists.push(how.into_iter())?]);
        }
        let words = lists.push(bias.into_iter())?;
        Ok(Places { rows, sources, ids, keep, starts, seats, identity, sampled, rounds, words })
    }
}

/// Proposals that take part in a round.
fn drafting(proposals: &[Proposal], round: u32) -> impl Iterator<Item = &Proposal> {
    proposals.iter().take_while(move |p| p.rounds > round)
}
