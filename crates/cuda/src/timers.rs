//! Where the time of steps goes: an event behind every operator, on the operator's own stream.
//!
//! Switched on for a while by who wants to know; steps are not replayed as graphs meanwhile, so gaps between launches count
//! to the operator behind them.

use std::cell::RefCell;

use longwave_engine::operators::{OperatorSums, OperatorTime};

use crate::driver::{Context, DriverError, Event, Stream};

/// Events of the steps since it was switched on.
pub struct Timers {
    context: Context,
    marks: RefCell<Vec<(&'static str, Event)>>,
}

impl Timers {
    /// None yet.
    pub fn new(context: &Context) -> Timers {
        Timers { context: context.clone(), marks: RefCell::default() }
    }

    /// Ends the operator `name`.
    pub fn mark(&self, stream: &Stream, name: &'static str) -> Result<(), DriverError> {
        let event = Event::new(&self.context)?;
        event.record(stream)?;
        self.marks.borrow_mut().push((name, event));
        Ok(())
    }

    /// The operators so far, the longest first.
    pub fn table(&self) -> Result<Vec<OperatorTime>, DriverError> {
        let marks = self.marks.borrow();
        let mut sums = OperatorSums::default();
        for pair in marks.windows(2) {
            sums.add(pair[1].0, pair[1].1.elapsed_us(&pair[0].1)?);
        }
        Ok(sums.table())
    }
}
