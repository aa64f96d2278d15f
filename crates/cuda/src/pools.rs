//! The three pools of the cache on the GPU, and the block tables through which kernels find their rows.
//!
//! Same layout as on the CPU: a unit has the same bytes wherever it lies. Tables are `u32 [seats, blocks]` per group and
//! follow the engine's by differences. Assumes steps that `step_check` let pass.

use longwave_engine::step::{BlockCopy, BlockId, Step};
use longwave_engine::tables::SeatTables;
use longwave_model::CacheLayout;
use longwave_model::geometry::{CacheKind, Retention, WINDOW_BLOCK};

use crate::driver::{Arena, DeviceSlice, DriverError, Stream};
use crate::ops::{Pages, UNMAPPED};

/// Pools and tables of one GPU.
pub struct Pools {
    layout: CacheLayout,
    data: [DeviceSlice<u8>; 3],
    /// Window rows of a step: pages like those of the window groups, but only for the time of the step.
    local: DeviceSlice<u8>,
    tables: DeviceSlice<u32>,
    places: Places,
}

/// Sizes of pools and tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSizes {
    /// Units of each pool.
    pub units: [u32; 3],
    /// Seats.
    pub seats: u32,
    /// Largest context.
    pub context: u32,
    /// Tokens of the largest step.
    pub step_tokens: u32,
}

/// Pages of window rows that a step needs at most: its own rows, and a window and cut pages for each sequence.
fn local_pages(sizes: &PoolSizes) -> u32 {
    sizes.step_tokens / WINDOW_BLOCK + 4 * sizes.seats.min(sizes.step_tokens)
}

/// Bytes of one page of window rows of a step.
fn local_page_bytes(layout: &CacheLayout) -> u32 {
    WINDOW_BLOCK * layout.formats.main.row_bytes()
}

/// Words of all block tables of `seats` seats.
pub fn table_words(layout: &CacheLayout, seats: u32, context: u32) -> u64 {
    let blocks = |tokens: u32| u64::from(context.div_ceil(tokens));
    let groups = layout.groups.iter().map(|g| g.block_tokens);
    let longest = groups.clone().map(blocks).max().unwrap_or(0);
    u64::from(seats) * groups.chain([WINDOW_BLOCK]).map(blocks).sum::<u64>() + longest
}

/// Bytes of the arena that pools and tables take.
pub fn bytes(layout: &CacheLayout, sizes: &PoolSizes) -> u64 {
    let tables = 4 * table_words(layout, sizes.seats, sizes.context);
    let local = u64::from(local_pages(sizes)) * u64::from(local_page_bytes(layout));
    layout.bytes(sizes.units) + tables + local + 5 * 256
}

/// Where tables are among all of them, in words.
#[derive(Debug, Clone)]
struct Places {
    /// Of each group: its first table, and blocks of one seat.
    groups: Vec<(u32, u32)>,
    /// Tables of the step's own window pages: the first, and blocks of one seat.
    local: (u32, u32),
    /// As many blocks as any table has, none of which is there.
    hidden: u32,
    /// All words.
    len: u32,
    /// Rows of every table.
    seats: u32,
}

impl Places {
    fn new(layout: &CacheLayout, seats: u32, context: u32) -> Places {
        let mut next = 0;
        let mut tables = |block_tokens: u32| {
            let (first, blocks) = (next, context.div_ceil(block_tokens));
            next += seats * blocks;
            (first, blocks)
        };
        let groups: Vec<(u32, u32)> = layout.groups.iter().map(|g| tables(g.block_tokens)).collect();
        let local = tables(WINDOW_BLOCK);
        let longest = groups.iter().map(|group| group.1).max().unwrap_or(0);
        Places { groups, local, hidden: next, len: next + longest, seats }
    }
}

/// Turns the table changes of steps into places among all tables.
pub struct Changes {
    places: Places,
}

impl Changes {
    /// For pools of the same layout, seats and context.
    pub fn new(layout: &CacheLayout, seats: u32, context: u32) -> Changes {
        Changes { places: Places::new(layout, seats, context) }
    }

    /// The changes that a step makes, as (place, block) with distinct places. `before` are the tables before the step is
    /// applied: windows of a seat that is given to another sequence go. What a wrong step names is left out.
    pub fn of(&self, step: &Step, layout: &CacheLayout, before: &SeatTables) -> Vec<[u32; 2]> {
        let mut out = Vec::new();
        for seq in &step.seqs {
            let place = |group: usize, index: u32| {
                let &(first, blocks) = self.places.groups.get(group)?;
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
        sizes: &PoolSizes,
    ) -> Result<Pools, DriverError> {
        let mut pool = |b: usize| arena.slice(sizes.units[b] as usize * layout.buckets[b].unit_bytes() as usize);
        let data = [pool(0)?, pool(1)?, pool(2)?];
        let local = arena.slice(local_pages(sizes) as usize * local_page_bytes(&layout) as usize)?;
        let places = Places::new(&layout, sizes.seats, sizes.context);
        let tables: DeviceSlice<u32> = arena.slice(places.len as usize)?;
        tables.fill(stream, 0xff)?;
        Ok(Pools { layout, data, local, tables, places })
    }

    /// Window rows of a step.
    pub fn local(&self) -> Pages {
        Pages {
            pool: self.local.address(),
            table: self.tables.address() + 4 * u64::from(self.places.local.0),
            unit_bytes: u64::from(local_page_bytes(&self.layout)),
            table_len: self.places.local.1,
            shift: WINDOW_BLOCK.ilog2(),
        }
    }

    /// Gives the sequences of a step their own window pages: (seat, first position, end). Every page that their queries
    /// see is set anew.
    pub fn give_local(&self, sequences: impl Iterator<Item = (u32, u32, u32)>, changes: &mut Vec<[u32; 2]>) {
        let (first, blocks) = self.places.local;
        let mut page = 0;
        for (seat, start, end) in sequences {
            let from = start.saturating_sub(self.layout.reach()) / WINDOW_BLOCK;
            for block in from..end.div_ceil(WINDOW_BLOCK) {
                changes.push([first + seat * blocks + block, page]);
                page += 1;
            }
        }
    }

    /// Entries that are nowhere, for every seat.
    pub fn hidden(&self) -> Pages {
        Pages {
            pool: 0,
            table: self.tables.address() + 4 * u64::from(self.places.hidden),
            unit_bytes: 0,
            table_len: 0,
            shift: 0,
        }
    }

    /// The layout.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Rows of every table.
    pub fn seats(&self) -> u32 {
        self.places.seats
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
        let (first, table_len) = self.places.groups[group];
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

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_engine::step::{Seat, SeqStep, TableWrite};
    use longwave_model::{CacheFormats, IndexFormat, MainFormat, presets};

    fn layout() -> CacheLayout {
        CacheLayout::new(&presets::flash(), CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 })
    }

    fn step(fresh: bool, seat: u32, writes: &[(usize, u32, BlockId)]) -> Step {
        let write = |&(group, index, block): &(usize, u32, BlockId)| TableWrite { group: group as u8, index, block };
        let seq = SeqStep { fresh, writes: 0..writes.len() as u32, ..SeqStep::new(Seat(seat), 0, 0..0) };
        Step { seqs: vec![seq], writes: writes.iter().map(write).collect(), ..Step::default() }
    }

    #[test]
    fn tables_do_not_overlap_and_hidden_entries_cover_every_index() {
        let (layout, seats, context) = (layout(), 3, 1 << 20);
        let places = Places::new(&layout, seats, context);
        let mut next = 0;
        for (&(first, blocks), group) in places.groups.iter().zip(&layout.groups) {
            assert_eq!((first, blocks), (next, context / group.block_tokens));
            next += seats * blocks;
        }
        assert_eq!(places.local.0, next);
        assert_eq!(places.hidden, next + seats * places.local.1);
        // The largest index of an entry: one per four positions.
        assert!(places.len - places.hidden >= context / 4);
        assert_eq!(u64::from(places.len), table_words(&layout, seats, context));
    }

    #[test]
    fn a_seat_that_is_given_away_loses_its_windows_and_the_last_change_of_a_place_stays() {
        let (layout, context) = (layout(), 4096);
        let window = layout.groups.iter().position(|g| g.kind == CacheKind::Window).unwrap();
        let (mut tables, changes) = (SeatTables::new(&layout, 2), Changes::new(&layout, 2, context));
        let place = |seat: u32, index: u32| {
            let (first, blocks) = changes.places.groups[window];
            first + seat * blocks + index
        };
        let begin = step(true, 1, &[(window, 0, BlockId(7)), (window, 1, BlockId(8)), (window, 0, BlockId::NONE)]);
        assert_eq!(changes.of(&begin, &layout, &tables), [[place(1, 0), UNMAPPED], [place(1, 1), 8]]);
        tables.apply(&begin, &begin.seqs[0]).unwrap();
        let other = step(true, 1, &[(window, 5, BlockId(9)), (window, 1, BlockId(3))]);
        assert_eq!(changes.of(&other, &layout, &tables), [[place(1, 1), 3], [place(1, 5), 9]]);
        let third = step(true, 1, &[(window, 5, BlockId(9))]);
        assert_eq!(changes.of(&third, &layout, &tables), [[place(1, 1), UNMAPPED], [place(1, 5), 9]]);
        // What `step_check` refuses harms nobody before.
        let wrong = step(true, 9, &[(99, 0, BlockId(1)), (window, 1 << 20, BlockId(1))]);
        assert_eq!(changes.of(&wrong, &layout, &tables), Vec::<[u32; 2]>::new());
    }
}
