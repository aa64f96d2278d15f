//! What the requests of a load say together: latencies in ms, throughput, and how many met their targets.
//! Failed requests count as failed and enter no latency.

use anyhow::{Result, bail};

use crate::bench::percentiles::Distribution;
use crate::bench::record::Record;

/// Latencies that a good request does not exceed, ms.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Targets {
    limits_ms: [Option<f64>; 4],
}

/// Names of the latencies: in targets, and in the fields of the JSON.
pub const LATENCIES: [(&str, &str); 4] = [
    ("ttft", "time to first token"),
    ("tpot", "time per output token"),
    ("itl", "between pieces"),
    ("e2el", "whole request"),
];

impl Targets {
    /// Reads `ttft:500`, `tpot:50`, ...
    pub fn read(texts: &[String]) -> Result<Targets> {
        let mut targets = Targets::default();
        for text in texts {
            let parts = text.split_once(':').and_then(|(name, limit)| Some((name, limit.parse::<f64>().ok()?)));
            let place = parts.and_then(|(name, _)| LATENCIES.iter().position(|(known, _)| *known == name));
            match (place, parts) {
                (Some(place), Some((_, limit))) if limit > 0.0 => targets.limits_ms[place] = Some(limit),
                _ => bail!("--goodput {text}: write latencies in ms as ttft:500 tpot:50 itl:80 e2el:5000"),
            }
        }
        Ok(targets)
    }

    /// Whether there is any.
    pub fn any(&self) -> bool {
        self.limits_ms.iter().any(Option::is_some)
    }

    /// `ttft 500 ms, tpot 50 ms`.
    pub fn describe(&self) -> String {
        let set = LATENCIES.iter().zip(self.limits_ms).filter_map(|((name, _), limit)| Some((name, limit?)));
        set.map(|(name, limit)| format!("{name} {limit} ms")).collect::<Vec<_>>().join(", ")
    }

    fn met(&self, record: &Record) -> bool {
        let mean_gap = record.gaps_s.iter().sum::<f64>() / record.gaps_s.len().max(1) as f64;
        let seen = [record.ttft_s, record.tpot_s().unwrap_or(0.0), mean_gap, record.latency_s];
        self.limits_ms.iter().zip(seen).all(|(limit, seen)| limit.is_none_or(|limit| seen * 1e3 <= limit))
    }
}

/// The load in numbers.
#[derive(Debug, Clone)]
pub struct Summary {
    /// Requests with a whole answer.
    pub completed: u64,
    /// The others.
    pub failed: u64,
    /// From the first request to the last answer.
    pub duration_s: f64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of them, from the server's cache, where it says so.
    pub cached_tokens: Option<u64>,
    /// Tokens of answers.
    pub output_tokens: u64,
    /// What a good request is.
    pub targets: Targets,
    /// Requests that met all targets.
    pub good: u64,
    /// In the order of [`LATENCIES`], ms.
    pub latencies_ms: [Option<Distribution>; 4],
    /// Output tokens of every second of the load.
    pub tokens_by_second: Vec<f64>,
    /// Most requests under way at the same moment.
    pub peak_running: usize,
}

impl Summary {
    /// Of the records of a load that took so long.
    pub fn of(records: &[Record], duration_s: f64, targets: &Targets) -> Summary {
        let whole: Vec<&Record> = records.iter().filter(|record| record.error.is_none()).collect();
        let sum = |of: fn(&Record) -> u64| whole.iter().map(|record| of(record)).sum::<u64>();
        let ms = |of: &dyn Fn(&Record) -> Option<f64>| {
            Distribution::of(whole.iter().filter_map(|record| of(record)).map(|s| s * 1e3).collect())
        };
        let gaps: Vec<f64> = whole.iter().flat_map(|record| record.gaps_s.iter().map(|gap| gap * 1e3)).collect();
        Summary {
            completed: whole.len() as u64,
            failed: (records.len() - whole.len()) as u64,
            duration_s,
            prompt_tokens: sum(|record| record.prompt_tokens),
            cached_tokens: whole.iter().filter_map(|record| record.cached_tokens).reduce(|a, b| a + b),
            output_tokens: sum(|record| record.output_tokens),
            targets: *targets,
            good: whole.iter().filter(|record| targets.met(record)).count() as u64,
            latencies_ms: [
                ms(&|record| Some(record.ttft_s)),
                ms(&Record::tpot_s),
                Distribution::of(gaps),
                ms(&|record| Some(record.latency_s)),
            ],
            tokens_by_second: by_second(&whole, duration_s),
            peak_running: peak(records),
        }
    }

    /// Something per second of the load.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 / self.duration_s.max(1e-9)
    }
}

/// Output tokens by the second in which they came; those of a piece share its time.
fn by_second(records: &[&Record], duration_s: f64) -> Vec<f64> {
    let mut out = vec![0.0; duration_s.ceil().max(1.0) as usize];
    for record in records {
        let share = record.output_tokens as f64 / (record.gaps_s.len() + 1) as f64;
        let mut at_s = record.sent_s + record.ttft_s;
        for gap in record.gaps_s.iter().copied().chain([0.0]) {
            let last = out.len() - 1;
            out[(at_s as usize).min(last)] += share;
            at_s += gap;
        }
    }
    out
}

fn peak(records: &[Record]) -> usize {
    let mut changes: Vec<(f64, i64)> =
        records.iter().flat_map(|r| [(r.sent_s, 1), (r.sent_s + r.latency_s, -1)]).collect();
    // An end comes before a beginning at the same time.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let running = changes.iter().scan(0, |running, (_, change)| {
        *running += change;
        Some(*running)
    });
    running.max().unwrap_or(0).max(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(sent_s: f64, ttft_s: f64, gaps_s: &[f64]) -> Record {
        Record {
            sent_s,
            prompt_tokens: 10,
            cached_tokens: Some(4),
            output_tokens: gaps_s.len() as u64 + 1,
            ttft_s,
            latency_s: ttft_s + gaps_s.iter().sum::<f64>(),
            gaps_s: gaps_s.to_vec(),
            ..Record::default()
        }
    }

    #[test]
    fn good_requests_meet_all_targets_and_failed_ones_enter_no_latency() {
        let targets = Targets::read(&["ttft:300".into(), "tpot:100".into()]).unwrap();
        let records = [
            record(0.0, 0.2, &[0.1, 0.05]),
            record(0.5, 0.4, &[0.1]),
            record(0.5, 0.2, &[0.2]),
            Record::failed(0.6, 9.0, "no"),
        ];
        let summary = Summary::of(&records, 2.0, &targets);
        assert_eq!((summary.completed, summary.failed, summary.good), (3, 1, 1));
        assert_eq!((summary.prompt_tokens, summary.cached_tokens, summary.output_tokens), (30, Some(12), 7));
        let median = |i: usize| summary.latencies_ms[i].as_ref().unwrap().median().round();
        assert_eq!([0, 1, 2, 3].map(median), [200.0, 100.0, 100.0, 400.0]);
        assert_eq!(summary.per_second(summary.completed), 1.5);
        assert_eq!(summary.targets.describe(), "ttft 300 ms, tpot 100 ms");
    }

    #[test]
    fn tokens_fall_into_their_seconds_and_overlaps_are_counted() {
        let records = [record(0.0, 0.5, &[0.4, 0.3]), record(1.2, 0.1, &[0.1])];
        let summary = Summary::of(&records, 1.5, &Targets::default());
        assert_eq!(summary.tokens_by_second, [2.0, 3.0]);
        assert_eq!(summary.peak_running, 1);
        assert_eq!(
            Summary::of(&[record(0.0, 1.0, &[]), record(0.5, 1.0, &[])], 2.0, &Targets::default()).peak_running,
            2
        );
    }

    #[test]
    fn unknown_targets_are_refused() {
        for bad in ["ttft", "ttft:x", "speed:3", "tpot:0", "tpot:-1"] {
            let error = Targets::read(&[bad.into()]).unwrap_err().to_string();
            assert!(error.contains(bad) && error.contains("ttft:500"), "{error}");
        }
    }
}
