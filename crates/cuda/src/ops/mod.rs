//! The model's steps on a GPU, one file per family of kernels: it loads them once and launches them on a stream.
//!
//! Assumes that slices have the shapes that a launch names; a kernel reads and writes nothing else. Nothing here allocates
//! or waits. Numbers follow the serving profile (model.md 0.3): what is bf16 or e4m3 there is so here. A row has the same
//! bits whatever else is in its batch, in every kernel.

pub mod attend;
pub mod compress;
pub mod ends;
pub mod experts;
pub mod index;
pub mod keys;
pub mod linear_bf16;
pub mod linear_fp8;
pub mod mhc;
pub mod mtp;
pub mod quantise;
pub mod reduce;
pub mod rope;
pub mod router;
pub mod sample;

use crate::driver::{Argument, DriverError};

/// Where the rows of one layer and kind of cache are. A position's block is `position >> shift`; its page starts at
/// `pool + block_id * unit_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    /// Address of the layer's page in the first unit of the pool.
    pub pool: u64,
    /// Address of the block ids, `u32 [seats, table_len]`; [`UNMAPPED`] where no block is.
    pub table: u64,
    /// Bytes from one unit to the next.
    pub unit_bytes: u64,
    /// Blocks of a seat's table.
    pub table_len: u32,
    /// Rows (entries, or positions for windows and state) of a page, as a power of two.
    pub shift: u32,
}

/// A block that is not there: its rows are not stored and never read.
pub const UNMAPPED: u32 = u32::MAX;

impl Pages {
    /// As five parameters of a kernel: pool, table, unit_bytes, table_len, shift.
    pub fn arguments(&self) -> [Argument; 5] {
        [
            Argument::Pointer(self.pool),
            Argument::Pointer(self.table),
            Argument::U64(self.unit_bytes),
            Argument::U32(self.table_len),
            Argument::U32(self.shift),
        ]
    }
}

/// Parts into which the columns of a product are cut, each with a sum of its own: by the shape alone, so that sums have one order.
fn parts(cols: u32) -> u32 {
    if cols >= 2048 { 8 } else { 2 }
}

/// The refusal of a format that no kernel is compiled for.
fn no_kernels(rows: &str, format: &str) -> DriverError {
    let what = format!("{rows} in {format}");
    DriverError { call: "looking for kernels", what, name: "the CUDA backend has none for this format".into() }
}

/// One row of a step's batch, as four `u32` in memory of the GPU (`[T, 4]`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchRow {
    /// Row of the block tables; [`UNMAPPED`] for a padded row, which does nothing and writes nothing.
    pub seat: u32,
    /// Position in its sequence.
    pub position: u32,
    /// First position of that sequence in the step: earlier ones are in pages, later ones in the batch.
    pub start: u32,
    /// Row of the batch that holds `start`.
    pub start_row: u32,
}
