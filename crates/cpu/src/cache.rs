//! The three pools of the cache in memory, and pages inside them.
//!
//! Assumes block ids below the pool sizes; the backend checks the tables of a step before it computes.

use longwave_engine::step::{BlockId, Seat};
use longwave_engine::tables::{SeatTables, Table};
use longwave_model::CacheLayout;
use longwave_model::geometry::CacheKind;

/// Pools of one backend.
pub struct Cache {
    layout: CacheLayout,
    data: [Vec<u8>; 3],
    units: [u32; 3],
}

/// Where one layer's rows of one kind live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Group id.
    pub group: usize,
    /// Page inside a unit.
    pub page: usize,
    bucket: usize,
    /// Positions per block.
    pub block_tokens: u32,
    /// Rows per page.
    pub rows: usize,
}

impl Cache {
    /// Pools of `units` units (large, middle, small). Memory is taken from the system as it is first touched.
    pub fn new(layout: CacheLayout, units: [u32; 3]) -> Cache {
        let data = std::array::from_fn(|b| vec![0; units[b] as usize * layout.buckets[b].unit_bytes() as usize]);
        Cache { layout, data, units }
    }

    /// The layout.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Units of each pool.
    pub fn units(&self) -> [u32; 3] {
        self.units
    }

    /// Place of `kind` for `layer`; `None` when the layer has no such cache.
    pub fn place(&self, kind: CacheKind, layer: usize) -> Option<Place> {
        let (group, page) = self.layout.find(kind, layer)?;
        let g = &self.layout.groups[group];
        Some(Place {
            group,
            page,
            bucket: g.bucket as usize,
            block_tokens: g.block_tokens,
            rows: g.rows_per_block as usize,
        })
    }

    fn range(&self, place: Place, block: BlockId) -> std::ops::Range<usize> {
        let spec = &self.layout.buckets[place.bucket];
        let at = block.0 as usize * spec.unit_bytes() as usize + place.page * spec.page_bytes as usize;
        at..at + spec.page_bytes as usize
    }

    /// A page.
    pub fn page(&self, place: Place, block: BlockId) -> &[u8] {
        &self.data[place.bucket][self.range(place, block)]
    }

    /// A page to write.
    pub fn page_mut(&mut self, place: Place, block: BlockId) -> &mut [u8] {
        let r = self.range(place, block);
        &mut self.data[place.bucket][r]
    }

    /// A whole unit.
    pub fn unit(&self, bucket: usize, block: BlockId) -> &[u8] {
        let n = self.layout.buckets[bucket].unit_bytes() as usize;
        &self.data[bucket][block.0 as usize * n..][..n]
    }

    /// A whole unit to write.
    pub fn unit_mut(&mut self, bucket: usize, block: BlockId) -> &mut [u8] {
        let n = self.layout.buckets[bucket].unit_bytes() as usize;
        &mut self.data[bucket][block.0 as usize * n..][..n]
    }

    /// Copies a unit inside a pool.
    pub fn copy_unit(&mut self, bucket: usize, from: BlockId, to: BlockId) {
        let n = self.layout.buckets[bucket].unit_bytes() as usize;
        let at = from.0 as usize * n;
        self.data[bucket].copy_within(at..at + n, to.0 as usize * n);
    }
}

/// Block tables of one sequence, looked up by place and position.
#[derive(Clone, Copy)]
pub struct SeqTables<'a> {
    tables: &'a SeatTables,
    seat: Seat,
}

impl<'a> SeqTables<'a> {
    /// Tables of `seat`.
    pub fn new(tables: &'a SeatTables, seat: Seat) -> Self {
        SeqTables { tables, seat }
    }

    /// Table of a place's group.
    pub fn table(&self, place: Place) -> &'a Table {
        self.tables.table(self.seat, place.group)
    }

    /// Block that holds `position`, if it is mapped.
    pub fn block(&self, place: Place, position: u32) -> Option<BlockId> {
        self.table(place).get(position / place.block_tokens)
    }

    /// Block that holds `position`; it must be mapped, or the step is wrong.
    pub fn must(&self, place: Place, position: u32) -> BlockId {
        self.block(place, position).unwrap_or_else(|| {
            panic!("position {position} of group {} is not mapped at seat {}", place.group, self.seat.0)
        })
    }
}
