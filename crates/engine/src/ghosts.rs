//! What was evicted lately from the prefix cache, and for which pool: it lets a report say why a prompt missed.
//!
//! Holds hashes, no texts, and a bounded number of them: the oldest are forgotten. Assumes nothing of who evicts.

use std::collections::{BTreeMap, VecDeque};

use longwave_model::geometry::Bucket;

use crate::hash::BlockHash;

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

    pub fn add(&mut self, kind: Ghost, hash: BlockHash, pool: Bucket) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ghosts_are_bounded_and_the_latest_counts() {
        let mut ghosts = Ghosts::default();
        let hash = |i: usize| BlockHash((i as u128).to_le_bytes());
        ghosts.add(Ghost::Node, hash(0), Bucket::Large);
        ghosts.add(Ghost::Node, hash(0), Bucket::Small);
        (1..GHOSTS).for_each(|i| ghosts.add(Ghost::Checkpoint, hash(i), Bucket::Large));
        assert_eq!(ghosts.get(Ghost::Node, hash(0)), Some(Bucket::Small), "its second time is remembered");
        assert_eq!(ghosts.get(Ghost::Checkpoint, hash(0)), None);
        ghosts.add(Ghost::Node, hash(1), Bucket::Small);
        assert_eq!(ghosts.get(Ghost::Node, hash(0)), None);
        assert_eq!((ghosts.order.len(), ghosts.pools.len()), (GHOSTS, GHOSTS));
    }
}
