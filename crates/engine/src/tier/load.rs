//! What the tiers can add to a waiting request's prefix, and reading it from disk.
//!
//! A plan begins where the device's blocks of the text end and goes to the last boundary that has a checkpoint in a tier,
//! when that is behind what the device can give. Records in host memory are taken when the request is admitted. Records
//! on disk are read first, for one request at a time, while others run; nothing else is held for it meanwhile. A record
//! that is missing, late or not what it should be is forgotten and the request plans again; after [`TRIES`] it computes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use longwave_model::geometry::LOGICAL_BLOCK;

use super::Tiers;
use super::record::{Key, Kind, Title};
use crate::hash::{BLOCK, BlockHash};
use crate::lookup::Found;
use crate::request::{Request, RequestId};

/// Plans of one request that may come to nothing.
const TRIES: u32 = 3;
/// How long a load waits for the next record.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the tiers add to a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Blocks that the device has.
    pub first: u32,
    /// Blocks after it is carried out; there is a checkpoint in a tier at the last.
    pub end: u32,
    /// Blocks that the tiers know of, without a checkpoint behind `end`.
    pub matched: u32,
}

/// How a waiting request gets on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// With what the device has.
    Device,
    /// Later: records are being read, for it or for another one.
    Wait,
    /// With records of the tiers.
    Tiers(Plan),
}

/// Where a record came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Host,
    Disk,
}

/// Checked records of a plan.
pub(crate) struct Staged {
    pub end: u32,
    /// Record and source of each block from the device's last on.
    pub nodes: Vec<(Arc<Vec<u8>>, Title, Source)>,
    pub checkpoint: (Arc<Vec<u8>>, Title, Source),
}

impl Staged {
    /// Prompt tokens that host memory and disk saved, of a request that the device alone would have started at `hit`.
    pub fn tokens(&self, hit: u32) -> (u32, u32) {
        let own = self.nodes.iter().map(|n| n.2);
        // Blocks of the device behind its last checkpoint count for the record that made them usable.
        let bare = (self.end - hit) as usize - self.nodes.len().min((self.end - hit) as usize);
        let all = std::iter::repeat_n(self.checkpoint.2, bare).chain(own);
        let of = |source| all.clone().filter(|&s| s == source).count() as u32 * LOGICAL_BLOCK;
        (of(Source::Host), of(Source::Disk))
    }
}

/// A record on its way to the device.
#[derive(Clone)]
struct Loaded {
    record: Arc<Vec<u8>>,
    source: Source,
    /// The thread that read it has checked it.
    checked: bool,
}

/// Reading for a request.
pub(crate) struct Load {
    pub id: RequestId,
    serial: u64,
    plan: Plan,
    /// Records still to come.
    missing: u32,
    records: BTreeMap<Key, Loaded>,
    /// A record was bad.
    failed: bool,
    /// The next record did not come.
    given_up: bool,
    /// When the last record came.
    moved: Instant,
}

impl Load {
    /// Whether no more records come. After a bad one the rest is still read, so that all bad ones are found.
    pub fn is_over(&self) -> bool {
        self.given_up || self.missing == 0
    }
}

/// The title of a record of a prompt's block.
fn title(request: &Request, hashes: &[BlockHash], block: u32, kind: Kind) -> Title {
    let at = block as usize;
    Title {
        key: Key { hash: hashes[at], kind },
        parent: at.checked_sub(1).map_or(BlockHash::ROOT, |before| hashes[before]),
        salt: request.salt,
        depth: block + 1,
        tokens: request.prompt[at * BLOCK..][..BLOCK].to_vec(),
    }
}

impl Tiers {
    /// How a waiting request gets on; starts to read what it needs from disk.
    pub fn reach(&mut self, id: RequestId, request: &Request, hashes: &[BlockHash], found: &Found) -> Reach {
        if !self.is_on() || request.wants_every_position() {
            return Reach::Device;
        }
        if let Some(load) = &self.load
            && load.id == id
        {
            if !load.is_over() {
                return Reach::Wait;
            }
            let plan = load.plan;
            // The device may have lost blocks meanwhile, or got better ones.
            if !load.failed && plan.first <= found.matched() && plan.end > found.hit {
                return Reach::Tiers(Plan { first: found.matched().min(plan.end), ..plan });
            }
            self.end_load();
            *self.tries.entry(id).or_default() += 1;
        }
        if self.tries.get(&id).is_some_and(|&n| n >= TRIES) {
            return Reach::Device;
        }
        let most = (request.prompt.len() as u32 - 1) / LOGICAL_BLOCK;
        let Some(plan) = self.plan(hashes, found, most) else { return Reach::Device };
        let mut keys = keys(plan, hashes);
        if keys.all(|key| self.in_memory(key).is_some()) {
            return Reach::Tiers(plan);
        }
        if self.load.is_none() {
            self.start_load(id, request, hashes, plan);
        } else {
            self.parked.insert(id);
        }
        Reach::Wait
    }

    fn plan(&self, hashes: &[BlockHash], found: &Found, most: u32) -> Option<Plan> {
        let has = |block: u32, kind| {
            let key = Key { hash: hashes[block as usize], kind };
            self.host.as_ref().is_some_and(|h| h.contains(key)) || self.disk.as_ref().is_some_and(|d| d.contains(key))
        };
        let mut matched = found.matched();
        while matched < most && has(matched, Kind::Node) {
            matched += 1;
        }
        let end = (found.hit + 1..=matched).rev().find(|&end| has(end - 1, Kind::Checkpoint))?;
        Some(Plan { first: found.matched().min(end), end, matched })
    }

    fn start_load(&mut self, id: RequestId, request: &Request, hashes: &[BlockHash], plan: Plan) {
        self.loads += 1;
        let mut load = Load {
            id,
            serial: self.loads,
            plan,
            missing: 0,
            records: BTreeMap::new(),
            failed: false,
            given_up: false,
            moved: Instant::now(),
        };
        let nodes = (plan.first..plan.end).map(|block| (block, Kind::Node));
        for (block, kind) in nodes.chain([(plan.end - 1, Kind::Checkpoint)]) {
            let title = title(request, hashes, block, kind);
            if let Some(loaded) = self.in_memory(title.key) {
                // Held here so that it stays until it is used.
                load.records.insert(title.key, loaded);
            } else if let Some(disk) = &self.disk {
                load.missing += 1;
                disk.queue.read(load.serial, title);
            }
        }
        self.load = Some(load);
    }

    /// Takes a record that was read. One of a load that is over goes nowhere.
    pub(super) fn loaded(&mut self, serial: u64, key: Key, record: Result<Arc<Vec<u8>>, String>) {
        if let (Err(fault), Some(disk)) = (&record, &mut self.disk) {
            disk.forget(key, fault.clone());
        }
        let Some(load) = self.load.as_mut().filter(|load| load.serial == serial) else { return };
        load.moved = Instant::now();
        load.missing -= 1;
        match record {
            Ok(record) => drop(load.records.insert(key, Loaded { record, source: Source::Disk, checked: true })),
            Err(_) => load.failed = true,
        }
    }

    /// Gives a load up when its next record takes too long.
    pub(super) fn watch_load(&mut self) {
        let (Some(load), Some(disk)) = (&mut self.load, &mut self.disk) else { return };
        let stuck = load.missing > 0 && (disk.queue.ended() || load.moved.elapsed() > PATIENCE);
        if stuck && !load.given_up {
            (load.failed, load.given_up) = (true, true);
            disk.counts.failed += 1;
            disk.fault = Some(format!("no record came for {} s", PATIENCE.as_secs()));
            // The next plan would only wait as long again.
            self.tries.insert(load.id, TRIES);
        }
    }

    /// Whether a request has to wait, as far as is known without looking at it.
    pub fn is_parked(&self, id: RequestId) -> bool {
        let Some(load) = &self.load else { return false };
        if load.id == id { !load.is_over() } else { self.parked.contains(&id) }
    }

    /// The request whose records have all been read and wait for its seat.
    pub fn over_for(&self) -> Option<RequestId> {
        self.load.as_ref().filter(|load| load.is_over()).map(|load| load.id)
    }

    /// Drops what was read and was not taken.
    pub(crate) fn end_load(&mut self) {
        self.parked.clear();
        if self.load.take().is_some()
            && let Some(disk) = &self.disk
        {
            disk.queue.cancel_reads();
        }
    }

    /// The records of a plan for a request that gets its seat now. `None` when one turned out bad: plan again.
    pub fn take_records(
        &mut self,
        id: RequestId,
        request: &Request,
        hashes: &[BlockHash],
        plan: Plan,
    ) -> Option<Staged> {
        let load = self.load.take_if(|load| load.id == id);
        if load.is_some() {
            self.parked.clear();
        }
        let loaded = load.map(|load| load.records).unwrap_or_default();
        let mut take = |block, kind| {
            let title = title(request, hashes, block, kind);
            let loaded = loaded.get(&title.key).cloned().or_else(|| self.in_memory(title.key))?;
            self.is_good(&loaded, &title).then_some((loaded.record, title, loaded.source))
        };
        let nodes: Option<Vec<_>> = (plan.first..plan.end).map(|block| take(block, Kind::Node)).collect();
        let checkpoint = take(plan.end - 1, Kind::Checkpoint);
        let (Some(nodes), Some(checkpoint)) = (nodes, checkpoint) else {
            *self.tries.entry(id).or_default() += 1;
            return None;
        };
        for (record, title, source) in nodes.iter().chain([&checkpoint]) {
            self.count_restored(record, title, *source);
        }
        Some(Staged { end: plan.end, nodes, checkpoint })
    }

    /// A record that need not be read: of host memory, or on its way to the disk.
    fn in_memory(&self, key: Key) -> Option<Loaded> {
        let held = self.host.as_ref().and_then(|h| h.get(key)).map(|record| (record, Source::Host));
        let queued = || self.disk.as_ref().and_then(|d| d.queued(key)).map(|record| (record, Source::Disk));
        held.or_else(queued).map(|(record, source)| Loaded { record, source, checked: false })
    }

    /// Whether a record is what it should be; else it is forgotten.
    fn is_good(&mut self, loaded: &Loaded, title: &Title) -> bool {
        if loaded.checked || self.form.check(&loaded.record, title).is_ok() {
            return true;
        }
        match (loaded.source, &mut self.host, &mut self.disk) {
            (Source::Host, Some(host), _) => {
                host.remove(title.key);
                host.counts.failed += 1;
            }
            (Source::Disk, _, Some(disk)) => disk.forget(title.key, "a record changed before it was written".into()),
            _ => {}
        }
        false
    }

    fn count_restored(&mut self, record: &Arc<Vec<u8>>, title: &Title, source: Source) {
        match (source, &mut self.host, &mut self.disk) {
            (Source::Host, Some(host), _) => host.counts.restored += 1,
            (Source::Disk, host, Some(disk)) => {
                disk.counts.restored += 1;
                if let Some(host) = host {
                    host.put(title, Arc::clone(record));
                }
            }
            _ => {}
        }
    }
}

fn keys(plan: Plan, hashes: &[BlockHash]) -> impl Iterator<Item = Key> {
    let nodes = (plan.first..plan.end).map(|block| Key { hash: hashes[block as usize], kind: Kind::Node });
    nodes.chain([Key { hash: hashes[plan.end as usize - 1], kind: Kind::Checkpoint }])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::chain;
    use crate::testing::{Folder, cache, record, tiny_layout};
    use crate::tier::record::Form;
    use crate::tier::{TierOptions, digest, directory};

    #[test]
    fn a_read_that_does_not_come_is_given_up_for_good() {
        let folder = Folder::new();
        let form = Form { layout: tiny_layout(), digest: digest::layout_digest(&tiny_layout(), &[0; 32]) };
        let request = crate::testing::request((0..600).collect(), 1);
        let hashes = chain(0, &request.prompt);
        for (block, kind) in [(0, Kind::Node), (1, Kind::Node), (1, Kind::Checkpoint)] {
            let title = title(&request, &hashes, block, kind);
            directory::write(folder.path(), &form, title.key, &record(&form, &title)).unwrap();
        }
        let (directory, inline) = (Some(folder.path().to_owned()), true);
        let options = TierOptions { directory, disk_bytes: 1 << 30, inline, ..TierOptions::default() };
        let mut tiers = Tiers::open(&options, &tiny_layout(), || [0; 32]).unwrap();
        let found = cache(0).lookup(&request, &hashes);
        let (first, second) = (RequestId(1), RequestId(2));
        assert_eq!(tiers.reach(first, &request, &hashes, &found), Reach::Wait);
        assert_eq!(tiers.reach(second, &request, &hashes, &found), Reach::Wait);
        assert!(tiers.is_parked(first) && tiers.is_parked(second));
        tiers.load.as_mut().unwrap().moved -= 2 * PATIENCE;
        tiers.watch_load();
        assert!(!tiers.is_parked(first));
        assert_eq!(tiers.reach(first, &request, &hashes, &found), Reach::Device);
        assert_eq!(tiers.status().disk.failed, 1);
        // Another request may find the disk awake.
        assert_eq!(tiers.reach(second, &request, &hashes, &found), Reach::Wait);
        (0..4).for_each(|_| tiers.poll());
        assert_eq!(tiers.reach(second, &request, &hashes, &found), Reach::Tiers(Plan { first: 0, end: 2, matched: 2 }));
        let staged = tiers.take_records(second, &request, &hashes, Plan { first: 0, end: 2, matched: 2 });
        assert_eq!(staged.unwrap().tokens(0), (0, 512));
    }
}
