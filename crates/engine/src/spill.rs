//! What a request keeps in host memory when it loses its seat: windows, compressor state and the blocks that are not
//! published yet.
//!
//! Published blocks stay with the prefix cache, which may evict them; a spill is of use only while they are all there.
//! Assumes that no step is in flight. Reads and writes whole units through the backend; the bytes are not looked at.

use longwave_model::CacheLayout;
use longwave_model::geometry::LOGICAL_BLOCK;

use crate::blocks::SequenceBlocks;
use crate::pool::Units;
use crate::sequence::Sequence;
use crate::step::{Backend, BackendError, BlockId};

/// Fewer tokens than this are computed again sooner than their state is copied twice.
pub(crate) const WORTH_TOKENS: u32 = 16;

/// Rows of a request without a seat.
#[derive(Debug)]
pub(crate) struct Spill {
    /// Positions that they belong to: everything before it was committed.
    pub committed: u32,
    /// Blocks of the prefix cache that must still be there.
    pub published: u32,
    /// Group and block index of each unit, in the order of `bytes`.
    units: Vec<(u8, u32)>,
    bytes: Vec<u8>,
}

impl Spill {
    /// Bytes that a spill of `sequence` takes.
    pub fn bytes_of(layout: &CacheLayout, sequence: &Sequence) -> u64 {
        let mut units = [0; 3];
        for (group, _, _) in spilled(layout, sequence) {
            units[layout.groups[group].bucket as usize] += 1;
        }
        layout.bytes(units)
    }

    /// Copies what `sequence` alone has.
    pub fn take<B: Backend>(layout: &CacheLayout, sequence: &Sequence, backend: &mut B) -> Result<Spill, BackendError> {
        let mut spill = Spill {
            committed: sequence.committed,
            published: sequence.reuse.published,
            units: Vec::new(),
            bytes: Vec::with_capacity(Spill::bytes_of(layout, sequence) as usize),
        };
        for (group, index, block) in spilled(layout, sequence) {
            let bucket = layout.groups[group].bucket;
            let start = spill.bytes.len();
            spill.bytes.resize(start + layout.buckets[bucket as usize].unit_bytes() as usize, 0);
            backend.read_unit(bucket as u8, block, &mut spill.bytes[start..])?;
            spill.units.push((group as u8, index));
        }
        Ok(spill)
    }

    /// Units that [`Spill::restore`] maps.
    pub fn units(&self, layout: &CacheLayout) -> Units {
        let mut units = [0; 3];
        for &(group, _) in &self.units {
            units[layout.groups[group as usize].bucket as usize] += 1;
        }
        units
    }

    /// Maps a new unit for each one that was copied, behind the published blocks, and writes it.
    pub fn restore<B: Backend>(
        &self,
        layout: &CacheLayout,
        blocks: &mut SequenceBlocks,
        pools: &mut crate::pool::Pools,
        backend: &mut B,
    ) -> Result<(), BackendError> {
        let mut bytes = self.bytes.as_slice();
        for &(group, index) in &self.units {
            let bucket = layout.groups[group as usize].bucket;
            let (unit, rest) = bytes.split_at(layout.buckets[bucket as usize].unit_bytes() as usize);
            bytes = rest;
            let block = blocks.map_new(layout, pools, group as usize, index);
            backend.write_unit(bucket as u8, block, unit)?;
        }
        Ok(())
    }

    /// Host memory held.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }
}

/// Group, index and id of the blocks that only `sequence` has: all of the sliding groups, and the last ones of the others.
fn spilled<'a>(
    layout: &'a CacheLayout,
    sequence: &'a Sequence,
) -> impl Iterator<Item = (usize, u32, BlockId)> + use<'a> {
    let published = sequence.reuse.published;
    layout.groups.iter().enumerate().flat_map(move |(group, spec)| {
        let own = sequence.blocks.of(group).iter();
        let first = if spec.is_sliding() { 0 } else { published };
        // Behind the last committed position there are only rows that will be written first.
        let end = sequence.committed.div_ceil(if spec.is_sliding() { spec.block_tokens } else { LOGICAL_BLOCK });
        own.filter(move |b| (first..end).contains(&b.0)).map(move |&(index, block)| (group, index, block))
    })
}
