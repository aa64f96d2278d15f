//! CUDA graphs: work of a stream, captured once and replayed at one launch.
//! What is captured must not allocate, wait for the host or touch another stream that is not joined to this one. Other
//! threads may do what they like meanwhile, but for waiting for the whole GPU, which [`Context::synchronize`] puts off.
//!
//! [`Context::synchronize`]: super::context::Context::synchronize

use cudarc::driver::sys;

use super::error::{DriverError, check};
use super::stream::Stream;

/// Captured work, ready to run.
pub struct Graph {
    executable: sys::CUgraphExec,
}

impl Graph {
    /// Captures what `work` submits to `stream`. Nothing of it runs yet.
    pub fn capture(
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<(), DriverError>,
    ) -> Result<Graph, DriverError> {
        let what = || "a graph".to_owned();
        let _capturing = stream.context.capturing();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists and captures nothing yet.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.handle, mode) }, what)?;
        let worked = work(stream);
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture that was begun above, also after a failure.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream.handle, &mut graph) }, what);
        worked.and(ended)?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was just made; writes one handle.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        // SAFETY: the executable does not need the graph any more.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        check("cuGraphInstantiate", made, what)?;
        Ok(Graph { executable })
    }

    /// Runs it on `stream`.
    pub fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both exist.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.executable, stream.handle) }, || "a graph".into())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made once above; a replay under way goes on to its end.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}
