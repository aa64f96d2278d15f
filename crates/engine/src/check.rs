//! Checks of the prefix cache: its tree, its references and the paths of running sequences.
//!
//! Called when the engine is idle and, in tests, after every step. Assumes nothing; the error names the first broken rule.

use longwave_model::geometry::Bucket;

use crate::hash::BLOCK;
use crate::pool::{PoolCount, Pools};
use crate::prefix::{NodeId, PrefixCache};
use crate::sequence::Sequence;

impl PrefixCache {
    /// Checks that a running sequence maps the blocks of its path.
    pub fn check_sequence(&self, sequence: &Sequence) -> Result<(), String> {
        let reuse = &sequence.reuse;
        let (mut next, mut index) = (reuse.node, reuse.published);
        while let Some(id) = next {
            let node = self.node(id);
            index = index.checked_sub(1).ok_or("its path is longer than its text")?;
            let tokens = &sequence.tokens[index as usize * BLOCK..][..BLOCK];
            if !node.alive || node.hash != reuse.hashes[index as usize] || node.tokens != tokens {
                return Err(format!("block {index} is not the node that it was published as"));
            }
            for (&group, &block) in self.long.iter().zip(&node.blocks) {
                if sequence.blocks.get(group, index) != Some(block) {
                    return Err(format!("block {index} of group {group} is not that of its node"));
                }
            }
            next = node.parent;
        }
        if index > 0 { Err(format!("its path begins at block {index}")) } else { Ok(()) }
    }

    /// Adds the cache's references to `counts` and checks the tree.
    pub fn check(&self, pools: &Pools, counts: &mut [PoolCount; 3]) -> Result<(), String> {
        let mut count = |bucket: Bucket, block| counts[bucket as usize].entry(block);
        let (mut nodes, mut checkpoints, mut listed) = (0, 0, self.roots.values().map(Vec::len).sum::<usize>());
        for (i, node) in self.nodes.iter().enumerate().filter(|(_, n)| n.alive) {
            let id = NodeId(i as u32);
            nodes += 1;
            listed += node.children.len();
            for (&group, &block) in self.long.iter().zip(&node.blocks) {
                count(self.layout.groups[group].bucket, block);
            }
            for &(group, _, block) in node.checkpoint.iter().flat_map(|c| &c.blocks) {
                count(self.layout.groups[group].bucket, block);
            }
            checkpoints += u64::from(node.checkpoint.is_some());
            let parent = node.parent.map(|p| self.node(p));
            let siblings = parent.map_or_else(|| self.roots.get(&node.salt), |p| Some(&p.children));
            if self.by_hash.get(&node.hash) != Some(&id) || !siblings.is_some_and(|s| s.contains(&id)) {
                return Err(format!("node {i} cannot be found"));
            }
            if parent.is_some_and(|p| !p.alive || p.depth + 1 != node.depth) {
                return Err(format!("node {i} hangs in the air"));
            }
            if self.is_held(id, pools) && node.parent.is_some_and(|p| !self.is_held(p, pools)) {
                return Err(format!("node {i} is in a table and its parent is in none"));
            }
        }
        let of_status = (self.status.nodes, self.status.checkpoints);
        if (nodes, checkpoints) != of_status || listed as u64 != nodes || self.by_hash.len() as u64 != nodes {
            return Err(format!("{nodes} nodes and {checkpoints} checkpoints, {listed} in lists, not {of_status:?}"));
        }
        Ok(())
    }
}
