//! Where the time of steps goes: a look at the clock behind every operator, on the thread that computes the step.
//!
//! Switched on for a while by who wants to know. Operators are those of `longwave_model::floors`, by their names; routed and
//! shared experts run side by side and are one.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use longwave_engine::operators::{OperatorSums, OperatorTime};

/// Times of the operators since they were switched on.
pub(crate) struct Timers(Mutex<Clock>);

struct Clock {
    last: Instant,
    sums: OperatorSums,
}

impl Timers {
    /// None yet.
    pub fn new() -> Timers {
        Timers(Mutex::new(Clock { last: Instant::now(), sums: OperatorSums::default() }))
    }

    /// Ends the operator `name`, which began where the one before it ended.
    pub fn mark(&self, name: &'static str) {
        let mut clock = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let us = (now - clock.last).as_secs_f64() * 1e6;
        clock.last = now;
        clock.sums.add(name, us);
    }

    /// The operators so far, the longest first.
    pub fn table(&self) -> Vec<OperatorTime> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).sums.table()
    }
}
