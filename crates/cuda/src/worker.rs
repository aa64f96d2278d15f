//! The thread that owns a GPU: memory is taken once, then commands run in the order in which they come.
//!
//! Assumes steps that were checked. A driver error is answered once; after it the context is of no use and every command
//! fails the same way.

use std::sync::mpsc::{Receiver, Sender};

use longwave_engine::step::Limits;
use longwave_engine::tables::SeatTables;
use longwave_model::{CacheFormats, CacheLayout, IndexFormat, MainFormat, ModelConfig, digest};

use crate::backend::{Answer, Command, CudaOptions, Load, OpenError};
use crate::driver::{Arena, Context, DeviceSlice, DriverError, Gpu, Stream};
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
/// Rows whose logits are computed at once.
const HEADS: usize = 64;

/// What the rest of a backend needs to know of an opened GPU.
pub(crate) struct Opened {
    pub limits: Limits,
    pub layout: CacheLayout,
    pub fingerprint: [u8; 32],
    pub summary: String,
}

/// A GPU with a model.
pub(crate) struct Worker {
    stream: Stream,
    model: Model,
    stepper: Stepper,
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
        check(config, options.formats)?;
        let layout = CacheLayout::new(config, options.formats);
        let context = options.context.min(config.max_position_embeddings);
        let sizes = StepSizes { tokens: options.step_tokens as usize, seats: options.seats as usize, heads: HEADS };

        let device = Context::open(gpu)?;
        let stream = Stream::new(&device)?;
        let mut counting = Arena::counting(&device);
        buffers(&device, &mut counting, config, &layout, sizes)?;
        let (weights_bytes, scratch_bytes) = (loader::bytes(config), counting.used_bytes());
        let memory = |what, need: u64, hint| OpenError::Memory {
            what,
            need_gib: need as f64 / (1u64 << 30) as f64,
            have_gib: gpu.memory_bytes as f64 / (1u64 << 30) as f64,
            gpu: gpu.index,
            hint,
        };
        let room = gpu.memory_bytes.saturating_sub(RESERVE_BYTES);
        let pool_sizes = |units| PoolSizes { units, seats: options.seats, context, step_tokens: options.step_tokens };
        let taken = weights_bytes + scratch_bytes + pools::bytes(&layout, &pool_sizes([0; 3]));
        if taken > room {
            let hint =
                "use more GPUs, fewer layers of random weights, a smaller --max-num-batched-tokens or --max-model-len";
            return Err(memory("weights, scratch and block tables", taken, hint));
        }
        let cache_bytes = options.cache_bytes.unwrap_or(room - taken);
        let sliding = 2 * layout.bytes(layout.sliding_units(0)) * u64::from(options.seats);
        let least = sliding + layout.bytes(layout.long_lived_units());
        if cache_bytes < least {
            let hint = "lower --max-num-seqs or raise --kv-cache-memory-bytes";
            return Err(memory("the windows of all sequences and one block", taken + least, hint));
        }
        if taken + cache_bytes > room {
            let hint = "lower --kv-cache-memory-bytes, or leave it out";
            return Err(memory("weights, scratch and the cache", taken + cache_bytes, hint));
        }
        let units = layout.plan_units(options.seats, 0, cache_bytes);
        let pool_bytes = layout.bytes(units);
        let mut arena = Arena::new(&device, taken + pool_bytes + (1 << 20))?;
        // Rows that nothing was written to are multiplied by zero now and then, and must be finite.
        arena.clear(&stream)?;
        let source = match load {
            Load::Checkpoint(checkpoint) => Source::Checkpoint(checkpoint),
            Load::Dummy(config) => Source::Dummy(Dummy::new(&device, config)?),
        };
        let mut loader = Loader { source: &source, stream: &stream, arena: &mut arena, progress };
        let weights = Weights::load(&mut loader, config)?;
        let pools = Pools::new(&mut arena, &stream, layout.clone(), &pool_sizes(units))?;
        let (scratch, frequencies, stepper) = buffers(&device, &mut arena, config, &layout, sizes)?;
        let model = Model::new(&device, &stream, config.clone(), weights, pools, scratch, frequencies)?;
        stream.synchronize()?;

        let limits = Limits {
            seats: options.seats,
            step_tokens: options.step_tokens,
            context,
            units,
            drafts: 0,
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
        Ok((Worker { stream, model, stepper, context: device }, Opened { limits, layout, fingerprint, summary }))
    }

    /// Runs commands until nobody sends any more.
    pub fn run(mut self, commands: &Receiver<Command>, answers: &Sender<Result<Answer, DriverError>>) {
        for command in commands {
            let answer = match command {
                Command::Step(step, changes) => {
                    self.stepper.step(&self.stream, &self.model, &step, &changes).map(Answer::Step)
                }
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
    sizes: StepSizes,
) -> Result<(Scratch, [DeviceSlice<f32>; 2], Stepper), DriverError> {
    let scratch = scratch::take(arena, config, sizes)?;
    let frequencies = [arena.slice(32)?, arena.slice(32)?];
    let tables = SeatTables::new(layout, sizes.seats as u32);
    let stepper = Stepper::new(device, arena, config.num_hidden_layers, config.vocab_size, tables, sizes)?;
    Ok((scratch, frequencies, stepper))
}

/// Changed whenever a kernel computes rows with other bits than before.
const ROWS: &str = "cuda rows 1";

/// Equal only if equal steps give equal cache bytes.
fn fingerprint(load: &Load, gpu: &Gpu, options: CudaOptions) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    let formats = (options.formats.main.name(), options.formats.index.name());
    let (config, digest) = match load {
        Load::Checkpoint(checkpoint) => (&checkpoint.config, digest::weights(checkpoint)),
        Load::Dummy(config) => (config, [0; 32]),
    };
    hash.update(format!("{ROWS} sm_{}{} {config:?} {formats:?}", gpu.major, gpu.minor).as_bytes());
    hash.update(&digest);
    *hash.finalize().as_bytes()
}

/// Refuses shapes and formats that the kernels do not have.
fn check(config: &ModelConfig, formats: CacheFormats) -> Result<(), OpenError> {
    let model = |what: String| Err(OpenError::Model(what));
    if config.head_dim != 512 || config.qk_rope_head_dim != 64 || config.index_head_dim != 128 || config.hc_mult != 4 {
        return model("heads must be 512 wide with 64 rotary channels, index heads 128, and streams 4".into());
    }
    for (name, width) in [
        ("hidden_size", config.hidden_size),
        ("q_lora_rank", config.q_lora_rank),
        ("moe_intermediate_size", config.moe_intermediate_size),
        ("o_lora_rank", config.o_lora_rank),
    ] {
        if !width.is_multiple_of(128) {
            return model(format!("{name} is {width}, not a multiple of 128"));
        }
    }
    if !config.hidden_size.is_multiple_of(256) {
        return model(format!("hidden_size is {}, not a multiple of 256", config.hidden_size));
    }
    if formats.main == MainFormat::F32 || formats.index == IndexFormat::F32 {
        return model("f32 caches are for the CPU alone".into());
    }
    Ok(())
}
