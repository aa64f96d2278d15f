//! Making room: which cached entries go when a pool has no free unit.
//!
//! An entry is worth the tokens that would be computed again without it, per byte, halved with every
//! [`HALF_LIFE_STEPS`] since its last use. A checkpoint saves the distance to the checkpoint before it on its path. A
//! leaf with a checkpoint saves the same: without it, it and the nodes that only lead to it are worth nothing; a leaf
//! without one saves nothing and goes first. Only entries with an idle unit in the pool in need are touched, and never
//! a unit that a running sequence maps. Assumes what `prefix.rs` keeps true: nodes in no table have no children in one.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use longwave_model::geometry::{Bucket, LOGICAL_BLOCK};

use crate::hash::BlockHash;
use crate::pool::{Pools, Units};
use crate::prefix::{NodeId, PrefixCache};

/// Steps after which an unused entry is worth half.
const HALF_LIFE_STEPS: f64 = 16_384.0;
/// One scan of all entries evicts at least this part of them, so that scans stay cheap.
const SCAN_SHARE: u64 = 64;
/// Evicted entries that are remembered, to say why a prompt missed.
const GHOSTS: usize = 8192;

/// Kind of an evicted entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ghost {
    Checkpoint,
    Node,
}

/// What was evicted lately and which pool needed room.
#[derive(Debug, Default)]
pub(crate) struct Ghosts {
    pools: BTreeMap<(Ghost, BlockHash), (Bucket, u64)>,
    order: VecDeque<(Ghost, BlockHash, u64)>,
    serial: u64,
}

impl Ghosts {
    /// The pool that an entry had to make room in.
    pub fn get(&self, kind: Ghost, hash: BlockHash) -> Option<Bucket> {
        self.pools.get(&(kind, hash)).map(|entry| entry.0)
    }

    fn add(&mut self, kind: Ghost, hash: BlockHash, pool: Bucket) {
        self.serial += 1;
        self.pools.insert((kind, hash), (pool, self.serial));
        self.order.push_back((kind, hash, self.serial));
        if self.order.len() > GHOSTS
            && let Some((kind, hash, serial)) = self.order.pop_front()
            && self.pools.get(&(kind, hash)).is_some_and(|entry| entry.1 == serial)
        {
            self.pools.remove(&(kind, hash));
        }
    }
}

/// What goes first: least worth, then longest unused, then checkpoints, then deeper ones, then lower slots.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    worth: f64,
    last_use: u64,
    kind: Ghost,
    depth: u32,
    id: NodeId,
}

impl Candidate {
    fn key(&self) -> (u64, Ghost, Reverse<u32>, NodeId) {
        (self.last_use, self.kind, Reverse(self.depth), self.id)
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
        let tokens = if node.checkpoint.is_some() { saved * LOGICAL_BLOCK } else { 0 };
        let nodes = if leaf { chain } else { 0 };
        let checkpoint = if node.checkpoint.is_some() { self.layout.checkpoint_units() } else { [0; 3] };
        let long = self.layout.long_lived_units();
        let bytes = self.layout.bytes([0, 1, 2].map(|i| long[i] * nodes + checkpoint[i]));
        Some(Candidate { worth: worth(tokens, bytes, last_use), last_use, kind, depth: node.depth, id })
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

/// Logarithm of the worth of an entry, up to what passes for all entries alike as time goes by.
fn worth(tokens: u32, bytes: u64, last_use: u64) -> f64 {
    if tokens == 0 {
        return f64::NEG_INFINITY;
    }
    (f64::from(tokens) / bytes as f64).log2() + last_use as f64 / HALF_LIFE_STEPS
}
