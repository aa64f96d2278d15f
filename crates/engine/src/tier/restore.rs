//! Records become cached blocks again: as if the sequence that is being admitted had computed them.
//!
//! Assumes a sequence that maps the device's blocks of its text and whose promise covers its whole prompt, so there is
//! always room; blocks are taken, written and published in the usual way, and others share them at once. Assumes checked
//! records; refuses nothing else.

use super::load::Staged;
use super::record::Title;
use super::{Key, Tiers};
use crate::pool::Pools;
use crate::prefix::PrefixCache;
use crate::sequence::Sequence;
use crate::step::{Backend, BackendError};

/// Writes the records of `staged` to blocks of `sequence` and publishes them.
pub(crate) fn restore<B: Backend>(
    tiers: &mut Tiers,
    staged: &Staged,
    sequence: &mut Sequence,
    prefix: &mut PrefixCache,
    pools: &mut Pools,
    backend: &mut B,
    now: u64,
) -> Result<(), BackendError> {
    let records = || staged.nodes.iter().chain([&staged.checkpoint]);
    let mut units = [0; 3];
    for (_, title, _) in records() {
        for unit in places(tiers, title) {
            units[tiers.form.layout.groups[unit.0].bucket as usize] += 1;
        }
    }
    prefix.make_room(pools, units);
    for (record, title, _) in records() {
        let ranges = tiers.form.ranges(title.key.kind, title.depth);
        for ((group, index), range) in places(tiers, title).into_iter().zip(ranges) {
            let bucket = tiers.form.layout.groups[group].bucket;
            let block = sequence.blocks.map_new(&tiers.form.layout, pools, group, index);
            tiers.scratch.clear();
            tiers.scratch.extend_from_slice(&record[range]);
            tiers.scratch.resize(tiers.form.layout.buckets[bucket as usize].unit_bytes() as usize, 0);
            backend.write_unit(bucket as u8, block, &tiers.scratch)?;
        }
    }
    prefix.publish_restored(sequence, pools, now);
    Ok(())
}

/// Group and block index of the units of a record.
fn places(tiers: &Tiers, title: &Title) -> Vec<(usize, u32)> {
    let Key { kind, .. } = title.key;
    tiers.form.units(kind, title.depth).iter().map(|u| (u.group as usize, u.index)).collect()
}
