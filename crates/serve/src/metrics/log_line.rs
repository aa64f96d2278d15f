//! The line about the engine that the log gets every ten seconds, as vLLM writes it.
//!
//! Rates are those of the interval; the hit rate counts from the start. Silent while nothing happens. Assumes snapshots of
//! one engine in order.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use longwave_engine::Status;

use crate::server::App;

/// Between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Writes lines until it is dropped.
pub(crate) async fn run(app: Arc<App>) {
    let mut before = (app.engine.status)();
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.tick().await;
    let mut was_busy = false;
    loop {
        ticks.tick().await;
        let now = (app.engine.status)();
        let busy = now.running + now.waiting > 0 || now.steps > before.steps;
        // One more after the end shows that the rates are zero.
        if busy || was_busy {
            for line in lines(&before, &now, INTERVAL.as_secs_f64()) {
                tracing::info!("{line}");
            }
        }
        (before, was_busy) = (now, busy);
    }
}

fn lines(before: &Status, now: &Status, seconds: f64) -> Vec<String> {
    let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / seconds;
    let share = |part: u64, all: u64| 100.0 * part as f64 / all.max(1) as f64;
    let promised = (0..3).map(|i| share(now.units_promised[i].into(), now.units_total[i].into()));
    let mut line = format!(
        "Engine 000: Avg prompt throughput: {:.1} tokens/s, Avg generation throughput: {:.1} tokens/s, Running: {} reqs, \
         Waiting: {} reqs, ",
        rate(before.prompt_tokens, now.prompt_tokens),
        rate(before.output_tokens, now.output_tokens),
        now.running,
        now.waiting,
    );
    if now.preempted > before.preempted {
        let _ = write!(line, "Preemptions: {}, ", now.preempted - before.preempted);
    }
    let _ = write!(
        line,
        "KV cache usage: {:.1}%, Prefix cache hit rate: {:.1}%",
        promised.fold(0.0, f64::max).min(100.0),
        share(now.prefix.hit_tokens, now.prefix.query_tokens),
    );
    let restored = now.prefix.host_tokens + now.prefix.disk_tokens;
    if now.tiers.host.limit_bytes + now.tiers.disk.limit_bytes > 0 {
        let asked = now.prefix.query_tokens.saturating_sub(now.prefix.hit_tokens.saturating_sub(restored));
        let _ = write!(line, ", External prefix cache hit rate: {:.1}%", share(restored, asked));
    }
    let mut lines = vec![line];
    let drafted = now.drafts_proposed.saturating_sub(before.drafts_proposed);
    if drafted > 0 {
        let accepted = now.drafts_accepted.saturating_sub(before.drafts_accepted);
        let times = now.drafts_proposed_at[0].saturating_sub(before.drafts_proposed_at[0]).max(1);
        let places = 0..now.limits.drafts as usize;
        let by_place = places.map(|i| {
            let accepted = now.drafts_accepted_at[i].saturating_sub(before.drafts_accepted_at[i]);
            format!("{:.3}", accepted as f64 / times as f64)
        });
        lines.push(format!(
            "SpecDecoding metrics: Mean acceptance length: {:.2}, Accepted throughput: {:.2} tokens/s, Drafted throughput: \
             {:.2} tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {}, Avg \
             Draft acceptance rate: {:.1}%",
            1.0 + accepted as f64 / times as f64,
            accepted as f64 / seconds,
            drafted as f64 / seconds,
            by_place.collect::<Vec<_>>().join(", "),
            share(accepted, drafted),
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_engine::step::Limits;

    #[test]
    fn lines_read_as_vllms() {
        let limits =
            Limits { seats: 4, step_tokens: 256, context: 4096, units: [100; 3], drafts: 2, in_flight: 1, vocab: 9 };
        let before = Status::new(limits);
        let mut now = Status { prompt_tokens: 5000, output_tokens: 123, running: 2, waiting: 1, ..before.clone() };
        now.units_promised = [25, 10, 0];
        (now.prefix.query_tokens, now.prefix.hit_tokens) = (1000, 625);
        assert_eq!(
            lines(&before, &now, 10.0),
            [
                "Engine 000: Avg prompt throughput: 500.0 tokens/s, Avg generation throughput: 12.3 tokens/s, Running: 2 reqs, \
              Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 62.5%"
            ]
        );
        (now.drafts_proposed, now.drafts_accepted) = (20, 15);
        (now.drafts_proposed_at[0], now.drafts_accepted_at[0]) = (10, 9);
        (now.drafts_proposed_at[1], now.drafts_accepted_at[1]) = (10, 6);
        assert_eq!(
            lines(&before, &now, 10.0)[1],
            "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 1.50 tokens/s, Drafted throughput: 2.00 \
             tokens/s, Accepted: 15 tokens, Drafted: 20 tokens, Per-position acceptance rate: 0.900, 0.600, Avg Draft \
             acceptance rate: 75.0%"
        );
    }
}
