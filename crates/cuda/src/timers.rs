//! Where the time of steps goes: an event behind every operator, on the operator's own stream.
//!
//! Switched on for a while by who wants to know; steps are not replayed as graphs meanwhile, so gaps between launches count
//! to the operator behind them.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::driver::{Context, DriverError, Event, Stream};

/// Events of the steps since it was switched on.
pub struct Timers {
    context: Context,
    marks: RefCell<Vec<(&'static str, Event)>>,
}

/// What one operator took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OperatorTime {
    /// Its name.
    pub name: &'static str,
    /// How often it ran.
    pub calls: u32,
    /// Microseconds in all.
    pub us: f64,
}

/// The mark before the first operator of a step: the time up to it is not counted.
pub const START: &str = "start";

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
        let mut sums: BTreeMap<&'static str, (u32, f64)> = BTreeMap::new();
        for pair in marks.windows(2) {
            if pair[1].0 != START {
                let sum = sums.entry(pair[1].0).or_default();
                *sum = (sum.0 + 1, sum.1 + pair[1].1.elapsed_us(&pair[0].1)?);
            }
        }
        let mut table: Vec<OperatorTime> =
            sums.into_iter().map(|(name, (calls, us))| OperatorTime { name, calls, us }).collect();
        table.sort_by(|a, b| b.us.total_cmp(&a.us));
        Ok(table)
    }
}
