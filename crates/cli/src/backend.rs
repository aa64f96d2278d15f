//! Which backend runs a model, with which sizes: the CPU or GPUs, as asked for or as the machine allows.
//!
//! Assumes options that were parsed. Refuses sizes that do not fit the model or the machine, and combinations that only
//! the other backend has, before weights are read by it.

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_cuda::backend::{CudaBackend, CudaOptions, Load, OpenError};
use longwave_cuda::driver::{Missing, probe};
use longwave_cuda::fit;
use longwave_model::{CacheFormats, ModelConfig};

use crate::model_args::{BackendName, ModelArgs, formats};
use crate::units;

/// Tokens of a step on the CPU: about a second's work.
const STEP_TOKENS: u32 = 512;
/// On a GPU: enough to keep its tensor cores busy with most of the experts.
const STEP_TOKENS_ON_GPU: u32 = 2048;

/// A backend that has opened.
pub enum Opened {
    /// On the CPU.
    Cpu(Box<CpuBackend>),
    /// On GPUs.
    Cuda(Box<CudaBackend>),
}

/// Opens the backend for what [`weights`](crate::load::weights) found; the second is one line about the device.
pub fn open(args: &ModelArgs, load: Load, config: &ModelConfig) -> Result<(Opened, String)> {
    let formats = formats(args);
    match load {
        load if on_gpu(args, config)? => {
            let options = cuda_options(args, config, formats)?;
            let backend = CudaBackend::open(load, options, upload_bar())?;
            let device = backend.summary().to_owned();
            Ok((Opened::Cuda(Box::new(backend)), device))
        }
        Load::Dummy(_) => bail!("random weights are made on a GPU"),
        Load::Checkpoint(checkpoint) => {
            let options = cpu_options(args, config, formats)?;
            let backend = CpuBackend::new(Model::new(&checkpoint, args.numerics, formats), options)?;
            let device = format!(
                "{} on {} threads: {} for the cache, {} of scratch at most",
                longwave_cpu::simd::level().name(),
                std::thread::available_parallelism().map_or(1, |n| n.get()),
                units::show_bytes(options.cache_bytes),
                units::show_bytes(backend.scratch_bytes().0),
            );
            Ok((Opened::Cpu(Box::new(backend)), device))
        }
    }
}

/// Whether a model of this configuration runs on a GPU. `auto` takes one that can run it, when nothing is asked for that
/// only the CPU has, and says why not.
pub fn on_gpu(args: &ModelArgs, config: &ModelConfig) -> Result<bool> {
    let options = || cuda_options(args, config, formats(args));
    let ranks = args.tensor_parallel_size;
    match args.backend {
        BackendName::Cpu if ranks > 1 => {
            bail!("--tensor-parallel-size {ranks} shares a model among GPUs; leave it out, or use --backend cuda")
        }
        BackendName::Cpu => Ok(false),
        // Who asks for several GPUs does not mean the CPU.
        BackendName::Auto if ranks > 1 => on_gpu(&ModelArgs { backend: BackendName::Cuda, ..args.clone() }, config),
        BackendName::Auto if args.numerics != Profile::Serving => Ok(false),
        BackendName::Auto => match fit::fits(config, &options()?) {
            Ok(()) => Ok(true),
            // Nobody expects a GPU here.
            Err(OpenError::Missing(Missing::Driver)) => Ok(false),
            Err(OpenError::NoKernels) if probe().is_err() => Ok(false),
            Err(reason) => {
                tracing::warn!("on the CPU: {reason}");
                Ok(false)
            }
        },
        BackendName::Cuda if args.numerics != Profile::Serving => {
            bail!("the CUDA backend rounds as serving does; leave --numerics out, or use --backend cpu")
        }
        BackendName::Cuda => {
            fit::fits(config, &options()?)?;
            Ok(true)
        }
    }
}

/// Sizes of the CUDA backend; without a size for the cache it takes what the GPU has left.
fn cuda_options(args: &ModelArgs, config: &ModelConfig, formats: CacheFormats) -> Result<CudaOptions> {
    Ok(CudaOptions {
        gpu: 0,
        ranks: args.tensor_parallel_size,
        seats: args.max_num_seqs,
        step_tokens: args.max_num_batched_tokens.unwrap_or(STEP_TOKENS_ON_GPU),
        context: context(args, config)?,
        cache_bytes: args.kv_cache_memory_bytes,
        formats,
        drafts: args.drafts(),
        streams: 2,
    })
}

/// A progress bar of the bytes that have come to the GPUs.
fn upload_bar() -> impl FnMut(u64) + Send + 'static {
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("To the GPU {bytes} {elapsed}").expect("a constant template"));
    move |bytes| bar.inc(bytes)
}

/// The largest context that is served.
fn context(args: &ModelArgs, config: &ModelConfig) -> Result<u32> {
    let own = config.max_position_embeddings;
    match args.max_model_len {
        Some(n) if n == 0 || n > own => bail!("--max-model-len {n} must be between 1 and {own}, the model's context"),
        Some(n) => Ok(n),
        None => Ok(own),
    }
}

/// Sizes of the CPU backend: the cache holds what the requests can use, but not more than a part of the memory.
fn cpu_options(args: &ModelArgs, config: &ModelConfig, formats: CacheFormats) -> Result<CpuOptions> {
    let context = context(args, config)?;
    let layout = longwave_model::CacheLayout::new(config, formats);
    let blocks = u64::from(context.div_ceil(longwave_model::geometry::LOGICAL_BLOCK));
    let one = layout.bytes(layout.long_lived_units()) * blocks + 2 * layout.bytes(layout.sliding_units(args.drafts()));
    let useful = one.saturating_mul(u64::from(args.max_num_seqs));
    let cache_bytes = args.kv_cache_memory_bytes.unwrap_or_else(|| useful.min(memory("MemAvailable") / 4));
    let (installed, block) = (memory("MemTotal"), layout.bytes(layout.long_lived_units()));
    if cache_bytes > installed {
        let (asked, have) = (units::show_bytes(cache_bytes), units::show_bytes(installed));
        bail!("--kv-cache-memory-bytes asks for {asked}, this machine has {have}");
    }
    let least = 2 * layout.bytes(layout.sliding_units(args.drafts())) * u64::from(args.max_num_seqs) + block;
    if cache_bytes < least {
        let (have, need) = (units::show_bytes(cache_bytes), units::show_bytes(least));
        bail!(
            "a cache of {have} is too small for {} requests at once, whose windows and one block of 256 tokens take {need}; raise --kv-cache-memory-bytes or lower --max-num-seqs",
            args.max_num_seqs
        );
    }
    Ok(CpuOptions {
        seats: args.max_num_seqs,
        step_tokens: args.max_num_batched_tokens.unwrap_or(STEP_TOKENS),
        context,
        cache_bytes,
        drafts: args.drafts(),
    })
}

/// A line of the system's memory report, in bytes; 16 GiB where it does not say.
fn memory(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map_or(16 << 30, |k| k * 1024)
}
