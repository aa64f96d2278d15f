//! The disk tier as the engine sees it: which records are in the directory, which go first, what failed.
//!
//! All decisions are made here, on the engine's thread; the queue only moves bytes. A record counts for the limit from
//! the moment it is queued; until it is written it is read from the queue. Files of other models and versions count too and go
//! first. After [`WRITE_FAULTS`] failed writes in a row nothing more is written; serving goes on either way.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use super::directory::{self, DirectoryError};
use super::queue::{Answer, Queue};
use super::record::{Form, Key, Title};
use super::shelf::Shelf;
use super::status::TierStatus;

/// Failed writes in a row after which the tier is only read.
const WRITE_FAULTS: u32 = 3;

/// See the [module](self).
pub(crate) struct Disk {
    shelf: Shelf,
    limit: u64,
    /// Writes that are queued; a record that was evicted and comes again may have several.
    unwritten: BTreeMap<Key, (u32, Arc<Vec<u8>>)>,
    /// Files of ours that this engine cannot read, longest unused first.
    others: VecDeque<(String, u64)>,
    others_bytes: u64,
    digest: [u8; 32],
    pub queue: Queue,
    pub counts: TierStatus,
    pub fault: Option<String>,
    pub discarded: u64,
    faults_in_row: u32,
    pub read_only: bool,
    closed: bool,
    /// Keeps other servers out until the engine is gone.
    _lock: File,
}

impl Disk {
    /// Opens a directory for at most `limit` bytes and looks at what it holds.
    pub fn open(path: PathBuf, form: &Form, limit: u64, inline: bool) -> Result<Disk, DirectoryError> {
        if limit == 0 {
            return Err(DirectoryError::NoRoom);
        }
        let lock = directory::lock(&path)?;
        let scan = directory::scan(&path, form);
        let queue = Queue::start(path.clone(), form.clone(), inline);
        let queue = queue.map_err(|source| DirectoryError::Unusable { path, action: "served by a thread", source })?;
        let mut disk = Disk {
            shelf: Shelf::new(limit),
            limit,
            unwritten: BTreeMap::new(),
            others_bytes: scan.others.iter().map(|o| o.1).sum(),
            others: scan.others.into(),
            digest: form.digest,
            queue,
            counts: TierStatus::default(),
            fault: None,
            discarded: scan.discarded,
            faults_in_row: 0,
            read_only: false,
            closed: false,
            _lock: lock,
        };
        // Time is counted in bytes: a file is as old as all that was used after it is long.
        let mut used = 0;
        let uses = scan.records.iter().map(|seen| {
            used += seen.bytes;
            used
        });
        let uses: Vec<u64> = uses.collect();
        // What a checkpoint saves is known once the blocks are there.
        let mut order: Vec<usize> = (0..uses.len()).collect();
        order.sort_by_key(|&i| scan.records[i].key.kind);
        for i in order {
            let seen = &scan.records[i];
            disk.shelf.put_at(seen.key, seen.parent, seen.depth, seen.bytes, uses[i]);
        }
        if let Some(newest) = scan.records.last() {
            disk.make_room(newest.key);
        }
        Ok(disk)
    }

    /// Whether a record is there or on its way.
    pub fn contains(&self, key: Key) -> bool {
        self.shelf.contains(key)
    }

    /// A record that is still on its way.
    pub fn queued(&self, key: Key) -> Option<Arc<Vec<u8>>> {
        self.unwritten.get(&key).filter(|_| self.contains(key)).map(|queued| queued.1.clone())
    }

    /// Queues a record, with room made for it. The queue must have room.
    pub fn put(&mut self, title: &Title, record: Arc<Vec<u8>>) {
        let key = title.key;
        let bytes = record.len() as u64;
        let Some(gone) = self.shelf.put(key, title.parent, title.depth, bytes) else {
            self.counts.skipped += 1;
            return;
        };
        if gone.contains(&key) {
            self.counts.skipped += 1;
        } else {
            self.unwritten.entry(key).or_insert_with(|| (0, record.clone())).0 += 1;
            self.queue.write(key, record);
        }
        self.drop_files(gone.into_iter().filter(|k| *k != key).collect());
        self.make_room(key);
    }

    /// Removes files of other layouts, then records, until the limit holds.
    fn make_room(&mut self, last: Key) {
        while self.shelf.bytes() + self.others_bytes > self.limit
            && let Some((name, bytes)) = self.others.pop_front()
        {
            self.others_bytes -= bytes;
            self.counts.evicted += 1;
            self.queue.remove(name);
        }
        let gone = self.shelf.make_room(last);
        self.drop_files(gone);
    }

    fn drop_files(&mut self, keys: Vec<Key>) {
        for key in keys {
            self.counts.evicted += 1;
            self.queue.remove(directory::name_of(&self.digest, key));
        }
    }

    pub fn touch(&mut self, key: Key) {
        self.shelf.touch(key);
    }

    /// Takes a record out that cannot be read.
    pub fn forget(&mut self, key: Key, fault: String) {
        self.shelf.remove(key);
        self.counts.failed += 1;
        self.fault = Some(fault);
    }

    /// Takes note of a write.
    pub fn wrote(&mut self, key: Key, error: Option<String>) {
        let queued = self.unwritten.get_mut(&key).expect("only what was queued is written");
        queued.0 -= 1;
        let more = queued.0;
        if more == 0 {
            self.unwritten.remove(&key);
        }
        let Some(error) = error else {
            self.faults_in_row = 0;
            self.counts.stored += 1;
            return;
        };
        if more == 0 {
            self.shelf.remove(key);
        }
        self.counts.failed += 1;
        self.fault = Some(format!("writing failed: {error}"));
        self.faults_in_row += 1;
        self.read_only |= self.faults_in_row >= WRITE_FAULTS;
    }

    /// Lets queued writes finish.
    pub fn close(&mut self) {
        for answer in self.queue.close() {
            if let Answer::Wrote { key, error } = answer {
                self.wrote(key, error);
            }
        }
        self.closed = true;
    }

    /// Whether it takes records.
    pub fn takes(&self) -> bool {
        !self.read_only && !self.closed
    }

    pub fn status(&self) -> TierStatus {
        let (bytes, records) = (self.shelf.bytes() + self.others_bytes, self.shelf.len());
        TierStatus { limit_bytes: self.limit, bytes, records, ..self.counts.clone() }
    }
}
