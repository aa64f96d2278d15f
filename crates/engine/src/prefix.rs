//! The prefix cache: which computed blocks are kept, under which text, and where a new prompt can start.
//!
//! A *node* is one block of 256 tokens behind its parent: the tokens themselves and one long-lived block per group. A
//! *checkpoint* hangs on a node and holds what the sliding groups need to go on behind it; the c128 state is empty there.
//! Nodes and checkpoints live and die separately (`evict.rs`). A prompt starts at the longest boundary that has both, or
//! replays some tokens before the longest boundary that has nodes, whichever is cheaper (`lookup.rs`, `replay.rs`).
//!
//! Assumes equal contents for equal texts, bit for bit: so a block that is computed a second time is dropped for the
//! cached one. It follows that a running sequence maps the blocks of every node on its path, and that nodes which nobody
//! maps have only such descendants: every idle unit can be evicted, leaves first. Hashes find nodes; tokens, parent and
//! salt are compared before anything is shared. Shared blocks are never written.

use std::collections::{BTreeMap, VecDeque};

use longwave_model::CacheLayout;
use longwave_model::geometry::LOGICAL_BLOCK;

use crate::ghosts::Ghosts;
use crate::hash::BlockHash;
use crate::pool::Pools;
use crate::replay::Triangle;
use crate::report::PrefixStatus;
use crate::reuse::Reuse;
use crate::sequence::Sequence;
use crate::step::{BlockId, Token};
use crate::tier::Fresh;

/// What an operator chooses about the prefix cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefixOptions {
    /// Whether anything is kept.
    pub on: bool,
    /// Distance of checkpoints inside prompts, rounded down to blocks; 0 is none.
    pub interval: u32,
    /// Checkpoints while an answer is generated.
    pub answers: bool,
    /// Whether windows are rebuilt where only the checkpoint is missing.
    pub replay: bool,
    /// Whether the MTP module's window is one of them.
    pub drafts: bool,
}

/// Slot of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeId(pub u32);

/// One cached block.
#[derive(Debug)]
pub(crate) struct Node {
    /// False when the slot is free.
    pub alive: bool,
    pub hash: BlockHash,
    pub salt: u64,
    pub parent: Option<NodeId>,
    /// Blocks from the start, this one included.
    pub depth: u32,
    pub tokens: Vec<Token>,
    /// One per long-lived group.
    pub blocks: Vec<BlockId>,
    /// Ascending by tokens, so that the closest text is next to where a missing one would be.
    pub children: Vec<NodeId>,
    pub last_use: u64,
    pub checkpoint: Option<Checkpoint>,
}

/// Blocks of the sliding groups at the end of a node.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// Group, block index, block; ascending in each group.
    pub blocks: Vec<(usize, u32, BlockId)>,
    pub last_use: u64,
    /// Requests that started here.
    pub uses: u32,
    /// Tells it from others at the same node.
    pub serial: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct PrefixCache {
    pub options: PrefixOptions,
    pub layout: CacheLayout,
    /// Ids of the long-lived groups.
    pub long: Vec<usize>,
    pub nodes: Vec<Node>,
    free: Vec<NodeId>,
    pub by_hash: BTreeMap<BlockHash, NodeId>,
    /// First blocks by salt, ascending by tokens.
    pub roots: BTreeMap<u64, Vec<NodeId>>,
    /// Of the last checkpoint.
    pub serial: u64,
    /// Rises whenever nodes or checkpoints come or go.
    pub version: u64,
    pub status: PrefixStatus,
    pub ghosts: Ghosts,
    pub scratch: crate::evict::Scratch,
    /// How windows are rebuilt; `None` when they are not.
    pub triangle: Option<Triangle>,
    /// Published entries that the tiers have not copied yet; empty unless `announces`.
    pub fresh: VecDeque<Fresh>,
    /// Entries that fell out of it.
    pub fresh_lost: u64,
    pub announces: bool,
}

impl PrefixCache {
    /// An empty cache.
    pub fn new(layout: &CacheLayout, mut options: PrefixOptions) -> PrefixCache {
        for spec in &layout.groups {
            // A boundary is the end of a block in every group: rows behind it go to blocks of their own.
            assert!(LOGICAL_BLOCK.is_multiple_of(spec.block_tokens), "a block would span a boundary: {spec:?}");
            assert!(spec.is_sliding() || spec.block_tokens == LOGICAL_BLOCK, "one long-lived block per node: {spec:?}");
        }
        let long: Vec<usize> = layout.long_lived().collect();
        options.on &= !long.is_empty();
        if options.interval > 0 {
            options.interval = options.interval.max(LOGICAL_BLOCK) / LOGICAL_BLOCK * LOGICAL_BLOCK;
        }
        PrefixCache {
            options,
            layout: layout.clone(),
            long,
            nodes: Vec::new(),
            free: Vec::new(),
            by_hash: BTreeMap::new(),
            roots: BTreeMap::new(),
            serial: 0,
            version: 0,
            status: PrefixStatus::default(),
            ghosts: Ghosts::default(),
            scratch: crate::evict::Scratch::default(),
            triangle: Triangle::new(layout, options.drafts).filter(|_| options.replay),
            fresh: VecDeque::new(),
            fresh_lost: 0,
            announces: false,
        }
    }

    /// Whether anything is kept.
    pub fn is_on(&self) -> bool {
        self.options.on
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    /// Whether a node is the block `tokens` behind `parent`, whatever its hash says.
    pub fn is_block(&self, id: NodeId, parent: Option<NodeId>, salt: u64, tokens: &[Token]) -> bool {
        let node = self.node(id);
        node.parent == parent && node.salt == salt && node.tokens == tokens
    }

    /// Whether a running sequence maps the blocks of a node.
    pub fn is_held(&self, id: NodeId, pools: &Pools) -> bool {
        let bucket = self.layout.groups[self.long[0]].bucket;
        pools.of(bucket).tables(self.node(id).blocks[0]) > 0
    }

    /// Tokens that a running sequence would compute again if it lost its windows and state now.
    pub fn redo_tokens(&self, sequence: &Sequence) -> u32 {
        let mut next = sequence.reuse.node;
        while let Some(id) = next {
            let node = self.node(id);
            if node.checkpoint.is_some() {
                // Behind a replay that is under way nothing is done yet.
                return sequence.committed.saturating_sub(node.depth * LOGICAL_BLOCK);
            }
            next = node.parent;
        }
        sequence.committed
    }

    /// Adds a node behind `parent`; its blocks are held for it already.
    pub fn insert(
        &mut self,
        parent: Option<NodeId>,
        hash: BlockHash,
        salt: u64,
        tokens: &[Token],
        blocks: Vec<BlockId>,
        now: u64,
    ) -> NodeId {
        let depth = 1 + parent.map_or(0, |p| self.node(p).depth);
        let tokens = tokens.to_vec();
        let children = Vec::new();
        let node =
            Node { alive: true, hash, salt, parent, depth, tokens, blocks, children, last_use: now, checkpoint: None };
        let id = match self.free.pop() {
            Some(id) => {
                *self.node_mut(id) = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId(self.nodes.len() as u32 - 1)
            }
        };
        self.by_hash.insert(hash, id);
        let mut siblings = std::mem::take(self.siblings(parent, salt));
        let at = siblings.partition_point(|&s| self.node(s).tokens < self.node(id).tokens);
        siblings.insert(at, id);
        *self.siblings(parent, salt) = siblings;
        self.status.nodes += 1;
        self.version += 1;
        id
    }

    fn siblings(&mut self, parent: Option<NodeId>, salt: u64) -> &mut Vec<NodeId> {
        match parent {
            Some(parent) => &mut self.node_mut(parent).children,
            None => self.roots.entry(salt).or_default(),
        }
    }

    /// Takes a checkpoint out of the cache.
    pub fn remove_checkpoint(&mut self, id: NodeId, pools: &mut Pools) {
        let checkpoint = self.node_mut(id).checkpoint.take().expect("only a checkpoint that exists is removed");
        for (group, _, block) in checkpoint.blocks {
            pools.of_mut(self.layout.groups[group].bucket).uncache(block);
        }
        self.status.checkpoints -= 1;
        self.version += 1;
    }

    /// Takes all checkpoints out of the cache and leaves the nodes.
    pub fn drop_checkpoints(&mut self, pools: &mut Pools) {
        for id in (0..self.nodes.len() as u32).map(NodeId) {
            if self.node(id).checkpoint.is_some() {
                self.remove_checkpoint(id, pools);
            }
        }
    }

    /// Takes a leaf out of the cache. Its checkpoint must be gone.
    pub fn remove_leaf(&mut self, id: NodeId, pools: &mut Pools) {
        let node = self.node_mut(id);
        assert!(node.alive && node.children.is_empty() && node.checkpoint.is_none(), "only bare leaves are removed");
        node.alive = false;
        let (hash, parent, salt) = (node.hash, node.parent, node.salt);
        let blocks = std::mem::take(&mut node.blocks);
        for (&group, block) in self.long.iter().zip(blocks) {
            pools.of_mut(self.layout.groups[group].bucket).uncache(block);
        }
        self.by_hash.remove(&hash);
        let siblings = self.siblings(parent, salt);
        siblings.retain(|&s| s != id);
        if siblings.is_empty() && parent.is_none() {
            self.roots.remove(&salt);
        }
        self.free.push(id);
        self.status.nodes -= 1;
        self.version += 1;
    }

    /// Marks the path of a sequence that ends as used until now.
    pub fn leave(&mut self, reuse: &Reuse, now: u64) {
        self.announce_answer(reuse.answer);
        let mut next = reuse.node;
        while let Some(id) = next {
            let node = self.node_mut(id);
            node.last_use = now;
            next = node.parent;
        }
    }
}
