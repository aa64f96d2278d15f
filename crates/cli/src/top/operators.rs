//! What operators took on average in the steps of the last seconds, from views that each have sums over their new steps.
//! Assumes the server's `operators`; one that does not time them has none, and nothing is shown then.

use std::collections::{BTreeMap, VecDeque};

use serde_json::Value;

/// Seconds over which is averaged, back from the last view with a timed step.
const RECENT_S: f64 = 10.0;

/// Sums of views.
#[derive(Default)]
pub struct Operators {
    parts: VecDeque<Part>,
}

/// Sums of one view.
struct Part {
    at_s: f64,
    steps: u64,
    us: Vec<(String, f64)>,
}

/// What an operator takes in a step, on average.
#[derive(Debug, PartialEq)]
pub struct Mean {
    /// Its name.
    pub name: String,
    /// Microseconds of a step.
    pub us: f64,
    /// Of all operators' time.
    pub share: f64,
}

impl Operators {
    /// A view came at `at_s`, with these operators.
    pub fn take(&mut self, operators: &Value, at_s: f64) {
        let steps = operators["steps"].as_u64().unwrap_or(0);
        if steps == 0 {
            return;
        }
        self.parts.retain(|part| at_s - part.at_s < RECENT_S);
        let times = operators["times"].as_array().into_iter().flatten();
        let us = times.filter_map(|time| Some((time["name"].as_str()?.to_owned(), time["us"].as_f64()?))).collect();
        self.parts.push_back(Part { at_s, steps, us });
    }

    /// All of them, the longest first.
    pub fn means(&self) -> Vec<Mean> {
        let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
        for (name, us) in self.parts.iter().flat_map(|part| &part.us) {
            *sums.entry(name).or_default() += us;
        }
        let steps = self.parts.iter().map(|part| part.steps).sum::<u64>() as f64;
        let all: f64 = sums.values().sum();
        let mean = |(name, us): (&str, f64)| Mean { name: name.to_owned(), us: us / steps, share: us / all.max(1e-9) };
        let mut means: Vec<Mean> = sums.into_iter().map(mean).collect();
        means.sort_by(|a, b| b.us.total_cmp(&a.us));
        means
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn operators_are_averaged_over_the_steps_of_the_last_seconds() {
        let mut operators = Operators::default();
        operators.take(&Value::Null, 0.0);
        operators.take(&json!({"steps": 0, "times": []}), 0.0);
        assert_eq!(operators.means(), []);
        let of = |steps: u64, router: f64, head: f64| {
            json!({"steps": steps, "times": [
                {"name": "router", "calls": 4, "us": router}, {"name": "lm_head", "calls": 1, "us": head},
            ]})
        };
        let mean = |name: &str, us, share| Mean { name: name.into(), us, share };
        operators.take(&of(1, 900.0, 100.0), 1.0);
        operators.take(&of(3, 100.0, 500.0), 6.0);
        assert_eq!(operators.means(), [mean("router", 250.0, 0.625), mean("lm_head", 150.0, 0.375)]);
        // An idle server's stay; with new ones the old ones go.
        operators.take(&json!({"steps": 0, "times": []}), 40.0);
        assert_eq!(operators.means().len(), 2);
        operators.take(&of(1, 100.0, 300.0), 41.0);
        assert_eq!(operators.means(), [mean("lm_head", 300.0, 0.75), mean("router", 100.0, 0.25)]);
    }
}
