//! GET /explore/api/live: what the engine holds, several times a second, as server-sent events.
//!
//! The engine is asked for a view when the last one was sent, so a slow page gets fewer, and nobody's looking costs nothing.
//! Counts and places only, no text. Refuses more pages at once than [`PAGES`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use longwave_engine::operators::OperatorSums;
use longwave_engine::view::{RequestView, RunView, StepView, UnitUse, View};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{MissedTickBehavior, interval};

use crate::errors::ApiError;
use crate::input::Asked;
use crate::server::App;
use crate::sse;

/// Pages that may look at once.
const PAGES: usize = 16;
/// Times between two views, ms: by default, at least, at most.
const EVERY_MS: [u64; 3] = [250, 50, 60_000];
/// Longest wait for the engine: a step may be long.
const PATIENCE: Duration = Duration::from_secs(15);
/// Reports of the prefix cache that are sent along.
const REPORTS: usize = 24;

/// Places for pages.
pub(crate) struct Pages(Arc<Semaphore>);

impl Default for Pages {
    fn default() -> Pages {
        Pages(Arc::new(Semaphore::new(PAGES)))
    }
}

/// Streams until the page goes away.
pub(crate) async fn live(
    State(app): State<Arc<App>>,
    Asked(query): Asked<HashMap<String, String>>,
) -> Result<Response, ApiError> {
    let [default, least, most] = EVERY_MS;
    let every_ms = match query.get("every_ms") {
        None => default,
        Some(text) => {
            let number = text.parse().ok().filter(|ms| (least..=most).contains(ms));
            number.ok_or_else(|| ApiError::field("every_ms", format!("expected {least} to {most} ms")))?
        }
    };
    let place = app.pages.0.clone().try_acquire_owned();
    let place = place.map_err(|_| {
        ApiError::rate_limited("too_many_pages", format!("{PAGES} pages look at this server already; close one"), 10)
    })?;
    let (sender, response) = sse::channel();
    tokio::spawn(async move {
        let mut ticks = interval(Duration::from_millis(every_ms));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut seen_step = None;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = sender.closed() => break,
            }
            let (show, shown) = oneshot::channel();
            (app.engine.look)(Box::new(move |view| drop(show.send(view))));
            let frame = match tokio::time::timeout(PATIENCE, shown).await {
                Ok(Ok(view)) => {
                    let event = event(&app, &view, seen_step);
                    seen_step = Some(view.status.steps);
                    sse::data(&event)
                }
                // Dropped unseen: the engine has stopped, or it is one that plays a script.
                Ok(Err(_)) => {
                    let _ = sender.send(sse::data(&json!({"gone": "this engine shows nothing"}))).await;
                    break;
                }
                Err(_) => sse::data(&json!({"late": "the engine has not finished a step for 15 s"})),
            };
            if sender.send(frame).await.is_err() {
                break;
            }
        }
        drop(place);
    });
    Ok(response)
}

/// A view as one event; of the steps, those behind `seen_step`.
fn event(app: &App, view: &View, seen_step: Option<u64>) -> Value {
    let status = &view.status;
    let pools = ["large", "middle", "small"].iter().zip(&view.units).map(|(name, units)| pool(name, units));
    let steps: Vec<&StepView> =
        view.steps.iter().filter(|step| seen_step.is_none_or(|seen| step.number > seen)).collect();
    json!({
        "running": status.running, "waiting": status.waiting, "seats": status.limits.seats,
        "steps": status.steps, "prompt_tokens": status.prompt_tokens, "output_tokens": status.output_tokens,
        "preempted": status.preempted, "stalled": status.stalled,
        "drafts_proposed": status.drafts_proposed_at, "drafts_accepted": status.drafts_accepted_at,
        "prefix": {
            "queries": status.prefix.queries, "query_tokens": status.prefix.query_tokens, "hits": status.prefix.hits,
            "hit_tokens": status.prefix.hit_tokens, "blocks": status.prefix.nodes,
            "checkpoints": status.prefix.checkpoints, "evicted_blocks": status.prefix.evicted_nodes,
        },
        "pools": pools.collect::<Value>(),
        "requests": view.requests.iter().map(request).collect::<Value>(),
        "tree": view.tree.iter().map(run).collect::<Value>(), "tree_hidden": view.tree_hidden,
        "operators": operators(&steps),
        "step_list": steps.into_iter().map(step).collect::<Value>(),
        "latencies": app.metrics.latencies(),
        "reports": app.prefixes.newest(REPORTS),
    })
}

/// The units of a pool as runs: use, count, use, count, ...
fn pool(name: &str, units: &[UnitUse]) -> Value {
    let mut runs: Vec<u32> = Vec::new();
    for run in units.chunk_by(|a, b| a == b) {
        runs.extend([run[0] as u32, run.len() as u32]);
    }
    json!({"name": name, "total": units.len(), "runs": runs})
}

fn request(view: &RequestView) -> Value {
    json!({
        "id": view.id, "phase": view.phase.name(), "prompt": view.prompt_tokens, "cached": view.cached_tokens,
        "committed": view.committed, "output": view.output_tokens, "most": view.max_outputs, "units": view.units,
        "priority": view.priority,
    })
}

fn run(view: &RunView) -> Value {
    json!({
        "id": view.id, "parent": view.parent, "depth": view.depth, "blocks": view.blocks,
        "checkpoints": view.checkpoints, "uses": view.uses, "held": view.held, "idle": view.idle_steps,
    })
}

fn step(view: &StepView) -> Value {
    json!([view.number, view.wall_us, view.prompt_tokens, view.output_tokens, view.running, view.run_us])
}

/// What operators took in all of `steps` that were timed, and how many these are: a list of every step would be long.
fn operators(steps: &[&StepView]) -> Value {
    let mut sums = OperatorSums::default();
    let timed: Vec<_> = steps.iter().filter(|step| !step.operators.is_empty()).collect();
    timed.iter().flat_map(|step| step.operators.iter()).for_each(|time| sums.merge(time));
    let times = sums.table();
    let times = times.iter().map(|time| json!({"name": time.name, "calls": time.calls, "us": time.us}));
    json!({"steps": timed.len(), "times": times.collect::<Value>()})
}

#[cfg(test)]
mod tests {
    use longwave_engine::operators::OperatorTime;

    use super::*;

    #[test]
    fn units_are_sent_as_runs() {
        let units = [UnitUse::LongLived, UnitUse::LongLived, UnitUse::Free, UnitUse::Shared];
        assert_eq!(pool("large", &units), json!({"name": "large", "total": 4, "runs": [1, 2, 0, 1, 5, 1]}));
        assert_eq!(pool("small", &[])["runs"], json!([]));
    }

    #[test]
    fn operators_are_summed_over_the_steps_that_were_timed() {
        let time = |name, calls, us| OperatorTime { name, calls, us };
        let step = |operators: Vec<OperatorTime>| StepView { operators: operators.into(), ..StepView::default() };
        let steps = [
            step(vec![]),
            step(vec![time("router", 43, 80.5), time("lm_head", 1, 60.0)]),
            step(vec![time("lm_head", 1, 61.5), time("router", 43, 20.0)]),
        ];
        assert_eq!(
            operators(&steps.iter().collect::<Vec<_>>()),
            json!({"steps": 2, "times": [
                {"name": "lm_head", "calls": 2, "us": 121.5}, {"name": "router", "calls": 86, "us": 100.5},
            ]})
        );
        assert_eq!(operators(&[&steps[0]]), json!({"steps": 0, "times": []}));
    }
}
