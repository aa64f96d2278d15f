//! Which rows of a batch a layer still works on while windows are rebuilt (`longwave_engine::step::Replay`).
//!
//! From layer to layer the rows of a replaying sequence become fewer; those of the others stay. Dropping a row is skipping
//! its work: rows of a batch do not depend on each other. Assumes that the backend checked where the replay begins.

use longwave_model::ModelConfig;

use crate::forward::Rows;
use crate::scratch::{Buffer, Scratch};

/// The rows of a batch that go on, and the batch that they make up.
pub struct Kept<'a> {
    /// Rows of the batch before, ascending.
    pub rows: Vec<usize>,
    /// Each sequence's part of the new one; empty for those that have no row left.
    pub seqs: Vec<Rows<'a>>,
}

impl<'a> Kept<'a> {
    /// Drops the rows of replaying sequences before the position that `first` names; `None` when no row goes.
    pub fn new(seqs: &[Rows<'a>], first: impl Fn(&Rows<'a>) -> u32) -> Option<Kept<'a>> {
        let gone = |s: &Rows<'a>| match s.replay {
            Some(_) => (first(s).clamp(s.start, s.end()) - s.start) as usize,
            None => 0,
        };
        if seqs.iter().all(|s| gone(s) == 0) {
            return None;
        }
        let mut kept = Kept { rows: Vec::new(), seqs: Vec::with_capacity(seqs.len()) };
        for s in seqs {
            let (gone, from) = (gone(s), kept.rows.len());
            kept.rows.extend(s.rows.start + gone..s.rows.end);
            kept.seqs.push(Rows { rows: from..kept.rows.len(), start: s.start + gone as u32, ..s.clone() });
        }
        Some(kept)
    }

    /// The rows whose inputs of layer `layer` are exact.
    pub fn at_layer(seqs: &[Rows<'a>], layer: usize, config: &ModelConfig) -> Option<Kept<'a>> {
        Kept::new(seqs, |s| s.oldest_in(layer, config))
    }

    /// Their values of a list with one value per row.
    pub fn pick<T: Clone>(&self, all: &[T]) -> Vec<T> {
        self.rows.iter().map(|&r| all[r].clone()).collect()
    }

    /// Their parts of a matrix `[rows, width]`.
    pub fn gather(&self, scratch: &Scratch, all: &[f32], width: usize) -> Buffer {
        let mut out = scratch.take(self.rows.len() * width);
        for (&r, out) in self.rows.iter().zip(out.chunks_mut(width)) {
            out.copy_from_slice(&all[r * width..(r + 1) * width]);
        }
        out
    }
}

/// Puts the rows of `seqs`, what is left of `whole`, where they were in a matrix `[whole_rows, width]`; zeros elsewhere.
pub fn spread(scratch: &Scratch, rows: &[f32], width: usize, seqs: &[Rows], whole: &[Rows]) -> Buffer {
    let mut out = scratch.zeros(whole.last().map_or(0, |s| s.rows.end) * width);
    for (s, w) in seqs.iter().zip(whole) {
        let at = w.rows.start + (s.start - w.start) as usize;
        out[at * width..][..s.rows.len() * width].copy_from_slice(&rows[s.rows.start * width..s.rows.end * width]);
    }
    out
}
