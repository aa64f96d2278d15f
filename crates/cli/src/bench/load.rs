//! Load: when requests are sent. A closed loop keeps a number of sessions busy; an open loop lets them arrive as they come.
//!
//! Arrivals of the open loop are a Poisson process from a seed, so they do not wait for slow answers. A limit on what runs at
//! once may be set there too; then a request's times begin when it is sent, not when it would have come. At the end of its
//! time, or at Ctrl-C, nothing new is sent.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use longwave_engine::proof::Numbers;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::bench::connection::Server;
use crate::bench::record::Record;
use crate::bench::stream::ask;
use crate::bench::workload::{Scale, Workload};

/// When requests are sent, and how many.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Sessions that run at once, at most.
    pub sessions: Option<usize>,
    /// Sessions that arrive per second; `None` is the closed loop.
    pub rate: Option<f64>,
    /// Sessions in all.
    pub count: usize,
    /// No session begins after this.
    pub duration: Option<Duration>,
    /// Between an answer and the next turn.
    pub think: Duration,
    /// Longest time of one request.
    pub timeout: Duration,
}

/// What the tasks share.
struct Running {
    server: Server,
    workload: Workload,
    scale: Scale,
    plan: Plan,
    began: Instant,
    records: Mutex<Vec<Record>>,
    bar: ProgressBar,
}

/// What came of a load.
pub struct Outcome {
    /// In the order in which they ended.
    pub records: Vec<Record>,
    /// From the first request to the last answer.
    pub duration_s: f64,
    /// Whether Ctrl-C ended it.
    pub interrupted: bool,
}

/// Runs the plan.
pub async fn run(server: Server, workload: Workload, scale: Scale, plan: Plan, bar: ProgressBar) -> Outcome {
    let (began, records) = (Instant::now(), Mutex::default());
    let running = Arc::new(Running { server, workload, scale, plan, began, records, bar });
    let work = async {
        match running.plan.rate {
            None => closed(&running).await,
            Some(rate) => open(&running, rate).await,
        }
    };
    let interrupted = tokio::select! {
        () = work => false,
        _ = tokio::signal::ctrl_c() => true,
    };
    let records = std::mem::take(&mut *running.records.lock().unwrap_or_else(PoisonError::into_inner));
    Outcome { records, duration_s: began.elapsed().as_secs_f64(), interrupted }
}

async fn closed(running: &Arc<Running>) {
    let next = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..running.plan.sessions.unwrap_or(1).min(running.plan.count) {
        let (running, next) = (running.clone(), next.clone());
        tasks.spawn(async move {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= running.plan.count || running.is_over() {
                    break;
                }
                running.play(index).await;
            }
        });
    }
    while tasks.join_next().await.is_some() {}
}

async fn open(running: &Arc<Running>, rate: f64) {
    let seats = Arc::new(Semaphore::new(running.plan.sessions.unwrap_or(Semaphore::MAX_PERMITS)));
    let mut numbers = Numbers::new(running.workload.seed ^ 0x5eed);
    let (mut tasks, mut due_s) = (JoinSet::new(), 0.0);
    for index in 0..running.plan.count {
        if index > 0 {
            due_s += pause_s(&mut numbers, rate);
        }
        sleep(Duration::from_secs_f64(due_s).saturating_sub(running.began.elapsed())).await;
        let Ok(seat) = seats.clone().acquire_owned().await else { break };
        if running.is_over() {
            break;
        }
        let running = running.clone();
        tasks.spawn(async move {
            running.play(index).await;
            drop(seat);
        });
        // What has ended is let go.
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
}

/// Seconds to the next arrival of a Poisson process.
fn pause_s(numbers: &mut Numbers, rate: f64) -> f64 {
    let unit = (numbers.below(1 << 52) as f64 + 0.5) / (1u64 << 52) as f64;
    -unit.ln() / rate
}

impl Running {
    fn is_over(&self) -> bool {
        self.plan.duration.is_some_and(|duration| self.began.elapsed() >= duration)
    }

    /// A session from its first turn to its last; one that fails ends it.
    async fn play(&self, index: usize) {
        let mut session = self.workload.session(index, self.scale);
        for turn in 0..self.workload.turns {
            if turn > 0 {
                sleep(self.plan.think).await;
                if self.is_over() {
                    return;
                }
            }
            let (body, route) = (session.body(), self.workload.endpoint.route());
            let sent_s = self.began.elapsed().as_secs_f64();
            let asked = timeout(self.plan.timeout, ask(&self.server, route, body, self.began)).await;
            let seconds = self.plan.timeout.as_secs();
            let late = |_| Record::failed(sent_s, seconds as f64, format!("no end after {seconds} s (--timeout)"));
            let mut record = asked.unwrap_or_else(late);
            let (failed, answer) = (record.error.is_some(), std::mem::take(&mut record.text));
            self.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
            self.bar.inc(1);
            if failed {
                return;
            }
            session.go_on(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_are_a_poisson_process() {
        let mut numbers = Numbers::new(1);
        let pauses: Vec<f64> = (0..20_000).map(|_| pause_s(&mut numbers, 4.0)).collect();
        let mean = pauses.iter().sum::<f64>() / 20_000.0;
        let variance = pauses.iter().map(|p| (p - mean) * (p - mean)).sum::<f64>() / 20_000.0;
        // Exponential with mean 1/4: its standard deviation is its mean.
        assert!((mean - 0.25).abs() < 0.01 && (variance.sqrt() - 0.25).abs() < 0.02, "{mean} {variance}");
        assert!(pauses.iter().all(|p| p.is_finite() && *p > 0.0));
    }
}
