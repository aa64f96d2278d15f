//! Which records a tier holds and which go first when it is full.
//!
//! A record is worth the tokens that it saves per byte, halved whenever as many bytes as the tier holds were added since
//! its last use. A block goes only when no record of the tier hangs on it: no child and no checkpoint. Checkpoints go at any
//! time; one saves the distance to the checkpoint before it, the blocks between count as its bytes, and those that only
//! led to it go with it. A checkpoint that
//! the only text behind it has passed counts for [`PASSED`] of that, as in the prefix cache. Assumes that the caller
//! removes the data of what is evicted. Refuses a record that is larger than the tier. Knows no clock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use longwave_model::geometry::LOGICAL_BLOCK;

use super::record::{Key, Kind};
use crate::hash::BlockHash;

/// Fixed-point logarithm of a worth: this much is a factor of two.
const ONE: f64 = 1_048_576.0;
/// Logarithm of the part of its worth that a checkpoint keeps when the text goes on behind it and does not part there.
const PASSED: f64 = -3.0;

#[derive(Debug, Clone, Copy)]
struct Entry {
    parent: BlockHash,
    depth: u32,
    bytes: u64,
    /// Logarithm of the tokens saved per byte.
    base: f64,
    /// [`Shelf::added`] at its last use.
    used: u64,
}

/// What goes first: least worth, then the deepest.
type Rank = (i64, Reverse<u32>, Key);

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shelf {
    limit: u64,
    bytes: u64,
    /// Bytes ever added: the clock of worth.
    added: u64,
    entries: BTreeMap<Key, Entry>,
    /// Records that hang on a block, which may itself not be there.
    hanging: BTreeMap<BlockHash, u32>,
    /// Everything that may go.
    order: BTreeSet<Rank>,
}

impl Shelf {
    /// An empty shelf for `limit` bytes.
    pub fn new(limit: u64) -> Shelf {
        Shelf { limit, bytes: 0, added: 0, entries: BTreeMap::new(), hanging: BTreeMap::new(), order: BTreeSet::new() }
    }

    pub fn contains(&self, key: Key) -> bool {
        self.entries.contains_key(&key)
    }

    /// Records.
    pub fn len(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Their bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Adds a record that is used now. The records that go for it, itself when it hangs on all others; `None` when it is
    /// larger than everything.
    pub fn put(&mut self, key: Key, parent: BlockHash, depth: u32, bytes: u64) -> Option<Vec<Key>> {
        if bytes > self.limit {
            return None;
        }
        self.added += bytes;
        self.put_at(key, parent, depth, bytes, self.added);
        Some(self.make_room(key))
    }

    /// Adds a record that was last used when `used` bytes had been added, without making room.
    pub fn put_at(&mut self, key: Key, parent: BlockHash, depth: u32, bytes: u64, used: u64) {
        self.remove(key);
        self.added = self.added.max(used);
        let base = self.base(key, parent, bytes);
        self.entries.insert(key, Entry { parent, depth, bytes, base, used });
        self.bytes += bytes;
        self.hang(below(key, parent), 1);
        self.list(key);
    }

    /// Takes out what is worth least until the limit holds; `last` only when nothing else may go.
    pub fn make_room(&mut self, last: Key) -> Vec<Key> {
        let mut gone = Vec::new();
        while self.bytes > self.limit {
            let Some(key) = self.order.iter().map(|rank| rank.2).find(|&key| key != last) else {
                self.remove(last);
                gone.push(last);
                break;
            };
            // Since it was listed, checkpoints before it may have gone: then it saves more.
            let entry = self.entries[&key];
            let base = self.base(key, entry.parent, entry.bytes);
            if base > entry.base {
                self.unlist(key);
                self.entries.insert(key, Entry { base, ..entry });
                self.list(key);
                continue;
            }
            self.remove(key);
            gone.push(key);
            if key.kind == Kind::Checkpoint {
                self.remove_chain(key.hash, &mut gone);
            }
        }
        gone
    }

    /// Takes out the blocks that only led to a checkpoint that went.
    fn remove_chain(&mut self, mut hash: BlockHash, gone: &mut Vec<Key>) {
        while !self.hanging.contains_key(&hash)
            && let Some(&entry) = self.entries.get(&Key { hash, kind: Kind::Node })
        {
            self.remove(Key { hash, kind: Kind::Node });
            gone.push(Key { hash, kind: Kind::Node });
            hash = entry.parent;
        }
    }

    /// Marks a record as used now.
    pub fn touch(&mut self, key: Key) {
        if self.contains(key) {
            // Later than all that was added before.
            self.added += 1;
            self.unlist(key);
            self.entries.entry(key).and_modify(|e| e.used = self.added);
            self.list(key);
        }
    }

    /// Takes a record out. Whether it was there.
    pub fn remove(&mut self, key: Key) -> bool {
        self.unlist(key);
        let Some(entry) = self.entries.remove(&key) else { return false };
        self.bytes -= entry.bytes;
        self.hang(below(key, entry.parent), -1);
        true
    }

    /// Hangs something on a block or takes it off, which changes what may go and what a checkpoint there is worth.
    fn hang(&mut self, hash: BlockHash, by: i32) {
        let concerned = [Kind::Node, Kind::Checkpoint].map(|kind| Key { hash, kind });
        concerned.iter().for_each(|&key| self.unlist(key));
        let count = self.hanging.get(&hash).copied().unwrap_or(0).saturating_add_signed(by);
        match count {
            0 => drop(self.hanging.remove(&hash)),
            n => drop(self.hanging.insert(hash, n)),
        }
        concerned.iter().for_each(|&key| self.list(key));
    }

    /// Logarithm of the tokens that a record saves per byte.
    fn base(&self, key: Key, parent: BlockHash, bytes: u64) -> f64 {
        let node = |hash| self.entries.get(&Key { hash, kind: Kind::Node });
        let (mut blocks, mut total) = (1, bytes);
        if key.kind == Kind::Checkpoint {
            let mut own = node(key.hash);
            let mut next = parent;
            while let Some(entry) = own {
                total += entry.bytes;
                if self.contains(Key { hash: next, kind: Kind::Checkpoint }) {
                    break;
                }
                own = node(next);
                if let Some(before) = own {
                    next = before.parent;
                    blocks += 1;
                }
            }
        }
        (f64::from(blocks * LOGICAL_BLOCK) / total.max(1) as f64).log2()
    }

    fn rank(&self, key: Key) -> Option<Rank> {
        let entry = self.entries.get(&key)?;
        // Itself and one child.
        let passed = key.kind == Kind::Checkpoint && self.hanging.get(&key.hash) == Some(&2);
        let share = if passed { PASSED } else { 0.0 };
        let worth = entry.base + share + entry.used as f64 / self.limit.max(1) as f64;
        Some(((worth * ONE) as i64, Reverse(entry.depth), key))
    }

    /// Lets a record go when room is needed, unless something hangs on it.
    fn list(&mut self, key: Key) {
        let free = key.kind == Kind::Checkpoint || !self.hanging.contains_key(&key.hash);
        if free && let Some(rank) = self.rank(key) {
            self.order.insert(rank);
        }
    }

    fn unlist(&mut self, key: Key) {
        if let Some(rank) = self.rank(key) {
            self.order.remove(&rank);
        }
    }
}

/// The block that a record hangs on.
fn below(key: Key, parent: BlockHash) -> BlockHash {
    match key.kind {
        Kind::Node => parent,
        Kind::Checkpoint => key.hash,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash(text: u8, depth: u32) -> BlockHash {
        if depth == 0 {
            BlockHash::ROOT
        } else {
            BlockHash([text, depth as u8, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        }
    }

    fn node(text: u8, depth: u32) -> Key {
        Key { hash: hash(text, depth), kind: Kind::Node }
    }

    fn checkpoint(text: u8, depth: u32) -> Key {
        Key { kind: Kind::Checkpoint, ..node(text, depth) }
    }

    /// Blocks `1..=blocks` of a text, 100 bytes each, and a checkpoint of 300 at the end.
    fn put(shelf: &mut Shelf, text: u8, blocks: u32) -> Vec<Key> {
        let mut gone = Vec::new();
        for depth in 1..=blocks {
            gone.extend(shelf.put(node(text, depth), hash(text, depth - 1), depth, 100).unwrap());
        }
        gone.extend(shelf.put(checkpoint(text, blocks), hash(text, blocks - 1), blocks, 300).unwrap());
        gone
    }

    #[test]
    fn the_longest_unused_text_goes_from_its_end() {
        let mut shelf = Shelf::new(1600);
        assert!(put(&mut shelf, 1, 3).is_empty() && put(&mut shelf, 2, 3).is_empty());
        (1..=3).for_each(|d| shelf.touch(node(1, d)));
        shelf.touch(checkpoint(1, 3));
        let gone = put(&mut shelf, 3, 3);
        assert_eq!(gone, [checkpoint(2, 3), node(2, 3), node(2, 2), node(2, 1)], "what led to it is of no use alone");
        assert_eq!((shelf.bytes(), shelf.len()), (1200, 8));
    }

    #[test]
    fn a_checkpoint_that_saves_little_goes_first_and_the_next_one_then_saves_more() {
        let mut shelf = Shelf::new(1400);
        put(&mut shelf, 1, 5);
        for depth in [2, 4] {
            shelf.put(checkpoint(1, depth), hash(1, depth - 1), depth, 300).unwrap();
        }
        // Passed ones before the one at the end, that with two blocks behind the other at 2 before that at 2.
        let mut room = |bytes| shelf.put(node(2, 1), BlockHash::ROOT, 1, bytes).unwrap();
        assert_eq!([room(100), room(400), room(600)].concat().len(), 2);
        let left = |d| shelf.contains(checkpoint(1, d));
        assert_eq!([left(2), left(4), left(5)], [false, false, true]);
    }

    #[test]
    fn a_new_block_does_not_push_its_own_parent_out() {
        let mut shelf = Shelf::new(200);
        for depth in 1..=2 {
            shelf.put(node(1, depth), hash(1, depth - 1), depth, 100).unwrap();
        }
        assert_eq!(shelf.put(node(1, 3), hash(1, 2), 3, 100), Some(vec![node(1, 3)]), "it hangs on all the others");
        assert_eq!(shelf.put(node(2, 1), BlockHash::ROOT, 1, 100), Some(vec![node(1, 2)]));
        assert_eq!(shelf.put(node(3, 1), BlockHash::ROOT, 1, 201), None);
    }

    proptest! {
        /// Bytes, counts and lists stay consistent whatever comes and goes, and blocks with something on them stay.
        #[test]
        fn sums_hold(ops in prop::collection::vec((0u8..4, 0u8..3, 1u32..6, 1u64..200), 0..200)) {
            let mut shelf = Shelf::new(600);
            for (op, text, depth, bytes) in ops {
                let key = if op & 1 == 0 { node(text, depth) } else { checkpoint(text, depth) };
                match op {
                    0 | 1 => {
                        let gone = shelf.put(key, hash(text, depth - 1), depth, bytes).unwrap();
                        prop_assert!(gone.iter().all(|k| !shelf.contains(*k)) && shelf.bytes <= shelf.limit);
                    }
                    2 => shelf.touch(key),
                    _ => drop(shelf.remove(key)),
                }
                prop_assert_eq!(shelf.bytes, shelf.entries.values().map(|e| e.bytes).sum::<u64>());
                let mut hanging = BTreeMap::new();
                for (k, e) in &shelf.entries {
                    *hanging.entry(below(*k, e.parent)).or_insert(0) += 1;
                }
                prop_assert_eq!(&shelf.hanging, &hanging);
                let free = |k: &Key| k.kind == Kind::Checkpoint || !hanging.contains_key(&k.hash);
                let listed: BTreeSet<Key> = shelf.order.iter().map(|r| r.2).collect();
                prop_assert_eq!(listed, shelf.entries.keys().copied().filter(free).collect::<BTreeSet<_>>());
            }
        }
    }
}
