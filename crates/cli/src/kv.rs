//! `longwave kv`: where the bytes of a cache go, with the arithmetic spelled out.
//!
//! Prints what `longwave_model::memory` counts and adds nothing to it; the explorer shows the same JSON. Refuses a context
//! above the model's own.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use longwave_model::memory::{Fit, Memory};
use longwave_model::payload::Payload;
use longwave_model::{CacheFormats, IndexFormat, MainFormat};
use serde_json::{Value, json};

use crate::units::{grouped, show_short};
use crate::{model_args, output, source, units};

/// Arguments of `longwave kv`.
#[derive(clap::Args)]
pub struct Args {
    /// flash, pro, flash-0731, pro-0813, a config.json or a folder that has one; without it the embedded tiny model.
    model: Option<PathBuf>,
    /// Positions of a request, for example 128K; by default the model's largest context.
    #[arg(long, value_parser = units::tokens)]
    context: Option<u32>,
    /// Format of the main cache: fp8 or bf16.
    #[arg(long, default_value = "fp8", value_parser = model_args::main_format)]
    cache: MainFormat,
    /// Format of the index keys: fp4, fp8 or bf16.
    #[arg(long, default_value = "fp4", value_parser = model_args::index_format)]
    index: IndexFormat,
    /// Requests of that context at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    users: u64,
    /// Memory of one GPU, for example 141G: says how many such requests fit.
    #[arg(long, value_name = "SIZE", value_parser = units::bytes)]
    gpu_memory: Option<u64>,
    /// GPUs of that size that share the model.
    #[arg(long, default_value_t = 1, requires = "gpu_memory", value_parser = clap::value_parser!(u32).range(1..=1024))]
    gpus: u32,
    /// Percent of a GPU that scratch and the driver keep.
    #[arg(long, default_value_t = 10, requires = "gpu_memory", value_parser = clap::value_parser!(u32).range(0..=99))]
    keep_percent: u32,
    /// Print the numbers as JSON.
    #[arg(long)]
    json: bool,
}

/// What is counted; `longwave explore` and the server's explorer count through it as well.
pub struct Wanted<'a> {
    /// As [`source::find`] takes it.
    pub model: Option<&'a Path>,
    /// Positions; the model's largest context when `None`.
    pub context: Option<u32>,
    /// Formats of the cache.
    pub formats: CacheFormats,
    /// Requests at once.
    pub users: u64,
    /// GPUs, bytes of one and percent of it that are kept, to say how many requests fit.
    pub gpus: Option<(u32, u64, u32)>,
}

/// Counts; with the model's name and description.
pub fn count(wanted: &Wanted) -> Result<(String, String, Memory)> {
    let (source, config) = source::find(wanted.model)?;
    let most = config.max_position_embeddings;
    let context = wanted.context.unwrap_or(most);
    if context == 0 || context > most {
        bail!("--context {context} must be between 1 and {most}, the model's context");
    }
    Ok((source.name(), config.describe(), Memory::of(&config, wanted.formats, context)))
}

/// The numbers as JSON.
pub fn json(wanted: &Wanted) -> Result<Value> {
    let (name, describes, memory) = count(wanted)?;
    json_of(wanted, &name, &describes, &memory)
}

/// What was counted as JSON.
pub fn json_of(wanted: &Wanted, name: &str, describes: &str, memory: &Memory) -> Result<Value> {
    let mut out = json!({"model": name, "describes": describes});
    if let (Some(out), Value::Object(fields)) = (out.as_object_mut(), serde_json::to_value(memory)?) {
        out.extend(fields);
        out.insert("users".into(), users_json(memory, wanted.users));
        if let Some((gpus, bytes, kept)) = wanted.gpus {
            out.insert("fit".into(), serde_json::to_value(memory.fit(gpus, bytes, kept))?);
        }
    }
    Ok(out)
}

/// Counts and prints.
pub fn run(args: Args) -> Result<()> {
    let wanted = Wanted {
        model: args.model.as_deref(),
        context: args.context,
        formats: CacheFormats { main: args.cache, index: args.index },
        users: args.users,
        gpus: args.gpu_memory.map(|bytes| (args.gpus, bytes, args.keep_percent)),
    };
    if args.json {
        return output::json(&json(&wanted)?);
    }
    let (_, describes, memory) = count(&wanted)?;
    let mut out = text(&describes, &memory, args.users);
    if let Some((gpus, bytes, kept)) = wanted.gpus {
        fit_text(&mut out, &memory, &memory.fit(gpus, bytes, kept));
    }
    output::text(&out)
}

fn fit_text(out: &mut String, memory: &Memory, fit: &Fit) {
    let short = |bytes: u64| show_short(bytes).to_string();
    line(
        out,
        format_args!(
            "\n{} x {}: {} kept, {} of weights, {} for the cache, which each has whole\n  {} requests of {} tokens",
            fit.gpus,
            short(fit.gpu_bytes),
            short(fit.kept_bytes),
            short(fit.weights_bytes),
            short(fit.cache_bytes),
            grouped(fit.requests),
            grouped(memory.context.into())
        ),
    );
}

fn users_json(memory: &Memory, users: u64) -> Value {
    json!({
        "count": users,
        "payload_bytes": memory.payload.total_bytes * users,
        "allocated_bytes": memory.allocated.total_bytes * users,
        "allocated_bytes_with_drafts": memory.allocated.total_bytes_with_drafts * users,
        "v32_bytes": memory.v32.total_bytes * users,
    })
}

/// The whole report.
fn text(name: &str, memory: &Memory, users: u64) -> String {
    let mut out = format!(
        "{name}: one request of {} tokens, main cache {}, index keys {}\n\n",
        grouped(memory.context.into()),
        memory.formats.main.name(),
        memory.formats.index.name()
    );
    payload_text(&mut out, &memory.payload);
    v32_text(&mut out, memory);
    allocated_text(&mut out, memory);
    if users > 1 {
        let times = |bytes: u64| format!("{:>18} B  {:>9}", grouped(bytes * users), show_short(bytes * users));
        line(&mut out, format_args!("{} requests of this context", grouped(users)));
        line(&mut out, format_args!("  {:<58}{}", "payload", times(memory.payload.total_bytes)));
        line(&mut out, format_args!("  {:<58}{}", "allocated", times(memory.allocated.total_bytes)));
        line(&mut out, format_args!("  {:<58}{}\n", "V3.2-style stack", times(memory.v32.total_bytes)));
    }
    line(
        &mut out,
        format_args!(
            "Checkpoint: {} B in {} tensors ({})",
            grouped(memory.weights.bytes),
            grouped(memory.weights.tensors as u64),
            show_short(memory.weights.bytes)
        ),
    );
    out
}

/// Appends one line.
fn line(out: &mut String, text: std::fmt::Arguments) {
    writeln!(out, "{text}").expect("writing to a String cannot fail");
}

fn amount(bytes: u64) -> String {
    format!("{:>18} B  {:>9}", grouped(bytes), show_short(bytes))
}

fn payload_text(out: &mut String, payload: &Payload) {
    line(out, format_args!("Payload, as published (no MTP window, no compressor rows, no rounding to blocks)"));
    for c in payload.caches.iter().filter(|c| c.layers > 0) {
        let steps =
            format!("{} layers x {} entries x {} B", c.layers, grouped(c.entries), grouped(c.entry_bytes.into()));
        line(out, format_args!("  {:<10}{steps:<48}{}", c.cache.name(), amount(c.total_bytes)));
    }
    line(out, format_args!("  {:<58}{}", "sum", amount(payload.total_bytes)));
    let [main, index, c128, window] = &payload.caches;
    let w = grouped(window.entries);
    line(out, format_args!("  the same by kind of layer:"));
    if main.layers > 0 {
        let steps = format!(
            "{} c4 layers x (({} + {w}) entries x {} B + {} keys x {} B)",
            main.layers,
            grouped(main.entries),
            grouped(main.entry_bytes.into()),
            grouped(index.entries),
            index.entry_bytes
        );
        let per_layer = main.layer_bytes + index.layer_bytes + window.layer_bytes;
        kind_text(out, &steps, main.layers, per_layer);
    }
    if c128.layers > 0 {
        let entry = grouped(c128.entry_bytes.into());
        let steps = format!("{} c128 layers x ({} + {w}) entries x {entry} B", c128.layers, grouped(c128.entries));
        kind_text(out, &steps, c128.layers, c128.layer_bytes + window.layer_bytes);
    }
    let bare = window.layers - main.layers - c128.layers;
    if bare > 0 {
        let steps = format!("{bare} window layers x {w} entries x {} B", grouped(window.entry_bytes.into()));
        kind_text(out, &steps, bare, window.layer_bytes);
    }
    let whole = grouped(payload.bytes_per_token.trunc() as u64);
    let rest = payload.bytes_per_token.fract().to_string();
    line(out, format_args!("  each further token adds {whole}{} B\n", rest.trim_start_matches('0')));
}

fn kind_text(out: &mut String, steps: &str, layers: u32, layer_bytes: u64) {
    let total = grouped(layer_bytes * u64::from(layers));
    line(out, format_args!("    {steps}\n      = {layers} x {} B = {total} B", grouped(layer_bytes)));
}

fn v32_text(out: &mut String, memory: &Memory) {
    let v = &memory.v32;
    line(out, format_args!("V3.2-style stack of as many layers, bf16"));
    line(
        out,
        format_args!(
            "  ({} latent + {} index) values x {} B = {} B per token and layer",
            v.latent_values,
            v.index_values,
            v.value_bytes,
            grouped(v.bytes_per_token_and_layer.into())
        ),
    );
    let steps = format!(
        "{} layers x {} tokens x {} B",
        v.layers,
        grouped(memory.context.into()),
        grouped(v.bytes_per_token_and_layer.into())
    );
    line(out, format_args!("  {:<10}{steps:<48}{}", "sum", amount(v.total_bytes)));
    line(
        out,
        format_args!(
            "  {} against {}: {:.1} times less ({:.1} %)\n",
            show_short(memory.payload.total_bytes),
            show_short(v.total_bytes),
            v.times_larger,
            100.0 / v.times_larger
        ),
    );
}

fn allocated_text(out: &mut String, memory: &Memory) {
    let a = &memory.allocated;
    line(
        out,
        format_args!(
            "Allocated from the pools while the request decodes, {}compressor states included\n  \
             ({} logical blocks of 256 positions)",
            if a.draft_window_layers > 0 { "MTP window and " } else { "" },
            grouped(a.logical_blocks.into())
        ),
    );
    for b in a.buckets.iter().filter(|b| b.layers_per_unit > 0) {
        let steps = format!(
            "({} long-lived + {} sliding) units x {} layers x {} B",
            grouped(b.long_lived_units),
            b.sliding_units,
            b.layers_per_unit,
            grouped(b.page_bytes.into())
        );
        line(out, format_args!("  {:<8}{steps:<50}{}", b.bucket.name(), amount(b.total_bytes)));
    }
    line(out, format_args!("  {:<58}{}", "sum", amount(a.total_bytes)));
    line(out, format_args!("  {:<58}{}", "of it long-lived", amount(a.long_lived_bytes)));
    line(out, format_args!("  {:<58}{}", "of it windows and compressor states", amount(a.sliding_bytes)));
    line(out, format_args!("  {:<58}{}", "the same with 7 drafts in flight", amount(a.sliding_bytes_with_drafts)));
    line(out, format_args!("  {:<58}{}", "reserve for prefill", amount(a.prefill_reserve_bytes)));
    line(out, format_args!("  {:<58}{}\n", "one prefix checkpoint, if kept", amount(a.prefix_checkpoint_bytes)));
}
