//! What running sequences leave in the prefix cache: full blocks and checkpoints, taken over when a step is committed.
//!
//! Only committed tokens are published, of prompts and answers alike. A block whose text is cached already is given back
//! for the cached one. Assumes that the windows of the sequence have not moved since the step: then the rows that a
//! checkpoint keeps are all mapped, also behind accepted drafts. Refuses to give two texts with one hash the same name.

use longwave_model::geometry::LOGICAL_BLOCK;

use crate::blocks::SequenceBlocks;
use crate::hash::{BLOCK, BlockHash};
use crate::pool::Pools;
use crate::prefix::{Checkpoint, NodeId, PrefixCache};
use crate::sequence::Sequence;
use crate::step::BlockId;

impl PrefixCache {
    /// Publishes what a step filled and takes the checkpoint that it reached. `started` is where the step began; the
    /// windows of the sequence have not moved yet.
    pub fn commit(&mut self, sequence: &mut Sequence, pools: &mut Pools, started: u32, prefill: bool, now: u64) {
        while sequence.reuse.active && sequence.reuse.published < sequence.committed / LOGICAL_BLOCK {
            self.publish(sequence, pools, now);
        }
        let committed = sequence.committed;
        let boundary = committed - committed % LOGICAL_BLOCK;
        let wanted = if prefill {
            sequence.reuse.next_cut(started, sequence.prefill_tokens) == Some(committed)
        } else {
            self.options.answers && boundary > started
        };
        if !sequence.reuse.active || !wanted {
            return;
        }
        assert!(boundary > started && sequence.reuse.published * LOGICAL_BLOCK == boundary);
        let node = sequence.reuse.node.expect("the block before a boundary is published");
        let serial = self.take_checkpoint(node, &sequence.blocks, pools, now);
        if prefill && serial.is_some() {
            self.announce(node, serial);
        }
        if !prefill {
            if let Some((old, serial)) = sequence.reuse.answer.take() {
                self.drop_unused(old, serial, pools);
            }
            sequence.reuse.answer = serial.map(|serial| (node, serial));
        }
    }

    /// Publishes the blocks of a sequence that came from a tier, with the checkpoint at their end.
    pub fn publish_restored(&mut self, sequence: &mut Sequence, pools: &mut Pools, now: u64) {
        while sequence.reuse.active && sequence.reuse.published < sequence.committed / LOGICAL_BLOCK {
            self.publish(sequence, pools, now);
        }
        if let Some(node) = sequence.reuse.node.filter(|_| sequence.reuse.active) {
            let serial = self.take_checkpoint(node, &sequence.blocks, pools, now);
            // For the other tier, if it lacks it.
            self.announce_answer(serial.map(|serial| (node, serial)));
        }
    }

    /// Publishes the next block of a sequence, or takes the cached one in its place.
    fn publish(&mut self, sequence: &mut Sequence, pools: &mut Pools, now: u64) {
        let Sequence { reuse, blocks, tokens, salt, .. } = sequence;
        let index = reuse.published as usize;
        let tokens = &tokens[index * BLOCK..][..BLOCK];
        if reuse.hashes.len() == index {
            let parent = reuse.hashes.last().copied().unwrap_or(BlockHash::ROOT);
            reuse.hashes.push(parent.child(*salt, tokens));
        }
        let hash = reuse.hashes[index];
        let id = match self.by_hash.get(&hash) {
            Some(&id) if self.is_block(id, reuse.node, *salt, tokens) => {
                let node = &mut self.nodes[id.0 as usize];
                node.last_use = now;
                for (&group, &block) in self.long.iter().zip(&node.blocks) {
                    if blocks.get(group, index as u32) != Some(block) {
                        blocks.replace(&self.layout, pools, group, index as u32, block);
                    }
                }
                id
            }
            // Two texts with one hash: the first keeps the name, the second stays private from here on.
            Some(_) => {
                reuse.active = false;
                return;
            }
            None => {
                let own = self.long.iter().map(|&g| blocks.get(g, index as u32).expect("a full block is mapped"));
                let own: Vec<BlockId> = own.collect();
                for (&group, &block) in self.long.iter().zip(&own) {
                    pools.of_mut(self.layout.groups[group].bucket).cache(block);
                }
                let id = self.insert(reuse.node, hash, *salt, tokens, own, now);
                self.announce(id, None);
                id
            }
        };
        reuse.node = Some(id);
        reuse.published += 1;
    }

    /// Keeps the windows at the end of `node`, which is where `blocks` stand. The serial of a new checkpoint.
    fn take_checkpoint(&mut self, id: NodeId, blocks: &SequenceBlocks, pools: &mut Pools, now: u64) -> Option<u64> {
        let node = &mut self.nodes[id.0 as usize];
        if let Some(checkpoint) = &mut node.checkpoint {
            checkpoint.last_use = now;
            return None;
        }
        let boundary = node.depth * LOGICAL_BLOCK;
        let mut kept = Vec::new();
        for group in self.layout.sliding() {
            let spec = &self.layout.groups[group];
            for index in spec.retention.first_needed(boundary) / spec.block_tokens..boundary / spec.block_tokens {
                // Also behind drafts: a step maps from what the first position after its start needs.
                let block = blocks.get(group, index).expect("windows move after checkpoints are taken");
                pools.of_mut(spec.bucket).cache(block);
                kept.push((group, index, block));
            }
        }
        self.serial += 1;
        node.checkpoint = Some(Checkpoint { blocks: kept, last_use: now, uses: 0, serial: self.serial });
        self.status.checkpoints += 1;
        self.version += 1;
        Some(self.serial)
    }

    fn drop_unused(&mut self, id: NodeId, serial: u64, pools: &mut Pools) {
        if self.node(id).checkpoint.as_ref().is_some_and(|c| c.serial == serial && c.uses == 0) {
            self.remove_checkpoint(id, pools);
            self.status.replaced_checkpoints += 1;
        } else {
            self.announce_answer(Some((id, serial)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PoolCount;
    use crate::testing::{cache, computed, tiny_layout};

    #[test]
    fn two_texts_with_one_hash_share_nothing() {
        let (layout, mut pools) = (tiny_layout(), Pools::new([99; 3]));
        let mut cache = cache(0);
        let mut sequence = computed(&mut pools, vec![1; 600], 0);
        // Another text is cached under the hash of this one's first block.
        let hash = BlockHash::ROOT.child(0, &[1; BLOCK]);
        let blocks = cache.long.iter().map(|&group| {
            let pool = pools.of_mut(layout.groups[group].bucket);
            let block = pool.alloc().expect("99 units");
            pool.cache(block);
            pool.release(block, crate::pool::Hold::Life);
            block
        });
        let blocks: Vec<BlockId> = blocks.collect();
        cache.insert(None, hash, 0, &[2; BLOCK], blocks, 0);
        let request = crate::testing::request(vec![1; 600], 1);
        assert_eq!(cache.lookup(&request, &crate::hash::chain(0, &request.prompt)).report.matched_tokens, 0);
        cache.commit(&mut sequence, &mut pools, 0, true, 1);
        assert_eq!((cache.status.nodes, sequence.reuse.active, sequence.reuse.published), (1, false, 0));
        sequence.blocks.release(&layout, &mut pools);
        let mut counts = [99; 3].map(PoolCount::new);
        cache.check(&pools, &mut counts).unwrap();
        assert_eq!(pools.used(), pools.cached());
    }

    #[test]
    fn a_second_copy_is_given_back() {
        let (layout, mut pools) = (tiny_layout(), Pools::new([99; 3]));
        let mut cache = cache(0);
        let [mut first, mut second] = [0, 1].map(|_| computed(&mut pools, vec![1; 512], 0));
        let used = pools.used();
        cache.commit(&mut first, &mut pools, 256, true, 1);
        cache.commit(&mut second, &mut pools, 256, true, 1);
        let long = layout.long_lived_units();
        assert_eq!(pools.used(), [0, 1, 2].map(|i| used[i] - 2 * long[i]), "two blocks were there twice");
        assert_eq!(pools.duplicates(), long.map(|u| 2 * u));
        assert_eq!((cache.status.nodes, cache.status.checkpoints), (2, 1));
        cache.check_sequence(&first).and(cache.check_sequence(&second)).unwrap();
    }
}
