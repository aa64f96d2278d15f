//! The blocks of one running sequence, group by group, and the table changes that a backend has not seen yet.
//!
//! Long-lived groups hold one block per 256 positions from the start. Sliding groups hold only blocks with rows that a
//! later position still reads. A prefill chunk therefore maps its tail and never its middle (ARCHITECTURE.md, "Cache design").
//! A block may be the prefix cache's as well, and other sequences'; rows are only ever added behind those. Blocks are mapped when a step is planned and given back when it is committed, by committed position; drafts that may
//! be rejected never push a row out. Assumes that the pools can serve what admission reserved.

use std::ops::Range;

use longwave_model::CacheLayout;
use longwave_model::geometry::GroupSpec;

use crate::pool::{Hold, PoolCount, Pools, Units};
use crate::step::{BlockId, TableWrite};

/// The positions that a step computes for one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// First position; everything before it is committed.
    pub start: u32,
    /// One past the last position.
    pub end: u32,
    /// How many positions, at the end, hold drafts that may be rejected.
    pub drafts: u32,
}

/// Blocks and pending table changes of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct SequenceBlocks {
    /// Per group: (block index, block), ascending; without holes from index 0 in long-lived groups.
    groups: Vec<Vec<(u32, BlockId)>>,
    /// Changes since the last step of this sequence.
    writes: Vec<TableWrite>,
}

impl SequenceBlocks {
    /// No blocks, with room for `positions` positions so that growing allocates nothing.
    pub fn new(layout: &CacheLayout, positions: u32) -> SequenceBlocks {
        let room = |g: &longwave_model::geometry::GroupSpec| {
            if g.is_sliding() { 16 } else { positions.div_ceil(g.block_tokens) }
        };
        SequenceBlocks {
            groups: layout.groups.iter().map(|g| Vec::with_capacity(room(g) as usize)).collect(),
            writes: Vec::with_capacity(64),
        }
    }

    /// Maps what the step over `span` stores. Blocks that it only reads are mapped already.
    pub fn extend(&mut self, layout: &CacheLayout, pools: &mut Pools, span: Span) {
        for (id, spec) in layout.groups.iter().enumerate() {
            for index in self.unmapped(id, spec, span) {
                let block = pools
                    .of_mut(spec.bucket)
                    .alloc()
                    .expect("admission reserved the worst case of every running request");
                self.map(id, index, block);
            }
        }
    }

    /// Units that [`SequenceBlocks::extend`] will take.
    pub fn missing(&self, layout: &CacheLayout, span: Span) -> Units {
        let mut units = [0; 3];
        for (id, spec) in layout.groups.iter().enumerate() {
            units[spec.bucket as usize] += self.unmapped(id, spec, span).len() as u32;
        }
        units
    }

    /// Block indices of a group that a step over `span` stores to and that are not mapped.
    fn unmapped(&self, group: usize, spec: &GroupSpec, span: Span) -> Range<u32> {
        assert!(span.start + span.drafts < span.end, "a step holds at least one token that is no draft: {span:?}");
        // The earliest position that can be next once drafts are rejected; 0 in long-lived groups.
        let first = spec.retention.first_needed(span.end - span.drafts);
        if first >= span.end {
            return 0..0;
        }
        let from = self.groups[group].last().map_or(0, |&(index, _)| index + 1).max(first / spec.block_tokens);
        from..((span.end - 1) / spec.block_tokens + 1).max(from)
    }

    /// Maps a block that the prefix cache holds, behind those that are mapped. It is read and never written.
    pub fn adopt(&mut self, layout: &CacheLayout, pools: &mut Pools, group: usize, index: u32, block: BlockId) {
        let spec = &layout.groups[group];
        pools.of_mut(spec.bucket).share(block, Hold::of(spec));
        self.map(group, index, block);
    }

    /// Takes a block for contents that come from elsewhere and maps it behind those that are mapped.
    pub fn place(&mut self, layout: &CacheLayout, pools: &mut Pools, group: usize, index: u32) -> BlockId {
        let block = pools.of_mut(layout.groups[group].bucket).alloc();
        let block = block.expect("admission reserved the worst case of every running request");
        self.map(group, index, block);
        block
    }

    /// Maps `block` in place of a block with equal contents, which is given back.
    pub fn replace(&mut self, layout: &CacheLayout, pools: &mut Pools, group: usize, index: u32, block: BlockId) {
        let spec = &layout.groups[group];
        pools.of_mut(spec.bucket).share(block, Hold::of(spec));
        let at = self.find(group, index).expect("only a mapped block is replaced");
        let old = std::mem::replace(&mut self.groups[group][at].1, block);
        pools.of_mut(spec.bucket).release(old, Hold::of(spec));
        self.writes.push(TableWrite { group: group as u8, index, block });
    }

    fn map(&mut self, group: usize, index: u32, block: BlockId) {
        self.groups[group].push((index, block));
        self.writes.push(TableWrite { group: group as u8, index, block });
    }

    fn find(&self, group: usize, index: u32) -> Option<usize> {
        self.groups[group].binary_search_by_key(&index, |b| b.0).ok()
    }

    /// The block of a group that is mapped at `index`.
    pub fn get(&self, group: usize, index: u32) -> Option<BlockId> {
        self.find(group, index).map(|at| self.groups[group][at].1)
    }

    /// Gives back sliding blocks that nothing reads once `committed` positions are committed.
    pub fn retire(&mut self, layout: &CacheLayout, pools: &mut Pools, committed: u32) {
        for id in layout.sliding() {
            let spec = &layout.groups[id];
            let first = spec.retention.first_needed(committed);
            let dead =
                self.groups[id].iter().take_while(|&&(index, _)| (index + 1) * spec.block_tokens <= first).count();
            for (index, block) in self.groups[id].drain(..dead) {
                pools.of_mut(spec.bucket).release(block, Hold::Window);
                self.writes.push(TableWrite { group: id as u8, index, block: BlockId::NONE });
            }
        }
    }

    /// Gives everything back.
    pub fn release(&mut self, layout: &CacheLayout, pools: &mut Pools) {
        for (spec, blocks) in layout.groups.iter().zip(&mut self.groups) {
            for (_, block) in blocks.drain(..) {
                pools.of_mut(spec.bucket).release(block, Hold::of(spec));
            }
        }
        self.writes.clear();
    }

    /// Moves the pending table changes into a step.
    pub fn take_writes(&mut self, out: &mut Vec<TableWrite>) {
        out.append(&mut self.writes);
    }

    /// Units held.
    pub fn units(&self, layout: &CacheLayout) -> Units {
        let mut units = [0; 3];
        for (spec, blocks) in layout.groups.iter().zip(&self.groups) {
            units[spec.bucket as usize] += blocks.len() as u32;
        }
        units
    }

    /// Adds this sequence's references to `counts` and checks that every row which the next position reads is mapped.
    pub fn check(&self, layout: &CacheLayout, committed: u32, counts: &mut [PoolCount; 3]) -> Result<(), String> {
        for (id, spec) in layout.groups.iter().enumerate() {
            for &(_, block) in &self.groups[id] {
                counts[spec.bucket as usize].table(block, Hold::of(spec));
            }
            if self.groups[id].windows(2).any(|w| w[1].0 != w[0].0 + 1) {
                return Err(format!("group {id} has a hole: {:?}", self.groups[id]));
            }
            let first = spec.retention.first_needed(committed);
            if first >= committed {
                continue;
            }
            for index in first / spec.block_tokens..=(committed - 1) / spec.block_tokens {
                if self.get(id, index).is_none() {
                    return Err(format!(
                        "group {id}: block {index} is needed at position {committed} and is not mapped"
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use longwave_model::geometry::{Bucket, CacheKind};

    use super::*;
    use crate::testing::tiny_layout;

    /// Runs spans to their end and reports the mapped indices of `kind` while the last one is in flight.
    fn mapped(kind: CacheKind, spans: &[(u32, u32)]) -> Vec<u32> {
        let layout = tiny_layout();
        let mut pools = Pools::new([99; 3]);
        let mut blocks = SequenceBlocks::new(&layout, 4096);
        let group = layout.groups.iter().position(|g| g.kind == kind).expect("the tiny layout has every kind");
        let mut seen = Vec::new();
        for &(start, end) in spans {
            blocks.extend(&layout, &mut pools, Span { start, end, drafts: 0 });
            seen = blocks.groups[group].iter().map(|b| b.0).collect();
            blocks.retire(&layout, &mut pools, end);
            blocks.check(&layout, end, &mut [99; 3].map(PoolCount::new)).unwrap();
        }
        blocks.release(&layout, &mut pools);
        assert_eq!(pools.used(), [0; 3]);
        seen
    }

    #[test]
    fn a_chunk_maps_its_tail_and_never_its_middle() {
        // 873..=999 live in blocks 13, 14, 15 of 64.
        assert_eq!(mapped(CacheKind::Window, &[(0, 1000)]), [13, 14, 15]);
        assert_eq!(mapped(CacheKind::C4State, &[(0, 1000)]), [249]);
        assert_eq!(mapped(CacheKind::C4State, &[(0, 1001)]), [249, 250]);
        assert_eq!(mapped(CacheKind::C128State, &[(0, 1000)]), [7]);
        assert_eq!(mapped(CacheKind::C128State, &[(0, 1024)]), [0u32; 0], "the group is closed, nothing is open");
        assert_eq!(mapped(CacheKind::C4Main, &[(0, 1000)]), [0, 1, 2, 3]);
    }

    #[test]
    fn rows_that_a_chunk_reads_stay_until_it_is_committed() {
        assert_eq!(mapped(CacheKind::Window, &[(0, 100), (100, 1000)]), [0, 1, 13, 14, 15]);
        assert_eq!(mapped(CacheKind::C128State, &[(0, 130), (130, 1000)]), [1, 7]);
    }

    #[test]
    fn drafts_do_not_push_rows_out() {
        let layout = tiny_layout();
        let mut pools = Pools::new([99; 3]);
        let mut blocks = SequenceBlocks::new(&layout, 4096);
        blocks.extend(&layout, &mut pools, Span { start: 0, end: 126, drafts: 0 });
        blocks.retire(&layout, &mut pools, 126);
        // Positions 126..130 with three drafts: committed may be 127, which still has group 0 open.
        blocks.extend(&layout, &mut pools, Span { start: 126, end: 130, drafts: 3 });
        let open = layout.groups.iter().position(|g| g.kind == CacheKind::C128State).unwrap();
        assert_eq!(blocks.groups[open].iter().map(|b| b.0).collect::<Vec<_>>(), [0, 1]);
        blocks.retire(&layout, &mut pools, 127);
        assert_eq!(blocks.groups[open].len(), 2);
        blocks.retire(&layout, &mut pools, 130);
        assert_eq!(blocks.groups[open].iter().map(|b| b.0).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_freed_block_is_told_to_the_backend_once() {
        let layout = tiny_layout();
        let mut pools = Pools::new([99; 3]);
        let mut blocks = SequenceBlocks::new(&layout, 4096);
        blocks.extend(&layout, &mut pools, Span { start: 0, end: 64, drafts: 0 });
        let mut writes = Vec::new();
        blocks.take_writes(&mut writes);
        assert!(writes.iter().all(|w| w.block != BlockId::NONE));
        blocks.extend(&layout, &mut pools, Span { start: 64, end: 512, drafts: 0 });
        blocks.retire(&layout, &mut pools, 512);
        writes.clear();
        blocks.take_writes(&mut writes);
        let gone = writes.iter().filter(|w| w.block == BlockId::NONE).count();
        assert!(gone > 0);
        writes.clear();
        blocks.take_writes(&mut writes);
        assert!(writes.is_empty());
        assert!(pools.of(Bucket::Large).used() > 0);
    }
}
