//! Opening a model for `serve` and `chat`: the embedded tiny checkpoint or a folder, with a progress bar.
//! Assumes one model per process. Refuses options that do not fit the model or this build, before anything is loaded.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_cuda::backend::{CudaBackend, CudaOptions, Load, OpenError};
use longwave_cuda::driver::{Missing, probe};
use longwave_cuda::fit;
use longwave_engine::EngineOptions;
use longwave_engine::handle::{self, EngineHandle};
use longwave_engine::tier::TierOptions;
use longwave_model::{CacheFormats, Checkpoint, IndexFormat, MainFormat, ModelConfig};
use longwave_serve::SamplingDefaults;
use longwave_text::{EffortTable, Tokenizer};

use crate::{source, tiers, units};

/// The tiny checkpoint that is part of the program.
pub mod tiny {
    /// `config.json`.
    pub const CONFIG: &str = include_str!("../../../testdata/tiny/config.json");
    /// The weights.
    pub static SHARD: &[u8] = include_bytes!("../../../testdata/tiny/model.safetensors");
    /// `tokenizer.json`.
    pub static TOKENIZER: &[u8] = include_bytes!("../../../testdata/tiny/tokenizer.json");
    /// Its name.
    pub const NAME: &str = "longwave-tiny";
}

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// The best one that this machine and program have.
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// Where weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// The checkpoint.
    Auto,
    /// The same.
    Safetensors,
    /// Random numbers.
    Dummy,
}

/// Options of the model and its cache, shared by `serve` and `chat`.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// Folder of a DeepSeek-V4 checkpoint; without it the embedded tiny model runs.
    pub model: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendName,
    /// Where the weights come from: the checkpoint (auto or safetensors), or random numbers of the same shapes, for
    /// measurements on a GPU (dummy; MODEL may then be a configuration's name, for example flash).
    #[arg(long, value_enum, default_value = "auto")]
    pub load_format: LoadFormat,
    /// GPUs that share the model, from the first on: each has its part of query heads and experts, and a whole cache.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub tensor_parallel_size: u32,
    /// With --load-format dummy: keep so many layers, so that a large model fits one GPU.
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Format of the main cache: fp8 (or auto, fp8_e4m3, fp8_ds_mla) or bf16.
    #[arg(long, default_value = "auto", value_parser = main_format)]
    pub kv_cache_dtype: MainFormat,
    /// Format of the indexer cache: fp4 (or auto), fp8 or bf16.
    #[arg(long, default_value = "auto", value_parser = index_format)]
    pub index_cache_dtype: IndexFormat,
    /// Largest context of a request in tokens, for example 128K; by default the model's own.
    #[arg(long, value_parser = units::tokens)]
    pub max_model_len: Option<u32>,
    /// Requests that run at once.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_num_seqs: u32,
    /// Tokens of one step, prefill and decode together; by default 512 on the CPU and 2048 on a GPU. More make long prompts
    /// faster, and other requests wait longer for a step.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_num_batched_tokens: Option<u32>,
    /// Bytes for the cache, for example 8G; by default a quarter of the free memory, or what weights leave of a GPU's, and at
    /// most what the context and the number of requests can use.
    #[arg(long, value_parser = units::bytes)]
    pub kv_cache_memory_bytes: Option<u64>,
    /// Rounding of intermediate values on the CPU: serving (as GPU engines round) or reference (as the released program).
    #[arg(long, default_value = "serving", value_parser = profile)]
    pub numerics: Profile,
    /// Compute every prompt from its first token instead of reusing what earlier ones left in the cache.
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    /// Tokens between checkpoints inside long prompts; 0 keeps those at the ends of prompts and answers only.
    #[arg(long, default_value_t = 8192)]
    pub checkpoint_interval: u32,
    /// Host memory for windows and state of requests that give up their seats to more urgent ones (`priority` in a
    /// request), for example 2G; with 0 they are computed again.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::bytes)]
    pub spill_memory: u64,
    /// vLLM's --spill-memory, in GiB.
    #[arg(long, value_name = "GIB", hide_short_help = true, conflicts_with = "spill_memory", value_parser = gibibytes)]
    pub swap_space: Option<u64>,
    /// Seconds without a completed step after which /health is bad and waiting requests fail; 0 waits for ever.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub stall_timeout: u32,
    /// Tokens that the model's MTP module drafts per step, 0 to 7. Drafts change the speed, never the tokens.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=MOST_DRAFTS))]
    pub num_speculative_tokens: u32,
    /// The same as vLLM writes it: {"method": "mtp", "num_speculative_tokens": 3}.
    #[arg(long, value_parser = speculative_config, conflicts_with = "num_speculative_tokens")]
    pub speculative_config: Option<u32>,
}

/// Tokens of a step on the CPU: about a second's work.
const STEP_TOKENS: u32 = 512;
/// On a GPU: enough to keep its tensor cores busy with most of the experts.
const STEP_TOKENS_ON_GPU: u32 = 2048;
const MOST_DRAFTS: i64 = longwave_model::geometry::MAX_DRAFTS as i64;

impl ModelArgs {
    /// Drafts per sequence and step.
    pub fn drafts(&self) -> u32 {
        self.speculative_config.unwrap_or(self.num_speculative_tokens)
    }
}

/// A number of GiB as bytes.
fn gibibytes(text: &str) -> Result<u64, String> {
    units::bytes(&format!("{text}G")).map_err(|_| format!("{text:?} is not a number of GiB; write for example 4"))
}

/// Reads vLLM's JSON. What is not known here is refused: it would have changed something there.
fn speculative_config(text: &str) -> Result<u32, String> {
    let form = r#"{"method": "mtp", "num_speculative_tokens": 3}"#;
    let json: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|e| format!("it is not a JSON object ({e}); write {form}"))?;
    if let Some(key) = json.keys().find(|k| !["method", "num_speculative_tokens"].contains(&k.as_str())) {
        return Err(format!("the key {key:?} has no meaning here; write {form}"));
    }
    match json.get("method").and_then(|v| v.as_str()) {
        Some("mtp" | "deepseek_mtp") => {}
        Some(other) => {
            return Err(format!(
                "the method {other:?} is not supported; mtp is, which drafts with the checkpoint's own module"
            ));
        }
        None => return Err(format!("the method is missing; write {form}")),
    }
    let count = json.get("num_speculative_tokens").and_then(|v| v.as_i64());
    let count = count.filter(|n| (0..=MOST_DRAFTS).contains(n)).and_then(|n| u32::try_from(n).ok());
    count.ok_or_else(|| format!("num_speculative_tokens must be a number from 0 to {MOST_DRAFTS}"))
}

/// Format of the main cache, by the names of `--kv-cache-dtype`.
pub fn main_format(name: &str) -> Result<MainFormat, String> {
    match name {
        "auto" | "fp8" | "fp8_e4m3" | "fp8_ds_mla" => Ok(MainFormat::Fp8),
        "bf16" | "bfloat16" => Ok(MainFormat::Bf16),
        _ => Err("DeepSeek-V4's cache is fp8 (584 bytes an entry) or bf16; use fp8".into()),
    }
}

/// Format of the index keys, by the names of `--index-cache-dtype`.
pub fn index_format(name: &str) -> Result<IndexFormat, String> {
    match name {
        "auto" | "fp4" | "mxfp4" => Ok(IndexFormat::Fp4),
        "fp8" => Ok(IndexFormat::Fp8),
        "bf16" | "bfloat16" => Ok(IndexFormat::Bf16),
        _ => Err("index keys are fp4, fp8 or bf16; fp4 is what the model was trained with".into()),
    }
}

fn profile(name: &str) -> Result<Profile, String> {
    Profile::by_name(name).filter(|p| p.rounds()).ok_or_else(|| "numerics are serving or reference".into())
}

/// A model that answers.
pub struct Loaded {
    /// The engine.
    pub engine: EngineHandle,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Name for `/v1/models`.
    pub name: String,
    /// Which texts its efforts put into the prompt.
    pub efforts: EffortTable,
    /// From generation_config.json.
    pub sampling: SamplingDefaults,
    /// One line about it.
    pub summary: String,
}

/// Opens the checkpoint of `args`.
pub fn checkpoint(args: &ModelArgs) -> Result<Checkpoint> {
    if args.load_format == LoadFormat::Dummy {
        bail!("random weights are for serve and chat on a GPU; leave --load-format out");
    }
    if args.layers.is_some() {
        bail!("--layers belongs to --load-format dummy; a checkpoint is run with all of its layers");
    }
    match &args.model {
        None => Checkpoint::embedded(tiny::NAME, tiny::CONFIG, tiny::SHARD).context("the embedded model"),
        Some(folder) => {
            source::check_folder(folder)?;
            open_folder(folder)
        }
    }
}

/// What the model of `args` is computed with, and its configuration.
pub fn weights(args: &ModelArgs) -> Result<(Load, ModelConfig)> {
    if args.load_format != LoadFormat::Dummy {
        let checkpoint = checkpoint(args)?;
        let config = checkpoint.config.clone();
        return Ok((Load::Checkpoint(checkpoint), config));
    }
    let (_, mut config) = source::find(args.model.as_deref())?;
    // The module is made only to draft.
    config.num_nextn_predict_layers = config.num_nextn_predict_layers.min(args.drafts() as usize);
    config.dspark = None;
    if let Some(layers) = args.layers {
        if layers == 0 || layers > config.num_hidden_layers {
            bail!("--layers {layers} must be from 1 to {}, which the model has", config.num_hidden_layers);
        }
        config.num_hidden_layers = layers;
        config.layers.truncate(layers);
    }
    if !on_gpu(args, &config)? {
        bail!("random weights are made on a GPU; use --backend cuda where there is one, or leave --load-format out");
    }
    Ok((Load::Dummy(config.clone()), config))
}

/// The tokenizer of the model of `args`, without its weights. Random weights of a mere configuration get the tiny one.
pub fn tokenizer(args: &ModelArgs) -> Result<Arc<Tokenizer>> {
    let dummy = args.load_format == LoadFormat::Dummy;
    Ok(Arc::new(match &args.model {
        Some(folder) if !dummy || folder.join("tokenizer.json").exists() => Tokenizer::from_file(folder)?,
        _ => Tokenizer::from_bytes(tiny::TOKENIZER)?,
    }))
}

/// The name of the model of `args`.
pub fn name(args: &ModelArgs) -> String {
    let folder = args.model.as_ref().and_then(|folder| folder.file_name());
    match &args.model {
        None => tiny::NAME.to_owned(),
        Some(_) => folder.map_or("model".into(), |name| name.to_string_lossy().into_owned()),
    }
}

/// A backend that has opened.
pub enum Opened {
    /// On the CPU.
    Cpu(Box<CpuBackend>),
    /// On GPUs.
    Cuda(Box<CudaBackend>),
}

/// Opens the backend for what [`weights`] found; the second is one line about the device.
pub fn backend(args: &ModelArgs, load: Load, config: &ModelConfig) -> Result<(Opened, String)> {
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

/// One line about a model and where it runs.
pub fn summary(args: &ModelArgs, config: &ModelConfig, device: &str) -> String {
    let (name, formats) = (name(args), formats(args));
    format!(
        "{name} ({}), cache {} main and {} index{}; {device}",
        config.describe(),
        formats.main.name(),
        formats.index.name(),
        if args.drafts() > 0 { format!(", {} drafts per step", args.drafts()) } else { String::new() },
    )
}

/// Opens the model of `args` with its tiers.
pub fn open(args: &ModelArgs, tiers: TierOptions) -> Result<Loaded> {
    open_with(args, EngineOptions { tiers, ..EngineOptions::default() })
}

/// [`open`] with options of the engine that `args` has none for.
pub fn open_with(args: &ModelArgs, options: EngineOptions) -> Result<Loaded> {
    let (load, config) = weights(args)?;
    let (tokenizer, name) = (tokenizer(args)?, name(args));
    if tokenizer.vocab_size() as usize > config.vocab_size {
        bail!(
            "tokenizer.json has {} tokens, the model's vocabulary {}; they do not belong together",
            tokenizer.vocab_size(),
            config.vocab_size
        );
    }
    // Checkpoints with the DSpark drafter are the retrained ones; the tiny model never saw an effort text either.
    let efforts = if config.dspark.is_some() { EffortTable::July } else { EffortTable::April };
    tiers::check_sizes(&options.tiers, &longwave_model::CacheLayout::new(&config, formats(args)))?;
    let engine_options = EngineOptions {
        drafts: args.drafts(),
        prefix_cache: !args.no_enable_prefix_caching,
        checkpoint_interval: args.checkpoint_interval,
        spill_bytes: args.swap_space.unwrap_or(args.spill_memory),
        stall_after: std::time::Duration::from_secs(args.stall_timeout.into()),
        ..options
    };
    let (backend, device) = backend(args, load, &config)?;
    let engine = match backend {
        Opened::Cpu(backend) => handle::open(*backend, engine_options)?,
        Opened::Cuda(backend) => handle::open(*backend, engine_options)?,
    };
    let summary = summary(args, &config, &device);
    Ok(Loaded { engine, tokenizer, name, efforts, sampling: sampling_defaults(args.model.as_deref())?, summary })
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

/// Cache formats that were asked for.
pub fn formats(args: &ModelArgs) -> CacheFormats {
    CacheFormats { main: args.kv_cache_dtype, index: args.index_cache_dtype }
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

/// Opens a checkpoint folder with a progress bar on the terminal.
pub fn open_folder(folder: &Path) -> Result<Checkpoint> {
    let bar = ProgressBar::new(0);
    let style = "Loading {bar:40} {bytes}/{total_bytes} {eta}";
    bar.set_style(ProgressStyle::with_template(style).expect("a constant template"));
    let checkpoint = Checkpoint::open(folder, &mut |p| {
        bar.set_length(p.total_bytes);
        bar.set_position(p.done_bytes);
    });
    bar.finish_and_clear();
    Ok(checkpoint?)
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

/// Sampling of requests that say nothing: generation_config.json beside the weights, else temperature 1.
fn sampling_defaults(folder: Option<&Path>) -> Result<SamplingDefaults> {
    let mut out = SamplingDefaults::default();
    let Some(folder) = folder else { return Ok(out) };
    let path = folder.join("generation_config.json");
    let Ok(text) = std::fs::read_to_string(&path) else { return Ok(out) };
    let json: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not valid JSON", path.display()))?;
    let number = |key: &str, least: f64, most: f64| match json.get(key).filter(|v| !v.is_null()) {
        None => Ok(None),
        Some(v) => match v.as_f64().filter(|n| (least..=most).contains(n)) {
            Some(n) => Ok(Some(n)),
            None => {
                Err(anyhow::anyhow!("{}: `{key}` is {v}, expected a number from {least} to {most}", path.display()))
            }
        },
    };
    if json.get("do_sample").and_then(|v| v.as_bool()) == Some(false) {
        out.temperature = 0.0;
    }
    out.temperature = number("temperature", 0.0, 2.0)?.map_or(out.temperature, |v| v as f32);
    out.top_p = number("top_p", 0.0, 1.0)?.map_or(out.top_p, |v| v as f32);
    out.top_k = number("top_k", 0.0, f64::from(u32::MAX))?.map_or(out.top_k, |v| v as u32);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speculative_config_is_read_or_says_what_to_write() {
        assert_eq!(speculative_config(r#"{"method":"mtp","num_speculative_tokens":3}"#), Ok(3));
        assert_eq!(speculative_config(r#"{"num_speculative_tokens": 0, "method": "deepseek_mtp"}"#), Ok(0));
        let refused = |text: &str, part: &str| {
            let e = speculative_config(text).unwrap_err();
            assert!(e.contains(part), "{text}: {e}");
        };
        refused(r#"{"method":"ngram","num_speculative_tokens":3}"#, "\"ngram\" is not supported; mtp is");
        refused(r#"{"num_speculative_tokens":3}"#, "the method is missing");
        refused(r#"{"method":"mtp"}"#, "a number from 0 to 7");
        refused(r#"{"method":"mtp","num_speculative_tokens":8}"#, "a number from 0 to 7");
        refused(r#"{"method":"mtp","num_speculative_tokens":"3"}"#, "a number from 0 to 7");
        refused(r#"{"method":"mtp","num_speculative_tokens":3,"model":"x"}"#, "\"model\" has no meaning here");
        refused("mtp", "not a JSON object");
    }
}
