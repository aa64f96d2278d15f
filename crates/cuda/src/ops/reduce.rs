//! Sums over ranks: the parts that several GPUs have, added in the order of the ranks, rounded once and given to all.
//!
//! Assumes that every rank launches the same sums in the same order, one after the other, on one stream; they may be
//! captured. A value's bits depend on its parts alone and are the same on every rank. When the [`Alarm`] is raised nothing
//! waits any more, and what comes out is worthless.
//!
//! [`Alarm`]: crate::driver::Alarm

use crate::driver::{Arena, Argument, Bell, Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};

/// Blocks of a launch at most, as in kernels/reduce.cu: all of them run at once.
const BLOCKS: usize = 256;
/// Float4 of a block for which it is worth being one.
const LEAST: usize = 256;
/// Bytes of the slots of one half of a box.
const HALF_BYTES: usize = 32 << 20;

/// Memory of a rank that the others write to, and what counts the turns.
pub struct Boxes {
    /// Flags and slots.
    own: DeviceSlice<u8>,
    addresses: DeviceSlice<u64>,
    turns: DeviceSlice<u32>,
    ranks: usize,
    /// Float4 of a slot.
    most: usize,
}

/// The kernel, with the boxes of all ranks.
pub struct Reduce {
    kernel: Kernel,
    boxes: Boxes,
    rank: u32,
    bell: Bell,
}

impl Boxes {
    /// Takes the memory of one of `ranks` for sums of `len` floats at most; longer ones go through in pieces. It must be
    /// zero before any rank adds up.
    pub fn new(arena: &mut Arena, ranks: usize, len: usize) -> Result<Boxes, DriverError> {
        let quads = len.div_ceil(4).min(HALF_BYTES / 16 / ranks);
        let most = quads.div_ceil(BLOCKS).max(LEAST);
        let bytes = 4 * ranks * BLOCKS + 2 * ranks * BLOCKS * most * 16;
        Ok(Boxes { own: arena.slice(bytes)?, addresses: arena.slice(ranks)?, turns: arena.slice(BLOCKS)?, ranks, most })
    }

    /// What the other ranks must be told.
    pub fn address(&self) -> u64 {
        self.own.address()
    }
}

impl Reduce {
    /// Loads the kernel for rank `rank`; `addresses` are those of all boxes by rank, which this GPU can reach.
    pub fn new(
        context: &Context,
        stream: &Stream,
        boxes: Boxes,
        rank: usize,
        addresses: &[u64],
        bell: Bell,
    ) -> Result<Reduce, DriverError> {
        assert!(addresses.len() == boxes.ranks && addresses[rank] == boxes.address(), "boxes of all ranks");
        boxes.addresses.write(stream, addresses)?;
        let kernel = Module::load(context, "reduce")?.kernel("sum_ranks", 0)?;
        Ok(Reduce { kernel, boxes, rank: rank as u32, bell })
    }

    /// The sum of what all ranks have at `part` (`len` floats), as bf16 at `out`.
    pub fn sum(&self, stream: &Stream, part: u64, out: u64, len: u64) -> Result<(), DriverError> {
        assert!(len.is_multiple_of(4), "fours, not {len} values");
        let (quads, most) = (len / 4, self.boxes.most as u64);
        let whole = most * BLOCKS as u64;
        for from in (0..quads).step_by(whole as usize) {
            let count = whole.min(quads - from);
            let blocks = count.div_ceil(LEAST as u64).min(BLOCKS as u64);
            let arguments = [
                Argument::Pointer(part + 16 * from),
                Argument::from(&self.boxes.addresses),
                Argument::from(&self.boxes.turns),
                Argument::Pointer(self.bell.address()),
                Argument::Pointer(out + 8 * from),
                Argument::U64(count),
                Argument::U32(count.div_ceil(blocks) as u32),
                Argument::U32(self.boxes.most as u32),
                self.rank.into(),
                Argument::U32(self.boxes.ranks as u32),
            ];
            stream.launch(&self.kernel, Grid::new(blocks as u32, 256), &arguments)?;
        }
        Ok(())
    }
}
