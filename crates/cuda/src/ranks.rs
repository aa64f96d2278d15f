//! The threads of all GPUs of a backend, asked and answering as one.
//!
//! Every command goes to all of them, in the same order, and every one answers; what rank 0 says counts. A thread that
//! fails raises the alarm before it answers, so that no other waits for it on its GPU; then all answer, and the error that
//! comes out is the one that was first, with its GPU. A thread that panics does the same while it unwinds.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use longwave_engine::operators::OperatorTime;
use longwave_engine::step::{BackendError, BlockCopy, BlockId, Step, StepResult};

use crate::backend::Memory;
use crate::backend::{CudaOptions, Load, OpenError};
use crate::driver::{Alarm, DriverError, Gpu};
use crate::meeting::{self, Chair};
use crate::split::Share;
use crate::worker::{Opened, Worker};

/// What the thread of a GPU is asked to do, in order.
#[derive(Clone)]
pub(crate) enum Command {
    /// Compute and sample.
    Step(Arc<Step>),
    /// Copy units.
    Copy(Arc<[BlockCopy]>),
    /// Hand over the bytes of a unit. All ranks have the same, so rank 0 does it.
    Read(u8, BlockId),
    /// Overwrite a unit.
    Write(u8, BlockId, Arc<[u8]>),
    /// Tell how much memory is used.
    Memory,
    /// Switch the timers on or off.
    Time(bool),
}

/// What it answers, in the same order.
pub(crate) enum Answer {
    /// A step.
    Step(StepResult),
    /// Bytes of a unit.
    Bytes(Vec<u8>),
    /// A unit was written, units were copied, or another rank answers.
    Done,
    /// Memory of the GPU.
    Memory(Memory),
    /// What the timers showed since they were switched on.
    Times(Vec<OperatorTime>),
}

/// Why a thread cannot answer.
#[derive(Clone)]
pub(crate) enum Failure {
    /// Its own GPU.
    Own(DriverError),
    /// Another rank, which it needs.
    Other,
}

/// What a thread knows of the others.
pub(crate) struct Rank {
    /// Its part of the model.
    pub share: Share,
    /// GPUs of all ranks.
    pub gpus: Vec<Gpu>,
    /// Where they wait for each other.
    pub chair: Chair,
    /// What ends waiting on GPUs.
    pub alarm: Arc<Alarm>,
}

impl Rank {
    /// Its GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpus[self.share.rank]
    }

    /// Tells the others that this rank has failed.
    pub fn raise(&self) {
        self.alarm.raise(self.share.rank as u32);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.raise();
        }
    }
}

/// All threads.
pub(crate) struct Ranks {
    threads: Vec<Thread>,
}

struct Thread {
    gpu: u32,
    commands: Option<Sender<Command>>,
    answers: Receiver<Result<Answer, Failure>>,
    handle: Option<JoinHandle<()>>,
}

impl Ranks {
    /// Opens all of `gpus`, each with its part of `load`, at the same time; `progress` gets the bytes of each tensor that
    /// has come to a GPU.
    pub fn open(
        load: &Arc<Load>,
        gpus: &[Gpu],
        options: CudaOptions,
        progress: impl FnMut(u64) + Send + 'static,
    ) -> Result<(Ranks, Opened), OpenError> {
        let (progress, alarm) = (Arc::new(Mutex::new(progress)), Arc::new(Alarm::default()));
        let (mut ranks, mut opening) = (Ranks { threads: Vec::new() }, Vec::new());
        for chair in meeting::chairs(gpus.len()) {
            let share = Share { rank: ranks.threads.len(), ranks: gpus.len() };
            let rank = Rank { share, gpus: gpus.to_vec(), chair, alarm: alarm.clone() };
            let (commands, orders) = channel();
            let (replies, answers) = channel();
            let (opened, facts) = channel();
            let (gpu, load, progress) = (rank.gpu().index, load.clone(), progress.clone());
            let thread = std::thread::Builder::new().name(format!("gpu{gpu}")).spawn(move || {
                let mut count = |bytes| (progress.lock().unwrap_or_else(PoisonError::into_inner))(bytes);
                let worker = match Worker::open(&load, &rank, options, &mut count) {
                    Ok((worker, facts)) => {
                        let _ = opened.send(Ok(facts));
                        worker
                    }
                    Err(error) => return drop(opened.send(Err(error))),
                };
                // All tensors are on the GPU.
                drop(load);
                worker.run(&orders, &replies, rank);
            });
            let handle = Some(thread.map_err(|_| OpenError::Thread)?);
            ranks.threads.push(Thread { gpu, commands: Some(commands), answers, handle });
            opening.push(facts);
        }
        let all = opening.iter().map(|facts| facts.recv().unwrap_or(Err(OpenError::Thread)));
        let all: Vec<Result<Opened, OpenError>> = all.collect();
        let (mut opened, mut failed, mut expert_rows) = (None, None, [0; 2]);
        for (gpu, facts) in ranks.threads.iter().map(|thread| thread.gpu).zip(all) {
            let error = match facts {
                Ok(facts) => {
                    (0..2).for_each(|i| expert_rows[i] += facts.expert_rows[i]);
                    opened = opened.or(Some(facts));
                    continue;
                }
                Err(OpenError::Driver(error)) if gpus.len() > 1 => OpenError::OnGpu { gpu, error },
                Err(error) => error,
            };
            // Of those that failed, the one that did so by itself.
            match failed {
                None | Some(OpenError::Other) => failed = Some(error),
                Some(_) => {}
            }
        }
        match (opened, failed) {
            (Some(mut opened), None) => {
                opened.summary += &rounded(expert_rows);
                Ok((ranks, opened))
            }
            (_, failed) => Err(failed.unwrap_or(OpenError::Thread)),
        }
    }

    /// Asks all of them.
    pub fn send(&self, command: &Command) -> Result<(), BackendError> {
        for thread in &self.threads {
            let gone = || BackendError::Fatal(ended(thread.gpu));
            thread.commands.as_ref().ok_or_else(gone)?.send(command.clone()).map_err(|_| gone())?;
        }
        Ok(())
    }

    /// The next answer, when all have answered.
    pub fn answer(&self) -> Result<Answer, BackendError> {
        let (mut answers, mut failed, mut others_failed) = (Vec::new(), None, false);
        for thread in &self.threads {
            match thread.answers.recv() {
                Ok(Ok(answer)) => answers.push(answer),
                Ok(Err(Failure::Other)) => others_failed = true,
                Ok(Err(Failure::Own(error))) => {
                    let text = match self.threads.len() {
                        1 => error.to_string(),
                        _ => format!("GPU {}: {error}", thread.gpu),
                    };
                    failed = failed.or(Some(text));
                }
                Err(_) => failed = failed.or(Some(ended(thread.gpu))),
            }
        }
        if let Some(text) = failed {
            return Err(BackendError::Fatal(text));
        }
        if others_failed {
            return Err(BackendError::Fatal("a GPU has failed before".into()));
        }
        agree(answers).map_err(BackendError::Fatal)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // Without senders the threads end, all of them together.
        self.threads.iter_mut().for_each(|thread| thread.commands = None);
        for thread in &mut self.threads {
            if let Some(handle) = thread.handle.take() {
                let _ = handle.join();
            }
        }
    }
}

fn ended(gpu: u32) -> String {
    format!("the thread of GPU {gpu} ended")
}

/// The first answer. Steps are the same on every rank, to the last bit, or something is broken.
fn agree(answers: Vec<Answer>) -> Result<Answer, String> {
    let mut answers = answers.into_iter();
    let first = answers.next().ok_or("no GPU answered")?;
    for (rank, other) in (1..).zip(answers) {
        let (Answer::Step(ours), Answer::Step(theirs)) = (&first, &other) else { continue };
        let tokens = |result: &StepResult| -> Vec<_> {
            result.seqs.iter().map(|seq| (seq.tokens.clone(), seq.drafts.clone())).collect()
        };
        if ours.number != theirs.number || tokens(ours) != tokens(theirs) {
            return Err(format!(
                "ranks 0 and {rank} chose other tokens in step {}: the GPUs did not compute the same; please report this",
                ours.number
            ));
        }
    }
    Ok(first)
}

/// What there is to say of rows of routed experts, of which some have smallest weights that Hopper's codes round (model.md 2.5).
fn rounded([rows, far_apart]: [usize; 2]) -> String {
    match far_apart {
        0 => String::new(),
        n => format!(
            "; {n} of {rows} rows of routed experts have scales more than 2^14 apart, and their smallest weights are rounded"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounded_weights_are_told_where_there_are_any() {
        assert!(rounded([4096, 3]).contains("3 of 4096 rows"));
        assert_eq!(rounded([4096, 0]), "");
    }
    use longwave_engine::step::SeqResult;

    /// Threads that answer `answers` and end.
    fn ranks(answers: Vec<Option<Result<Answer, Failure>>>) -> Ranks {
        let thread = |(gpu, answer)| {
            let (sender, answers) = channel();
            if let Some(answer) = answer {
                sender.send(answer).unwrap();
            }
            Thread { gpu, commands: None, answers, handle: None }
        };
        Ranks { threads: (0..).zip(answers).map(thread).collect() }
    }

    fn step(token: u32) -> Option<Result<Answer, Failure>> {
        let seq = SeqResult { tokens: vec![token], ..SeqResult::default() };
        Some(Ok(Answer::Step(StepResult { number: 4, seqs: vec![seq] })))
    }

    fn error(answers: Vec<Option<Result<Answer, Failure>>>) -> String {
        ranks(answers).answer().err().unwrap().to_string()
    }

    #[test]
    fn the_error_is_that_of_the_gpu_that_failed_first() {
        let own = || {
            let error = DriverError { call: "cuGraphLaunch", what: "a graph".into(), name: "CUDA_ERROR_X".into() };
            Some(Err(Failure::Own(error)))
        };
        let other = || Some(Err(Failure::Other));
        let text = error(vec![other(), own(), other()]);
        assert!(text.contains("GPU 1: cuGraphLaunch failed for a graph: CUDA_ERROR_X"), "{text}");
        assert!(error(vec![other(), None]).contains("the thread of GPU 1 ended"));
        assert!(!error(vec![own()]).contains("GPU 0"));
        assert!(error(vec![other(), other()]).contains("failed before"));
    }

    #[test]
    fn ranks_that_choose_other_tokens_are_found_out() {
        assert!(matches!(ranks(vec![step(7), step(7)]).answer(), Ok(Answer::Step(_))));
        let text = error(vec![step(7), step(7), step(8)]);
        assert!(text.contains("ranks 0 and 2") && text.contains("step 4"), "{text}");
    }
}
