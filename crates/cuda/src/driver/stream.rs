//! Streams and events.
//! Work on a stream runs in order. An event marks a place in it, for waiting and for measuring.

use std::cell::Cell;

use cudarc::driver::sys;

use super::context::Context;
use super::error::{DriverError, check};

/// A stream of a GPU.
pub struct Stream {
    pub(super) handle: sys::CUstream,
    /// The next launch follows an event of another stream.
    pub(super) joins: Cell<bool>,
    /// Outlives it.
    pub(super) context: Context,
}

impl Stream {
    /// A stream that does not wait for the default one.
    pub fn new(context: &Context) -> Result<Stream, DriverError> {
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) }, || "a stream".into())?;
        Ok(Stream { handle, joins: Cell::new(false), context: context.clone() })
    }

    /// Waits until all of it is done.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream exists.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) }, || "a stream".into())
    }

    /// Later work waits for `event`.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        self.joins.set(true);
        // SAFETY: both exist; 0 is the only value of the flags.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.handle, event.handle, 0) }, || {
            "an event".into()
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream exists; its work goes on to its end.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
    }
}

/// A place in a stream.
pub struct Event {
    handle: sys::CUevent,
    #[allow(dead_code, reason = "destroyed while its context still exists")]
    context: Context,
}

impl Event {
    /// An event that measures time.
    pub fn new(context: &Context) -> Result<Event, DriverError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle; 0 are the default flags.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, 0) }, || "an event".into())?;
        Ok(Event { handle, context: context.clone() })
    }

    /// Puts it behind what was submitted to `stream`.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both exist.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream.handle) }, || "an event".into())
    }

    /// Waits for it, then tells the time since `start`, microseconds.
    pub fn elapsed_us(&self, start: &Event) -> Result<f64, DriverError> {
        // SAFETY: the event exists.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) }, || "an event".into())?;
        let mut ms = 0.0;
        // SAFETY: both exist and were recorded; writes one float.
        let result = unsafe { sys::cuEventElapsedTime_v2(&mut ms, start.handle, self.handle) };
        check("cuEventElapsedTime", result, || "two events".into())?;
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event exists.
        let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
    }
}
