//! What the simulated backend refuses: steps that break the contract of [`crate::step`].
//!
//! Everything that a step says of itself is checked before its table changes are applied, what its tables then hold
//! afterwards. Assumes nothing of the engine; the error names the seat and the first broken rule.

use std::collections::{BTreeMap, BTreeSet};

use longwave_model::geometry::LOGICAL_BLOCK;

use super::SimBackend;
use crate::constraint::mask_words;
use crate::step::{BlockId, LAST_SAMPLED, ReturnLogits, SeqStep, Step};

impl SimBackend {
    /// Everything about a step that needs no tables.
    pub(super) fn check(&self, step: &Step) -> Result<(), String> {
        if step.tokens.len() > self.limits.step_tokens as usize {
            return Err(format!("{} tokens, the limit is {}", step.tokens.len(), self.limits.step_tokens));
        }
        let (mut tokens, mut writes, mut masks) = (0, 0, 0);
        for (i, seq) in step.seqs.iter().enumerate() {
            let at = format!("seat {}", seq.seat.0);
            let len = seq.tokens.end.saturating_sub(seq.tokens.start);
            if seq.seat.0 >= self.limits.seats || step.seqs[..i].iter().any(|s| s.seat == seq.seat) {
                return Err(format!("{at} does not exist or is there twice"));
            }
            if seq.tokens.start != tokens || seq.tokens.end as usize > step.tokens.len() {
                return Err(format!("{at}: tokens {:?} do not follow {tokens}", seq.tokens));
            }
            if seq.writes.start != writes || seq.writes.end < writes || seq.writes.end as usize > step.writes.len() {
                return Err(format!("{at}: writes {:?} do not follow {writes}", seq.writes));
            }
            let words = (1 + seq.drafts as usize) * mask_words(self.limits.vocab);
            let masked = if seq.masks.is_empty() { 0 } else { words };
            if seq.masks.start != masks || seq.masks.len() != masked || masked > 0 && seq.sample.is_none() {
                return Err(format!("{at}: masks {:?} do not follow {masks} with {words} words", seq.masks));
            }
            (tokens, writes, masks) = (seq.tokens.end, seq.writes.end, seq.masks.end);
            if step.history_of(seq).is_some_and(|h| h.len() != seq.start as usize) {
                return Err(format!("{at}: a history of {:?} for position {}", seq.history, seq.start));
            }
            if seq.drafts >= len || seq.drafts > self.limits.drafts || (seq.drafts > 0 && seq.sample.is_none()) {
                return Err(format!(
                    "{at}: {} drafts among {len} tokens, sampled: {}",
                    seq.drafts,
                    seq.sample.is_some()
                ));
            }
            if seq.want_drafts > self.limits.drafts {
                return Err(format!("{at} wants {} drafts, the limit is {}", seq.want_drafts, self.limits.drafts));
            }
            if seq.start + len > self.limits.context {
                return Err(format!("{at}: position {} is beyond the context", seq.start + len - 1));
            }
            if seq.replay.is_some() && (seq.sample.is_some() || seq.want_drafts > 0 || seq.logits != ReturnLogits::No) {
                return Err(format!("{at}: a replay gives no tokens, drafts or logits"));
            }
            match &self.seats[seq.seat.0 as usize] {
                _ if seq.fresh => {}
                Some(state) if !seq.fresh && state.next == seq.start && [None, state.replay].contains(&seq.replay) => {}
                state => {
                    return Err(format!("{at} starts at {}, fresh: {}, but is at {state:?}", seq.start, seq.fresh));
                }
            }
            self.check_tokens(step, seq).map_err(|e| format!("{at}: {e}"))?;
        }
        if [tokens, writes, masks].map(|n| n as usize) != [step.tokens.len(), step.writes.len(), step.masks.len()] {
            return Err("tokens, writes or masks that belong to no sequence".into());
        }
        Ok(())
    }

    fn check_tokens(&self, step: &Step, seq: &SeqStep) -> Result<(), String> {
        for (i, &token) in step.tokens_of(seq).iter().enumerate() {
            let known = self.seats[seq.seat.0 as usize].and_then(|s| s.last_sampled);
            if token == LAST_SAMPLED && (i > 0 || seq.fresh || known.is_none()) {
                return Err("nothing was sampled here before".into());
            }
            if token != LAST_SAMPLED && token >= self.limits.vocab {
                return Err(format!("token {token}, the vocabulary has {}", self.limits.vocab));
            }
        }
        Ok(())
    }

    pub(super) fn check_writes(&self, step: &Step, seq: &SeqStep) -> Result<(), String> {
        for w in step.writes_of(seq) {
            let spec =
                self.layout.groups.get(w.group as usize).ok_or_else(|| format!("group {} does not exist", w.group))?;
            if w.block != BlockId::NONE && w.block.0 >= self.limits.units[spec.bucket as usize] {
                return Err(format!("block {} does not exist in the {} pool", w.block.0, spec.bucket.name()));
            }
        }
        Ok(())
    }

    /// Blocks that nothing reads any more must have been taken out: they may belong to somebody else already.
    pub(super) fn check_past(&self, seq: &SeqStep) -> Result<(), String> {
        let end = seq.start + seq.tokens.len() as u32;
        for group in self.layout.long_lived().filter(|_| seq.replay.is_some()) {
            let mapped = self.tables.table(seq.seat, group).dense().len() as u32 * LOGICAL_BLOCK;
            if mapped < end {
                return Err(format!("seat {} group {group}: a replay to {end}, blocks to {mapped}", seq.seat.0));
            }
        }
        for group in self.layout.sliding() {
            let spec = &self.layout.groups[group];
            let first = spec.retention.first_needed(seq.start);
            match self.tables.table(seq.seat, group).sparse().first() {
                Some(&(index, _)) if (index + 1) * spec.block_tokens <= first => {
                    return Err(format!("seat {} group {group}: block {index} is past and still mapped", seq.seat.0));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Blocks (pool, id) that several sequences of the step map: they may be read and not stored to. A block has one
    /// meaning: the same place in every table that maps it.
    pub(super) fn check_shared(&self, step: &Step) -> Result<BTreeSet<(u8, BlockId)>, String> {
        let mut places = BTreeMap::new();
        let mut shared = BTreeSet::new();
        if step.seqs.len() < 2 {
            return Ok(shared);
        }
        for seq in &step.seqs {
            for (group, spec) in self.layout.groups.iter().enumerate() {
                let table = self.tables.table(seq.seat, group);
                let dense = table.dense().iter().enumerate().map(|(index, &block)| (index as u32, block));
                for (index, block) in dense.chain(table.sparse().iter().copied()) {
                    let (key, place) = ((spec.bucket as u8, block), (group, index));
                    match places.insert(key, (place, seq.seat)) {
                        None => {}
                        Some((other, seat)) if other == place && seat != seq.seat => drop(shared.insert(key)),
                        Some(other) => {
                            let (at, seat) = (format!("group {group} index {index}"), seq.seat.0);
                            return Err(format!("block {} is {at} of seat {seat} and also {other:?}", block.0));
                        }
                    }
                }
            }
        }
        Ok(shared)
    }
}
