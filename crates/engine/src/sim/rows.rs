//! The pools of the simulated backend: rows as they lie in units, read and stored through the block tables.
//!
//! Every row is tagged with its group, page and position, so that one of elsewhere is an error that names both. Assumes
//! that table changes of the step are applied; refuses to store to a block that another sequence maps.

use std::collections::BTreeSet;

use super::SimBackend;
use super::layers::{Scratch, ratio};
use crate::step::{BlockId, Seat, SeqStep, Step};

/// One stored row. The tag names group, page and position, so that a row of elsewhere is never mistaken; 0 is poison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Row {
    pub tag: u64,
    pub value: u64,
}

/// Rows of one unit and who stored to it last: (step, seat, group, block index).
#[derive(Debug, Clone, Default)]
pub(super) struct Unit {
    pub rows: Vec<Row>,
    writer: (u64, u32, u8, u32),
}

impl Unit {
    fn read(&self, tag: u64, row: u32) -> Result<u64, String> {
        match self.rows.get(row as usize) {
            Some(r) if r.tag == tag => Ok(r.value),
            Some(r) => Err(format!("{}: the row holds {}", name(tag), name(r.tag))),
            None => Err(format!("{}: the block was never written", name(tag))),
        }
    }
}

impl SimBackend {
    /// A newly mapped block whose positions are all still to come cannot hold anything that may be read. A replay finds
    /// its long-lived blocks written, and no row in the block where it begins.
    pub(super) fn poison(&mut self, step: &Step, seq: &SeqStep) {
        for w in step.writes_of(seq).iter().filter(|w| w.block != BlockId::NONE) {
            let spec = &self.layout.groups[w.group as usize];
            let unwritten = match seq.replay {
                Some(_) => spec.is_sliding() && (w.index + 1) * spec.block_tokens > seq.start,
                None => w.index * spec.block_tokens >= seq.start,
            };
            if unwritten {
                self.pools[spec.bucket as usize][w.block.0 as usize].rows.fill(Row::default());
            }
        }
    }

    /// A row of a sliding group that an earlier step stored.
    pub(super) fn row(&self, seat: Seat, group: usize, page: u32, p: u32) -> Result<u64, String> {
        let spec = &self.layout.groups[group];
        let index = p / spec.block_tokens;
        let block = self.tables.table(seat, group).get(index);
        let block = block.ok_or_else(|| format!("seat {} group {group}: block {index} is not mapped", seat.0))?;
        let unit = &self.pools[spec.bucket as usize][block.0 as usize];
        unit.read(tag(group, page, p), page * spec.block_tokens + p % spec.block_tokens)
    }

    /// Entry `n` of a long-lived group that an earlier step stored.
    pub(super) fn entry(&self, seat: Seat, group: usize, n: u32) -> Result<u64, String> {
        let spec = &self.layout.groups[group];
        let closed_at = (n + 1) * ratio(&self.layout, group) - 1;
        let index = closed_at / spec.block_tokens;
        let block = self.tables.table(seat, group).dense().get(index as usize);
        let block = block.ok_or_else(|| format!("seat {} group {group}: no block {index}", seat.0))?;
        let unit = &self.pools[spec.bucket as usize][block.0 as usize];
        unit.read(tag(group, 0, closed_at), n % spec.rows_per_block)
    }

    /// Writes the rows of a step to the blocks that are mapped, and its entries unless they are there already.
    pub(super) fn store(
        &mut self,
        step: &Step,
        scratch: &Scratch,
        shared: &BTreeSet<(u8, BlockId)>,
    ) -> Result<(), String> {
        for group in 0..self.layout.groups.len() {
            let spec = &self.layout.groups[group];
            for position in scratch.start..scratch.end() {
                let index = position / spec.block_tokens;
                let mut rows: Vec<(u32, u32, u64)> = Vec::new();
                if spec.is_sliding() {
                    if self.tables.table(scratch.seat, group).get(index).is_none() {
                        continue;
                    }
                    let at = |page: u32| page * spec.block_tokens + position % spec.block_tokens;
                    rows.extend(
                        self.layers.rows(scratch, group, position).map(|(page, value)| (page, at(page), value)),
                    );
                } else if (position + 1).is_multiple_of(ratio(&self.layout, group)) {
                    let n = position / ratio(&self.layout, group);
                    let entry = scratch.entry(&self.layout, group, n);
                    rows.extend(entry.map(|value| (0, n % spec.rows_per_block, value)));
                }
                if rows.is_empty() {
                    continue;
                }
                let block = self.tables.table(scratch.seat, group).get(index);
                let missing = || format!("seat {} group {group}: no block {index} for an entry", scratch.seat.0);
                let block = block.ok_or_else(missing)?;
                if shared.contains(&(spec.bucket as u8, block)) {
                    let seat = scratch.seat.0;
                    return Err(format!("block {} is stored to by seat {seat}; another one maps it", block.0));
                }
                let unit = &mut self.pools[spec.bucket as usize][block.0 as usize];
                let writer = (step.number, scratch.seat.0, group as u8, index);
                if unit.writer.0 == step.number && unit.writer != writer {
                    return Err(format!("block {} is stored to by {:?} and {writer:?}", block.0, unit.writer));
                }
                unit.writer = writer;
                let size = if spec.is_sliding() { spec.block_tokens } else { spec.rows_per_block };
                let size = (size * self.layers.pages[group]) as usize;
                if unit.rows.len() < size {
                    unit.rows.resize(size, Row::default());
                }
                for (page, row, value) in rows {
                    unit.rows[row as usize] = Row { tag: tag(group, page, position), value };
                }
            }
        }
        Ok(())
    }
}

fn tag(group: usize, page: u32, position: u32) -> u64 {
    (group as u64 + 1) << 48 | u64::from(page) << 32 | u64::from(position)
}

fn name(tag: u64) -> String {
    let (group, page) = (tag >> 48, (tag >> 32) & 0xffff);
    if tag == 0 { "poison".into() } else { format!("group {} page {page} position {}", group - 1, tag as u32) }
}
