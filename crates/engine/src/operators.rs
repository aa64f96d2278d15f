//! What operators of a backend took, by name, for whoever wants to know where the time of steps goes.
//! Assumes times from a backend that was told to take them ([`crate::step::Backend::time_operators`]).

use std::collections::BTreeMap;

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

/// Times of operators, added up.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OperatorSums(BTreeMap<&'static str, (u32, f64)>);

impl OperatorSums {
    /// One run of an operator. What ends at a [`START`] belongs to none.
    pub fn add(&mut self, name: &'static str, us: f64) {
        if name != START {
            self.merge(&OperatorTime { name, calls: 1, us });
        }
    }

    /// What an operator took in other steps.
    pub fn merge(&mut self, time: &OperatorTime) {
        let sum = self.0.entry(time.name).or_default();
        *sum = (sum.0 + time.calls, sum.1 + time.us);
    }

    /// All of them, the longest first.
    pub fn table(&self) -> Vec<OperatorTime> {
        let mut table: Vec<OperatorTime> =
            self.0.iter().map(|(&name, &(calls, us))| OperatorTime { name, calls, us }).collect();
        table.sort_by(|a, b| b.us.total_cmp(&a.us));
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_add_up_and_the_longest_comes_first() {
        let mut sums = OperatorSums::default();
        for (name, us) in [("router", 2.0), (START, 900.0), ("wq_b", 5.0), ("router", 1.5)] {
            sums.add(name, us);
        }
        let of = |name, calls, us| OperatorTime { name, calls, us };
        assert_eq!(sums.table(), [of("wq_b", 1, 5.0), of("router", 2, 3.5)]);
        sums.merge(&of("router", 3, 2.0));
        assert_eq!(sums.table(), [of("router", 5, 5.5), of("wq_b", 1, 5.0)]);
    }
}
