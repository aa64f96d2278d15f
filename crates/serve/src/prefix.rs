//! What the prefix cache did for requests: as a response field, as GET /debug/prefix, as a line of the log. And what the
//! engine does, as GET /debug/engine.
//!
//! Shows counts and positions, never text, and the last requests only. A request sees its own report when it asks with
//! `"prefix_report": true`.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::State;
use longwave_engine::report::{PrefixEnd, PrefixReport};
use longwave_engine::tier::TierStatus;
use serde_json::{Value, json};

use crate::server::{App, unix_seconds};

/// Requests that are remembered.
const REMEMBERED: usize = 256;

/// Reports of the last requests.
#[derive(Default)]
pub(crate) struct PrefixLog {
    last: Mutex<VecDeque<Value>>,
}

impl PrefixLog {
    /// Remembers and logs a report.
    pub(crate) fn add(&self, id: &str, prompt_tokens: usize, report: &PrefixReport) {
        tracing::info!("{id}: {prompt_tokens} prompt tokens; {report}");
        let mut entry = json(report);
        entry["id"] = id.into();
        entry["created"] = unix_seconds().into();
        entry["prompt_tokens"] = prompt_tokens.into();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == REMEMBERED {
            last.pop_front();
        }
        last.push_back(entry);
    }
}

impl PrefixLog {
    /// The last reports, newest first.
    pub(crate) fn newest(&self, count: usize) -> Vec<Value> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter().rev().take(count).cloned().collect()
    }
}

/// A report as JSON.
pub(crate) fn json(report: &PrefixReport) -> Value {
    let pool = match report.ended_by {
        PrefixEnd::Evicted { pool } | PrefixEnd::CheckpointEvicted { pool } => Some(pool),
        _ => None,
    };
    json!({
        "cached_tokens": report.cached_tokens,
        "host_tokens": report.host_tokens,
        "disk_tokens": report.disk_tokens,
        "replayed_tokens": report.replayed_tokens,
        "matched_tokens": report.matched_tokens,
        "first_difference": report.first_difference,
        "ended_by": report.ended_by.name(),
        "pool": pool.map(|pool| pool.name()),
        "text": report.to_string(),
    })
}

fn tier(tier: &TierStatus) -> Value {
    json!({
        "limit_bytes": tier.limit_bytes, "bytes": tier.bytes, "records": tier.records, "stored": tier.stored,
        "restored": tier.restored, "skipped": tier.skipped, "failed": tier.failed, "evicted": tier.evicted,
    })
}

/// GET /debug/engine: what runs and waits, steps and tokens, drafts by place, seats that were given up.
pub(crate) async fn engine(State(app): State<Arc<App>>) -> Json<Value> {
    let status = (app.engine.status)();
    Json(json!({
        "alive": status.alive,
        "stalled": status.stalled,
        "running": status.running,
        "waiting": status.waiting,
        "steps": status.steps,
        "last_step_us": status.last_step.as_micros() as u64,
        "prompt_tokens": status.prompt_tokens,
        "output_tokens": status.output_tokens,
        "drafts_proposed": status.drafts_proposed_at,
        "drafts_accepted": status.drafts_accepted_at,
        "preempted": status.preempted,
        "spilled": status.spilled,
        "resumed": status.resumed,
        "spilled_bytes": status.spilled_bytes,
    }))
}

/// GET /debug/prefix: totals, what is held, and the last requests, newest first.
pub(crate) async fn debug(State(app): State<Arc<App>>) -> Json<Value> {
    let status = (app.engine.status)();
    let prefix = status.prefix;
    let pools = |units: [u32; 3]| json!({"large": units[0], "middle": units[1], "small": units[2]});
    let last = app.prefixes.last.lock().unwrap_or_else(PoisonError::into_inner);
    let last: Vec<&Value> = last.iter().rev().collect();
    Json(json!({
        "queries": prefix.queries,
        "query_tokens": prefix.query_tokens,
        "hits": prefix.hits,
        "hit_tokens": prefix.hit_tokens,
        "blocks": prefix.nodes,
        "checkpoints": prefix.checkpoints,
        "evicted_blocks": prefix.evicted_nodes,
        "evicted_checkpoints": prefix.evicted_checkpoints,
        "replaced_checkpoints": prefix.replaced_checkpoints,
        "replays": prefix.replays,
        "replayed_tokens": prefix.replayed_tokens,
        "host_tokens": prefix.host_tokens,
        "disk_tokens": prefix.disk_tokens,
        "host": tier(&status.tiers.host),
        "disk": tier(&status.tiers.disk),
        "disk_fault": status.tiers.disk_fault,
        "units_total": pools(status.units_total),
        "units_used": pools(status.units_used),
        "units_cached": pools(status.units_cached),
        "requests": last,
    }))
}
