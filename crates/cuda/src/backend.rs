//! GPUs as a [`Backend`]: checks a step, keeps the block tables and hands the work to the thread that owns the GPU.
//!
//! A step is refused before anything is computed when it would read or write outside its tables (`step_check`). Errors
//! of the driver are fatal and name the call, the kernel and its shape. One step is in flight.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use longwave_engine::step::{Backend, BackendError, BlockCopy, BlockId, Limits, Step, StepResult, Ticket};
use longwave_engine::step_check;
use longwave_engine::tables::SeatTables;
use longwave_model::{CacheFormats, CacheLayout, Checkpoint, ModelConfig};
use thiserror::Error;

use crate::driver::{DriverError, Gpu, Missing, probe};
use crate::timers::OperatorTime;
use crate::worker::{Opened, Worker};

/// Sizes of a CUDA backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// Ordinal of the GPU.
    pub gpu: u32,
    /// Sequences at once.
    pub seats: u32,
    /// Tokens per step.
    pub step_tokens: u32,
    /// Largest context.
    pub context: u32,
    /// Bytes for all cache pools; `None` takes what weights and scratch leave, less a reserve for the driver.
    pub cache_bytes: Option<u64>,
    /// Cache formats.
    pub formats: CacheFormats,
    /// Most drafts per sequence and step; 0 leaves the MTP module out.
    pub drafts: u32,
    /// Streams that a step uses on a GPU: 2, or 1 to measure what the second one is worth.
    pub streams: u32,
}

/// Why a backend cannot be opened.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum OpenError {
    /// No GPU can be used.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// The ordinal names none.
    #[error("there is no GPU {index}; this machine has {count}, counted from 0")]
    NoSuchGpu {
        /// Asked for.
        index: u32,
        /// GPUs there are.
        count: usize,
    },
    /// The program has no kernels.
    #[error(
        "this program was built without CUDA kernels; run `cargo xtask cuda-toolkit` and build again, or use --backend cpu"
    )]
    NoKernels,
    /// The model is not one that kernels exist for.
    #[error("the CUDA backend cannot run this model: {0}")]
    Model(String),
    /// There is no code for the GPU.
    #[error(
        "{name} has compute capability {major}.{minor}; there are kernels for 9.0 (H100, H200) and 10.0 (B200), use --backend cpu"
    )]
    Architecture {
        /// Product name.
        name: String,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
    /// The cache is too small.
    #[error(
        "a cache of {have_gib:.2} GiB is too small: the windows of all sequences and one block take {need_gib:.2} GiB; raise --kv-cache-memory-bytes or lower --max-num-seqs"
    )]
    Cache {
        /// GiB that it has.
        have_gib: f64,
        /// GiB that it needs.
        need_gib: f64,
    },
    /// It does not fit.
    #[error("{what} need {need_gib:.1} GiB and GPU {gpu} has {have_gib:.1} GiB for them; {hint}")]
    Memory {
        /// What does not fit.
        what: &'static str,
        /// GiB that are needed.
        need_gib: f64,
        /// GiB of the GPU.
        have_gib: f64,
        /// Ordinal.
        gpu: u32,
        /// What to do.
        hint: &'static str,
    },
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The thread of the GPU ended.
    #[error("the thread of the GPU ended while it opened")]
    Thread,
}

/// What the thread of a GPU is asked to do, in order.
pub(crate) enum Command {
    /// Compute and sample.
    Step(Box<Step>),
    /// Copy units.
    Copy(Vec<BlockCopy>),
    /// Hand over the bytes of a unit.
    Read(u8, BlockId),
    /// Overwrite a unit.
    Write(u8, BlockId, Vec<u8>),
    /// Switch the timers on or off.
    Time(bool),
}

/// What it answers, in the same order.
pub(crate) enum Answer {
    /// A step.
    Step(StepResult),
    /// Bytes of a unit.
    Bytes(Vec<u8>),
    /// A unit was written, units were copied.
    Done,
    /// What the timers showed since they were switched on.
    Times(Vec<OperatorTime>),
}

/// A model on a GPU.
pub struct CudaBackend {
    limits: Limits,
    layout: CacheLayout,
    fingerprint: [u8; 32],
    summary: String,
    tables: SeatTables,
    /// Steps that were answered while something else was asked for.
    early: VecDeque<StepResult>,
    commands: Option<Sender<Command>>,
    answers: Receiver<Result<Answer, DriverError>>,
    thread: Option<JoinHandle<()>>,
}

/// What a backend computes with.
pub enum Load {
    /// Tensors of a checkpoint.
    Checkpoint(Checkpoint),
    /// Random weights of these shapes (`--load-format dummy`).
    Dummy(ModelConfig),
}

impl CudaBackend {
    /// Opens GPU `options.gpu` with `load`; `progress` gets the bytes of each tensor that is there.
    pub fn open(
        load: Load,
        options: CudaOptions,
        mut progress: impl FnMut(u64) + Send + 'static,
    ) -> Result<CudaBackend, OpenError> {
        let gpus = probe()?;
        if crate::cubins::CUBINS.is_empty() {
            return Err(OpenError::NoKernels);
        }
        let count = gpus.len();
        let none = OpenError::NoSuchGpu { index: options.gpu, count };
        let gpu: Gpu = gpus.into_iter().nth(options.gpu as usize).ok_or(none)?;
        let (commands, orders) = channel();
        let (replies, answers) = channel();
        let (opened, opening) = channel();
        let thread = std::thread::Builder::new().name(format!("gpu{}", options.gpu)).spawn(move || {
            let worker = match Worker::open(&load, &gpu, options, &mut progress) {
                Ok((worker, facts)) => {
                    let _ = opened.send(Ok(facts));
                    worker
                }
                Err(error) => return drop(opened.send(Err(error))),
            };
            // All tensors are on the GPU.
            drop(load);
            worker.run(&orders, &replies);
        });
        let thread = thread.map_err(|_| OpenError::Thread)?;
        let Opened { limits, layout, fingerprint, summary } = opening.recv().map_err(|_| OpenError::Thread)??;
        Ok(CudaBackend {
            tables: SeatTables::new(&layout, limits.seats),
            early: VecDeque::new(),
            limits,
            layout,
            fingerprint,
            summary,
            commands: Some(commands),
            answers,
            thread: Some(thread),
        })
    }

    /// One line about GPU, weights, cache and scratch.
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// Switches timers of operators on or off; what they showed since they were last switched on, the longest first. While
    /// they are on, steps take longer.
    pub fn time_operators(&mut self, on: bool) -> Result<Vec<OperatorTime>, BackendError> {
        self.send(Command::Time(on))?;
        match self.other()? {
            Answer::Times(times) => Ok(times),
            _ => Err(unexpected()),
        }
    }

    fn send(&self, command: Command) -> Result<(), BackendError> {
        let gone = || BackendError::Fatal("the thread of the GPU ended".into());
        self.commands.as_ref().ok_or_else(gone)?.send(command).map_err(|_| gone())
    }

    /// The next answer that is not a step's; steps before it are kept for `collect`.
    fn other(&mut self) -> Result<Answer, BackendError> {
        loop {
            match self.answer()? {
                Answer::Step(result) => self.early.push_back(result),
                answer => return Ok(answer),
            }
        }
    }

    fn done(&mut self) -> Result<(), BackendError> {
        match self.other()? {
            Answer::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }

    fn answer(&self) -> Result<Answer, BackendError> {
        let gone = |_| BackendError::Fatal("the thread of the GPU ended".into());
        self.answers.recv().map_err(gone)?.map_err(|error| BackendError::Fatal(error.to_string()))
    }
}

fn unexpected() -> BackendError {
    BackendError::Fatal("the thread of the GPU answered something else than it was asked".into())
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Without senders the thread ends.
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Backend for CudaBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        step_check::apply(step, &self.layout, &self.limits, &mut self.tables)?;
        self.send(Command::Step(Box::new(step.clone())))?;
        Ok(Ticket(step.number))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        let result = match self.early.pop_front() {
            Some(result) => result,
            None => match self.answer()? {
                Answer::Step(result) => result,
                _ => return Err(unexpected()),
            },
        };
        match result {
            result if result.number == ticket.0 => Ok(result),
            _ => Err(BackendError::BadStep { step: ticket.0, what: "it was not submitted, or out of order".into() }),
        }
    }

    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError> {
        self.send(Command::Copy(copies.to_vec()))?;
        self.done()
    }

    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError> {
        self.send(Command::Read(bucket, block))?;
        match self.other()? {
            Answer::Bytes(bytes) => out.copy_from_slice(&bytes),
            _ => return Err(unexpected()),
        }
        Ok(())
    }

    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.send(Command::Write(bucket, block, bytes.to_vec()))?;
        self.done()
    }
}
