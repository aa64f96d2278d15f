//! The last steps, and what their operators took where that is allowed, while somebody looks.
//!
//! Assumes to be told of every look and of every step, before and after it, with the clock of whoever drives the loop.
//! Timers make steps slower, so they go on with the first look and off before the first step that nobody watches; times
//! are read after every step, because a backend keeps what it was not asked for.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::step::{Backend, BackendError};
use crate::view::StepView;

/// Steps that a view remembers.
const STEPS_SEEN: usize = 256;
/// Steps are recorded for so long after a look.
const WATCHED: Duration = Duration::from_secs(10);
/// And kept for who looks seldom: a little longer than the longest time between two views of the API.
const KEPT: Duration = Duration::from_secs(70);

/// See the [module](self).
pub(crate) struct Watched {
    operator_times: bool,
    last_look: Option<Instant>,
    records: bool,
    steps: VecDeque<StepView>,
}

impl Watched {
    /// Nobody looks yet. `operator_times` allows the timers.
    pub fn new(operator_times: bool) -> Watched {
        Watched { operator_times, last_look: None, records: false, steps: VecDeque::new() }
    }

    /// Somebody looks.
    pub fn look(&mut self, backend: &mut impl Backend, now: Instant) -> Result<(), BackendError> {
        if self.last_look.is_some_and(|look| now.duration_since(look) > KEPT) {
            self.steps.clear();
        }
        if self.operator_times && !self.records {
            backend.time_operators(true)?;
        }
        (self.last_look, self.records) = (Some(now), true);
        Ok(())
    }

    /// Before a step: records no more when the last look is too long ago.
    pub fn before_step(&mut self, backend: &mut impl Backend, now: Instant) -> Result<(), BackendError> {
        if self.records && self.last_look.is_some_and(|look| now.duration_since(look) > WATCHED) {
            self.records = false;
            if self.operator_times {
                backend.time_operators(false)?;
            }
        }
        Ok(())
    }

    /// After a step, which is `step` but for its operators.
    pub fn after_step(&mut self, backend: &mut impl Backend, mut step: StepView) -> Result<(), BackendError> {
        if !self.records {
            return Ok(());
        }
        if self.operator_times {
            step.operators = backend.time_operators(true)?.into();
        }
        if self.steps.len() == STEPS_SEEN {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
        Ok(())
    }

    /// The last steps while somebody looked.
    pub fn steps(&self) -> Vec<StepView> {
        self.steps.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::options::EngineOptions;
    use crate::sim::{SimBackend, SimOptions};
    use crate::step::Limits;
    use crate::testing::{request, tiny_layout};

    const LONGER: Duration = WATCHED.saturating_add(Duration::from_millis(1));

    /// An engine that decodes one request, a step at a time.
    fn busy() -> Engine<SimBackend> {
        let limits =
            Limits { seats: 1, step_tokens: 512, context: 4096, units: [900; 3], drafts: 0, in_flight: 1, vocab: 1000 };
        let backend = SimBackend::new(tiny_layout(), limits, SimOptions::default());
        let mut engine = Engine::new(backend, EngineOptions::default());
        engine.submit(request(vec![7; 5], 900), Box::new(|_| ())).unwrap();
        engine
    }

    /// A step at `now`, as the loop takes it.
    fn step(watched: &mut Watched, engine: &mut Engine<SimBackend>, now: Instant) {
        watched.before_step(&mut engine.backend, now).unwrap();
        assert!(engine.step());
        let view = StepView { number: engine.status().steps, ..StepView::default() };
        watched.after_step(&mut engine.backend, view).unwrap();
    }

    /// Numbers of the steps that are remembered, and how often an operator ran in each.
    fn calls(watched: &Watched) -> Vec<(u64, u32)> {
        watched.steps().iter().map(|s| (s.number, s.operators.iter().map(|o| o.calls).sum())).collect()
    }

    #[test]
    fn operators_are_timed_from_the_first_look_until_nobody_has_looked_for_a_while() {
        let (mut engine, mut watched, start) = (busy(), Watched::new(true), Instant::now());
        let timed = |engine: &Engine<SimBackend>| engine.backend.times_operators();
        step(&mut watched, &mut engine, start);
        assert!(!timed(&engine) && calls(&watched).is_empty(), "nobody looks");
        watched.look(&mut engine.backend, start).unwrap();
        step(&mut watched, &mut engine, start);
        step(&mut watched, &mut engine, start + WATCHED);
        // Each step has its own times, not those of the steps before it.
        assert_eq!(calls(&watched), [(2, 1), (3, 1)]);
        assert!(timed(&engine));
        // A second look keeps what there is, and the timers as long as it is not old either.
        watched.look(&mut engine.backend, start + WATCHED).unwrap();
        step(&mut watched, &mut engine, start + LONGER);
        assert_eq!(calls(&watched), [(2, 1), (3, 1), (4, 1)]);
        step(&mut watched, &mut engine, start + WATCHED + LONGER);
        assert!(!timed(&engine), "nobody looks any more");
        // And on again: who looks seldom sees the steps behind the last look.
        watched.look(&mut engine.backend, start + 3 * WATCHED).unwrap();
        assert_eq!(calls(&watched), [(2, 1), (3, 1), (4, 1)]);
        step(&mut watched, &mut engine, start + 3 * WATCHED);
        assert_eq!(calls(&watched), [(2, 1), (3, 1), (4, 1), (6, 1)]);
        // Much later they are old.
        let later = start + 3 * WATCHED + KEPT.saturating_add(Duration::from_millis(1));
        step(&mut watched, &mut engine, later);
        watched.look(&mut engine.backend, later).unwrap();
        assert!(calls(&watched).is_empty());
    }

    #[test]
    fn without_leave_nothing_is_timed_and_steps_are_remembered_all_the_same() {
        let (mut engine, mut watched, start) = (busy(), Watched::new(false), Instant::now());
        watched.look(&mut engine.backend, start).unwrap();
        for _ in 0..STEPS_SEEN + 2 {
            step(&mut watched, &mut engine, start);
            assert!(!engine.backend.times_operators());
        }
        let remembered = calls(&watched);
        assert_eq!((remembered.len(), remembered[0]), (STEPS_SEEN, (3, 0)));
    }
}
