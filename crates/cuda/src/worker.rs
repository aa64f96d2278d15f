//! The thread that owns a GPU: memory is taken once, then commands run in the order in which they come.
//!
//! Assumes steps that were checked. After an error nothing is known of what is on the GPU, so every later command fails with
//! the same one.

use std::sync::mpsc::{Receiver, Sender};

use longwave_engine::step::Limits;
use longwave_model::geometry::LOGICAL_BLOCK;
use longwave_model::{CacheLayout, ModelConfig, digest};

use crate::backend::{Answer, Command, CudaOptions, Load, OpenError};
use crate::cubins;
use crate::driver::{Arena, Context, DeviceSlice, DriverError, Gpu, Stream};
use crate::fit;
use crate::forward::Model;
use crate::loader::{self, Loader};
use crate::pools::{self, PoolSizes, Pools};
use crate::scratch::{self, Scratch, StepSizes};
use crate::source::{Dummy, Source};
use crate::stepper::Stepper;
use crate::timers::Timers;
use crate::weights::Weights;

/// Bytes of the GPU that are left to the driver: modules, graphs, stacks.
const RESERVE_BYTES: u64 = 1 << 30;
/// Rows whose logits are computed at once, at least and at most: a decode step of all seats where that fits.
const HEADS: (usize, usize) = (64, 256);

/// What the rest of a backend needs to know of an opened GPU.
pub(crate) struct Opened {
    pub limits: Limits,
    pub layout: CacheLayout,
    pub fingerprint: [u8; 32],
    pub summary: String,
}

/// A GPU with a model.
pub(crate) struct Worker {
    // In the order in which they go: graphs before the code that they run.
    stepper: Stepper,
    model: Model,
    stream: Stream,
    context: Context,
}

impl Worker {
    pub fn open(
        load: &Load,
        gpu: &Gpu,
        options: CudaOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(Worker, Opened), OpenError> {
        let config = match load {
            Load::Checkpoint(checkpoint) => &checkpoint.config,
            Load::Dummy(config) => config,
        };
        fit::check(config, &options, gpu)?;
        let layout = CacheLayout::new(config, options.formats);
        let context = options.context.min(config.max_position_embeddings);
        let (tokens, seats) = (options.step_tokens as usize, options.seats as usize);
        let rows = seats.saturating_mul(1 + options.drafts as usize);
        let sizes = StepSizes { tokens, seats, heads: rows.clamp(HEADS.0, HEADS.1), drafts: options.drafts };

        let device = Context::open(gpu)?;
        let stream = Stream::new(&device)?;
        let mut counting = Arena::counting(&device);
        buffers(&device, &mut counting, config, &layout, context, sizes)?;
        let (weights_bytes, scratch_bytes) = (loader::bytes(config, options.drafts > 0), counting.used_bytes());
        let free = device.free_bytes()?;
        let memory = |what, need: u64, hint| OpenError::Memory {
            what,
            need_gib: need as f64 / (1u64 << 30) as f64,
            have_gib: room_of(free) as f64 / (1u64 << 30) as f64,
            gpu: gpu.index,
            hint,
        };
        let room = room_of(free);
        let pool_sizes = |units| PoolSizes { units, seats: options.seats, context, step_tokens: options.step_tokens };
        let taken = weights_bytes + scratch_bytes + pools::bytes(&layout, &pool_sizes([0; 3]));
        if taken > room {
            let hint = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len, or use --backend cpu";
            return Err(memory("weights, scratch and block tables", taken, hint));
        }
        let sliding = 2 * layout.bytes(layout.sliding_units(options.drafts)) * u64::from(options.seats);
        let block = layout.bytes(layout.long_lived_units());
        // More than all sequences at their longest is of no use.
        let blocks = u64::from(context.div_ceil(LOGICAL_BLOCK)) * u64::from(options.seats);
        let useful = sliding.saturating_add(block.saturating_mul(blocks));
        let cache_bytes = options.cache_bytes.unwrap_or_else(|| useful.min(room - taken));
        if cache_bytes < sliding + block {
            let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
            return Err(OpenError::Cache { have_gib: gib(cache_bytes), need_gib: gib(sliding + block) });
        }
        if taken + cache_bytes > room {
            let hint = "lower --kv-cache-memory-bytes, or leave it out";
            return Err(memory("weights, scratch and the cache", taken + cache_bytes, hint));
        }
        let units = layout.plan_units(options.seats, options.drafts, cache_bytes);
        let pool_bytes = layout.bytes(units);
        let mut arena = Arena::new(&device, taken + pool_bytes + (1 << 20))?;
        // Rows that nothing was written to are multiplied by zero now and then, and must be finite.
        arena.clear(&stream)?;
        let source = match load {
            Load::Checkpoint(checkpoint) => Source::Checkpoint(checkpoint),
            Load::Dummy(config) => Source::Dummy(Dummy::new(&device, config)?),
        };
        let mut loader = Loader { source: &source, stream: &stream, arena: &mut arena, progress };
        let weights = Weights::load(&mut loader, config, options.drafts > 0)?;
        let pools = Pools::new(&mut arena, &stream, layout.clone(), &pool_sizes(units))?;
        let (scratch, frequencies, stepper) = buffers(&device, &mut arena, config, &layout, context, sizes)?;
        let model =
            Model::new(&device, &stream, config.clone(), weights, pools, scratch, frequencies, options.streams)?;
        stream.synchronize()?;

        let limits = Limits {
            seats: options.seats,
            step_tokens: options.step_tokens,
            context,
            units,
            drafts: options.drafts,
            in_flight: 1,
            vocab: config.vocab_size as u32,
        };
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let summary = format!(
            "{} ({:.0} GiB): {:.2} GiB of weights, {:.2} of scratch, {:.2} for the cache",
            gpu.name,
            gib(gpu.memory_bytes),
            gib(weights_bytes),
            gib(scratch_bytes),
            gib(pool_bytes)
        );
        let fingerprint = fingerprint(load, gpu, options);
        Ok((Worker { stepper, model, stream, context: device }, Opened { limits, layout, fingerprint, summary }))
    }

    /// Runs commands until nobody sends any more.
    pub fn run(mut self, commands: &Receiver<Command>, answers: &Sender<Result<Answer, DriverError>>) {
        let mut dead: Option<DriverError> = None;
        for command in commands {
            let answer = match command {
                _ if dead.is_some() => Err(dead.clone().expect("there is an error")),
                Command::Step(step) => self.stepper.step(&self.stream, &self.model, &step).map(Answer::Step),
                Command::Time(on) => {
                    let timers = on.then(|| Timers::new(&self.context));
                    let before = std::mem::replace(&mut self.model.timers, timers);
                    before.map_or(Ok(Vec::new()), |timers| timers.table()).map(Answer::Times)
                }
                Command::Copy(copies) => {
                    copies.iter().try_for_each(|c| self.model.pools.copy(&self.stream, c)).map(|()| Answer::Done)
                }
                Command::Read(bucket, block) => self.model.pools.read(&self.stream, bucket, block).map(Answer::Bytes),
                Command::Write(bucket, block, bytes) => {
                    self.model.pools.write(&self.stream, bucket, block, &bytes).map(|()| Answer::Done)
                }
            };
            dead = dead.or_else(|| answer.as_ref().err().cloned());
            if answers.send(answer).is_err() {
                return;
            }
        }
    }
}

/// Everything of a step that lives on the GPU.
fn buffers(
    device: &Context,
    arena: &mut Arena,
    config: &ModelConfig,
    layout: &CacheLayout,
    context: u32,
    sizes: StepSizes,
) -> Result<(Scratch, [DeviceSlice<f32>; 2], Stepper), DriverError> {
    let scratch = scratch::take(arena, config, sizes)?;
    let frequencies = [arena.slice(32)?, arena.slice(32)?];
    let stepper = Stepper::new(device, arena, config, layout, context, sizes)?;
    Ok((scratch, frequencies, stepper))
}

/// Bytes of free memory that may be taken.
fn room_of(free: u64) -> u64 {
    free.saturating_sub(RESERVE_BYTES)
}

/// Changed whenever other bits come of the same kernels: another order of launches, other sizes of groups.
const ROWS: &str = "cuda rows 1";

/// Equal only if equal steps give equal cache bytes.
fn fingerprint(load: &Load, gpu: &Gpu, options: CudaOptions) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    let formats = (options.formats.main.name(), options.formats.index.name());
    let (config, digest) = match load {
        Load::Checkpoint(checkpoint) => (&checkpoint.config, digest::weights(checkpoint)),
        Load::Dummy(config) => (config, [0; 32]),
    };
    // With drafts the module's window rows are filled.
    let drafts = options.drafts > 0;
    hash.update(format!("{ROWS} sm_{}{} {config:?} {formats:?} {drafts}", gpu.major, gpu.minor).as_bytes());
    hash.update(&digest);
    let own = |cubin: &&cubins::Cubin| cubin.arch.trim_end_matches(['a', 'f']) == format!("{}{}", gpu.major, gpu.minor);
    for cubin in cubins::CUBINS.iter().filter(own) {
        hash.update(cubin.bytes);
    }
    *hash.finalize().as_bytes()
}
