//! Making room: which cached entries go when a pool has no free unit.
//!
//! An entry is worth the tokens that would be computed again without it, per byte, halved with every
//! [`HALF_LIFE_STEPS`] since its last use. Without a checkpoint, a boundary costs what it takes to rebuild its windows: the
//! distance to the checkpoint before it on its path or, far behind one, the tokens of a replay (`replay.rs`). That is what
//! a checkpoint saves. A leaf, with the nodes that only lead to it, saves the computing of their tokens, less the replay
//! that it takes to go on behind it when it has no checkpoint; without replays such a leaf is worth nothing. Where the
//! nodes are worth less per byte than their checkpoint, it is worth no more than they are with it: it goes first.
//! A checkpoint that the only text behind it has passed counts for [`PASSED_SHARE`] of its worth: most prompts go on where
//! a text ended or where texts part. Only entries with an idle unit in the pool in need are touched, and never a unit that
//! a running sequence maps. Assumes what `prefix.rs` keeps true: nodes in no table have no children in one.

use std::collections::BinaryHeap;

use longwave_model::geometry::{Bucket, LOGICAL_BLOCK};

use crate::ghosts::Ghost;
use crate::pool::{Pools, Units};
use crate::prefix::{NodeId, PrefixCache};

/// Steps after which an unused entry is worth half.
const HALF_LIFE_STEPS: f64 = 16_384.0;
/// Part of its worth that a checkpoint keeps when the text goes on behind it and does not part there.
const PASSED_SHARE: f64 = 1.0 / 8.0;
/// One scan of all entries evicts at least this part of them, so that scans stay cheap.
const SCAN_SHARE: u64 = 64;

/// What goes first: least worth, then longest unused, then checkpoints, then those closer to the start, then lower slots.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    worth: f64,
    last_use: u64,
    kind: Ghost,
    depth: u32,
    id: NodeId,
}

impl Candidate {
    fn key(&self) -> (u64, Ghost, u32, NodeId) {
        (self.last_use, self.kind, self.depth, self.id)
    }
}

impl Ord for Candidate {
    /// Greater goes first.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.worth.total_cmp(&self.worth).then_with(|| other.key().cmp(&self.key()))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

/// What a scan finds out about a node.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    /// Blocks from the checkpoint before it to its end.
    saved: u32,
    /// Nodes up to it that lead to nothing else and have no checkpoint before it.
    chain: u32,
}

/// Lists of a scan, kept so that the next one allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    places: Vec<Place>,
    open: Vec<NodeId>,
    heap: BinaryHeap<Candidate>,
}

impl PrefixCache {
    /// Evicts until each pool has `units` free units, or nothing is left that may go.
    pub fn make_room(&mut self, pools: &mut Pools, units: Units) {
        for bucket in Bucket::ALL {
            let need = units[bucket as usize];
            while pools.of(bucket).free() < need && self.evict_some(pools, bucket, need) {}
        }
    }

    /// One scan and the evictions after it. Whether anything went.
    fn evict_some(&mut self, pools: &mut Pools, bucket: Bucket, need: u32) -> bool {
        let entries = self.status.nodes + self.status.checkpoints;
        let enough = need.max((entries / SCAN_SHARE) as u32);
        self.scan(pools, bucket);
        let mut went = false;
        while pools.of(bucket).free() < enough
            && let Some(candidate) = self.scratch.heap.pop()
        {
            went |= self.evict(candidate, pools, bucket);
        }
        went
    }

    /// Visits all nodes, parents first, and lists what may go.
    fn scan(&mut self, pools: &Pools, bucket: Bucket) {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.heap.clear();
        scratch.places.resize(self.nodes.len(), Place::default());
        scratch.open.extend(self.roots.values().flatten());
        while let Some(id) = scratch.open.pop() {
            let node = self.node(id);
            let before = node.parent.map(|p| (self.node(p), scratch.places[p.0 as usize]));
            let fresh = Place { saved: 1, chain: 1 };
            scratch.places[id.0 as usize] = match before {
                None => fresh,
                Some((parent, _)) if parent.checkpoint.is_some() => fresh,
                Some((parent, place)) => {
                    Place { saved: place.saved + 1, chain: if parent.children.len() > 1 { 1 } else { place.chain + 1 } }
                }
            };
            scratch.open.extend(&node.children);
            scratch.heap.extend(self.candidate(id, Ghost::Checkpoint, &scratch.places, pools, bucket));
            scratch.heap.extend(self.candidate(id, Ghost::Node, &scratch.places, pools, bucket));
        }
        self.scratch = scratch;
    }

    /// An entry, if it exists, may go and helps.
    fn candidate(&self, id: NodeId, kind: Ghost, places: &[Place], pools: &Pools, bucket: Bucket) -> Option<Candidate> {
        let node = self.node(id);
        let leaf = node.children.is_empty();
        let idle = |group: usize, block| {
            let its = self.layout.groups[group].bucket;
            its == bucket && pools.of(its).tables(block) == 0
        };
        let (helps, last_use) = match (kind, &node.checkpoint) {
            (Ghost::Checkpoint, None) => return None,
            (Ghost::Checkpoint, Some(c)) => (c.blocks.iter().any(|&(group, _, block)| idle(group, block)), c.last_use),
            (Ghost::Node, c) => {
                let last_use = node.last_use.max(c.as_ref().map_or(0, |c| c.last_use));
                (leaf && self.long.iter().zip(&node.blocks).any(|(&group, &block)| idle(group, block)), last_use)
            }
        };
        if !helps {
            return None;
        }
        let Place { saved, chain } = places[id.0 as usize];
        let has_checkpoint = node.checkpoint.is_some();
        let checkpoint = if has_checkpoint { self.layout.checkpoint_units() } else { [0; 3] };
        let long = self.layout.long_lived_units();
        let bytes = |nodes: u32| self.layout.bytes([0, 1, 2].map(|i| long[i] * nodes + checkpoint[i]));
        // The nodes of a leaf and its checkpoint, if it has one, together.
        let all = || {
            let without = chain * LOGICAL_BLOCK + self.rebuild_tokens(saved - chain);
            let with = if has_checkpoint { 0 } else { self.rebuild_tokens(saved) };
            worth(f64::from(without - with), bytes(chain), last_use)
        };
        let worth = match kind {
            Ghost::Node => all(),
            Ghost::Checkpoint => {
                let share = if node.children.len() == 1 { PASSED_SHARE } else { 1.0 };
                let alone = worth(f64::from(self.rebuild_tokens(saved)) * share, bytes(0), last_use);
                if leaf { alone.min(all()) } else { alone }
            }
        };
        Some(Candidate { worth, last_use, kind, depth: node.depth, id })
    }

    /// Tokens that it costs to go on at a boundary without a checkpoint, `blocks` behind the last one.
    fn rebuild_tokens(&self, blocks: u32) -> u32 {
        let distance = blocks * LOGICAL_BLOCK;
        self.triangle.map_or(distance, |t| t.tokens(distance))
    }

    /// Takes an entry out, unless it went already. Whether it did.
    fn evict(&mut self, candidate: Candidate, pools: &mut Pools, bucket: Bucket) -> bool {
        let Candidate { id, kind, .. } = candidate;
        let node = self.node(id);
        if !node.alive || (kind == Ghost::Checkpoint && node.checkpoint.is_none()) {
            return false;
        }
        let (hash, parent) = (node.hash, node.parent);
        if node.checkpoint.is_some() {
            self.remove_checkpoint(id, pools);
            self.status.evicted_checkpoints += 1;
            self.ghosts.add(Ghost::Checkpoint, hash, bucket);
        }
        // What it leaves: the node of a checkpoint, now worth less, or the parent of a leaf, now a leaf perhaps.
        let next = match kind {
            Ghost::Checkpoint => Some(id),
            Ghost::Node => {
                self.remove_leaf(id, pools);
                self.status.evicted_nodes += 1;
                self.ghosts.add(Ghost::Node, hash, bucket);
                parent
            }
        };
        let places = std::mem::take(&mut self.scratch.places);
        let next = next.and_then(|next| self.candidate(next, Ghost::Node, &places, pools, bucket));
        self.scratch.places = places;
        self.scratch.heap.extend(next);
        true
    }
}

/// Logarithm of the worth of an entry, up to what all entries lose alike as time goes by. Minus infinity for nothing.
fn worth(tokens: f64, bytes: u64, last_use: u64) -> f64 {
    (tokens / bytes as f64).log2() + last_use as f64 / HALF_LIFE_STEPS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::Span;
    use crate::hash;
    use crate::prefix::PrefixOptions;
    use crate::report::PrefixEnd;
    use crate::reuse::Reuse;
    use crate::sequence::Sequence;
    use crate::testing::{cache, computed, request, tiny_layout};

    const UNITS: u32 = 200;

    /// A sequence of `blocks` blocks of token `token`, with checkpoints at the given ones, that runs.
    fn running(
        cache: &mut PrefixCache,
        pools: &mut Pools,
        token: u32,
        blocks: u32,
        checkpoints: &[u32],
        now: u64,
    ) -> Sequence {
        let layout = tiny_layout();
        let mut s = computed(pools, Vec::from([token; 1]), 0);
        s.tokens = vec![token; 256 * blocks as usize];
        s.prefill_tokens = 256 * blocks;
        for block in 1..=blocks {
            let (start, end) = (s.committed, 256 * block);
            s.blocks.extend(&layout, pools, Span { start, end, drafts: 0 });
            s.committed = end;
            // One past the end, nothing is wanted there.
            s.reuse = Reuse { junction: if checkpoints.contains(&block) { end } else { 0 }, ..s.reuse };
            s.prefill_tokens = end + if checkpoints.contains(&block) { 0 } else { 1 };
            cache.commit(&mut s, pools, start, checkpoints.contains(&block), now);
            s.blocks.retire(&layout, pools, end);
        }
        s
    }

    /// The same, ended.
    fn left(cache: &mut PrefixCache, pools: &mut Pools, token: u32, blocks: u32, checkpoints: &[u32], now: u64) {
        let mut s = running(cache, pools, token, blocks, checkpoints, now);
        cache.leave(&s.reuse, now);
        s.blocks.release(&tiny_layout(), pools);
    }

    /// Blocks of `token` that are cached, and where a prompt of them can start.
    fn kept(cache: &PrefixCache, token: u32) -> (u32, u32) {
        let request = request(vec![token; 256 * 20 + 1], 1);
        let report = cache.lookup(&request, &hash::chain(0, &request.prompt)).report;
        (report.matched_tokens / 256, report.cached_tokens / 256)
    }

    /// Evicts until `more` units of a pool are free beyond those that are.
    fn squeeze(cache: &mut PrefixCache, pools: &mut Pools, bucket: Bucket, more: u32) {
        let mut units = [0; 3];
        units[bucket as usize] = pools.of(bucket).free() + more;
        cache.make_room(pools, units);
    }

    #[test]
    fn what_no_checkpoint_reaches_goes_first() {
        let (mut cache, mut pools) = (cache(0), Pools::new([UNITS; 3]));
        left(&mut cache, &mut pools, 1, 2, &[1, 2], 1);
        left(&mut cache, &mut pools, 2, 5, &[3], 100_000);
        squeeze(&mut cache, &mut pools, Bucket::Small, 2);
        assert_eq!((kept(&cache, 1), kept(&cache, 2)), ((2, 2), (3, 3)));
        assert_eq!(cache.status.evicted_checkpoints, 0);
    }

    #[test]
    fn a_prefix_that_saves_more_stays_until_it_is_much_older() {
        for (age, stays) in [(1, true), (4, false)] {
            let (mut cache, mut pools) = (cache(0), Pools::new([UNITS; 3]));
            left(&mut cache, &mut pools, 1, 8, &[8], 0);
            left(&mut cache, &mut pools, 2, 1, &[1], age * HALF_LIFE_STEPS as u64);
            squeeze(&mut cache, &mut pools, Bucket::Large, 1);
            assert_eq!((kept(&cache, 1).1, kept(&cache, 2).1), if stays { (8, 0) } else { (0, 1) }, "{age}");
        }
    }

    #[test]
    fn a_checkpoint_close_behind_another_goes_before_one_far_behind() {
        let (mut cache, mut pools) = (cache(0), Pools::new([UNITS; 3]));
        left(&mut cache, &mut pools, 1, 9, &[7, 8, 9], 1);
        squeeze(&mut cache, &mut pools, Bucket::Large, 1);
        let at: Vec<u32> = cache.nodes.iter().filter(|n| n.checkpoint.is_some()).map(|n| n.depth).collect();
        assert_eq!((at, cache.status.nodes), (vec![7, 9], 9), "the end of a text is where the next prompt starts");
        squeeze(&mut cache, &mut pools, Bucket::Large, 1);
        assert_eq!(kept(&cache, 1), (9, 9));
        squeeze(&mut cache, &mut pools, Bucket::Large, 1);
        assert_eq!(kept(&cache, 1), (9, 0));
        let ended_by = {
            let request = request(vec![1; 9 * 256 + 1], 1);
            cache.lookup(&request, &hash::chain(0, &request.prompt)).report.ended_by
        };
        assert_eq!(ended_by, PrefixEnd::CheckpointEvicted { pool: Bucket::Large });
    }

    /// A cache that rebuilds windows.
    fn rebuilding() -> PrefixCache {
        let options = PrefixOptions { on: true, interval: 0, answers: false, replay: true, drafts: false };
        PrefixCache::new(&tiny_layout(), options)
    }

    /// Depths at which texts of `token` have checkpoints.
    fn checkpoints(cache: &PrefixCache, token: u32) -> Vec<u32> {
        cache
            .nodes
            .iter()
            .filter(|n| n.alive && n.tokens[0] == token && n.checkpoint.is_some())
            .map(|n| n.depth)
            .collect()
    }

    #[test]
    fn a_long_text_without_a_checkpoint_is_worth_what_a_replay_leaves_of_it() {
        for replay in [false, true] {
            let (mut cache, mut pools) = (if replay { rebuilding() } else { cache(0) }, Pools::new([UNITS; 3]));
            left(&mut cache, &mut pools, 1, 20, &[], 1);
            left(&mut cache, &mut pools, 2, 1, &[1], 1);
            squeeze(&mut cache, &mut pools, Bucket::Small, 1);
            let blocks = (kept(&cache, 1).0, kept(&cache, 2).0);
            assert_eq!(blocks, if replay { (20, 0) } else { (19, 1) });
        }
        // Two blocks without a checkpoint: a replay costs 357 of 512 tokens, 155 are left for two blocks.
        let (mut cache, mut pools) = (rebuilding(), Pools::new([UNITS; 3]));
        left(&mut cache, &mut pools, 1, 2, &[], 1);
        left(&mut cache, &mut pools, 2, 20, &[], 1);
        squeeze(&mut cache, &mut pools, Bucket::Small, 2);
        assert_eq!((kept(&cache, 1).0, kept(&cache, 2).0), (0, 20));
    }

    #[test]
    fn a_checkpoint_saves_no_more_than_a_replay() {
        for (replay, first) in [(false, 2), (true, 1)] {
            let (mut cache, mut pools) = (if replay { rebuilding() } else { cache(0) }, Pools::new([UNITS; 3]));
            left(&mut cache, &mut pools, 1, 20, &[20], 1);
            left(&mut cache, &mut pools, 2, 3, &[3], 2);
            squeeze(&mut cache, &mut pools, Bucket::Large, 1);
            // Behind 20 blocks and behind 3 it saves one triangle: the one that was used earlier goes. Without replays it
            // saves the blocks.
            assert_eq!(
                (checkpoints(&cache, 1), checkpoints(&cache, 2)).clone(),
                match first {
                    1 => (vec![], vec![3]),
                    _ => (vec![20], vec![]),
                }
            );
            assert_eq!((kept(&cache, 1).0, kept(&cache, 2).0), (20, 3), "the blocks stay");
        }
    }

    #[test]
    fn what_runs_is_never_touched() {
        let (mut cache, mut pools) = (cache(0), Pools::new([UNITS; 3]));
        let s = running(&mut cache, &mut pools, 1, 4, &[2, 4], 1);
        left(&mut cache, &mut pools, 2, 3, &[3], 2);
        cache.make_room(&mut pools, [UNITS; 3]);
        assert_eq!((cache.status.nodes, kept(&cache, 2)), (4, (0, 0)));
        cache.check_sequence(&s).unwrap();
        let held = s.blocks.units(&tiny_layout());
        assert_eq!(pools.used(), held, "nothing but its own blocks is left");
    }

    #[test]
    fn a_tree_is_evicted_from_its_leaves() {
        let (mut cache, mut pools) = (cache(0), Pools::new([UNITS; 3]));
        left(&mut cache, &mut pools, 1, 6, &[2, 6], 1);
        for small in (0..6).rev() {
            squeeze(&mut cache, &mut pools, Bucket::Small, 1);
            assert_eq!(kept(&cache, 1).0, small);
        }
        assert_eq!((pools.used(), cache.status.checkpoints), ([0; 3], 0));
    }
}
