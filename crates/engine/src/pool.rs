//! Block pools: one fixed set of units per bucket, handed out by id with reference counts.
//!
//! Allocation, sharing and release are O(1) and allocate no memory. Assumes that admission has reserved what a running
//! request can need, so an empty pool at allocation is a broken invariant of the caller. Refuses to release or share a
//! free unit. Contents are the backend's; a unit that is handed out again holds whatever its last owner left.

use longwave_model::geometry::Bucket;

use crate::step::BlockId;

/// Units per bucket: large, middle, small.
pub type Units = [u32; 3];

/// Who has a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitState {
    /// Nobody; it can be handed out.
    Free,
    /// Block tables (and, later, cached prefixes) that refer to it.
    Owned {
        /// How many, at least one.
        refs: u32,
    },
}

/// The units of one bucket.
#[derive(Debug, Clone)]
pub struct Pool {
    refs: Vec<u32>,
    free: Vec<BlockId>,
}

impl Pool {
    /// A pool of `units` free units; low ids are handed out first.
    pub fn new(units: u32) -> Pool {
        Pool { refs: vec![0; units as usize], free: (0..units).rev().map(BlockId).collect() }
    }

    /// Takes a free unit with one reference; `None` when there is none.
    pub fn alloc(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        let refs = &mut self.refs[block.0 as usize];
        assert!(*refs == 0, "block {} was in the free list with {refs} references", block.0);
        *refs = 1;
        Some(block)
    }

    /// Adds a reference to an owned unit.
    pub fn retain(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        assert!(*refs > 0, "block {} is free, it cannot be shared", block.0);
        *refs += 1;
    }

    /// Drops a reference; the last one frees the unit. Returns whether it became free.
    pub fn release(&mut self, block: BlockId) -> bool {
        let refs = &mut self.refs[block.0 as usize];
        assert!(*refs > 0, "block {} is free, it cannot be released", block.0);
        *refs -= 1;
        if *refs == 0 {
            self.free.push(block);
        }
        *refs == 0
    }

    /// State of a unit.
    pub fn state(&self, block: BlockId) -> UnitState {
        match self.refs[block.0 as usize] {
            0 => UnitState::Free,
            refs => UnitState::Owned { refs },
        }
    }

    /// Units in all.
    pub fn total(&self) -> u32 {
        self.refs.len() as u32
    }

    /// Units that are owned.
    pub fn used(&self) -> u32 {
        self.total() - self.free.len() as u32
    }

    /// Checks that the free list holds exactly the unreferenced units, each once, and that the references are those of
    /// `counted` (one count per unit, gathered from all tables).
    pub fn check(&self, counted: &[u32]) -> Result<(), String> {
        if let Some(b) = (0..self.refs.len()).find(|&b| self.refs[b] != counted[b]) {
            return Err(format!("block {b} has {} references, tables hold {}", self.refs[b], counted[b]));
        }
        let mut listed = vec![false; self.refs.len()];
        for b in &self.free {
            if std::mem::replace(&mut listed[b.0 as usize], true) {
                return Err(format!("block {} is in the free list twice", b.0));
            }
        }
        match (0..self.refs.len()).find(|&b| listed[b] != (self.refs[b] == 0)) {
            Some(b) => Err(format!("block {b} has {} references, in the free list: {}", self.refs[b], listed[b])),
            None => Ok(()),
        }
    }
}

/// The three pools of an engine.
#[derive(Debug, Clone)]
pub struct Pools {
    pools: [Pool; 3],
}

impl Pools {
    /// Pools of the given sizes, all free.
    pub fn new(units: Units) -> Pools {
        Pools { pools: units.map(Pool::new) }
    }

    /// Pool of `bucket`.
    pub fn of(&self, bucket: Bucket) -> &Pool {
        &self.pools[bucket as usize]
    }

    /// Pool of `bucket`, to change.
    pub fn of_mut(&mut self, bucket: Bucket) -> &mut Pool {
        &mut self.pools[bucket as usize]
    }

    /// Sizes.
    pub fn total(&self) -> Units {
        [0, 1, 2].map(|i| self.pools[i].total())
    }

    /// Owned units.
    pub fn used(&self) -> Units {
        [0, 1, 2].map(|i| self.pools[i].used())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn low_ids_first_and_an_empty_pool_says_so() {
        let mut pool = Pool::new(2);
        assert_eq!(pool.alloc(), Some(BlockId(0)));
        assert_eq!(pool.alloc(), Some(BlockId(1)));
        assert_eq!(pool.alloc(), None);
        assert_eq!(pool.used(), 2);
        assert!(pool.release(BlockId(0)));
        assert_eq!(pool.state(BlockId(0)), UnitState::Free);
        assert_eq!(pool.state(BlockId(1)), UnitState::Owned { refs: 1 });
    }

    #[test]
    #[should_panic(expected = "is free, it cannot be released")]
    fn a_double_release_is_refused() {
        let mut pool = Pool::new(1);
        let block = pool.alloc().expect("one unit");
        pool.release(block);
        pool.release(block);
    }

    #[test]
    #[should_panic(expected = "is free, it cannot be shared")]
    fn a_free_unit_cannot_be_shared() {
        Pool::new(1).retain(BlockId(0));
    }

    #[test]
    fn the_check_sees_a_lost_reference() {
        let mut pool = Pool::new(2);
        pool.alloc();
        assert!(pool.check(&[1, 0]).is_ok());
        assert_eq!(pool.check(&[0, 0]), Err("block 0 has 1 references, tables hold 0".into()));
    }

    proptest! {
        /// The pool against a model that is a plain map of counts.
        #[test]
        fn behaves_like_a_map_of_counts(units in 1u32..9, ops in prop::collection::vec((0u8..3, 0u32..9), 0..200)) {
            let mut pool = Pool::new(units);
            let mut model = vec![0u32; units as usize];
            for (op, pick) in ops {
                let owned: Vec<u32> = (0..units).filter(|&b| model[b as usize] > 0).collect();
                if op == 0 {
                    match pool.alloc() {
                        Some(b) => {
                            prop_assert_eq!(model[b.0 as usize], 0);
                            model[b.0 as usize] = 1;
                        }
                        None => prop_assert!(model.iter().all(|&r| r > 0)),
                    }
                } else if !owned.is_empty() {
                    let b = owned[pick as usize % owned.len()];
                    if op == 1 {
                        pool.retain(BlockId(b));
                        model[b as usize] += 1;
                    } else {
                        model[b as usize] -= 1;
                        prop_assert_eq!(pool.release(BlockId(b)), model[b as usize] == 0);
                    }
                }
                prop_assert_eq!(pool.check(&model), Ok(()));
                prop_assert_eq!(pool.used() as usize, model.iter().filter(|&&r| r > 0).count());
            }
        }
    }
}
