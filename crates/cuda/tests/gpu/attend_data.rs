//! What tests of the core of attention share: rows as stored and as widened, queries with their picks, jobs, outputs.

use longwave_cpu::ops::rows::{load_main, store_main};
use longwave_cuda::driver::DeviceSlice;
use longwave_cuda::ops::attend::Job;
use longwave_model::MainFormat;

use crate::paged::Paged;
use crate::rig::{Fresh, Rig};

pub const REACH: u32 = 127;

/// Rows of one kind: as stored, and widened from there.
pub struct Rows {
    pub paged: Paged,
    first: u32,
    wide: Vec<f32>,
}

pub fn rows(fresh: &mut Fresh, format: MainFormat, first: u32, end: u32, shift: u32) -> Rows {
    rows_as_large(fresh, format, first, end, shift, |_| 1.7)
}

/// Rows whose values are this large at most.
pub fn rows_as_large(
    fresh: &mut Fresh,
    format: MainFormat,
    first: u32,
    end: u32,
    shift: u32,
    size: fn(u32) -> f32,
) -> Rows {
    let page = (format.row_bytes() as usize) << shift;
    let blocks = (end as usize).div_ceil(1 << shift) + 1;
    // Two seats; the rows are the second one's.
    let mut paged = Paged::from(fresh, 2, (first >> shift) as usize, blocks, shift, page);
    let mut wide = Vec::new();
    for row in first..end {
        let x: Vec<f32> = fresh.floats(512).iter().map(|v| size(row) * v).collect();
        let (slot, n) = (paged.slot(row), paged.rows());
        // The first seat has the same rows with another sign.
        let other: Vec<f32> = x.iter().map(|v| -v).collect();
        store_main(format, &other, paged.page(0, row).unwrap(), slot, n);
        let page = paged.page(1, row).unwrap();
        store_main(format, &x, page, slot, n);
        let mut y = vec![0.0; 512];
        load_main(format, page, slot, n, &mut y);
        wide.extend(y);
    }
    Rows { paged, first, wide }
}

impl Rows {
    pub fn wide(&self, row: u32) -> &[f32] {
        &self.wide[(row - self.first) as usize * 512..][..512]
    }
}

/// A query of the batch.
#[derive(Clone)]
pub struct Query {
    pub position: u32,
    pub oldest: u32,
    pub picks: Vec<u32>,
}

pub struct Outputs {
    pub out: DeviceSlice<u16>,
    pub codes: DeviceSlice<u8>,
    pub scales: DeviceSlice<f32>,
}

pub fn outputs(rig: &mut Rig, tokens: usize, heads: usize) -> Outputs {
    let n = tokens * heads * 512;
    Outputs { out: rig.poisoned(n), codes: rig.poisoned(n), scales: rig.poisoned(n / 128) }
}

pub fn job(row: usize, tokens: u32, query: &Query) -> Job {
    Job { seat: 1, row: row as u32, tokens, position: query.position, oldest: query.oldest, unused: [7; 3] }
}

pub fn put_jobs(rig: &mut Rig, jobs: &[Job]) -> DeviceSlice<u32> {
    let words: Vec<u32> = jobs.iter().flat_map(|j| [j.seat, j.row, j.tokens, j.position, j.oldest, 7, 7, 7]).collect();
    rig.put(&words)
}

pub fn picks(fresh: &mut Fresh, visible: u32, k: usize) -> Vec<u32> {
    let want = if visible as usize <= k { visible as usize } else { k };
    let mut all: Vec<u32> = (0..visible).collect();
    for i in 0..want {
        let j = i + fresh.below(all.len() - i);
        all.swap(i, j);
    }
    all.truncate(want);
    all.sort_unstable();
    all
}
