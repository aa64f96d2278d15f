//! A word of pinned memory for each of several GPUs, which their kernels read while they wait for each other, and which any
//! thread can set when a GPU has failed.
//!
//! Once it is raised, kernels do not wait any more: what they leave is worth nothing, and whoever launched them has to ask
//! [`Alarm::raised_by`] before using it. It is never taken back.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::context::Context;
use super::error::DriverError;
use super::memory::Pinned;

/// Shared by the threads of all GPUs.
#[derive(Default)]
pub struct Alarm {
    /// Addresses of the words that exist now.
    words: Mutex<Vec<usize>>,
    /// One more than the number of who raised it first.
    by: AtomicU32,
}

impl Alarm {
    /// Number `who` has failed: no kernel waits any more.
    pub fn raise(&self, who: u32) {
        let _ = self.by.compare_exchange(0, who + 1, Ordering::SeqCst, Ordering::SeqCst);
        for &word in self.words().iter() {
            // SAFETY: a word is taken out of the list, under this lock, before its memory is freed; it is aligned, and
            // only ever accessed as an atomic.
            unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(word)) }.store(1, Ordering::SeqCst);
        }
    }

    /// Who raised it first.
    pub fn raised_by(&self) -> Option<u32> {
        self.by.load(Ordering::SeqCst).checked_sub(1)
    }

    fn words(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The word of one GPU.
pub struct Bell {
    alarm: Arc<Alarm>,
    word: Pinned,
}

impl Bell {
    /// A word that `alarm` sets.
    pub fn new(context: &Context, alarm: &Arc<Alarm>) -> Result<Bell, DriverError> {
        let bell = Bell { alarm: alarm.clone(), word: Pinned::new(context, 4)? };
        alarm.words().push(bell.word.address());
        if let Some(who) = alarm.raised_by() {
            // It may have missed this word.
            alarm.raise(who);
        }
        Ok(bell)
    }

    /// Where kernels read it; not 0 once the alarm is raised.
    pub fn address(&self) -> u64 {
        self.word.address() as u64
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        let own = self.word.address();
        self.alarm.words().retain(|&word| word != own);
    }
}
