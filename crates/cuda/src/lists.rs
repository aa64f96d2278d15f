//! Lists of a step on the GPU: written into pinned memory one after the other, copied at once.
//!
//! Assumes that the GPU is done with the lists of the step before when the next ones are written. Refuses more than was
//! planned.

use crate::driver::{Arena, Context, DeviceSlice, DriverError, Pinned, Stream};

/// Words of a step's lists.
pub struct Lists {
    device: DeviceSlice<u32>,
    pinned: Pinned,
    used: usize,
}

/// Lists begin at multiples of this many words.
const ALIGN: usize = 4;

impl Lists {
    /// Room for `words`.
    pub fn new(context: &Context, arena: &mut Arena, words: usize) -> Result<Lists, DriverError> {
        Ok(Lists { device: arena.slice(words)?, pinned: Pinned::new(context, 4 * words)?, used: 0 })
    }

    /// Forgets all lists.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// Adds a list; its address on the GPU, where it is after [`Lists::upload`].
    pub fn push(&mut self, words: impl ExactSizeIterator<Item = u32>) -> Result<u64, DriverError> {
        let (from, len) = (self.used.next_multiple_of(ALIGN), words.len());
        if from + len > self.device.len() {
            let what = format!("{len} words behind {from} of {}", self.device.len());
            return Err(DriverError { call: "listing a step", what, name: "the plan was too small".into() });
        }
        let bytes = &mut self.pinned.bytes_mut()[4 * from..4 * (from + len)];
        for (to, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        self.used = from + len;
        Ok(self.device.address() + 4 * from as u64)
    }

    /// Copies all lists, in order with the work on `stream`.
    pub fn upload(&self, stream: &Stream) -> Result<(), DriverError> {
        self.device.part(0..self.used).write_pinned(stream, &self.pinned)
    }
}
