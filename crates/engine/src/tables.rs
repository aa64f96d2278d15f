//! Block tables per seat, kept by a backend and changed by the differences that steps carry.
//!
//! Long-lived groups have a dense list (index = position / 256). Sliding groups have a short sorted list, because only
//! the last few blocks and, in a prefill step, checkpoint blocks are mapped. Refuses writes that leave holes.

use longwave_model::CacheLayout;

use crate::step::{BlockId, Seat, SeqStep, Step, TableWrite};

/// Tables of all seats of one backend.
#[derive(Debug, Clone)]
pub struct SeatTables {
    sliding: Vec<bool>,
    seats: Vec<Vec<Table>>,
}

/// Table of one group at one seat.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// Long-lived: block of index `i`.
    dense: Vec<BlockId>,
    /// Sliding: (index, block), ascending.
    sparse: Vec<(u32, BlockId)>,
}

impl Table {
    /// Block that holds block index `index`, or `None` when it is not mapped.
    pub fn get(&self, index: u32) -> Option<BlockId> {
        if let Some(&b) = self.dense.get(index as usize) {
            return Some(b);
        }
        self.sparse.binary_search_by_key(&index, |e| e.0).ok().map(|i| self.sparse[i].1)
    }

    /// Blocks of a long-lived group from the start of the sequence.
    pub fn dense(&self) -> &[BlockId] {
        &self.dense
    }

    /// Mapped blocks of a sliding group, ascending by index.
    pub fn sparse(&self) -> &[(u32, BlockId)] {
        &self.sparse
    }
}

impl SeatTables {
    /// Empty tables for `seats` seats of `layout`.
    pub fn new(layout: &CacheLayout, seats: u32) -> SeatTables {
        let sliding: Vec<bool> = layout.groups.iter().map(|g| g.is_sliding()).collect();
        let seats = (0..seats).map(|_| vec![Table::default(); sliding.len()]).collect();
        SeatTables { sliding, seats }
    }

    /// Applies the changes that `seq` carries. The error says which write is impossible.
    pub fn apply(&mut self, step: &Step, seq: &SeqStep) -> Result<(), String> {
        let tables =
            self.seats.get_mut(seq.seat.0 as usize).ok_or_else(|| format!("seat {} does not exist", seq.seat.0))?;
        if seq.fresh {
            for t in tables.iter_mut() {
                t.dense.clear();
                t.sparse.clear();
            }
        }
        for w in step.writes_of(seq) {
            let sliding =
                *self.sliding.get(w.group as usize).ok_or_else(|| format!("group {} does not exist", w.group))?;
            let table = &mut tables[w.group as usize];
            if sliding { table.write_sparse(w) } else { table.write_dense(w)? }
        }
        Ok(())
    }

    /// Whether there is such a seat.
    pub fn has(&self, seat: Seat) -> bool {
        (seat.0 as usize) < self.seats.len()
    }

    /// Table of `group` at `seat`.
    pub fn table(&self, seat: Seat, group: usize) -> &Table {
        &self.seats[seat.0 as usize][group]
    }
}

impl Table {
    fn write_dense(&mut self, w: &TableWrite) -> Result<(), String> {
        let i = w.index as usize;
        if w.block == BlockId::NONE {
            return Err(format!("group {} is long-lived, block index {i} cannot be taken out", w.group));
        }
        match i.cmp(&self.dense.len()) {
            std::cmp::Ordering::Less => self.dense[i] = w.block,
            std::cmp::Ordering::Equal => self.dense.push(w.block),
            std::cmp::Ordering::Greater => {
                return Err(format!("group {}: block index {i} leaves a hole after {}", w.group, self.dense.len()));
            }
        }
        Ok(())
    }

    fn write_sparse(&mut self, w: &TableWrite) {
        match (self.sparse.binary_search_by_key(&w.index, |e| e.0), w.block) {
            (Ok(i), BlockId::NONE) => drop(self.sparse.remove(i)),
            (Ok(i), b) => self.sparse[i].1 = b,
            (Err(_), BlockId::NONE) => {}
            (Err(i), b) => self.sparse.insert(i, (w.index, b)),
        }
    }
}
