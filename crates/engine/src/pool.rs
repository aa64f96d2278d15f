//! Block pools: one fixed set of units per bucket, handed out by id with reference counts.
//!
//! A unit is held by block tables of running sequences and, at most once, by the prefix cache. Allocation, sharing and
//! release are O(1) and allocate no memory. Assumes that admission has reserved what a running request can need and that
//! the prefix cache has made room, so an empty pool at allocation is a broken invariant of the caller. Refuses to release
//! or share a free unit. Contents are the backend's; a unit that is handed out again holds whatever its last owner left.

use longwave_model::geometry::{Bucket, GroupSpec};

use crate::step::BlockId;

/// Units per bucket: large, middle, small.
pub type Units = [u32; 3];

/// Who has a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitState {
    /// Nobody; it can be handed out.
    Free,
    /// Block tables, the prefix cache, or both.
    Owned {
        /// Tables of running sequences that map it.
        tables: u32,
        /// Whether the prefix cache holds it.
        cached: bool,
    },
}

/// For how long a table maps a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// Until the sequence ends. Only then is a second table that maps it a unit saved for good.
    Life,
    /// Until the window has passed.
    Window,
}

impl Hold {
    /// How tables hold the blocks of a group.
    pub fn of(spec: &GroupSpec) -> Hold {
        if spec.is_sliding() { Hold::Window } else { Hold::Life }
    }
}

/// The units of one bucket.
#[derive(Debug, Clone)]
pub struct Pool {
    tables: Vec<u32>,
    cached: Vec<bool>,
    free: Vec<BlockId>,
    cached_units: u32,
    duplicates: u32,
}

impl Pool {
    /// A pool of `units` free units; low ids are handed out first.
    pub fn new(units: u32) -> Pool {
        Pool {
            tables: vec![0; units as usize],
            cached: vec![false; units as usize],
            free: (0..units).rev().map(BlockId).collect(),
            cached_units: 0,
            duplicates: 0,
        }
    }

    /// Takes a free unit for one table; `None` when there is none.
    pub fn alloc(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        assert!(self.state(block) == UnitState::Free, "block {} was in the free list and has owners", block.0);
        self.tables[block.0 as usize] = 1;
        Some(block)
    }

    /// Maps an owned unit in one more table.
    pub fn share(&mut self, block: BlockId, hold: Hold) {
        assert!(self.state(block) != UnitState::Free, "block {} is free, it cannot be shared", block.0);
        let tables = &mut self.tables[block.0 as usize];
        self.duplicates += u32::from(hold == Hold::Life && *tables > 0);
        *tables += 1;
    }

    /// Takes a unit out of a table; the last owner frees it. Returns whether it became free.
    pub fn release(&mut self, block: BlockId, hold: Hold) -> bool {
        let tables = &mut self.tables[block.0 as usize];
        assert!(*tables > 0, "block {} is in no table, it cannot be released", block.0);
        *tables -= 1;
        self.duplicates -= u32::from(hold == Hold::Life && *tables > 0);
        self.free_if_unowned(block)
    }

    /// Lets the prefix cache hold a unit that a table maps.
    pub fn cache(&mut self, block: BlockId) {
        assert!(self.tables(block) > 0, "block {} is in no table, it cannot be cached", block.0);
        let was = std::mem::replace(&mut self.cached[block.0 as usize], true);
        assert!(!was, "block {} is cached already", block.0);
        self.cached_units += 1;
    }

    /// Ends what [`Pool::cache`] began. Returns whether the unit became free.
    pub fn uncache(&mut self, block: BlockId) -> bool {
        let was = std::mem::replace(&mut self.cached[block.0 as usize], false);
        assert!(was, "block {} is not cached", block.0);
        self.cached_units -= 1;
        self.free_if_unowned(block)
    }

    fn free_if_unowned(&mut self, block: BlockId) -> bool {
        let unowned = self.state(block) == UnitState::Free;
        if unowned {
            self.free.push(block);
        }
        unowned
    }

    /// State of a unit.
    pub fn state(&self, block: BlockId) -> UnitState {
        match (self.tables[block.0 as usize], self.cached[block.0 as usize]) {
            (0, false) => UnitState::Free,
            (tables, cached) => UnitState::Owned { tables, cached },
        }
    }

    /// Tables that map a unit.
    pub fn tables(&self, block: BlockId) -> u32 {
        self.tables[block.0 as usize]
    }

    /// Units in all.
    pub fn total(&self) -> u32 {
        self.tables.len() as u32
    }

    /// Units that are owned.
    pub fn used(&self) -> u32 {
        self.total() - self.free()
    }

    /// Units that nobody owns.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Units that the prefix cache holds, those in tables included.
    pub fn cached(&self) -> u32 {
        self.cached_units
    }

    /// Over all units that tables hold for life: tables after the first.
    pub fn duplicates(&self) -> u32 {
        self.duplicates
    }

    /// Checks that owners are as counted from all tables and cache entries (per unit), that the free list holds exactly
    /// the units without an owner, each once, and that the sums are right.
    pub fn check(&self, counted: &PoolCount) -> Result<(), String> {
        let units = self.tables.len();
        if let Some(b) = (0..units).find(|&b| self.tables[b] != counted.tables[b]) {
            return Err(format!("block {b} is in {} tables, counted {}", self.tables[b], counted.tables[b]));
        }
        if let Some(b) = (0..units).find(|&b| u32::from(self.cached[b]) != counted.cached[b]) {
            return Err(format!("block {b} is cached: {}, by {} entries", self.cached[b], counted.cached[b]));
        }
        let cached = counted.cached.iter().sum::<u32>();
        let duplicates = counted.life.iter().map(|n| n.saturating_sub(1)).sum::<u32>();
        if (self.cached_units, self.duplicates) != (cached, duplicates) {
            let (c, d) = (self.cached_units, self.duplicates);
            return Err(format!("{c} units cached and {d} duplicates, counted {cached} and {duplicates}"));
        }
        let mut listed = vec![false; units];
        for b in &self.free {
            if std::mem::replace(&mut listed[b.0 as usize], true) {
                return Err(format!("block {} is in the free list twice", b.0));
            }
        }
        let state = |b: usize| self.state(BlockId(b as u32));
        match (0..units).find(|&b| listed[b] != (state(b) == UnitState::Free)) {
            Some(b) => Err(format!("block {b} is {:?}, in the free list: {}", state(b), listed[b])),
            None => Ok(()),
        }
    }
}

/// Owners of the units of one pool, gathered from tables and cache entries to check it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolCount {
    /// Tables, per unit.
    pub tables: Vec<u32>,
    /// Of them, those that hold it for life.
    pub life: Vec<u32>,
    /// Cache entries, per unit.
    pub cached: Vec<u32>,
}

impl PoolCount {
    /// Nothing counted yet.
    pub fn new(units: u32) -> PoolCount {
        let zero = vec![0; units as usize];
        PoolCount { tables: zero.clone(), life: zero.clone(), cached: zero }
    }

    /// Counts a table.
    pub fn table(&mut self, block: BlockId, hold: Hold) {
        self.tables[block.0 as usize] += 1;
        self.life[block.0 as usize] += u32::from(hold == Hold::Life);
    }

    /// Counts a cache entry.
    pub fn entry(&mut self, block: BlockId) {
        self.cached[block.0 as usize] += 1;
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

    /// Units that the prefix cache holds.
    pub fn cached(&self) -> Units {
        [0, 1, 2].map(|i| self.pools[i].cached())
    }

    /// Tables after the first, over all units that are held for life.
    pub fn duplicates(&self) -> Units {
        [0, 1, 2].map(|i| self.pools[i].duplicates())
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
        assert!(pool.release(BlockId(0), Hold::Life));
        assert_eq!(pool.state(BlockId(0)), UnitState::Free);
        assert_eq!(pool.state(BlockId(1)), UnitState::Owned { tables: 1, cached: false });
    }

    #[test]
    #[should_panic(expected = "is in no table, it cannot be released")]
    fn a_double_release_is_refused() {
        let mut pool = Pool::new(1);
        let block = pool.alloc().expect("one unit");
        pool.release(block, Hold::Window);
        pool.release(block, Hold::Window);
    }

    #[test]
    #[should_panic(expected = "is free, it cannot be shared")]
    fn a_free_unit_cannot_be_shared() {
        Pool::new(1).share(BlockId(0), Hold::Life);
    }

    #[test]
    fn a_cached_unit_outlives_its_tables() {
        let mut pool = Pool::new(1);
        let block = pool.alloc().expect("one unit");
        pool.cache(block);
        assert!(!pool.release(block, Hold::Life));
        assert_eq!((pool.used(), pool.cached(), pool.alloc()), (1, 1, None));
        pool.share(block, Hold::Life);
        assert_eq!(pool.duplicates(), 0, "the cache's reference is no duplicate");
        pool.share(block, Hold::Life);
        assert_eq!(pool.duplicates(), 1);
        assert!(!pool.uncache(block));
        assert!(!pool.release(block, Hold::Life));
        assert!(pool.release(block, Hold::Life));
        assert_eq!((pool.used(), pool.cached(), pool.duplicates()), (0, 0, 0));
    }

    #[test]
    fn the_check_sees_a_lost_reference() {
        let mut pool = Pool::new(2);
        let block = pool.alloc().expect("two units");
        let mut counted = PoolCount::new(2);
        assert_eq!(pool.check(&counted), Err("block 0 is in 1 tables, counted 0".into()));
        counted.table(block, Hold::Window);
        assert!(pool.check(&counted).is_ok());
        counted.entry(block);
        assert_eq!(pool.check(&counted), Err("block 0 is cached: false, by 1 entries".into()));
    }

    proptest! {
        /// The pool against a model that is a plain map of counts.
        #[test]
        fn behaves_like_a_map_of_counts(units in 1u32..9, ops in prop::collection::vec((0u8..5, 0u32..9), 0..200)) {
            let mut pool = Pool::new(units);
            let mut model = PoolCount::new(units);
            for (op, pick) in ops {
                let of = |b: u32| (model.tables[b as usize], model.cached[b as usize]);
                let owned: Vec<u32> = (0..units).filter(|&b| of(b) != (0, 0)).collect();
                if op == 0 {
                    match pool.alloc() {
                        Some(b) => {
                            prop_assert_eq!(of(b.0), (0, 0));
                            model.table(b, Hold::Life);
                        }
                        None => prop_assert_eq!(owned.len() as u32, units),
                    }
                } else if !owned.is_empty() {
                    let b = BlockId(owned[pick as usize % owned.len()]);
                    match (op, of(b.0)) {
                        (1, _) => {
                            pool.share(b, Hold::Life);
                            model.table(b, Hold::Life);
                        }
                        (2, (1.., 0)) => {
                            pool.cache(b);
                            model.entry(b);
                        }
                        (3, (tables, 1)) => {
                            model.cached[b.0 as usize] = 0;
                            prop_assert_eq!(pool.uncache(b), tables == 0);
                        }
                        (4, (tables @ 1.., cached)) => {
                            model.tables[b.0 as usize] -= 1;
                            model.life[b.0 as usize] -= 1;
                            prop_assert_eq!(pool.release(b, Hold::Life), (tables, cached) == (1, 0));
                        }
                        _ => {}
                    }
                }
                prop_assert_eq!(pool.check(&model), Ok(()));
            }
        }
    }
}
