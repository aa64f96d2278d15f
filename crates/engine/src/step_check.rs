//! What a backend refuses before it computes: steps that would read or write outside their tables or limits.
//!
//! Every backend calls [`apply`] first, so that a bug of the planner ends in a named error and not in wrong rows. Assumes
//! nothing of the step. Nothing is computed and no row is touched; only tables change.

use longwave_model::CacheLayout;
use longwave_model::geometry::{CacheKind, MAX_DRAFTS};

use crate::constraint::mask_words;
use crate::step::{BackendError, BlockId, LAST_SAMPLED, Limits, ReturnLogits, SeqStep, Step};
use crate::tables::SeatTables;

/// Applies the table changes of `step` and checks each sequence against its tables and `limits`. The error names the step.
pub fn apply(step: &Step, layout: &CacheLayout, limits: &Limits, tables: &mut SeatTables) -> Result<(), BackendError> {
    let bad = |what: String| BackendError::BadStep { step: step.number, what };
    let total: usize = step.seqs.iter().map(|s| s.tokens.len()).sum();
    if total > limits.step_tokens as usize {
        return Err(bad(format!("{total} tokens, the limit is {}", limits.step_tokens)));
    }
    let mut seats: Vec<u32> = step.seqs.iter().map(|s| s.seat.0).collect();
    seats.sort_unstable();
    seats.dedup();
    if seats.len() != step.seqs.len() {
        return Err(bad("a seat is there twice".into()));
    }
    for seq in &step.seqs {
        tables.apply(step, seq).map_err(bad)?;
        check(step, seq, layout, limits, tables).map_err(bad)?;
    }
    Ok(())
}

/// Refuses what would read or write outside the tables. Called after the writes of the sequence were applied.
fn check(step: &Step, seq: &SeqStep, layout: &CacheLayout, limits: &Limits, tables: &SeatTables) -> Result<(), String> {
    if let Some(history) = step.history_of(seq)
        && (history.len() != seq.start as usize || history.iter().any(|&t| t >= limits.vocab))
    {
        return Err(format!("seat {}: a history of {} tokens for {}", seq.seat.0, history.len(), seq.start));
    }
    let n = seq.tokens.len() as u32;
    if n == 0 || seq.drafts >= n && seq.drafts > 0 || seq.drafts > MAX_DRAFTS {
        return Err(format!("seat {}: {n} tokens with {} drafts", seq.seat.0, seq.drafts));
    }
    let end = seq.start + n;
    if end > limits.context {
        return Err(format!("seat {}: position {end} is past the context {}", seq.seat.0, limits.context));
    }
    for &t in step.tokens_of(seq) {
        if t >= limits.vocab && t != LAST_SAMPLED {
            return Err(format!("token {t} is not below the vocabulary size {}", limits.vocab));
        }
    }
    if seq.want_drafts > limits.drafts {
        let most = limits.drafts;
        return Err(format!("seat {} wants {} drafts, the limit is {most}", seq.seat.0, seq.want_drafts));
    }
    let masks = (1 + seq.drafts as usize) * mask_words(limits.vocab);
    let range = seq.masks.start as usize..seq.masks.end as usize;
    if !seq.masks.is_empty() && (seq.masks.len() != masks || step.masks.get(range).is_none()) {
        return Err(format!("seat {}: {} words of masks, not {masks}", seq.seat.0, seq.masks.len()));
    }
    if seq.replay.is_some() && (seq.sample.is_some() || seq.want_drafts > 0 || seq.logits != ReturnLogits::No) {
        return Err(format!("seat {}: a replay gives no tokens, drafts or logits", seq.seat.0));
    }
    let mapped = |group, from, to| check_blocks(seq, layout, limits, tables, group, from, to);
    for (g, spec) in layout.groups.iter().enumerate() {
        // Long-lived entries are read from the beginning and written up to the end; windows are read from the first
        // row that is still needed.
        if spec.is_sliding() {
            // Of a replay, no layer has rows before the lowest one does.
            let oldest = seq.replay.map_or(0, |r| r.first(spec.layers[0], layout.reach()));
            let first = spec.retention.first_needed(seq.start).max(oldest);
            mapped(g, first.min(seq.start), seq.start)?;
        } else {
            mapped(g, 0, end)?;
        }
        // The drafter reads the window that the next step will read.
        if seq.want_drafts > 0 && spec.kind == CacheKind::Window {
            mapped(g, spec.retention.first_needed(end - seq.drafts), end)?;
        }
    }
    Ok(())
}

/// Refuses when positions `from..to` of a group are not mapped, or a mapped block does not exist.
fn check_blocks(
    seq: &SeqStep,
    layout: &CacheLayout,
    limits: &Limits,
    tables: &SeatTables,
    group: usize,
    from: u32,
    to: u32,
) -> Result<(), String> {
    let spec = &layout.groups[group];
    let table = tables.table(seq.seat, group);
    let (seat, units, pool) = (seq.seat.0, limits.units[spec.bucket as usize], spec.bucket.name());
    let exists = |b: BlockId| match b.0 >= units {
        true => Err(format!("seat {seat}: block id {} is past the {pool} pool", b.0)),
        false => Ok(()),
    };
    table.sparse().iter().try_for_each(|&(_, b)| exists(b))?;
    let past = if from < to { to.div_ceil(spec.block_tokens) } else { 0 };
    for index in from / spec.block_tokens..past {
        let block = table.get(index);
        exists(block.ok_or_else(|| format!("seat {seat}: block {index} of {:?} is not mapped", spec.kind))?)?;
    }
    Ok(())
}
