//! Work that is replayed as a graph when it comes again, by what its launches and addresses depend on.
//!
//! Assumes that equal keys mean equal launches. At most so many graphs are kept: each takes memory of the driver, for which
//! little is left. Beyond, and where the driver cannot make one, work is launched one by one, which gives the same bits.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use crate::driver::{DriverError, Graph, Stream};

/// Graphs of one kind of work: a batch of each size up to 64, and as many of its drafts.
const MOST: usize = 128;

/// Graphs by key.
pub struct Graphs<K> {
    kept: HashMap<K, Graph>,
    /// Work that came once.
    seen: HashSet<K>,
    /// The driver made none when it was asked last.
    refused: bool,
}

impl<K> Default for Graphs<K> {
    fn default() -> Self {
        Graphs { kept: HashMap::new(), seen: HashSet::new(), refused: false }
    }
}

impl<K: Eq + Hash> Graphs<K> {
    /// Submits `work` to `stream`: one launch after the other the first time, later as a graph.
    pub fn run(
        &mut self,
        stream: &Stream,
        key: K,
        work: impl Fn(&Stream) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        if let Some(graph) = self.kept.get(&key) {
            return graph.launch(stream);
        }
        // Code that is not on the GPU yet cannot be brought there inside a capture.
        if self.refused || self.kept.len() >= MOST || !self.seen.contains(&key) {
            work(stream)?;
            self.seen.insert(key);
            return Ok(());
        }
        match Graph::capture(stream, &work) {
            Ok(graph) => {
                graph.launch(stream)?;
                self.kept.insert(key, graph);
                Ok(())
            }
            Err(error) => {
                tracing::warn!("steps are launched one by one from here on: {error}");
                self.refused = true;
                work(stream)
            }
        }
    }
}
