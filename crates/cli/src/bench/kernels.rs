//! `longwave bench kernels`: what each operator of a step takes, beside what the machine allows at best.
//!
//! Decode steps of every batch behind every depth of context, then one chunk of a prompt behind each depth, as they are
//! served and again with timers. Refuses drafts, which are not in the floors, and points that do not fit the model's context
//! or the cache, before anything is measured.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use longwave_cpu::{roofs, simd};
use longwave_engine::step::Backend;
use longwave_model::floors::{self, Roofs, StepShape};
use longwave_model::geometry::LOGICAL_BLOCK;
use longwave_model::{CacheFormats, ModelConfig};
use serde_json::json;

use crate::backend::{self, Opened};
use crate::bench::depth::{Depth, Measured, WARM, positions};
use crate::bench::operators::{self, Point, Probe};
use crate::model_args::{self, BackendName, ModelArgs};
use crate::{load, output, units};

/// Bytes that the probe reads at least, and at most on a CPU and on a GPU, whose reads take a while to reach their rate.
const PROBE_LEAST: u64 = 1 << 20;
const PROBE_MOST: [u64; 2] = [1 << 30, 4 << 30];
/// Rounds of multiply-adds: some ten milliseconds each time.
const SPINS: usize = 2_000_000;

/// Arguments of `longwave bench kernels`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Sequences that decode together, one point each.
    #[arg(long, alias = "batch-size", value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: Vec<u32>,
    /// Tokens of context of each sequence, one point each, for example 8K,128K; whole blocks of 256. Near the end of the
    /// model's context as many as leave room for the steps.
    #[arg(long, alias = "input-len", value_delimiter = ',', default_value = "8K", value_parser = units::tokens)]
    depth: Vec<u32>,
    /// Steps of each point that are measured, and again with timers.
    #[arg(long, alias = "num-iters", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1000))]
    steps: u32,
    /// Leave the chunks of prompts out.
    #[arg(long)]
    no_prefill: bool,
    /// Write the numbers as JSON to this file; - is the standard output, instead of the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures all points.
pub fn run(mut args: Args) -> Result<()> {
    if let Some(path) = args.json.as_ref().filter(|path| path.as_os_str() != "-") {
        // Before minutes of measuring.
        let open = std::fs::OpenOptions::new().append(true).create(true).open(path);
        open.with_context(|| format!("cannot write {}", path.display()))?;
    }
    if args.model.drafts() > 0 {
        bail!(
            "bench kernels measures steps without drafts; leave --num-speculative-tokens and --speculative-config out"
        );
    }
    if let Some(depth) = args.depth.iter().find(|depth| **depth < LOGICAL_BLOCK) {
        bail!("--depth {depth}: contexts are whole blocks of {LOGICAL_BLOCK} tokens, so ask for at least one");
    }
    args.model.max_num_seqs = args.batch.iter().copied().max().unwrap_or(1).max(args.model.max_num_seqs);
    let (load, config) = load::weights(&args.model)?;
    let gpu = backend::on_gpu(&args.model, &config)?;
    // Said once why it is not the GPU.
    args.model.backend = if gpu { BackendName::Cuda } else { BackendName::Cpu };
    let probe = probe(&args, gpu, &config)?;
    let (backend, device) = backend::open(&args.model, load, &config)?;
    let summary = load::summary(&args.model, &config, &device);
    match backend {
        Opened::Cpu(backend) => measure(&args, *backend, &config, &probe, &summary),
        Opened::Cuda(backend) => measure(&args, *backend, &config, &probe, &summary),
    }
}

/// Looks at the machine before the model takes its memory. Reads as much as a small step does, so that a model that lies in
/// caches is compared with these.
fn probe(args: &Args, gpu: bool, config: &ModelConfig) -> Result<Probe> {
    let shape = StepShape { sequences: 1, rows: 1, context: LOGICAL_BLOCK, logits: 1, ranks: ranks(args) };
    let work = floors::step(config, model_args::formats(&args.model), &shape);
    let moved: f64 = work.iter().map(|work| f64::from(work.calls) * work.bytes).sum();
    let read_bytes = (moved as u64).clamp(PROBE_LEAST, PROBE_MOST[usize::from(gpu)]);
    if gpu {
        let first = longwave_cuda::driver::probe()?.into_iter().next().context("the driver finds no GPU")?;
        let measured = longwave_cuda::roofs::measure(&first, read_bytes)?;
        let (roofs, launch_us) = (measured.roofs, Some(measured.launch_us));
        return Ok(Probe { roofs, launch_us, read_bytes, device: measured.name });
    }
    // All products are of floats here.
    let flop = roofs::flop_per_s(SPINS);
    let read_bytes_per_s = roofs::read_bytes_per_s(read_bytes as usize);
    let roofs = Roofs { read_bytes_per_s, bf16_flop_per_s: flop, fp8_flop_per_s: flop, tf32_flop_per_s: flop };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let device = format!("{} on {threads} threads", simd::level().name());
    Ok(Probe { roofs, launch_us: None, read_bytes, device })
}

/// GPUs that share the model.
fn ranks(args: &Args) -> u32 {
    args.model.tensor_parallel_size
}

/// The points of the sweep.
fn shapes(args: &Args, context: u32, step_tokens: u32) -> Result<Vec<StepShape>> {
    let mut out = Vec::new();
    for &depth in &args.depth {
        let decode = args.batch.iter().map(|&sequences| (sequences, 1));
        // A chunk whose rows are one would be a decode step.
        let chunk = (!args.no_prefill && step_tokens > 1).then_some((1, step_tokens));
        for (sequences, rows) in decode.chain(chunk) {
            if sequences > step_tokens {
                bail!(
                    "--batch {sequences} is more than the {step_tokens} tokens of a step; raise --max-num-batched-tokens"
                );
            }
            let logits = if rows == 1 { sequences } else { 0 };
            let mut shape = StepShape { sequences, rows, context: 0, logits, ranks: ranks(args) };
            if depth > context {
                bail!(
                    "--depth {depth} is more than the context of {context} tokens; lower it, or raise --max-model-len"
                );
            }
            let room = context.saturating_sub(positions(&shape, WARM + 2 * args.steps));
            shape.context = depth.min(room) / LOGICAL_BLOCK * LOGICAL_BLOCK;
            if shape.context == 0 {
                let instead = if rows > 1 {
                    ", lower --max-num-batched-tokens, or leave the chunk out with --no-prefill"
                } else {
                    ""
                };
                bail!(
                    "a context of {context} tokens has no room for a block and {rows} rows a step behind it; raise --max-model-len{instead}"
                );
            }
            out.push(shape);
        }
    }
    Ok(out)
}

fn measure(args: &Args, backend: impl Backend, config: &ModelConfig, probe: &Probe, summary: &str) -> Result<()> {
    let limits = backend.limits();
    let shapes = shapes(args, limits.context, limits.step_tokens)?;
    let quiet = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    if !quiet {
        output::text(&format!("{summary}\n{}", operators::machine(probe)))?;
    }
    let longest = shapes.iter().map(|shape| shape.context).max().unwrap_or_default();
    let mut depth = Depth::new(backend, longest)?;
    shapes.iter().try_for_each(|shape| depth.check(shape, args.steps))?;
    let bar = ProgressBar::new(shapes.len() as u64 * u64::from(WARM + 2 * args.steps));
    bar.set_style(
        ProgressStyle::with_template("Measuring {bar:40} {pos}/{len} {elapsed}").expect("a constant template"),
    );
    let formats: CacheFormats = model_args::formats(&args.model);
    let mut points = Vec::new();
    for shape in shapes {
        let measured: Measured = depth.measure(&shape, args.steps, || bar.inc(1))?;
        let work = floors::step(config, formats, &shape);
        let point = Point { shape, steps: args.steps, measured, work };
        if !quiet {
            let table = operators::table(&point, probe);
            bar.suspend(|| output::text(&table))?;
        }
        points.push(operators::json_point(&point, probe));
    }
    bar.finish_and_clear();
    let Some(path) = &args.json else { return Ok(()) };
    let json = json!({
        "model_id": load::name(&args.model), "summary": summary, "probe": operators::json_probe(probe), "points": points,
    });
    if quiet {
        return output::json(&json);
    }
    let text = format!("{}\n", serde_json::to_string_pretty(&json)?);
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
