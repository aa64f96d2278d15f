//! Tiers below the device: cached blocks and checkpoints in host memory and on disk, which outlive their eviction and,
//! on disk, the process.
//!
//! What is published is copied to the tiers (`store.rs`); what a prompt finds there behind the device's own is brought
//! back (`load.rs`, `restore.rs`). Assumes that equal texts have equal bytes under one layout digest, and that contents of
//! full published blocks never change. Everything is checked before it is used; a tier that fails costs time, never a
//! result. This is the only part of the engine that touches files, has a thread and reads a clock: to give up on a disk
//! that does not answer.

mod digest;
mod directory;
mod disk;
mod host;
mod load;
mod queue;
mod record;
mod restore;
mod shelf;
mod status;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use longwave_model::CacheLayout;

pub use directory::{DirectoryError, lock};
pub(crate) use load::{Plan, Reach, Staged};
#[cfg(test)]
pub(crate) use record::Title;
pub(crate) use record::{Form, Key, Kind};
pub(crate) use restore::restore;
pub use status::{TierStatus, TiersStatus};
pub(crate) use store::Fresh;

use self::disk::Disk;
use self::host::Host;
use self::load::Load;
use self::queue::Answer;
use crate::hash::BlockHash;
use crate::request::RequestId;

/// Longest wait of a step that has nothing else to do.
const IDLE_WAIT: Duration = Duration::from_millis(5);
/// Such waits in a row after which copies that the disk does not take are given up: about ten seconds.
const IDLE_WAITS: u32 = 2000;

/// Where and how large the tiers are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierOptions {
    /// Bytes of host memory for records; 0 is no host tier.
    pub host_bytes: u64,
    /// Directory of the disk tier, of one server at a time; `None` is no disk tier.
    pub directory: Option<PathBuf>,
    /// Most bytes in the directory.
    pub disk_bytes: u64,
    /// Read and write files on the engine's own thread, one per step: for simulations, which then run the same way
    /// every time.
    pub inline: bool,
}

/// See the [module](self).
pub(crate) struct Tiers {
    form: Form,
    host: Option<Host>,
    disk: Option<Disk>,
    /// The request whose records are read from disk.
    load: Option<Load>,
    loads: u64,
    /// Requests that wait for the end of another one's load.
    parked: BTreeSet<RequestId>,
    /// How often a waiting request's plan came to nothing.
    tries: BTreeMap<RequestId, u32>,
    /// Entries that are still to be copied, at the last look.
    pending: u64,
    idle_waits: u32,
    /// A unit on its way.
    scratch: Vec<u8>,
}

impl Tiers {
    /// Opens the tiers of an engine. `fingerprint` is the backend's and asked for only if there are any.
    pub fn open(
        options: &TierOptions,
        layout: &CacheLayout,
        fingerprint: impl FnOnce() -> [u8; 32],
    ) -> Result<Tiers, DirectoryError> {
        let on = options.host_bytes > 0 || options.directory.is_some();
        let digest = if on { digest::layout_digest(layout, &fingerprint()) } else { [0; 32] };
        let form = Form { layout: layout.clone(), digest };
        let disk = match &options.directory {
            Some(path) => Some(Disk::open(path.clone(), &form, options.disk_bytes, options.inline)?),
            None => None,
        };
        Ok(Tiers {
            host: (options.host_bytes > 0).then(|| Host::new(options.host_bytes)),
            disk,
            form,
            load: None,
            loads: 0,
            parked: BTreeSet::new(),
            tries: BTreeMap::new(),
            pending: 0,
            idle_waits: 0,
            scratch: Vec::new(),
        })
    }

    /// Whether there is a tier.
    pub fn is_on(&self) -> bool {
        self.host.is_some() || self.disk.is_some()
    }

    /// Takes in what the disk has done.
    pub fn poll(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        disk.queue.work_inline();
        while let Some(answer) = self.disk.as_mut().and_then(|d| d.queue.poll()) {
            self.take(answer);
        }
        self.watch_load();
    }

    /// When nothing else can be done: waits a little for the disk. Whether there is something to wait for.
    pub fn wait(&mut self) -> bool {
        let waits_for_load = self.load.is_some();
        if (!waits_for_load && self.pending == 0) || self.disk.is_none() {
            self.idle_waits = 0;
            return false;
        }
        if !self.load.as_ref().is_some_and(Load::is_over) {
            self.idle_waits += 1;
            if let Some(answer) = self.disk.as_mut().and_then(|d| d.queue.wait(IDLE_WAIT)) {
                self.take(answer);
            }
            self.watch_load();
        }
        true
    }

    fn take(&mut self, answer: Answer) {
        self.idle_waits = 0;
        match answer {
            Answer::Wrote { key, error } => {
                if let Some(disk) = &mut self.disk {
                    disk.wrote(key, error);
                }
            }
            Answer::Read { load, key, record } => self.loaded(load, key, record),
        }
    }

    /// Marks the records of a text's first blocks as used.
    pub fn touch(&mut self, hashes: &[BlockHash]) {
        if !self.is_on() {
            return;
        }
        for key in hashes.iter().flat_map(|&hash| [Kind::Node, Kind::Checkpoint].map(|kind| Key { hash, kind })) {
            if let Some(host) = &mut self.host {
                host.touch(key);
            }
            if let Some(disk) = &mut self.disk {
                disk.touch(key);
            }
        }
    }

    /// Forgets a request that waits no more.
    pub fn forget(&mut self, id: RequestId) {
        self.tries.remove(&id);
        self.parked.remove(&id);
        if self.load.as_ref().is_some_and(|load| load.id == id) {
            self.end_load();
        }
    }

    /// Writes what is queued, with a bounded wait, and takes no more.
    pub fn close(&mut self) {
        self.end_load();
        if let Some(disk) = &mut self.disk {
            disk.close();
        }
        self.pending = 0;
    }

    /// What the tiers do and hold.
    pub fn status(&self) -> TiersStatus {
        TiersStatus {
            host: self.host.as_ref().map(Host::status).unwrap_or_default(),
            disk: self.disk.as_ref().map(Disk::status).unwrap_or_default(),
            discarded_files: self.disk.as_ref().map_or(0, |d| d.discarded),
            loading: u32::from(self.load.is_some()),
            pending: self.pending,
            disk_fault: self.disk.as_ref().and_then(|d| d.fault.clone()),
            disk_read_only: self.disk.as_ref().is_some_and(|d| d.read_only),
        }
    }
}
