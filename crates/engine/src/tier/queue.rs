//! Files on their way: a bounded queue of reads and writes, and the thread that works it off.
//!
//! Reads go first, because a request waits for them. Assumes one engine that takes the answers. With `inline`, there is
//! no thread and the engine works off one job at a time, so that a simulation runs the same way every time. Refuses
//! writes while the queue is full.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::directory;
use super::record::{Form, Key, Title};

/// Bytes of records that may wait to be written; one record always may.
const QUEUE_BYTES: u64 = 256 << 20;
/// How long closing waits for the writes that are queued.
const CLOSE: Duration = Duration::from_secs(10);

/// Something to do in the directory.
enum Job {
    Write { key: Key, record: Arc<Vec<u8>> },
    Remove { name: String },
    Read { load: u64, title: Title },
}

/// What became of a job.
pub(crate) enum Answer {
    /// A write.
    Wrote { key: Key, error: Option<String> },
    /// A read for a load; the record is checked.
    Read { load: u64, key: Key, record: Result<Arc<Vec<u8>>, String> },
}

#[derive(Default)]
struct Jobs {
    reads: VecDeque<Job>,
    writes: VecDeque<Job>,
    /// Of the writes.
    bytes: u64,
    /// Ends when the writes are done.
    closed: bool,
    /// Ends now.
    abandoned: bool,
}

/// What the thread needs.
struct Shared {
    path: PathBuf,
    form: Form,
    jobs: Mutex<Jobs>,
    wake: Condvar,
}

/// The engine's end.
pub(crate) struct Queue {
    shared: Arc<Shared>,
    answers: Receiver<Answer>,
    /// Where an inline job's answer goes.
    inline: Option<Sender<Answer>>,
    /// Whether the thread is gone.
    ended: bool,
}

impl Queue {
    /// Starts the thread, unless jobs are worked off inline.
    pub fn start(path: PathBuf, form: Form, inline: bool) -> std::io::Result<Queue> {
        let shared = Arc::new(Shared { path, form, jobs: Mutex::default(), wake: Condvar::new() });
        let (sender, answers) = channel();
        if inline {
            return Ok(Queue { shared, answers, inline: Some(sender), ended: false });
        }
        let of_thread = Arc::clone(&shared);
        let work = move || {
            while let Some(job) = of_thread.next() {
                if let Some(answer) = of_thread.run(job)
                    && sender.send(answer).is_err()
                {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("longwave-tiers".into()).spawn(work)?;
        Ok(Queue { shared, answers, inline: None, ended: false })
    }

    /// Whether a record of `bytes` may be queued.
    pub fn has_room(&self, bytes: u64) -> bool {
        let jobs = lock(&self.shared.jobs);
        jobs.bytes == 0 || jobs.bytes + bytes <= QUEUE_BYTES
    }

    pub fn write(&self, key: Key, record: Arc<Vec<u8>>) {
        let mut jobs = lock(&self.shared.jobs);
        jobs.bytes += record.len() as u64;
        jobs.writes.push_back(Job::Write { key, record });
        self.shared.wake.notify_one();
    }

    /// Removes a file after the writes that are queued.
    pub fn remove(&self, name: String) {
        lock(&self.shared.jobs).writes.push_back(Job::Remove { name });
        self.shared.wake.notify_one();
    }

    pub fn read(&self, load: u64, title: Title) {
        lock(&self.shared.jobs).reads.push_back(Job::Read { load, title });
        self.shared.wake.notify_one();
    }

    /// Drops the reads that have not begun.
    pub fn cancel_reads(&self) {
        lock(&self.shared.jobs).reads.clear();
    }

    /// An answer, if there is one.
    pub fn poll(&mut self) -> Option<Answer> {
        match self.answers.try_recv() {
            Ok(answer) => Some(answer),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                self.ended = true;
                None
            }
        }
    }

    /// Waits for an answer, `most` at the longest; inline, does one job.
    pub fn wait(&mut self, most: Duration) -> Option<Answer> {
        if self.inline.is_some() {
            self.work_inline();
            return self.poll();
        }
        match self.answers.recv_timeout(most) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                self.ended = true;
                None
            }
        }
    }

    /// Inline, does one job.
    pub fn work_inline(&mut self) {
        if let Some(sender) = &self.inline
            && let Some(job) = lock(&self.shared.jobs).take()
            && let Some(answer) = self.shared.run(job)
        {
            // The other end is in this very struct.
            let _ = sender.send(answer);
        }
    }

    /// Whether the thread ended by itself, which it should not.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Lets the queued writes finish, but not for ever. The answers that came.
    pub fn close(&mut self) -> Vec<Answer> {
        {
            let mut jobs = lock(&self.shared.jobs);
            jobs.reads.clear();
            jobs.closed = true;
            self.shared.wake.notify_one();
        }
        let mut answers = Vec::new();
        let deadline = Instant::now() + CLOSE;
        if self.inline.is_some() {
            while !lock(&self.shared.jobs).writes.is_empty() && Instant::now() < deadline {
                self.work_inline();
                answers.extend(self.poll());
            }
            self.ended = true;
        }
        while !self.ended && Instant::now() < deadline {
            answers.extend(self.wait(deadline.saturating_duration_since(Instant::now())));
        }
        // A disk that hangs keeps its thread, which ends after the file it is at.
        lock(&self.shared.jobs).abandoned = true;
        answers
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if !lock(&self.shared.jobs).closed {
            self.close();
        }
    }
}

impl Jobs {
    fn take(&mut self) -> Option<Job> {
        let job = self.reads.pop_front().or_else(|| self.writes.pop_front())?;
        if let Job::Write { record, .. } = &job {
            self.bytes -= record.len() as u64;
        }
        Some(job)
    }
}

impl Shared {
    /// Waits for a job; `None` at the end.
    fn next(&self) -> Option<Job> {
        let mut jobs = lock(&self.jobs);
        loop {
            if jobs.abandoned {
                return None;
            }
            if let Some(job) = jobs.take() {
                return Some(job);
            }
            if jobs.closed {
                return None;
            }
            jobs = self.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, job: Job) -> Option<Answer> {
        match job {
            Job::Write { key, record } => {
                let written = directory::write(&self.path, &self.form, key, &record);
                Some(Answer::Wrote { key, error: written.err().map(|e| e.to_string()) })
            }
            Job::Remove { name } => {
                directory::remove(&self.path, &name);
                None
            }
            Job::Read { load, title } => {
                let record = directory::read(&self.path, &self.form, &title);
                Some(Answer::Read { load, key: title.key, record })
            }
        }
    }
}

/// Data under this lock is whole between statements.
fn lock(jobs: &Mutex<Jobs>) -> MutexGuard<'_, Jobs> {
    jobs.lock().unwrap_or_else(PoisonError::into_inner)
}
