//! Latencies of the last minute, as percentiles, for people who look.
//!
//! A few values per request go into bounded lists behind a lock; they are sorted only when somebody asks. Of more than
//! [`MOST`] requests in a minute the newest count.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How far back.
const SPAN: Duration = Duration::from_secs(60);
/// Values of each kind.
const MOST: usize = 4096;

/// What is measured of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Latency {
    /// From arrival to a seat.
    Queue,
    /// From arrival to the first token.
    FirstToken,
    /// Mean time per token behind the first.
    PerToken,
}

/// Values with their times, in the order in which they came.
type Values = VecDeque<(Instant, Duration)>;

/// The lists.
#[derive(Default)]
pub(crate) struct Recent(Mutex<[Values; 3]>);

impl Recent {
    pub(crate) fn add(&self, kind: Latency, now: Instant, value: Duration) {
        let values = &mut self.0.lock().unwrap_or_else(PoisonError::into_inner)[kind as usize];
        if values.len() == MOST {
            values.pop_front();
        }
        values.push_back((now, value));
    }

    /// Percentiles in ms by kind, with how many values there are; null where there is none.
    pub(crate) fn summary(&self, now: Instant) -> Value {
        let mut sorted = {
            let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kinds.each_mut().map(|values| {
                while values.front().is_some_and(|&(at, _)| now.duration_since(at) > SPAN) {
                    values.pop_front();
                }
                values.iter().map(|&(_, value)| value).collect::<Vec<_>>()
            })
        };
        let [queue, first, per] = sorted.each_mut().map(|values| {
            values.sort_unstable();
            let at = |percent: usize| {
                let place = (values.len() * percent).div_ceil(100).saturating_sub(1);
                values.get(place).map(|value| value.as_secs_f64() * 1000.0)
            };
            json!({"count": values.len(), "p50": at(50), "p90": at(90), "p99": at(99)})
        });
        json!({"queue_ms": queue, "ttft_ms": first, "tpot_ms": per})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_last_minute() {
        let (recent, start) = (Recent::default(), Instant::now());
        let ms = Duration::from_millis;
        assert_eq!(recent.summary(start)["ttft_ms"], json!({"count": 0, "p50": null, "p90": null, "p99": null}));
        recent.add(Latency::FirstToken, start, ms(5000));
        for value in (1..=100).rev() {
            recent.add(Latency::FirstToken, start + ms(40_000), ms(value));
        }
        recent.add(Latency::Queue, start + ms(40_000), ms(7));
        let now = recent.summary(start + ms(60_001));
        assert_eq!(now["ttft_ms"], json!({"count": 100, "p50": 50.0, "p90": 90.0, "p99": 99.0}));
        assert_eq!(now["queue_ms"]["p99"], 7.0);
        assert_eq!(now["tpot_ms"]["count"], 0);
        assert_eq!(recent.summary(start + ms(100_001))["ttft_ms"]["count"], 0);
    }

    #[test]
    fn the_lists_are_bounded() {
        let (recent, start) = (Recent::default(), Instant::now());
        for value in 0..MOST as u64 + 10 {
            recent.add(Latency::PerToken, start, Duration::from_millis(value));
        }
        let per = recent.summary(start)["tpot_ms"].clone();
        assert_eq!(per["count"], MOST);
        assert!(per["p50"].as_f64().unwrap() > 2000.0);
    }
}
