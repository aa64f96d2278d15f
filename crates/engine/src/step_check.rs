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
        check_ids(step, seq, layout, limits).map_err(bad)?;
        tables.apply(step, seq).map_err(bad)?;
        check(step, seq, layout, limits, tables).map_err(bad)?;
    }
    Ok(())
}

/// Refuses blocks that do not exist. Tables hold what came through here, so a step costs its own changes and not the
/// length of its contexts.
fn check_ids(step: &Step, seq: &SeqStep, layout: &CacheLayout, limits: &Limits) -> Result<(), String> {
    for write in step.writes_of(seq) {
        let Some(spec) = layout.groups.get(write.group as usize) else { continue };
        if write.block != BlockId::NONE && write.block.0 >= limits.units[spec.bucket as usize] {
            let (seat, id, pool) = (seq.seat.0, write.block.0, spec.bucket.name());
            return Err(format!("seat {seat}: block id {id} is past the {pool} pool"));
        }
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
    if let Some(how) = &seq.sample {
        let most = limits.vocab as usize;
        let bias = how.bias.iter().map(|&(token, _)| token).collect::<std::collections::BTreeSet<_>>();
        let known = |mut tokens: std::slice::Iter<u32>| tokens.all(|&token| token < limits.vocab);
        if bias.len() != how.bias.len() || bias.iter().any(|&token| token >= limits.vocab) {
            return Err(format!("seat {}: {} biases with a token twice or out of range", seq.seat.0, how.bias.len()));
        }
        if how.forbidden.len() > most || !known(how.forbidden.iter()) {
            return Err(format!("seat {}: {} forbidden tokens, or one out of range", seq.seat.0, how.forbidden.len()));
        }
    }
    let masks = (1 + seq.drafts as usize) * mask_words(limits.vocab);
    let range = seq.masks.start as usize..seq.masks.end as usize;
    if !seq.masks.is_empty() && (seq.masks.len() != masks || step.masks.get(range).is_none()) {
        return Err(format!("seat {}: {} words of masks, not {masks}", seq.seat.0, seq.masks.len()));
    }
    let gives =
        seq.sample.is_some() || seq.want_drafts > 0 || seq.logits != ReturnLogits::No || seq.attention.is_some();
    if seq.replay.is_some() && gives {
        return Err(format!(
            "seat {}: a replay gives no tokens, drafts or logits and tells of no attention",
            seq.seat.0
        ));
    }
    let mapped = |group, from, to| check_blocks(seq, layout, tables, group, from, to);
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

/// Refuses when positions `from..to` of a group are not mapped.
fn check_blocks(
    seq: &SeqStep,
    layout: &CacheLayout,
    tables: &SeatTables,
    group: usize,
    from: u32,
    to: u32,
) -> Result<(), String> {
    let spec = &layout.groups[group];
    let table = tables.table(seq.seat, group);
    let past = if from < to { to.div_ceil(spec.block_tokens) } else { 0 };
    // Long-lived tables have no holes.
    let known = if spec.is_sliding() { 0 } else { table.dense().len() as u32 };
    match (known.max(from / spec.block_tokens)..past).find(|&index| table.get(index).is_none()) {
        Some(index) => Err(format!("seat {}: block {index} of {:?} is not mapped", seq.seat.0, spec.kind)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::{Sampling, Seat, TableWrite};
    use crate::testing::tiny_layout;

    /// A first step of three tokens with all its blocks, changed by `spoil`; the refusal.
    fn refused(spoil: impl FnOnce(&mut Step)) -> Option<String> {
        let layout = tiny_layout();
        let limits =
            Limits { seats: 2, step_tokens: 8, context: 1024, units: [64; 3], drafts: 0, in_flight: 1, vocab: 100 };
        let writes: Vec<TableWrite> = (0..)
            .zip(&layout.groups)
            .map(|(group, _)| TableWrite { group, index: 0, block: BlockId(u32::from(group)) })
            .collect();
        let seq = SeqStep {
            fresh: true,
            writes: 0..writes.len() as u32,
            sample: Some(Sampling::default()),
            ..SeqStep::new(Seat(0), 0, 0..3)
        };
        let mut step = Step { number: 1, seqs: vec![seq], tokens: vec![1, 2, 3], writes, ..Step::default() };
        spoil(&mut step);
        match apply(&step, &layout, &limits, &mut SeatTables::new(&layout, 2)) {
            Err(BackendError::BadStep { what, .. }) => Some(what),
            other => other.err().map(|error| error.to_string()),
        }
    }

    #[test]
    fn what_a_kernel_could_not_bear_is_refused_by_name() {
        let how = |step: &mut Step, change: &dyn Fn(&mut Sampling)| {
            change(step.seqs[0].sample.as_mut().unwrap_or(&mut Sampling::default()));
        };
        assert_eq!(refused(|_| ()), None);
        assert_eq!(refused(|s| how(s, &|h| h.bias = vec![(5, 1.0), (99, 1.0)])), None);
        for (change, why) in [
            (&(|h: &mut Sampling| h.bias = vec![(5, 1.0), (5, 2.0)]) as &dyn Fn(&mut Sampling), "a token twice"),
            (&|h: &mut Sampling| h.bias = vec![(100, 1.0)], "out of range"),
            (&|h: &mut Sampling| h.forbidden = vec![100], "forbidden"),
            (&|h: &mut Sampling| h.forbidden = vec![1; 101], "forbidden"),
        ] {
            let refusal = refused(|s| how(s, change)).unwrap_or_default();
            assert!(refusal.contains(why), "{refusal:?} does not say {why:?}");
        }
        assert!(refused(|s| s.tokens[0] = 100).is_some_and(|why| why.contains("vocabulary size")));
        assert!(refused(|s| s.seqs[0].writes = 0..0).is_some_and(|why| why.contains("not mapped")));
        assert!(refused(|s| s.writes[0].block = BlockId(64)).is_some_and(|why| why.contains("past the")));
        assert_eq!(refused(|s| s.writes[0].block = BlockId(63)), None);
        assert!(refused(|s| s.seqs.push(s.seqs[0].clone())).is_some_and(|why| why.contains("there twice")));
    }
}
