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

    /// Rows of every sequence, where all have as many, at most one of them not a draft, and all windows are in the cache: a
    /// graph by the numbers of sequences and rows serves such steps.
    pub fn uniform(&self) -> Option<u32> {
        let rows = self.sequences.first()?.rows;
        let alike = |s: &Sequence| s.rows == rows && s.drafts == rows - 1;
        (!self.local && self.sequences.iter().all(alike)).then_some(rows)
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

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_engine::step::{Sampling, Seat};

    fn seq(seat: u32, start: u32, tokens: std::ops::Range<u32>, drafts: u32, sample: bool) -> SeqStep {
        SeqStep { drafts, sample: sample.then(Sampling::default), ..SeqStep::new(Seat(seat), start, tokens) }
    }

    #[test]
    fn rows_heads_and_windows_of_a_mixed_step() {
        // A verify step with two drafts, the middle of a prompt, and its end.
        let seqs = vec![seq(2, 70, 0..3, 2, true), seq(0, 0, 3..103, 0, false), seq(5, 127, 103..105, 0, true)];
        let mut tokens: Vec<Token> = (0..105).collect();
        tokens[0] = LAST_SAMPLED;
        let step = Step { seqs, tokens, ..Step::default() };
        let batch = Batch::new(&step, &[9, 9, 42, 9, 9, 9], |_, _| true);
        assert_eq!((batch.tokens[0], batch.rows.len(), batch.local), (42, 105, false));
        assert_eq!(batch.rows[2], BatchRow { seat: 2, position: 72, start: 70, start_row: 0 });
        assert_eq!(batch.rows[104], BatchRow { seat: 5, position: 128, start: 127, start_row: 103 });
        assert_eq!(batch.heads, [0, 1, 2, 104]);
        assert_eq!(step.seqs.iter().map(Batch::wanted).collect::<Vec<_>>(), [3, 0, 1]);
        assert_eq!(batch.tokens_of(&batch.sequences[2]), [103, 104]);
        assert_eq!(batch.uniform(), None);
        // One block that is not kept is enough; the block of every touched position is asked for.
        let asked = |position: u32, seat: u32| !(seat == 0 && position == 64);
        assert!(Batch::new(&step, &[0; 6], |seq, position| asked(position, seq.seat.0)).local);
        let before = |position: u32, seat: u32| !(seat == 5 && position == 0);
        assert!(!Batch::new(&step, &[0; 6], |seq, position| before(position, seq.seat.0)).local);
    }

    #[test]
    fn steps_of_equally_many_rows_and_drafts_are_uniform() {
        let of = |seqs: Vec<SeqStep>, mapped: bool| {
            let step = Step { seqs, tokens: vec![3; 6], ..Step::default() };
            Batch::new(&step, &[0; 2], |_, _| mapped).uniform()
        };
        let decode = vec![seq(1, 5, 0..1, 0, true), seq(0, 900, 1..2, 0, true)];
        assert_eq!(of(decode.clone(), true), Some(1));
        assert_eq!(of(decode, false), None);
        assert_eq!(of(vec![seq(1, 5, 0..3, 2, true), seq(0, 900, 3..6, 2, true)], true), Some(3));
        assert_eq!(of(vec![seq(1, 5, 0..3, 2, true), seq(0, 900, 3..5, 1, true)], true), None);
        assert_eq!(of(vec![seq(1, 5, 0..3, 0, true)], true), None);
    }
}
