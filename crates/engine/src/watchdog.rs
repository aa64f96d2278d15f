//! Notices that no step completes although there is work, and then fails the requests that have not begun.
//!
//! A backend can hang in a kernel or a collective, and a scheduler can have a bug: clients must not wait for ever and
//! health must be bad. Runs on a thread of its own, because the engine thread is the one that hangs. Every sink sits
//! behind a gate that lets one last event through, whoever sends it. Requests that run are left alone: they may still end.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::request::{Event, EventSink, FinishReason, RequestId};

/// The sink of one request.
struct Gate {
    /// `None` after the last event.
    sink: Option<EventSink>,
    scheduled: bool,
    prompt_tokens: u32,
}

impl Gate {
    fn deliver(&mut self, event: Event) {
        match &event {
            Event::Scheduled { .. } => self.scheduled = true,
            // Taken out first: whatever the sink does, there is one last event.
            Event::Finished { .. } => {
                if let Some(mut sink) = self.sink.take() {
                    sink(event);
                }
                return;
            }
            _ => {}
        }
        if let Some(sink) = &mut self.sink {
            sink(event);
        }
    }
}

/// When a step completed last.
struct Pulse {
    at: Instant,
    /// Whether something runs or waits.
    busy: bool,
    stalled: bool,
    ended: bool,
}

/// Shared by handles, the engine thread and the watching thread.
pub(crate) struct Watchdog {
    /// Longest time without a step; zero never stalls.
    limit: Duration,
    pulse: Mutex<Pulse>,
    ended: Condvar,
    gates: Mutex<BTreeMap<RequestId, Arc<Mutex<Gate>>>>,
}

impl Watchdog {
    pub fn new(limit: Duration) -> Arc<Watchdog> {
        let pulse = Pulse { at: Instant::now(), busy: false, stalled: false, ended: false };
        Arc::new(Watchdog { limit, pulse: Mutex::new(pulse), ended: Condvar::new(), gates: Mutex::default() })
    }

    /// Puts a gate before a sink.
    pub fn gate(self: &Arc<Self>, id: RequestId, prompt_tokens: u32, sink: EventSink) -> EventSink {
        let gate = Arc::new(Mutex::new(Gate { sink: Some(sink), scheduled: false, prompt_tokens }));
        lock(&self.gates).insert(id, Arc::clone(&gate));
        let watchdog = Arc::clone(self);
        Box::new(move |event| {
            if matches!(event, Event::Finished { .. }) {
                lock(&watchdog.gates).remove(&id);
            }
            lock(&gate).deliver(event);
        })
    }

    /// The engine thread has work, or has none.
    pub fn set_busy(&self, busy: bool) {
        let mut pulse = lock(&self.pulse);
        if busy && !pulse.busy {
            pulse.at = Instant::now();
        }
        pulse.busy = busy;
    }

    /// A step completed.
    pub fn beat(&self) {
        let mut pulse = lock(&self.pulse);
        (pulse.at, pulse.stalled) = (Instant::now(), false);
    }

    /// The engine thread is gone.
    pub fn end(&self) {
        lock(&self.pulse).ended = true;
        self.ended.notify_all();
    }

    /// Whether no step completed for too long.
    pub fn is_stalled(&self) -> bool {
        lock(&self.pulse).stalled
    }

    /// The limit in whole seconds, at least one.
    pub fn seconds(&self) -> u32 {
        self.limit.as_secs().clamp(1, u64::from(u32::MAX)) as u32
    }

    /// Delivers the last event of every request that has not had it: of those that a panic took out of the engine.
    pub fn settle(&self, why: &str) {
        let gates = std::mem::take(&mut *lock(&self.gates));
        for gate in gates.into_values() {
            let mut gate = lock(&gate);
            let (reason, prompt_tokens) = (FinishReason::Failed(why.to_string()), gate.prompt_tokens);
            let last = Event::Finished { reason, prompt_tokens, cached_tokens: 0, output_tokens: 0 };
            // It may have been a sink that panicked, and it may do so again.
            let _ = catch_unwind(AssertUnwindSafe(|| gate.deliver(last)));
        }
    }

    /// Watches until the engine thread ends; `cancel` is told of each request that was failed.
    pub fn watch(&self, cancel: impl Fn(RequestId)) {
        if self.limit.is_zero() {
            return;
        }
        loop {
            {
                let pulse = lock(&self.pulse);
                let waited = self.ended.wait_timeout_while(pulse, self.limit / 4, |pulse| !pulse.ended);
                let mut pulse = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(pulse, _)| pulse);
                if pulse.ended {
                    return;
                }
                pulse.stalled = pulse.busy && pulse.at.elapsed() >= self.limit;
                if !pulse.stalled {
                    continue;
                }
            }
            let gates: Vec<_> = lock(&self.gates).iter().map(|(&id, gate)| (id, Arc::clone(gate))).collect();
            for (id, gate) in gates {
                let mut gate = lock(&gate);
                if !gate.scheduled && gate.sink.is_some() {
                    let reason = FinishReason::Stalled { seconds: self.seconds() };
                    let prompt_tokens = gate.prompt_tokens;
                    let last = Event::Finished { reason, prompt_tokens, cached_tokens: 0, output_tokens: 0 };
                    // A sink that panics must not end the watch.
                    let _ = catch_unwind(AssertUnwindSafe(|| gate.deliver(last)));
                    drop(gate);
                    cancel(id);
                }
            }
        }
    }
}

/// Data under these locks is whole between statements, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
