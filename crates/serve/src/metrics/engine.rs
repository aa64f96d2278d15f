//! Families from the engine's status: what runs, what the cache holds, what steps took.
//!
//! Filled at a scrape and not before, so they cost nothing in between. vLLM's names where it has one, ours otherwise.
//! Assumes counts that never fall while the engine lives.

use longwave_engine::Status;
use longwave_engine::phases::{Phase, TOKEN_BUCKETS};

use super::families::{Label, Sheet};

const POOLS: [&str; 3] = ["large", "middle", "small"];

/// All of them.
pub(super) fn fill(sheet: &mut Sheet, status: &Status) {
    requests(sheet, status);
    cache(sheet, status);
    prefixes(sheet, status);
    tiers(sheet, status);
    drafts(sheet, status);
    steps(sheet, status);
}

fn requests(sheet: &mut Sheet, status: &Status) {
    sheet.gauge("longwave:engine_up", "1 while the engine takes requests.", f64::from(u8::from(status.alive)));
    sheet.gauge(
        "longwave:engine_stalled",
        "1 while no step completes though there is work.",
        f64::from(u8::from(status.stalled)),
    );
    sheet.gauge("vllm:num_requests_running", "Requests that have a seat.", status.running.into());
    sheet.gauge("vllm:num_requests_waiting", "Requests that wait for a seat.", status.waiting.into());
    let (loading, displaced) = (status.tiers.loading, status.displaced);
    let capacity = status.waiting.saturating_sub(loading + displaced);
    sheet.gauges(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait: for room, for records of the cache directory, or after they gave up their seat.",
        &[
            (&[("reason", "capacity")], capacity.into()),
            (&[("reason", "deferred")], loading.into()),
            (&[("reason", "preempted")], displaced.into()),
        ],
    );
    sheet.counter("vllm:num_preemptions_total", "Times that a request gave up its seat.", status.preempted);
    sheet.counter("longwave:preemptions_spilled_total", "Of them, with state kept in host memory.", status.spilled);
    sheet.counter("longwave:preemptions_resumed_total", "Of those, how many went on from there.", status.resumed);
    sheet.gauge("longwave:spilled_bytes", "Host memory that such state takes.", status.spilled_bytes as f64);
}

fn cache(sheet: &mut Sheet, status: &Status) {
    let share = |pool: usize| f64::from(status.units_promised[pool]) / f64::from(status.units_total[pool].max(1));
    let used = (0..3).map(share).fold(0.0, f64::max).min(1.0);
    sheet.gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the fullest pool that is promised to running requests, 0 to 1; at 1 nothing more is admitted.",
        used,
    );
    let kinds = [
        ("total", status.units_total),
        ("used", status.units_used),
        ("cached", status.units_cached),
        ("promised", status.units_promised),
    ];
    let labels: Vec<([Label; 2], f64)> = kinds
        .iter()
        .flat_map(|(state, units)| (0..3).map(|i| ([("pool", POOLS[i]), ("state", *state)], f64::from(units[i]))))
        .collect();
    let values: Vec<(&[Label], f64)> = labels.iter().map(|(labels, value)| (&labels[..], *value)).collect();
    sheet.gauges("longwave:cache_units", "Units of the cache pools, by what they are.", &values);
    let blocks = status.units_total.iter().min().copied().unwrap_or(0).to_string();
    let info: &[Label] = &[("block_size", "256"), ("num_gpu_blocks", &blocks)];
    sheet.gauges(
        "vllm:cache_config_info",
        "Always 1. The blocks are those of the smallest pool; longwave:cache_units has all pools.",
        &[(info, 1.0)],
    );
}

fn prefixes(sheet: &mut Sheet, status: &Status) {
    let prefix = &status.prefix;
    sheet.counter("vllm:prefix_cache_queries_total", "Prompt tokens that were looked up.", prefix.query_tokens);
    sheet.counter("vllm:prefix_cache_hits_total", "Of them, reused.", prefix.hit_tokens);
    sheet.counter("longwave:prefix_requests_total", "Requests that were looked up.", prefix.queries);
    sheet.counter("longwave:prefix_request_hits_total", "Of them, those that reused something.", prefix.hits);
    sheet.counter("longwave:prefix_replays_total", "Of them, those whose windows were rebuilt.", prefix.replays);
    sheet.counter(
        "longwave:prefix_replayed_tokens_total",
        "Prompt tokens that were replayed for it.",
        prefix.replayed_tokens,
    );
    sheet.gauge("longwave:prefix_blocks", "Blocks of 256 tokens that are cached.", prefix.nodes as f64);
    sheet.gauge("longwave:prefix_checkpoints", "Checkpoints that are cached.", prefix.checkpoints as f64);
    sheet.counters(
        "longwave:prefix_evicted_total",
        "Cached entries that made room.",
        &[
            (&[("kind", "block")], prefix.evicted_nodes as f64),
            (&[("kind", "checkpoint")], prefix.evicted_checkpoints as f64),
        ],
    );
    let name = "longwave:prefix_checkpoints_replaced_total";
    sheet.counter(name, "Checkpoints of an answer that gave way to a later one.", prefix.replaced_checkpoints);
}

fn tiers(sheet: &mut Sheet, status: &Status) {
    let tiers = &status.tiers;
    let both = [("host", &tiers.host), ("disk", &tiers.disk)];
    if both.iter().all(|(_, tier)| tier.limit_bytes == 0) {
        return;
    }
    let prefix = &status.prefix;
    let restored = prefix.host_tokens + prefix.disk_tokens;
    let missed = prefix.query_tokens.saturating_sub(prefix.hit_tokens.saturating_sub(restored));
    sheet.counter("vllm:external_prefix_cache_queries_total", "Prompt tokens that the device did not hold.", missed);
    sheet.counter("vllm:external_prefix_cache_hits_total", "Of them, those that came from a tier.", restored);
    let mut family = |counts: bool, name: &str, help: &str, of: &dyn Fn(&longwave_engine::tier::TierStatus) -> u64| {
        let labels = both.map(|(name, tier)| ([("tier", name)], of(tier) as f64));
        let values: Vec<(&[Label], f64)> = labels.iter().map(|(labels, value)| (&labels[..], *value)).collect();
        if counts { sheet.counters(name, help, &values) } else { sheet.gauges(name, help, &values) }
    };
    family(false, "longwave:tier_bytes", "Bytes that a tier holds.", &|tier| tier.bytes);
    family(false, "longwave:tier_limit_bytes", "Most bytes of a tier.", &|tier| tier.limit_bytes);
    family(false, "longwave:tier_records", "Records that a tier holds.", &|tier| tier.records);
    family(true, "longwave:tier_stored_total", "Records written.", &|tier| tier.stored);
    family(true, "longwave:tier_restored_total", "Records that became cached blocks again.", &|tier| tier.restored);
    family(true, "longwave:tier_skipped_total", "Records that were not written in time.", &|tier| tier.skipped);
    family(true, "longwave:tier_failed_total", "Reads and writes that failed.", &|tier| tier.failed);
    family(true, "longwave:tier_evicted_total", "Records that made room.", &|tier| tier.evicted);
    sheet.gauge("longwave:tier_pending", "Entries that are still to be copied to a tier.", tiers.pending as f64);
    let fault = f64::from(u8::from(tiers.disk_read_only));
    sheet.gauge("longwave:tier_disk_read_only", "1 when writing to the cache directory was given up.", fault);
}

fn drafts(sheet: &mut Sheet, status: &Status) {
    let places = status.limits.drafts as usize;
    if places == 0 {
        return;
    }
    let proposed = &status.drafts_proposed_at[..places];
    let accepted = &status.drafts_accepted_at[..places];
    sheet.counter("vllm:spec_decode_num_drafts_total", "Times that drafts were verified.", proposed[0]);
    sheet.counter("vllm:spec_decode_num_draft_tokens_total", "Drafts verified.", status.drafts_proposed);
    sheet.counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "Of them, how many became output.",
        status.drafts_accepted,
    );
    let names: Vec<String> = (0..places).map(|place| place.to_string()).collect();
    let mut by_place = |name: &str, help: &str, counts: &[u64]| {
        let labels: Vec<([Label; 1], f64)> =
            names.iter().zip(counts).map(|(place, &n)| ([("position", place.as_str())], n as f64)).collect();
        let values: Vec<(&[Label], f64)> = labels.iter().map(|(labels, value)| (&labels[..], *value)).collect();
        sheet.counters(name, help, &values);
    };
    by_place("vllm:spec_decode_num_accepted_tokens_per_pos_total", "Accepted drafts by place.", accepted);
    by_place("longwave:spec_decode_num_draft_tokens_per_pos_total", "Verified drafts by place.", proposed);
}

fn steps(sheet: &mut Sheet, status: &Status) {
    let totals = &status.step_totals;
    let labels = Phase::ALL.map(|phase| [("phase", phase.name())]);
    let values = |of: &dyn Fn(usize) -> f64| -> Vec<(&[Label], f64)> {
        labels.iter().enumerate().map(|(i, labels)| (&labels[..], of(i))).collect()
    };
    let (count, seconds) = (values(&|i| totals.steps[i] as f64), values(&|i| totals.time[i].as_secs_f64()));
    sheet.counters("longwave:steps_total", "Steps by what they computed.", &count);
    sheet.counters("longwave:step_seconds_total", "Their wall time.", &seconds);
    let help = "Prompt and output tokens of a step.";
    sheet.histogram("vllm:iteration_tokens_total", help, &TOKEN_BUCKETS, &totals.by_tokens, totals.tokens as f64);
}
