//! Opening a model for `serve` and `chat`: the embedded tiny checkpoint or a folder, with a progress bar.
//! Assumes one model per process. Refuses options that do not fit the model or this build, before anything is loaded.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use longwave_cuda::backend::Load;
use longwave_engine::EngineOptions;
use longwave_engine::handle::{self, EngineHandle};
use longwave_engine::tier::TierOptions;
use longwave_model::{Checkpoint, ModelConfig};
use longwave_serve::SamplingDefaults;
use longwave_text::{EffortTable, Tokenizer};

use crate::backend::{self, Opened};
use crate::model_args::{LoadFormat, ModelArgs, formats};
use crate::{source, tiers};

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
    if !backend::on_gpu(args, &config)? {
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
    let (backend, device) = backend::open(args, load, &config)?;
    let engine = match backend {
        Opened::Cpu(backend) => handle::open(*backend, engine_options)?,
        Opened::Cuda(backend) => handle::open(*backend, engine_options)?,
    };
    let summary = summary(args, &config, &device);
    Ok(Loaded { engine, tokenizer, name, efforts, sampling: sampling_defaults(args.model.as_deref())?, summary })
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
