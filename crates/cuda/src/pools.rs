//! The three pools of the cache on the GPU, and the block tables through which kernels find their rows.
//!
//! Same layout as on the CPU: a unit has the same bytes wherever it lies. Tables are `u32 [seats, blocks]` per group and
//! follow the engine's by differences. Assumes steps that `step_check` let pass.

use longwave_engine::step::{BlockCopy, BlockId, Step};
use longwave_engine::tables::SeatTables;
use longwave_model::CacheLayout;
use longwave_model::geometry::{CacheKind, Retention};

use crate::driver::{Arena, DeviceSlice, DriverError, Stream};
use crate::ops::{Pages, UNMAPPED};

/// Pools and tables of one GPU.
pub struct Pools {
    layout: CacheLayout,
    data: [DeviceSlice<u8>; 3],
    tables: DeviceSlice<u32>,
    /// Per group: where its tables begin, and blocks of one seat.
    groups: Vec<(u32, u32)>,
}

/// Bytes of the arena that pools of `units` and the tables of `seats` seats take.
pub fn bytes(layout: &CacheLayout, units: [u32; 3], seats: u32, context: u32) -> u64 {
    let tables: u64 = layout.groups.iter().map(|g| 4 * u64::from(seats * context.div_ceil(g.block_tokens))).sum();
    layout.bytes(units) + tables + 4 * 256
}

/// Where the tables of each group begin among all of them, and the blocks of one seat.
fn places(layout: &CacheLayout, seats: u32, context: u32) -> Vec<(u32, u32)> {
    let mut next = 0;
    let group = |blocks: u32| {
        let first = next;
        next += seats * blocks;
        (first, blocks)
    };
    layout.groups.iter().map(|g| context.div_ceil(g.block_tokens)).map(group).collect()
}

/// Turns the table changes of steps into places among all tables.
pub struct Changes {
    groups: Vec<(u32, u32)>,
}

impl Changes {
    /// For pools of the same layout, seats and context.
    pub fn new(layout: &CacheLayout, seats: u32, context: u32) -> Changes {
        Changes { groups: places(layout, seats, context) }
    }

    /// The changes that a step makes, as (place, block) with distinct places. `before` are the tables before the step is
    /// applied: windows of a seat that is given to another sequence go. What a wrong step names is left out.
    pub fn of(&self, step: &Step, layout: &CacheLayout, before: &SeatTables) -> Vec<[u32; 2]> {
        let mut out = Vec::new();
        for seq in &step.seqs {
            let place = |group: usize, index: u32| {
                let &(first, blocks) = self.groups.get(group)?;
                (index < blocks).then(|| first + seq.seat.0 * blocks + index)
            };
            if seq.fresh && before.has(seq.seat) {
                for group in layout.sliding() {
                    let old = before.table(seq.seat, group).sparse().iter();
                    out.extend(old.filter_map(|&(index, _)| Some([place(group, index)?, UNMAPPED])));
                }
            }
            let writes = step.writes_of(seq).iter();
            out.extend(writes.filter_map(|w| Some([place(w.group as usize, w.index)?, w.block.0])));
        }
        // Of several changes of one place the last stays: the sort is stable, and of equal places the first is kept.
        out.reverse();
        out.sort_by_key(|change| change[0]);
        out.dedup_by_key(|change| change[0]);
        out
    }
}

impl Pools {
    /// Takes the memory; all tables are empty.
    pub fn new(
        arena: &mut Arena,
        stream: &Stream,
        layout: CacheLayout,
        units: [u32; 3],
        seats: u32,
        context: u32,
    ) -> Result<Pools, DriverError> {
        let mut pool = |b: usize| arena.slice(units[b] as usize * layout.buckets[b].unit_bytes() as usize);
        let data = [pool(0)?, pool(1)?, pool(2)?];
        let groups = places(&layout, seats, context);
        let len = groups.last().map_or(0, |(first, blocks)| first + seats * blocks);
        let tables: DeviceSlice<u32> = arena.slice(len as usize)?;
        tables.fill(stream, 0xff)?;
        Ok(Pools { layout, data, tables, groups })
    }

    /// The layout.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The tables of all groups.
    pub fn tables(&self) -> &DeviceSlice<u32> {
        &self.tables
    }

    /// Rows of `kind` in `layer`; `None` when the layer has no such cache.
    pub fn pages(&self, kind: CacheKind, layer: usize) -> Option<Pages> {
        let (group, page) = self.layout.find(kind, layer)?;
        let spec = &self.layout.groups[group];
        let bucket = &self.layout.buckets[spec.bucket as usize];
        let rows = match spec.retention {
            Retention::LongLived { ratio } => spec.block_tokens / ratio,
            Retention::SlidingWindow { .. } => spec.block_tokens,
        };
        let (first, table_len) = self.groups[group];
        Some(Pages {
            pool: self.data[spec.bucket as usize].address() + page as u64 * u64::from(bucket.page_bytes),
            table: self.tables.address() + 4 * u64::from(first),
            unit_bytes: bucket.unit_bytes(),
            table_len,
            shift: rows.ilog2(),
        })
    }

    fn unit(&self, bucket: usize, block: BlockId) -> DeviceSlice<u8> {
        let bytes = self.layout.buckets[bucket].unit_bytes() as usize;
        self.data[bucket].part(block.0 as usize * bytes..(block.0 as usize + 1) * bytes)
    }

    /// Copies a unit inside a pool.
    pub fn copy(&self, stream: &Stream, copy: &BlockCopy) -> Result<(), DriverError> {
        let bucket = copy.bucket as usize;
        self.unit(bucket, copy.to).copy_from(stream, &self.unit(bucket, copy.from))
    }

    /// The bytes of a unit.
    pub fn read(&self, stream: &Stream, bucket: u8, block: BlockId) -> Result<Vec<u8>, DriverError> {
        self.unit(bucket as usize, block).read(stream)
    }

    /// Overwrites a unit.
    pub fn write(&self, stream: &Stream, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), DriverError> {
        self.unit(bucket as usize, block).write(stream, bytes)
    }
}
