//! GPUs as a [`Backend`]: checks a step, keeps the block tables and hands the work to the threads that own a GPU each.
//!
//! With several ranks every GPU has a part of the model and a whole cache. All of them compute every step to its end, head
//! and choice of tokens included: that takes no longer than on one, and what the next step needs is known everywhere.
//!
//! A step is refused before anything is computed when it would read or write outside its tables (`step_check`). Errors
//! of the driver are fatal and name the call, the kernel and its shape. One step is in flight.

use std::collections::VecDeque;
use std::sync::Arc;

use longwave_engine::operators::OperatorTime;
use longwave_engine::step::{Backend, BackendError, BlockCopy, BlockId, Limits, Step, StepResult, Ticket};
use longwave_engine::step_check;
use longwave_engine::tables::SeatTables;
use longwave_model::{CacheFormats, CacheLayout, Checkpoint, ModelConfig};
use thiserror::Error;

use crate::driver::{DriverError, Missing};
use crate::fit;
use crate::ranks::{Answer, Command, Ranks};
use crate::worker::{self, Opened};

/// Sizes of a CUDA backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// Ordinal of the first GPU.
    pub gpu: u32,
    /// GPUs that share the model: this one and those behind it.
    pub ranks: u32,
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
    /// There are fewer GPUs than ranks.
    #[error("--tensor-parallel-size {ranks} needs as many GPUs, and this machine has {count}; lower it")]
    TooFewGpus {
        /// Asked for.
        ranks: u32,
        /// GPUs there are.
        count: usize,
    },
    /// Ranks add up in each other's memory.
    #[error(
        "GPU {gpu} cannot reach the memory of GPU {other}, which sharing a model takes; choose others with CUDA_VISIBLE_DEVICES, or lower --tensor-parallel-size"
    )]
    Unreachable {
        /// Ordinal.
        gpu: u32,
        /// Ordinal.
        other: u32,
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
    /// The driver refused on one of several GPUs.
    #[error("GPU {gpu}: {error}")]
    OnGpu {
        /// Ordinal.
        gpu: u32,
        /// What it said.
        error: DriverError,
    },
    /// The thread of the GPU ended.
    #[error("the thread of the GPU ended while it opened")]
    Thread,
    /// Another rank could not be opened.
    #[error("another GPU could not be opened")]
    Other,
}

/// Memory of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Weights, scratch, tables, cache, and what is kept for the driver.
    pub planned_bytes: u64,
    /// What is gone since the backend opened, in use by whomever.
    pub used_bytes: u64,
}

/// A model on one GPU or several.
pub struct CudaBackend {
    limits: Limits,
    layout: CacheLayout,
    fingerprint: [u8; 32],
    summary: String,
    tables: SeatTables,
    /// Steps that were answered while something else was asked for.
    early: VecDeque<StepResult>,
    ranks: Ranks,
}

/// What a backend computes with.
pub enum Load {
    /// Tensors of a checkpoint.
    Checkpoint(Checkpoint),
    /// Random weights of these shapes (`--load-format dummy`).
    Dummy(ModelConfig),
}

impl CudaBackend {
    /// Opens the GPUs of `options` with `load`; `progress` gets the bytes of each tensor that has come to one of them.
    pub fn open(
        load: Load,
        options: CudaOptions,
        progress: impl FnMut(u64) + Send + 'static,
    ) -> Result<CudaBackend, OpenError> {
        let gpus = fit::gpus(&options)?;
        let load = Arc::new(load);
        let (ranks, opened) = Ranks::open(&load, &gpus, options, progress)?;
        let Opened { limits, layout, summary, .. } = opened;
        Ok(CudaBackend {
            tables: SeatTables::new(&layout, limits.seats),
            early: VecDeque::new(),
            limits,
            layout,
            fingerprint: worker::fingerprint(&load, &gpus[0], options),
            summary,
            ranks,
        })
    }

    /// One line about GPU, weights, cache and scratch.
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// Memory of the first GPU, planned and used so far.
    pub fn memory(&mut self) -> Result<Memory, BackendError> {
        self.ranks.send(&Command::Memory)?;
        match self.other()? {
            Answer::Memory(memory) => Ok(memory),
            _ => Err(unexpected()),
        }
    }

    /// The next answer that is not a step's; steps before it are kept for `collect`.
    fn other(&mut self) -> Result<Answer, BackendError> {
        loop {
            match self.ranks.answer()? {
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
}

fn unexpected() -> BackendError {
    BackendError::Fatal("a thread of a GPU answered something else than it was asked".into())
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

    fn time_operators(&mut self, on: bool) -> Result<Vec<OperatorTime>, BackendError> {
        self.ranks.send(&Command::Time(on))?;
        match self.other()? {
            Answer::Times(times) => Ok(times),
            _ => Err(unexpected()),
        }
    }

    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        step_check::apply(step, &self.layout, &self.limits, &mut self.tables)?;
        self.ranks.send(&Command::Step(Arc::new(step.clone())))?;
        Ok(Ticket(step.number))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        let result = match self.early.pop_front() {
            Some(result) => result,
            None => match self.ranks.answer()? {
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
        self.ranks.send(&Command::Copy(copies.into()))?;
        self.done()
    }

    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError> {
        self.ranks.send(&Command::Read(bucket, block))?;
        match self.other()? {
            Answer::Bytes(bytes) => out.copy_from_slice(&bytes),
            _ => return Err(unexpected()),
        }
        Ok(())
    }

    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.ranks.send(&Command::Write(bucket, block, bytes.into()))?;
        self.done()
    }
}
