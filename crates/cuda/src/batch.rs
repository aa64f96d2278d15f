//! A step as kernels see it: lists of rows, sequences and attention jobs, in one block of words that is copied to the GPU.
//!
//! Built on the host from a step that `step_check` let pass. A list has room for the largest step; what a launch reads of
//! it depends on its count alone.

use longwave_engine::step::{LAST_SAMPLED, ReturnLogits, SeqStep, Step, Token};
use longwave_model::geometry::WINDOW_BLOCK;

use crate::ops::BatchRow;

/// One sequence of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// Row of the block tables.
    pub seat: u32,
    /// Its first position in the step.
    pub start: u32,
    /// Row of the batch that holds it.
    pub start_row: u32,
    /// Rows.
    pub rows: u32,
    /// How many of them, at the end, are drafts.
    pub drafts: u32,
}

/// Lists of a step.
#[derive(Debug, Default)]
pub struct Batch {
    /// One per token.
    pub rows: Vec<BatchRow>,
    /// Their tokens.
    pub tokens: Vec<Token>,
    /// One per sequence.
    pub sequences: Vec<Sequence>,
    /// Rows whose logits are wanted, by sequence.
    pub heads: Vec<u32>,
    /// Some row's window block is not mapped: windows are read from the step's own pages.
    pub local: bool,
}

impl Batch {
    /// Rows of `step`; `last` are the tokens sampled last at each seat, `mapped` says whether a window row is stored.
    pub fn new(step: &Step, last: &[Token], mapped: impl Fn(&SeqStep, u32) -> bool) -> Batch {
        let mut batch = Batch::default();
        for seq in &step.seqs {
            let (seat, start, start_row) = (seq.seat.0, seq.start, batch.rows.len() as u32);
            for (i, &token) in (0..).zip(step.tokens_of(seq)) {
                batch.rows.push(BatchRow { seat, position: start + i, start, start_row });
                batch.tokens.push(if token == LAST_SAMPLED { last[seat as usize] } else { token });
            }
            let rows = seq.tokens.len() as u32;
            batch.sequences.push(Sequence { seat, start, start_row, rows, drafts: seq.drafts });
            let first = match (seq.logits, &seq.sample) {
                (ReturnLogits::All, _) => 0,
                (_, Some(_)) => rows - 1 - seq.drafts,
                _ => rows,
            };
            batch.heads.extend(start_row + first..start_row + rows);
            let end = start + rows;
            let mut blocks = (start / WINDOW_BLOCK..end.div_ceil(WINDOW_BLOCK)).map(|b| b * WINDOW_BLOCK);
            batch.local |= !blocks.all(|position| mapped(seq, position));
        }
        batch
    }

    /// Tokens of one sequence.
    pub fn tokens_of(&self, sequence: &Sequence) -> &[Token] {
        &self.tokens[sequence.start_row as usize..(sequence.start_row + sequence.rows) as usize]
    }

    /// Every sequence has one row, whose window is in the cache: a graph by the number of rows serves such steps.
    pub fn is_decode(&self) -> bool {
        !self.local && self.rows.len() == self.sequences.len()
    }

    /// How many rows' logits a sequence wants.
    pub fn wanted(seq: &SeqStep) -> usize {
        match (seq.logits, &seq.sample) {
            (ReturnLogits::All, _) => seq.tokens.len(),
            (_, Some(_)) => 1 + seq.drafts as usize,
            _ => 0,
        }
    }
}
