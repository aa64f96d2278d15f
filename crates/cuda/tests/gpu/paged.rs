//! Caches in pages for tests: the same bytes on the host, for the CPU's functions, and on the GPU.

use longwave_cuda::driver::DeviceSlice;
use longwave_cuda::ops::{BatchRow, Pages, UNMAPPED};

use crate::rig::{Fresh, Rig};

/// Pages of one layer, the second of two in their units; every byte is 255 at first.
#[derive(Clone)]
pub struct Paged {
    pub bytes: Vec<u8>,
    pub table: Vec<u32>,
    len: usize,
    shift: u32,
    page: usize,
}

/// The same on the GPU.
pub struct OnGpu {
    pub bytes: DeviceSlice<u8>,
    #[allow(dead_code, reason = "keeps the memory")]
    table: DeviceSlice<u32>,
    pub pages: Pages,
    pub seats: u32,
}

impl Paged {
    /// `len` blocks for each seat, all mapped, in mixed order.
    pub fn new(fresh: &mut Fresh, seats: usize, len: usize, shift: u32, page: usize) -> Paged {
        Paged::from(fresh, seats, 0, len, shift, page)
    }

    /// As `new`, without the blocks before `first`.
    pub fn from(fresh: &mut Fresh, seats: usize, first: usize, len: usize, shift: u32, page: usize) -> Paged {
        let mut ids: Vec<u32> = (0..(seats * (len - first)) as u32).collect();
        for i in (1..ids.len()).rev() {
            ids.swap(i, fresh.below(i + 1));
        }
        let mut table = vec![UNMAPPED; seats * len];
        for (seat, ids) in ids.chunks(len - first).enumerate() {
            table[seat * len + first..(seat + 1) * len].copy_from_slice(ids);
        }
        Paged { bytes: vec![0xff; 2 * page * ids.len()], table, len, shift, page }
    }

    /// Takes blocks away.
    pub fn unmap(&mut self, seat: usize, blocks: std::ops::Range<usize>) {
        self.table[seat * self.len..][blocks].fill(UNMAPPED);
    }

    /// The page of a row.
    pub fn page(&mut self, seat: u32, row: u32) -> Option<&mut [u8]> {
        let block = self.table[seat as usize * self.len + (row >> self.shift) as usize];
        (block != UNMAPPED).then(|| &mut self.bytes[(2 * block as usize + 1) * self.page..][..self.page])
    }

    /// The place of a row in its page.
    pub fn slot(&self, row: u32) -> usize {
        row as usize % self.rows()
    }

    /// Rows of a page.
    pub fn rows(&self) -> usize {
        1 << self.shift
    }

    /// Copies all to the GPU.
    pub fn put(&self, rig: &mut Rig) -> OnGpu {
        let (bytes, table) = (rig.put(&self.bytes), rig.put(&self.table));
        let pages = Pages {
            pool: bytes.address() + self.page as u64,
            table: table.address(),
            unit_bytes: 2 * self.page as u64,
            table_len: self.len as u32,
            shift: self.shift,
        };
        OnGpu { bytes, table, pages, seats: (self.table.len() / self.len) as u32 }
    }
}

/// `rows` on the GPU.
pub fn put_rows(rig: &mut Rig, rows: &[BatchRow]) -> DeviceSlice<u32> {
    let words: Vec<u32> = rows.iter().flat_map(|r| [r.seat, r.position, r.start, r.start_row]).collect();
    rig.put(&words)
}

/// Rows of sequences (seat, first position, rows), each followed by a padded row.
pub fn batch(sequences: &[(u32, u32, u32)]) -> Vec<BatchRow> {
    let mut rows = Vec::new();
    for &(seat, start, count) in sequences {
        let start_row = rows.len() as u32;
        rows.extend((start..start + count).map(|position| BatchRow { seat, position, start, start_row }));
        rows.push(BatchRow { seat: UNMAPPED, position: 0, start: 0, start_row: 0 });
    }
    rows
}

/// Counts what differs, tells the first place, and fails when there is one.
#[track_caller]
pub fn assert_same<T: PartialEq + std::fmt::Debug>(what: &str, ours: &[T], reference: &[T]) {
    assert_eq!(ours.len(), reference.len(), "{what}");
    let different = || (0..ours.len()).filter(|&i| ours[i] != reference[i]);
    if let Some(i) = different().next() {
        let (count, all) = (different().count(), ours.len());
        panic!("{what}: {count} of {all} differ, first at {i}: {:?} instead of {:?}", ours[i], reference[i]);
    }
}

/// Bits of floats, so that NaN equals itself.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
