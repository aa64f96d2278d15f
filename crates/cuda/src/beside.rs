//! A second stream beside a step's own: the indexer with its keys in c4 layers, the compressor in c128 layers, the shared expert
//! of few tokens beside the router and the routed experts.
//!
//! What both streams read is there before they part, they write different buffers, and they meet before anybody reads what
//! either wrote.

use crate::driver::{Context, DriverError, Event, Stream};
use crate::forward::Model;

/// A second stream, and the places where the two part and meet.
pub(crate) struct Beside {
    stream: Stream,
    parted: Event,
    met: Event,
}

impl Beside {
    /// A stream on the GPU of `context`.
    pub fn new(context: &Context) -> Result<Beside, DriverError> {
        let (parted, met) = (Event::new(context)?, Event::new(context)?);
        Ok(Beside { stream: Stream::new(context)?, parted, met })
    }
}

impl Model {
    /// The second stream, if there is `work` for it and while no timer needs all work in one.
    fn beside(&self, work: bool) -> Option<&Beside> {
        self.beside.as_ref().filter(|_| work && self.timers.is_none())
    }

    /// Lets `work` run beside what comes next in `stream` if it `may`, or in it.
    pub(crate) fn part(
        &self,
        stream: &Stream,
        may: bool,
        work: impl FnOnce(&Stream) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let Some(beside) = self.beside(may) else { return work(stream) };
        beside.parted.record(stream)?;
        beside.stream.wait(&beside.parted)?;
        work(&beside.stream)?;
        beside.met.record(&beside.stream)
    }

    /// Waits for what ran beside, if it `may`.
    pub(crate) fn meet(&self, stream: &Stream, may: bool) -> Result<(), DriverError> {
        self.beside(may).map_or(Ok(()), |beside| stream.wait(&beside.met))
    }
}
