//! The thread that owns a GPU: memory is taken once, then commands run in the order in which they come.
//!
//! Assumes steps that were checked. After an error nothing is known of what is on the GPU, so every later command fails with
//! the same one. Of several ranks each has a thread like this; they agree on the size of the cache, tell each other where
//! they add up, and leave their memory together.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender};

use longwave_engine::step::Limits;
use longwave_model::geometry::LOGICAL_BLOCK;
use longwave_model::{CacheLayout, ModelConfig, digest};

use crate::backend::{CudaOptions, Load, Memory, OpenError};
use crate::cubins;
use crate::driver::{Arena, Bell, Context, DeviceSlice, DriverError, Gpu, Stream};
use crate::fit;
use crate::forward::Model;
use crate::loader::{self, Loader};
use crate::meeting::Left;
use crate::ops::reduce::{Boxes, Reduce};
use crate::pools::{self, PoolSizes, Pools};
use crate::ranks::{Answer, Command, Failure, Rank};
use crate::scratch::{self, Scratch, StepSizes};
use crate::source::{Dummy, Origin, Source};
use crate::split::Share;
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
    pub summary: String,
    /// Rows of routed experts on this GPU, and those of them whose smallest weights are rounded.
    pub expert_rows: [usize; 2],
}

/// A GPU with a model.
pub(crate) struct Worker {
    // In the order in which they go: graphs before the code that they run.
    stepper: Stepper,
    model: Model,
    stream: Stream,
    context: Context,
    /// Bytes that were free before anything was taken, and bytes that were planned for.
    memory: (u64, u64),
}

impl Worker {
    pub fn open(
        load: &Load,
        rank: &Rank,
        options: CudaOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(Worker, Opened), OpenError> {
        let (gpu, share) = (rank.gpu(), rank.share);
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
        buffers(&device, &mut counting, config, share, &layout, context, sizes)?;
        let (weights_bytes, scratch_bytes) = (loader::bytes(config, share, options.drafts > 0), counting.used_bytes());
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
        // All have the same blocks.
        let cache_bytes = rank.chair.meet(cache_bytes)?.into_iter().fold(cache_bytes, u64::min);
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
        let origin = match load {
            Load::Checkpoint(checkpoint) => Origin::Checkpoint(checkpoint),
            Load::Dummy(_) => Origin::Dummy(Dummy::new(&device)?),
        };
        let source = Source::new(origin, config, share);
        let mut loader = Loader { source: &source, stream: &stream, arena: &mut arena, progress, expert_rows: [0; 2] };
        let weights = Weights::load(&mut loader, config, options.drafts > 0)?;
        let expert_rows = loader.expert_rows;
        let pools = Pools::new(&mut arena, &stream, layout.clone(), &pool_sizes(units))?;
        let Buffers { scratch, frequencies, stepper, boxes } =
            buffers(&device, &mut arena, config, share, &layout, context, sizes)?;
        let mut model =
            Model::new(&device, &stream, config.clone(), weights, pools, scratch, frequencies, options.streams)?;
        stream.synchronize()?;
        if let Some(boxes) = boxes {
            // Everybody's memory is there, and clear.
            let addresses = rank.chair.meet(boxes.address())?;
            rank.gpus.iter().filter(|other| other.index != gpu.index).try_for_each(|other| device.reach(other))?;
            let bell = Bell::new(&device, &rank.alarm)?;
            model.reduce = Some(Reduce::new(&device, &stream, boxes, share.rank, &addresses, bell)?);
        }

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
        let (count, each) = match share.ranks {
            1 => (String::new(), ""),
            n => (format!("{n} x "), ", on each"),
        };
        let summary = format!(
            "{count}{} ({:.0} GiB){each}: {:.2} GiB of weights, {:.2} of scratch, {:.2} for the cache",
            gpu.name,
            gib(gpu.memory_bytes),
            gib(weights_bytes),
            gib(scratch_bytes),
            gib(pool_bytes)
        );
        let is_hopper = cubins::find("experts_fp4_stream", gpu.major, gpu.minor).is_some();
        let expert_rows = [expert_rows[0], if is_hopper { expert_rows[1] } else { 0 }];
        let memory = (free, taken + pool_bytes + RESERVE_BYTES);
        Ok((
            Worker { stepper, model, stream, context: device, memory },
            Opened { limits, layout, summary, expert_rows },
        ))
    }

    /// Runs commands until nobody sends any more.
    pub fn run(mut self, commands: &Receiver<Command>, answers: &Sender<Result<Answer, Failure>>, rank: Rank) {
        let mut dead: Option<Failure> = None;
        for command in commands {
            let answer = match dead.clone() {
                Some(failure) => Err(failure),
                // After a panic nothing is known of what is on the GPU, and the others must hear of it.
                None => catch_unwind(AssertUnwindSafe(|| self.answer(command, &rank))).unwrap_or_else(|_| {
                    let what = "the thread of the GPU".to_owned();
                    Err(Failure::Own(DriverError {
                        call: "a step",
                        what,
                        name: "it panicked; please report this".into(),
                    }))
                }),
            };
            if let Err(failure) = &answer {
                rank.raise();
                dead = Some(failure.clone());
            }
            if answers.send(answer).is_err() {
                break;
            }
        }
        // Nobody's memory goes while another's kernels may still use it.
        let _ = self.context.synchronize();
        let _ = rank.chair.meet(0);
    }

    fn answer(&mut self, command: Command, rank: &Rank) -> Result<Answer, Failure> {
        let (stream, pools) = (&self.stream, &self.model.pools);
        let answer = match command {
            Command::Step(step) => self.stepper.step(stream, &self.model, &step).map(Answer::Step),
            Command::Time(on) => {
                let timers = on.then(|| Timers::new(&self.context));
                let before = std::mem::replace(&mut self.model.timers, timers);
                before.map_or(Ok(Vec::new()), |timers| timers.table()).map(Answer::Times)
            }
            Command::Memory => self.context.free_bytes().map(|left| {
                let (free, planned_bytes) = self.memory;
                Answer::Memory(Memory { planned_bytes, used_bytes: free.saturating_sub(left) })
            }),
            Command::Copy(copies) => copies.iter().try_for_each(|c| pools.copy(stream, c)).map(|()| Answer::Done),
            Command::Read(..) if rank.share.rank > 0 => Ok(Answer::Done),
            Command::Read(bucket, block) => pools.read(stream, bucket, block).map(Answer::Bytes),
            Command::Write(bucket, block, bytes) => pools.write(stream, bucket, block, &bytes).map(|()| Answer::Done),
        };
        match answer {
            // What was added up without waiting is worth nothing.
            Ok(_) if rank.alarm.raised_by().is_some() => Err(Failure::Other),
            answer => answer.map_err(Failure::Own),
        }
    }
}

impl From<Left> for OpenError {
    fn from(_: Left) -> OpenError {
        OpenError::Other
    }
}

struct Buffers {
    scratch: Scratch,
    frequencies: [DeviceSlice<f32>; 2],
    stepper: Stepper,
    /// Where ranks add up.
    boxes: Option<Boxes>,
}

/// Everything of a step that lives on the GPU.
fn buffers(
    device: &Context,
    arena: &mut Arena,
    config: &ModelConfig,
    share: Share,
    layout: &CacheLayout,
    context: u32,
    sizes: StepSizes,
) -> Result<Buffers, DriverError> {
    let scratch = scratch::take(arena, config, share, sizes)?;
    let largest = sizes.tokens * config.hidden_size;
    let boxes = share.is_part().then(|| Boxes::new(arena, share.ranks, largest)).transpose()?;
    let frequencies = [arena.slice(32)?, arena.slice(32)?];
    let stepper = Stepper::new(device, arena, config, layout, context, sizes)?;
    Ok(Buffers { scratch, frequencies, stepper, boxes })
}

/// Bytes of free memory that may be taken.
fn room_of(free: u64) -> u64 {
    free.saturating_sub(RESERVE_BYTES)
}

/// Changed whenever other bits come of the same kernels: another order of launches, other sizes of groups.
const ROWS: &str = "cuda rows 1";

/// Equal only if equal steps give equal cache bytes.
pub(crate) fn fingerprint(load: &Load, gpu: &Gpu, options: CudaOptions) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    let formats = (options.formats.main.name(), options.formats.index.name());
    let (config, digest) = match load {
        Load::Checkpoint(checkpoint) => (&checkpoint.config, digest::weights(checkpoint)),
        Load::Dummy(config) => (config, [0; 32]),
    };
    // With drafts the module's window rows are filled; the number of ranks says how sums are cut.
    let (drafts, ranks) = (options.drafts > 0, options.ranks);
    hash.update(format!("{ROWS} {ranks} sm_{}{} {config:?} {formats:?} {drafts}", gpu.major, gpu.minor).as_bytes());
    hash.update(&digest);
    let own = |cubin: &&cubins::Cubin| cubin.arch.trim_end_matches(['a', 'f']) == format!("{}{}", gpu.major, gpu.minor);
    for cubin in cubins::CUBINS.iter().filter(own) {
        hash.update(cubin.bytes);
    }
    *hash.finalize().as_bytes()
}
