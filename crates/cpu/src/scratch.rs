//! Large buffers that are used again, so that a step does not fault in fresh pages. Small lists are still allocated.
//!
//! A buffer's old contents stay in it; every op writes all of what it hands on. In debug builds they are overwritten
//! with NaN, so that a forgotten write shows.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// A shelf of idle buffers.
#[derive(Clone, Default)]
pub struct Scratch(Arc<Mutex<Shelf>>);

#[derive(Default)]
struct Shelf {
    idle: Vec<Vec<f32>>,
    /// Floats of all buffers, idle and borrowed, now and at most so far.
    held: usize,
    peak: usize,
}

/// A borrowed buffer; it goes back to the shelf when dropped.
pub struct Buffer {
    data: Vec<f32>,
    len: usize,
    shelf: Scratch,
}

/// Idle buffers kept at most.
const SHELF: usize = 64;

impl Scratch {
    /// A buffer of `len` floats with arbitrary contents.
    pub fn take(&self, len: usize) -> Buffer {
        let mut shelf = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = &mut shelf.idle;
        // The smallest that is large enough, else the largest, which then grows.
        let best = idle.iter().enumerate().filter(|(_, b)| b.len() >= len).min_by_key(|(_, b)| b.len());
        let pick = best.or_else(|| idle.iter().enumerate().max_by_key(|(_, b)| b.len())).map(|(i, _)| i);
        let mut data = pick.map(|i| idle.swap_remove(i)).unwrap_or_default();
        shelf.held += len.saturating_sub(data.len());
        shelf.peak = shelf.peak.max(shelf.held);
        drop(shelf);
        if data.len() < len {
            // A fresh allocation: nothing of the old one is needed, and exactly what is counted.
            data = Vec::new();
            data.reserve_exact(len);
            data.resize(len, 0.0);
        }
        if cfg!(debug_assertions) {
            data[..len].fill(f32::NAN);
        }
        Buffer { data, len, shelf: self.clone() }
    }

    /// Bytes of all buffers at their most.
    pub fn peak_bytes(&self) -> u64 {
        4 * self.0.lock().unwrap_or_else(PoisonError::into_inner).peak as u64
    }

    /// A buffer that holds a copy of `x`.
    pub fn copy(&self, x: &[f32]) -> Buffer {
        let mut b = self.take(x.len());
        b.copy_from_slice(x);
        b
    }

    /// A buffer of zeros.
    pub fn zeros(&self, len: usize) -> Buffer {
        let mut b = self.take(len);
        b.fill(0.0);
        b
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.data[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut shelf = self.shelf.0.lock().unwrap_or_else(PoisonError::into_inner);
        if shelf.idle.len() < SHELF {
            shelf.idle.push(std::mem::take(&mut self.data));
        } else {
            shelf.held -= self.data.len();
        }
    }
}
