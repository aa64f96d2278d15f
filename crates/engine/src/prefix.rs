//! The prefix cache: which computed blocks are kept, under which text, and where a new prompt can start.
//!
//! A *node* is one block of 256 tokens behind its parent: the tokens themselves and one long-lived block per group. A
//! *checkpoint* hangs on a node and holds what the sliding groups need to go on behind it; the c128 state is empty there.
//! Nodes and checkpoints live and die separately (`evict.rs`). A prompt starts at the longest boundary that has both, or
//! replays some tokens before the longest boundary that has nodes, whichever is cheaper (`replay.rs`).
//!
//! Assumes equal contents for equal texts, bit for bit: so a block that is computed a second time is dropped for the
//! cached one. It follows that a running sequence maps the blocks of every node on its path, and that nodes which nobody
//! maps have only such descendants: every idle unit can be evicted, leaves first. Hashes find nodes; tokens, parent and
//! salt are compared before anything is shared. Shared blocks are never written.

use std::collections::{BTreeMap, VecDeque};

use longwave_model::CacheLayout;
use longwave_model::geometry::LOGICAL_BLOCK;

use crate::blocks::SequenceBlocks;
use crate::evict::{Ghost, Ghosts};
use crate::hash::{BLOCK, BlockHash};
use crate::pool::{Pools, Units};
use crate::replay::Triangle;
use crate::report::{PrefixEnd, PrefixReport, PrefixStatus};
use crate::request::Request;
use crate::sequence::Sequence;
use crate::step::{BlockId, Replay, Token};
use crate::tier::{Fresh, Plan};

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

/// A running sequence's side of the cache.
#[derive(Debug, Default)]
pub(crate) struct Reuse {
    /// Whether its blocks are published at all.
    pub active: bool,
    /// Hashes of its full blocks, as far as they were needed.
    pub hashes: Vec<BlockHash>,
    /// Its last published block; the path to the root is its own.
    pub node: Option<NodeId>,
    /// How many of its blocks are published.
    pub published: u32,
    /// Where it leaves cached blocks behind a missing checkpoint; 0 is nowhere.
    pub junction: u32,
    pub interval: u32,
    /// How its windows are rebuilt, until it has computed as far as it has published.
    pub replay: Option<Replay>,
    /// The last checkpoint taken in its answer.
    pub answer: Option<(NodeId, u64)>,
}

impl Reuse {
    /// The next position, behind `committed`, where the prefill of a prompt must stop for a checkpoint.
    pub fn next_cut(&self, committed: u32, prompt: u32) -> Option<u32> {
        if !self.active {
            return None;
        }
        let down = |n: u32| n - n % LOGICAL_BLOCK;
        // A prompt that fills its last block is asked again one block earlier, because its last token is computed.
        let ends = [down(prompt - 1), down(prompt)];
        let step = self.interval.max(1);
        let regular = if self.interval == 0 { 0 } else { (committed / step + 1).saturating_mul(step) };
        let wanted = [self.junction, regular, ends[0], ends[1]];
        // While windows are rebuilt there is nothing to keep before they are complete.
        let least = (committed + 1).max(self.published * LOGICAL_BLOCK);
        wanted.into_iter().filter(|&n| n >= least && n <= prompt).min()
    }

    /// How the positions from `committed` on are replayed, if they are.
    pub fn replaying(&self, committed: u32) -> Option<Replay> {
        self.replay.filter(|_| committed < self.published * LOGICAL_BLOCK)
    }
}

/// Where a prompt can start.
#[derive(Debug)]
pub(crate) struct Found {
    /// Matching nodes from the root.
    path: Vec<NodeId>,
    /// How many of them there are up to the last checkpoint.
    pub hit: u32,
    /// How many of them are reused: up to the checkpoint, or all of them when windows are rebuilt.
    pub reused: u32,
    /// How windows are rebuilt.
    replay: Option<Replay>,
    /// The tiers go on where they end and bring the checkpoint.
    restored: bool,
    pub report: PrefixReport,
}

impl Found {
    /// Blocks that were found, with or without a checkpoint.
    pub fn matched(&self) -> u32 {
        self.path.len() as u32
    }

    /// Whether the tiers bring more than a replay of what is here saves.
    pub fn is_worse_than(&self, plan: &Plan) -> bool {
        let behind = self.reused.saturating_sub(plan.end) * LOGICAL_BLOCK;
        // A replayed token passes half of the layers.
        self.replay.is_none() || behind <= self.report.replayed_tokens / 2
    }

    /// Extends it by what the tiers bring.
    pub fn reach(&mut self, plan: &Plan, most: u32) {
        self.hit = plan.end.min(self.matched());
        (self.reused, self.replay, self.restored) = (self.hit, None, true);
        let report = &mut self.report;
        (report.cached_tokens, report.replayed_tokens) = (plan.end * LOGICAL_BLOCK, 0);
        report.ended_by = match plan.end {
            end if end == most => PrefixEnd::PromptEnd,
            end if end >= report.matched_tokens / LOGICAL_BLOCK && end == plan.matched => PrefixEnd::CachedTextEnds,
            _ => PrefixEnd::CheckpointMissing,
        };
        let matched = plan.matched * LOGICAL_BLOCK;
        if matched > report.matched_tokens {
            report.matched_tokens = matched;
            report.first_difference = report.first_difference.filter(|&at| at >= matched);
        }
    }
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

    /// Finds where a request can start. `hashes` are those of the full blocks of its prompt.
    pub fn lookup(&self, request: &Request, hashes: &[BlockHash]) -> Found {
        let report = PrefixReport::default();
        let mut found = Found { path: Vec::new(), hit: 0, reused: 0, replay: None, restored: false, report };
        if !self.options.on {
            return found;
        }
        if request.wants_every_position() {
            found.report.ended_by = PrefixEnd::EveryPositionWanted;
            return found;
        }
        let (prompt, salt) = (request.prompt.as_slice(), request.salt);
        // The last token of a prompt is always computed: the first answer token comes from it.
        let most = (prompt.len() - 1) / BLOCK;
        while found.path.len() < most
            && let Some(id) = self.find(found.path.last().copied(), hashes, prompt, found.path.len(), salt)
        {
            found.path.push(id);
            if self.node(id).checkpoint.is_some() {
                found.hit = found.path.len() as u32;
            }
        }
        let matched = found.path.len();
        let (first_difference, goes_on) =
            if most > 0 { self.difference(&found.path, prompt, salt) } else { (None, false) };
        let ghost = |kind| hashes.get(matched).and_then(|&hash| self.ghosts.get(kind, hash));
        let tokens = |blocks: u32| blocks * LOGICAL_BLOCK;
        let (checkpoint, matched_tokens) = (tokens(found.hit), tokens(matched as u32));
        let distance = matched_tokens - checkpoint;
        let triangle = self.triangle.filter(|t| t.tokens(distance) < distance);
        found.replay = triangle.map(|t| t.replay(matched_tokens));
        found.reused = if found.replay.is_some() { matched as u32 } else { found.hit };
        let ended_by = if found.reused < matched as u32 {
            let last = self.node(found.path[matched - 1]).hash;
            let evicted = self.ghosts.get(Ghost::Checkpoint, last);
            evicted.map_or(PrefixEnd::CheckpointMissing, |pool| PrefixEnd::CheckpointEvicted { pool })
        } else if most == 0 {
            PrefixEnd::TooShort
        } else if matched == most {
            PrefixEnd::PromptEnd
        } else if let Some(pool) = ghost(Ghost::Node) {
            PrefixEnd::Evicted { pool }
        } else if matched == 0 {
            if goes_on { PrefixEnd::NoSuchPrefix } else { PrefixEnd::Empty }
        } else if goes_on {
            PrefixEnd::Diverged
        } else {
            PrefixEnd::CachedTextEnds
        };
        let cached_tokens = found.replay.map_or(checkpoint, |r| r.first(0, 0).max(checkpoint));
        let replayed_tokens = if found.replay.is_some() { matched_tokens - cached_tokens } else { 0 };
        let report =
            PrefixReport { cached_tokens, replayed_tokens, matched_tokens, first_difference, ended_by, ..report };
        found.report = report;
        found
    }

    /// The node of block `index` of a text, behind `parent`.
    fn find(
        &self,
        parent: Option<NodeId>,
        hashes: &[BlockHash],
        text: &[Token],
        index: usize,
        salt: u64,
    ) -> Option<NodeId> {
        let &id = self.by_hash.get(&hashes[index])?;
        self.is_block(id, parent, salt, &text[index * BLOCK..][..BLOCK]).then_some(id)
    }

    /// Whether a node is the block `tokens` behind `parent`, whatever its hash says.
    pub fn is_block(&self, id: NodeId, parent: Option<NodeId>, salt: u64, tokens: &[Token]) -> bool {
        let node = self.node(id);
        node.parent == parent && node.salt == salt && node.tokens == tokens
    }

    /// Where a prompt leaves the closest text behind `path`, and whether there is any text there.
    fn difference(&self, path: &[NodeId], prompt: &[Token], salt: u64) -> (Option<u32>, bool) {
        let start = path.len() * BLOCK;
        let rest = &prompt[start..prompt.len().min(start + BLOCK)];
        let children = match path.last() {
            Some(&id) => &self.node(id).children,
            None => match self.roots.get(&salt) {
                Some(roots) => roots,
                None => return (None, false),
            },
        };
        let common = |id: &NodeId| self.node(*id).tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
        let at = children.partition_point(|&id| self.node(id).tokens.as_slice() < rest);
        let best = children[at.saturating_sub(1)..children.len().min(at + 1)].iter().map(common).max();
        let difference = best.filter(|&n| n < rest.len()).map(|n| (start + n) as u32);
        (difference, !children.is_empty())
    }

    /// Units of the first `reused` blocks of what was found that a running sequence maps already: they cost nothing.
    pub fn shared_units(&self, found: &Found, reused: u32, pools: &Pools) -> Units {
        let held = found.path[..reused as usize].iter().filter(|&&id| self.is_held(id, pools)).count() as u32;
        self.layout.long_lived_units().map(|u| u * held)
    }

    /// Whether a running sequence maps the blocks of a node.
    pub fn is_held(&self, id: NodeId, pools: &Pools) -> bool {
        let bucket = self.layout.groups[self.long[0]].bucket;
        pools.of(bucket).tables(self.node(id).blocks[0]) > 0
    }

    /// Maps what was found in the tables of a new sequence.
    pub fn adopt(
        &mut self,
        found: &Found,
        hashes: Vec<BlockHash>,
        blocks: &mut SequenceBlocks,
        pools: &mut Pools,
        now: u64,
    ) -> Reuse {
        let node = self.adopt_nodes(&found.path[..found.reused as usize], blocks, pools, now);
        // A checkpoint before the origin of a replay is of no use to it.
        let at = found.hit * LOGICAL_BLOCK;
        if found.replay.is_some() && at < found.report.cached_tokens {
            blocks.begin_at(found.report.cached_tokens);
        } else if let Some(id) = found.path[..found.hit as usize].last()
            && !found.restored
        {
            let checkpoint = self.nodes[id.0 as usize].checkpoint.as_mut().expect("a hit ends at a checkpoint");
            (checkpoint.last_use, checkpoint.uses) = (now, checkpoint.uses + 1);
            for &(group, index, block) in &checkpoint.blocks {
                blocks.adopt(&self.layout, pools, group, index, block);
            }
        }
        let matched = found.report.matched_tokens;
        let junction = if matched > found.report.cached_tokens { matched } else { 0 };
        Reuse { junction, replay: found.replay, ..self.reuse(node, found.reused, hashes) }
    }

    /// Maps the first `published` blocks of what was found, for a sequence that brings its own windows.
    pub fn resume(
        &mut self,
        found: &Found,
        published: u32,
        hashes: Vec<BlockHash>,
        blocks: &mut SequenceBlocks,
        pools: &mut Pools,
        now: u64,
    ) -> Reuse {
        let node = self.adopt_nodes(&found.path[..published as usize], blocks, pools, now);
        self.reuse(node, published, hashes)
    }

    fn reuse(&self, node: Option<NodeId>, published: u32, hashes: Vec<BlockHash>) -> Reuse {
        let (active, interval) = (self.options.on, self.options.interval);
        Reuse { active, hashes, node, published, junction: 0, interval, replay: None, answer: None }
    }

    fn adopt_nodes(
        &mut self,
        path: &[NodeId],
        blocks: &mut SequenceBlocks,
        pools: &mut Pools,
        now: u64,
    ) -> Option<NodeId> {
        for (index, id) in path.iter().enumerate() {
            let node = &mut self.nodes[id.0 as usize];
            node.last_use = now;
            for (&group, &block) in self.long.iter().zip(&node.blocks) {
                blocks.adopt(&self.layout, pools, group, index as u32, block);
            }
        }
        path.last().copied()
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

    /// Counts a request that got its seat.
    pub fn count(&mut self, found: &Found, prompt: usize) {
        if self.options.on {
            self.status.queries += 1;
            self.status.query_tokens += prompt as u64;
            self.status.hits += u64::from(found.reused > 0 || found.report.cached_tokens > 0);
            self.status.hit_tokens += u64::from(found.report.cached_tokens);
            self.status.replays += u64::from(found.replay.is_some());
            self.status.replayed_tokens += u64::from(found.report.replayed_tokens);
            self.status.host_tokens += u64::from(found.report.host_tokens);
            self.status.disk_tokens += u64::from(found.report.disk_tokens);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_end_where_checkpoints_are_wanted() {
        let cuts = |interval, junction, prompt| {
            let reuse = Reuse { active: true, interval, junction, ..Reuse::default() };
            let mut all = Vec::new();
            while let Some(cut) = reuse.next_cut(all.last().copied().unwrap_or(0), prompt) {
                all.push(cut);
            }
            all
        };
        assert_eq!(cuts(0, 0, 255), [0; 0]);
        assert_eq!(cuts(0, 0, 256), [256]);
        assert_eq!(cuts(0, 0, 511), [256]);
        assert_eq!(cuts(0, 0, 512), [256, 512], "the same prompt again can start at 256 only");
        assert_eq!(cuts(0, 512, 2000), [512, 1792]);
        assert_eq!(cuts(768, 512, 2000), [512, 768, 1536, 1792]);
        assert_eq!(Reuse::default().next_cut(0, 2000), None);
        let near_the_end = Reuse { active: true, interval: 1 << 31, ..Reuse::default() };
        assert_eq!(near_the_end.next_cut(u32::MAX - 300, u32::MAX - 1), Some(u32::MAX - 255));
    }
}
