//! The directory of files and batches, and the index of it in memory.
//!
//! Records are small JSON files, written whole to a temporary file and renamed, so each is the old or the new one. Names
//! on disk are ids that this program made. Bounded in files, batches and bytes. Refuses a directory that another server
//! has open.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::sync::{Notify, mpsc};

use super::record::{BatchRecord, FileRecord, State};

/// Most files that are kept.
pub(super) const MAX_FILES: usize = 10_000;
/// Most batches that are remembered; the oldest finished ones are forgotten.
pub(super) const MAX_BATCHES: usize = 10_000;

/// What the server is told about batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchOptions {
    /// Where files are; made if it does not exist.
    pub directory: PathBuf,
    /// Lines that run at once; 0 takes half of the engine's seats.
    pub concurrency: usize,
    /// Largest file.
    pub max_file_bytes: u64,
    /// Most bytes of all files together.
    pub max_bytes: u64,
}

/// Why batches cannot be kept there.
#[derive(Debug, Error)]
pub enum BatchError {
    /// The lock is taken.
    #[error("--batch-dir {0}: another server uses it; give each server a directory of its own")]
    InUse(PathBuf),
    /// The system refused something.
    #[error("--batch-dir {directory}: {reason}")]
    Io {
        /// The directory.
        directory: PathBuf,
        /// What it said.
        reason: io::Error,
    },
}

/// Files and batches.
pub struct Batches {
    pub(super) options: BatchOptions,
    index: Mutex<Index>,
    queue: mpsc::UnboundedSender<String>,
    /// Taken by the task that runs batches.
    pub(super) waiting: Mutex<Option<mpsc::UnboundedReceiver<String>>>,
    /// Held open for its lock.
    _lock: File,
}

#[derive(Default)]
pub(super) struct Index {
    pub(super) files: BTreeMap<String, FileRecord>,
    pub(super) batches: BTreeMap<String, BatchRecord>,
    /// Bells of those that run, rung to cancel.
    pub(super) running: BTreeMap<String, Arc<Notify>>,
    /// Bytes of uploads on their way.
    pub(super) reserved_bytes: u64,
}

impl Index {
    pub(super) fn bytes(&self) -> u64 {
        self.files.values().map(|file| file.bytes).sum::<u64>() + self.reserved_bytes
    }
}

impl Batches {
    /// Opens or makes the directory. What was unfinished goes on when the server runs.
    pub fn open(options: BatchOptions) -> Result<Batches, BatchError> {
        let directory = options.directory.clone();
        let failed = |reason| BatchError::Io { directory: directory.clone(), reason };
        for part in ["files", "batches"] {
            fs::create_dir_all(directory.join(part)).map_err(failed)?;
        }
        let lock = File::create(directory.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(BatchError::InUse(directory)),
            Err(fs::TryLockError::Error(reason)) => return Err(failed(reason)),
        }
        let index = Index {
            files: read_all(&directory.join("files"), |file: &FileRecord| file.id.clone()).map_err(failed)?,
            batches: read_all(&directory.join("batches"), |batch: &BatchRecord| batch.id.clone()).map_err(failed)?,
            ..Index::default()
        };
        let (queue, waiting) = mpsc::unbounded_channel();
        let mut unfinished: Vec<&BatchRecord> =
            index.batches.values().filter(|batch| !batch.state.is_final()).collect();
        unfinished.sort_by_key(|batch| (batch.created_at, &batch.id));
        for batch in unfinished {
            // The receiver is in the next line.
            let _ = queue.send(batch.id.clone());
        }
        for part in ["files", "batches"] {
            remove_leftovers(&directory.join(part), &index).map_err(failed)?;
        }
        Ok(Batches { options, index: Mutex::new(index), queue, waiting: Mutex::new(Some(waiting)), _lock: lock })
    }

    pub(super) fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the contents of a file are. Only for ids that are in the index or were made here.
    pub(super) fn content(&self, id: &str) -> PathBuf {
        self.options.directory.join("files").join(format!("{id}.jsonl"))
    }

    fn file_record(&self, id: &str) -> PathBuf {
        self.options.directory.join("files").join(format!("{id}.json"))
    }

    fn batch_record(&self, id: &str) -> PathBuf {
        self.options.directory.join("batches").join(format!("{id}.json"))
    }

    /// Takes in a file whose contents are on disk.
    pub(super) fn add_file(&self, file: FileRecord) -> io::Result<()> {
        write_json(&self.file_record(&file.id), &file)?;
        self.index().files.insert(file.id.clone(), file);
        Ok(())
    }

    /// Forgets a file.
    pub(super) fn remove_file(&self, id: &str) -> io::Result<()> {
        self.index().files.remove(id);
        fs::remove_file(self.file_record(id))?;
        fs::remove_file(self.content(id))
    }

    /// Takes in a batch and lets it run.
    pub(super) fn add_batch(&self, batch: BatchRecord) -> io::Result<()> {
        write_json(&self.batch_record(&batch.id), &batch)?;
        let id = batch.id.clone();
        self.index().batches.insert(id.clone(), batch);
        // Fails when the server is ending; it runs after the next start.
        let _ = self.queue.send(id);
        Ok(())
    }

    /// Forgets a finished batch. Its files stay.
    pub(super) fn forget_batch(&self, id: &str) -> io::Result<()> {
        self.index().batches.remove(id);
        fs::remove_file(self.batch_record(id))
    }

    /// Changes a batch, on disk first.
    pub(super) fn change(&self, id: &str, change: impl FnOnce(&mut BatchRecord)) -> io::Result<Option<BatchRecord>> {
        let mut index = self.index();
        let Some(batch) = index.batches.get_mut(id) else { return Ok(None) };
        let mut changed = batch.clone();
        change(&mut changed);
        write_json(&self.batch_record(id), &changed)?;
        *batch = changed.clone();
        Ok(Some(changed))
    }

    /// Marks a batch as running; `None` when it is over already.
    pub(super) fn begin(&self, id: &str, bell: Arc<Notify>) -> Option<BatchRecord> {
        let mut index = self.index();
        let batch = index.batches.get(id).filter(|batch| !batch.state.is_final()).cloned()?;
        index.running.insert(id.to_owned(), bell);
        Some(batch)
    }

    /// The opposite.
    pub(super) fn end(&self, id: &str) {
        self.index().running.remove(id);
    }

    /// Asks a batch to end; one that does not run yet is over at once.
    pub(super) fn cancel(&self, id: &str) -> io::Result<Option<BatchRecord>> {
        let bell = self.index().running.get(id).cloned();
        let changed = self.change(id, |batch| match batch.state {
            State::Validating | State::InProgress | State::Finalizing => {
                batch.reach(State::Cancelling);
                if bell.is_none() {
                    batch.reach(State::Cancelled);
                }
            }
            _ => {}
        })?;
        if let Some(bell) = bell {
            bell.notify_one();
        }
        Ok(changed)
    }

    /// Counts answers, in memory: they are counted again from the files after a restart.
    pub(super) fn count(&self, id: &str, change: impl FnOnce(&mut super::record::Counts)) {
        if let Some(batch) = self.index().batches.get_mut(id) {
            change(&mut batch.counts);
        }
    }
}

/// Writes a record so that it is the old or the new one, whatever happens.
fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    sync_folder(path)
}

/// Makes a new name in the folder of `path` survive a loss of power.
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// All records of a folder. One that cannot be read is named in the log and left alone.
fn read_all<T: DeserializeOwned>(folder: &Path, id: impl Fn(&T) -> String) -> io::Result<BTreeMap<String, T>> {
    let mut records = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|end| end != "json") {
            continue;
        }
        match fs::read(&path).and_then(|bytes| Ok(serde_json::from_slice::<T>(&bytes)?)) {
            Ok(record) if path.file_stem().is_some_and(|name| name == id(&record).as_str()) => {
                records.insert(id(&record), record);
            }
            Ok(_) => tracing::warn!("{}: the record is of another file; left alone", path.display()),
            Err(error) => tracing::warn!("{}: not a record ({error}); left alone", path.display()),
        }
    }
    Ok(records)
}

/// Removes what uploads and writes left that did not end. Only files with names of our own making are touched.
fn remove_leftovers(folder: &Path, index: &Index) -> io::Result<()> {
    let unfinished =
        |name: &str| index.batches.values().any(|b| !b.state.is_final() && (b.output == name || b.failures == name));
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let (Some(name), Some(end)) =
            (path.file_stem().and_then(|s| s.to_str()), path.extension().and_then(|e| e.to_str()))
        else {
            continue;
        };
        let ours = name.starts_with("file-") || name.starts_with("batch_");
        let orphan = end == "jsonl" && !index.files.contains_key(name) && !unfinished(name);
        if ours && (end == "part" || end == "tmp" || orphan) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}
