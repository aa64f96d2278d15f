//! Where a prompt can start: what the prefix cache finds for it, why no more, and how a new sequence takes that over.
//!
//! Assumes that nothing is evicted between a lookup and the mapping of what it found. Refuses nothing: a prompt that finds
//! nothing starts at its first token, and its report says why.

use longwave_model::geometry::LOGICAL_BLOCK;

use crate::blocks::SequenceBlocks;
use crate::ghosts::Ghost;
use crate::hash::{BLOCK, BlockHash};
use crate::pool::{Pools, Units};
use crate::prefix::{NodeId, PrefixCache};
use crate::report::{PrefixEnd, PrefixReport};
use crate::request::Request;
use crate::reuse::Reuse;
use crate::step::{Replay, Token};
use crate::tier::Plan;

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

impl PrefixCache {
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
}
