//! The layers of the simulated model: which rows and entries each one has, and what a position reads of them.
//!
//! A layer's row at a position is a hash of its input there; its output is a hash of the input, of all rows of its windows
//! and of the newest entry of each long-lived group. So rows depend on the history as deep as in a real model, and a replay
//! rebuilds them in the same triangle. Windows are sums of hashed rows, so that a long chunk costs one pass. Of a model with
//! more than [`MAX_LAYERS`] layers only the last one of every group is simulated, and the last main one. Assumes that rows
//! which are read were checked by their tags; says which row is missing.

use longwave_model::CacheLayout;
use longwave_model::geometry::{CacheKind, GroupSpec, Retention};

use super::mix;
use crate::step::{Replay, Seat, Token};

/// Most layers that are all simulated.
const MAX_LAYERS: usize = 8;

/// One simulated layer.
#[derive(Debug)]
struct Layer {
    number: u32,
    /// Sliding groups that it has rows in, and its page there.
    sliding: Vec<(usize, u32)>,
    /// Long-lived groups that it has entries in.
    long: Vec<usize>,
}

/// All simulated layers of a layout.
#[derive(Debug)]
pub(super) struct Layers {
    /// Main layers, ascending.
    main: Vec<Layer>,
    /// Those of the MTP module: rows only.
    module: Vec<Layer>,
    /// Number of main layers of the model.
    depth: u32,
    reach: u32,
    /// Simulated pages of each group; 1 in long-lived groups.
    pub pages: Vec<u32>,
}

/// Rows of one layer in one group: those before the step that it reads, then its own. Sums of them, from `base` on.
#[derive(Debug)]
struct Strip {
    base: u32,
    /// `sums[i]` is the sum of the first `i` rows.
    sums: Vec<u64>,
}

/// The positions of a step while they are computed.
#[derive(Debug)]
pub(super) struct Scratch {
    pub seat: Seat,
    pub start: u32,
    replay: Option<Replay>,
    /// Position after the last one.
    next: u32,
    /// Final streams of each position; `None` where a replay has none.
    hidden: Vec<Option<u64>>,
    /// Per layer, main ones first, and sliding group of it.
    strips: Vec<Vec<Strip>>,
    /// Per long-lived group: entries that closed in this step.
    entries: Vec<Vec<u64>>,
}

/// A stored row: group, page in it, position.
pub(super) type RowAt = (usize, u32, u32);

impl Layers {
    pub fn new(layout: &CacheLayout) -> Layers {
        let all = || layout.groups.iter().flat_map(|g| &g.layers).copied();
        let few = all().max().unwrap_or(0) < MAX_LAYERS as u32;
        let last =
            |layer: u32| layer + 1 == layout.layers || layout.groups.iter().any(|g| g.layers.last() == Some(&layer));
        let mut chosen: Vec<u32> = all().filter(|&layer| few || last(layer)).collect();
        chosen.sort_unstable();
        chosen.dedup();
        let of = |number: u32| {
            let groups = |sliding: bool| {
                let has = move |&(_, g): &(usize, &GroupSpec)| g.is_sliding() == sliding && g.layers.contains(&number);
                layout.groups.iter().enumerate().filter(has)
            };
            let page = |layers: &[u32]| layers.iter().filter(|l| **l < number && chosen.contains(l)).count() as u32;
            Layer {
                number,
                sliding: groups(true).map(|(id, g)| (id, page(&g.layers))).collect(),
                long: groups(false).map(|(id, _)| id).collect(),
            }
        };
        let (main, module) = chosen.iter().map(|&n| of(n)).partition(|l: &Layer| l.number < layout.layers);
        let pages = layout
            .groups
            .iter()
            .map(|g| if g.is_sliding() { g.layers.iter().filter(|l| chosen.contains(l)).count() as u32 } else { 1 });
        let window = layout.groups.iter().find(|g| g.kind == CacheKind::Window).map(|g| g.retention);
        let reach = match window {
            Some(Retention::SlidingWindow { window, .. }) => window - 1,
            _ => 0,
        };
        Layers { pages: pages.collect(), main, module, depth: layout.layers, reach }
    }

    /// A scratch at `start`, with all earlier rows that the first position reads; the module's only if it `drafts`.
    pub fn scratch(
        &self,
        layout: &CacheLayout,
        (seat, start): (Seat, u32),
        replay: Option<Replay>,
        drafts: bool,
        read: &mut dyn FnMut(RowAt) -> Result<u64, String>,
    ) -> Result<Scratch, String> {
        let mut strips = Vec::with_capacity(self.main.len() + self.module.len());
        for layer in self.main.iter().chain(&self.module) {
            let module = layer.number >= self.depth;
            let exact = replay.map_or(0, |r| self.first_row(layer, r));
            let strip = |&(group, page): &(usize, u32)| {
                let needed = if module && !drafts { start } else { layout.groups[group].retention.first_needed(start) };
                let mut strip = Strip { base: needed.max(exact), sums: vec![0] };
                (strip.base..start).try_for_each(|p| read((group, page, p)).map(|row| strip.push(row)))?;
                Ok::<Strip, String>(strip)
            };
            strips.push(layer.sliding.iter().map(strip).collect::<Result<_, _>>()?);
        }
        let (hidden, entries) = (Vec::new(), vec![Vec::new(); layout.groups.len()]);
        Ok(Scratch { seat, start, replay, next: start, hidden, strips, entries })
    }

    /// First position where a replay has an exact row of a layer.
    fn first_row(&self, layer: &Layer, replay: Replay) -> u32 {
        let module = u32::from(layer.number >= self.depth);
        replay.first(layer.number.min(self.depth), self.reach) + module
    }

    /// Computes the next position of a scratch. `stored` reads entry `n` of a group from its block.
    pub fn extend(
        &self,
        layout: &CacheLayout,
        scratch: &mut Scratch,
        (seed, token): (u64, Token),
        stored: &mut dyn FnMut(usize, u32) -> Result<u64, String>,
    ) -> Result<(), String> {
        let Scratch { replay, strips, entries, start, next, .. } = scratch;
        let p = *next;
        let first = |layer: u32| replay.map_or(0, |r| r.first(layer, self.reach));
        let input = mix(mix(seed, u64::from(token)), u64::from(p));
        let (main, module) = strips.split_at_mut(self.main.len());
        for (layer, strips) in self.module.iter().zip(module) {
            if replay.is_none_or(|r| p >= self.first_row(layer, r)) {
                strips.iter_mut().for_each(|s| s.push(mix(input, u64::from(layer.number))));
            }
        }
        let (mut hidden, mut closing) = (Some(input), vec![0; layout.groups.len()]);
        for (layer, strips) in self.main.iter().zip(main) {
            let Some(input) = hidden.filter(|_| p >= first(layer.number)) else { break };
            for (&(group, _), strip) in layer.sliding.iter().zip(strips.iter_mut()) {
                strip.push(mix(input, group as u64));
            }
            layer.long.iter().for_each(|&group| closing[group] = mix(closing[group], input));
            if p < first(layer.number + 1) {
                hidden = None;
                break;
            }
            let mut output = input;
            for (&(group, _), strip) in layer.sliding.iter().zip(strips.iter()) {
                output = mix(output, strip.sum(layout.groups[group].retention.first_needed(p), p));
            }
            for &group in &layer.long {
                let ratio = ratio(layout, group);
                let Some(newest) = (p / ratio).checked_sub(1) else { continue };
                let own = newest.checked_sub(*start / ratio).and_then(|i| entries[group].get(i as usize));
                output = mix(output, own.map_or_else(|| stored(group, newest), |&value| Ok(value))?);
            }
            hidden = Some(output);
        }
        scratch.hidden.push(hidden.filter(|_| p >= first(self.depth)));
        for group in layout.long_lived().filter(|_| replay.is_none()) {
            if (p + 1).is_multiple_of(ratio(layout, group)) {
                entries[group].push(closing[group]);
            }
        }
        *next += 1;
        Ok(())
    }

    /// Rows that a unit of a pool may hold.
    pub fn most_rows(&self, layout: &CacheLayout, bucket: u8) -> usize {
        let rows = |(g, pages): (&GroupSpec, &u32)| {
            (if g.is_sliding() { g.block_tokens } else { g.rows_per_block } * pages) as usize
        };
        let groups = layout.groups.iter().zip(&self.pages);
        groups.filter(|(g, _)| g.bucket as u8 == bucket).map(rows).max().unwrap_or(0)
    }

    /// Rows of a scratch that are exact, in one group: page, position, value.
    pub fn rows<'a>(
        &'a self,
        scratch: &'a Scratch,
        group: usize,
        position: u32,
    ) -> impl Iterator<Item = (u32, u64)> + 'a {
        let layers = self.main.iter().chain(&self.module).zip(&scratch.strips);
        let of = move |(layer, strips): (&'a Layer, &'a Vec<Strip>)| {
            let at = layer.sliding.iter().position(|s| s.0 == group)?;
            strips[at].row(position).map(|value| (layer.sliding[at].1, value))
        };
        layers.filter_map(of)
    }
}

impl Scratch {
    /// Position after the last one that was computed.
    pub fn end(&self) -> u32 {
        self.next
    }

    /// Final streams of the last position.
    pub fn last(&self) -> Result<u64, String> {
        self.hidden.last().copied().flatten().ok_or_else(|| format!("position {} has no streams", self.next - 1))
    }

    /// Entry `n` of a long-lived group, if it closed in this step.
    pub fn entry(&self, layout: &CacheLayout, group: usize, n: u32) -> Option<u64> {
        let first = self.start / ratio(layout, group);
        n.checked_sub(first).and_then(|i| self.entries[group].get(i as usize).copied())
    }

    /// Forgets positions from `end` on.
    pub fn truncate(&mut self, layout: &CacheLayout, end: u32) {
        self.next = end;
        self.hidden.truncate((end - self.start) as usize);
        for strip in self.strips.iter_mut().flatten() {
            strip.sums.truncate((end - strip.base.min(end)) as usize + 1);
        }
        for group in layout.long_lived() {
            let ratio = ratio(layout, group);
            self.entries[group].truncate((end / ratio - self.start / ratio) as usize);
        }
    }
}

impl Strip {
    fn push(&mut self, row: u64) {
        self.sums.push(self.sums[self.sums.len() - 1].wrapping_add(row));
    }

    /// Sum of the rows of positions `from..to`, all of them there.
    fn sum(&self, from: u32, to: u32) -> u64 {
        let at = |p: u32| self.sums[(p - self.base) as usize];
        if from < to { at(to).wrapping_sub(at(from)) } else { 0 }
    }

    fn row(&self, p: u32) -> Option<u64> {
        let i = p.checked_sub(self.base)? as usize;
        Some(self.sums.get(i + 1)?.wrapping_sub(self.sums[i]))
    }
}

/// Positions per entry of a long-lived group.
pub(super) fn ratio(layout: &CacheLayout, group: usize) -> u32 {
    match layout.groups[group].retention {
        Retention::LongLived { ratio } => ratio,
        Retention::SlidingWindow { .. } => unreachable!("long-lived groups only"),
    }
}
