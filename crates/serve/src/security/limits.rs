//! What one API key may ask: requests at once, and requests per minute.
//!
//! Time is an input. A key that was quiet may send a minute's worth at once, then one whenever a place is free again. On a
//! server without keys all callers together count as one key.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Why a request has to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// So many of its key run already.
    Concurrent(u32),
    /// So many came in the last minute.
    Rate {
        /// The limit.
        per_minute: u32,
        /// Seconds until the next one is taken.
        retry_after_s: u32,
    },
}

/// The limits with what every key has used of them.
pub(crate) struct Limits {
    max_concurrent: Option<u32>,
    per_minute: Option<u32>,
    keys: Vec<Used>,
}

#[derive(Default)]
struct Used {
    running: Arc<AtomicU32>,
    /// When the request that came last is paid for, since the start of the server.
    paid: Mutex<Duration>,
}

/// A running request; its drop makes room for another one.
pub(crate) struct Permit(Arc<AtomicU32>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

const MINUTE: Duration = Duration::from_secs(60);

impl Limits {
    /// For `keys` keys, at least one.
    pub(crate) fn new(keys: usize, max_concurrent: Option<u32>, per_minute: Option<u32>) -> Limits {
        Limits { max_concurrent, per_minute, keys: (0..keys.max(1)).map(|_| Used::default()).collect() }
    }

    /// Takes a request of key `number` in at time `now`, or says why not.
    pub(crate) fn enter(&self, number: usize, now: Duration) -> Result<Permit, Over> {
        let used = &self.keys[number];
        let most = self.max_concurrent.unwrap_or(u32::MAX);
        let counted = |running: u32| (running < most).then_some(running + 1);
        if used.running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted).is_err() {
            return Err(Over::Concurrent(most));
        }
        // From here on a refusal gives the place back.
        let permit = Permit(used.running.clone());
        if let Some(per_minute) = self.per_minute {
            let mut paid = used.paid.lock().unwrap_or_else(PoisonError::into_inner);
            let next = (*paid).max(now) + MINUTE / per_minute;
            let latest = now + MINUTE;
            if next > latest {
                let retry_after_s = (next - latest).as_secs_f64().ceil().max(1.0) as u32;
                return Err(Over::Rate { per_minute, retry_after_s });
            }
            *paid = next;
        }
        Ok(permit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_again_when_its_request_ends() {
        let limits = Limits::new(2, Some(2), None);
        let first = limits.enter(0, MINUTE).ok();
        let _second = limits.enter(0, MINUTE).ok();
        assert_eq!(limits.enter(0, MINUTE).err(), Some(Over::Concurrent(2)));
        assert!(limits.enter(1, MINUTE).is_ok(), "keys do not share");
        drop(first);
        assert!(limits.enter(0, MINUTE).is_ok());
    }

    #[test]
    fn a_minute_takes_so_many_and_says_when_to_come_back() {
        let limits = Limits::new(1, None, Some(6));
        let at = |seconds| Duration::from_secs(seconds);
        for _ in 0..6 {
            assert!(limits.enter(0, at(100)).is_ok());
        }
        let over = |retry_after_s| Some(Over::Rate { per_minute: 6, retry_after_s });
        assert_eq!(limits.enter(0, at(100)).err(), over(10));
        assert_eq!(limits.enter(0, at(107)).err(), over(3));
        assert!(limits.enter(0, at(110)).is_ok());
        assert_eq!(limits.enter(0, at(110)).err(), over(10));
        // Never more than a minute's worth, however long it was quiet.
        let taken = (0..20).filter(|_| limits.enter(0, at(10_000)).is_ok()).count();
        assert_eq!(taken, 6);
    }

    #[test]
    fn a_request_over_the_rate_takes_no_place() {
        let limits = Limits::new(1, Some(1), Some(1));
        drop(limits.enter(0, MINUTE).ok());
        assert!(matches!(limits.enter(0, MINUTE), Err(Over::Rate { .. })));
        assert!(limits.enter(0, 2 * MINUTE).is_ok());
    }
}
