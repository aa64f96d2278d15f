//! `longwave prove`: the same tokens and logits however they are served, shown on this machine with this model.
//!
//! A seeded set of requests runs plainly, one after the other, then again in every other way. Any difference is printed
//! and makes the exit code 1; so does a way that a set of the default size or more did not exercise. The model is opened
//! once per way, on the CPU or on a GPU; ways that are about threads and instruction sets are the CPU's.

mod ways;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::simd::{self, Level};
use longwave_cuda::backend::{CudaBackend, CudaOptions, Load};
use longwave_engine::forced::ForcedDrafts;
use longwave_engine::proof::{self, Answer, Comparison};
use longwave_engine::request::Request;
use longwave_engine::step::Backend;
use longwave_engine::tier::TierOptions;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::geometry::LOGICAL_BLOCK;
use longwave_model::{CacheFormats, CacheLayout, Checkpoint};
use serde_json::json;

use crate::model_args::ModelArgs;
use crate::prove::ways::{PLAIN, Tier, Way, ways};
use crate::{backend, load, output};

/// Requests of a set in which every way finds something to do.
const REQUESTS: u16 = 20;

/// Arguments of `longwave prove`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Other numbers give other requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Requests of the set.
    #[arg(long, default_value_t = REQUESTS, value_parser = clap::value_parser!(u16).range(1..))]
    requests: u16,
    /// More and longer requests: minutes instead of seconds.
    #[arg(long)]
    thorough: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What one way of serving gave.
struct Served {
    answers: Vec<Answer>,
    /// What the way did not make happen; then its answers prove nothing.
    missing: Option<&'static str>,
}

/// A line of the report.
struct Row {
    name: &'static str,
    comparison: Comparison,
    missing: Option<&'static str>,
    seconds: f64,
}

/// Runs the proof.
pub fn run(args: Args) -> Result<()> {
    let (count, longest, outputs) =
        if args.thorough { (args.requests.max(48), 3000, 96) } else { (args.requests, 700, 24) };
    let checkpoint = load::checkpoint(&args.model)?;
    let gpu = backend::on_gpu(&args.model, &checkpoint.config)?;
    let vocab = checkpoint.config.vocab_size as u32;
    let requests = proof::workload(args.seed, usize::from(count), longest, outputs, 16.min(vocab - 1), vocab);
    let prompt_tokens: usize = requests.iter().map(|r| r.prompt.len()).sum();
    let device = if gpu { "GPU" } else { "CPU" };
    let (count_all, seed) = (requests.len(), args.seed);
    let title = format!("{count_all} requests of {prompt_tokens} prompt tokens in all, seed {seed}, on the {device}");
    if !args.json {
        output::text(&format!("{title}\n\n{}", header()))?;
    }
    let started = Instant::now();
    let mut rows: Vec<Row> = Vec::new();
    let mut report = |name: &'static str, plain: &[Answer], served: &Served, started: Instant| -> Result<()> {
        let (comparison, seconds) = (proof::compare(plain, &served.answers), started.elapsed().as_secs_f64());
        let row = Row { name, comparison, missing: served.missing, seconds };
        if !args.json {
            output::text(&line(&row))?;
        }
        rows.push(row);
        Ok(())
    };
    let plain = serve(&args.model, &checkpoint, &PLAIN, &requests, &[], gpu)?;
    report("plain", &plain.answers, &plain, started)?;
    let (long, began) = (behind_a_triangle(&args, &checkpoint, &requests), Instant::now());
    let plain_long = serve(&args.model, &checkpoint, &PLAIN, &long, &[], gpu)?;
    report("plain, behind one long text", &plain_long.answers, &plain_long, began)?;
    let drafter = checkpoint.config.num_nextn_predict_layers > 0;
    for way in ways().into_iter().filter(|w| (drafter || !w.needs_drafter()) && !(gpu && w.is_of_cpu())) {
        let began = Instant::now();
        let (requests, plain) = if way.forget { (&long, &plain_long.answers) } else { (&requests, &plain.answers) };
        let served = serve(&args.model, &checkpoint, &way, requests, plain, gpu)?;
        report(way.name, plain, &served, began)?;
    }
    let equal = rows.iter().all(|r| r.comparison.is_equal());
    let idle = rows.iter().filter(|r| r.missing.is_some()).count();
    if args.json {
        let ways: Vec<_> = rows.iter().map(json_row).collect();
        output::json(
            &json!({"requests": requests.len(), "prompt_tokens": prompt_tokens, "seed": args.seed, "device": device, "ways": ways,
                             "equal": equal, "exercised": idle == 0}),
        )?;
    }
    if !equal {
        bail!("not all ways gave the same tokens and logits; please report this with the model and the seed");
    }
    if idle > 0 && count >= REQUESTS {
        bail!("{idle} ways were not exercised, so they prove nothing; ask for more --requests or for --thorough");
    }
    if !args.json {
        let seconds = started.elapsed().as_secs_f64();
        output::text(&format!("\nNo token and no bit of a logit differs. {seconds:.0} s\n"))?;
    }
    Ok(())
}

fn json_row(row: &Row) -> serde_json::Value {
    let c = &row.comparison;
    json!({"way": row.name, "requests": c.requests, "tokens": c.tokens, "differences": c.differences,
           "logit_differences": c.logit_differences, "max_logit_difference": c.max_logit_difference,
           "exercised": row.missing.is_none(), "missing": row.missing, "seconds": row.seconds})
}

/// A few of the requests behind a text that is longer than what a replay rebuilds: 127 positions per layer and 128 for
/// the MTP module.
fn behind_a_triangle(args: &Args, checkpoint: &Checkpoint, requests: &[Request]) -> Vec<Request> {
    let config = &checkpoint.config;
    let depth = config.num_hidden_layers * (config.sliding_window as usize - 1) + config.sliding_window as usize;
    let (length, vocab) = ((depth.next_multiple_of(256) + 256).min(4096), config.vocab_size as u32);
    let few = &requests[..(requests.len() / 5).clamp(2, 4).min(requests.len())];
    proof::behind_one_text(few, args.seed, length, 16.min(vocab - 1), vocab)
}

/// Serves the set in one way; forced drafts are made from the `plain` answers.
fn serve(
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    way: &Way,
    requests: &[Request],
    plain: &[Answer],
    gpu: bool,
) -> Result<Served> {
    simd::set_level(way.level);
    let folder = TemporaryFolder::new()?;
    let mut pool = rayon::ThreadPoolBuilder::new();
    if way.threads > 0 {
        pool = pool.num_threads(way.threads);
    }
    let drafter = checkpoint.config.num_nextn_predict_layers > 0;
    let served: Result<Served> = pool.build()?.install(|| {
        let formats = CacheFormats { main: args.kv_cache_dtype, index: args.index_cache_dtype };
        let engine_options = EngineOptions {
            max_chunk_tokens: way.chunk,
            drafts: way.drafts,
            prefix_cache: way.again,
            checkpoint_interval: 512,
            spill_bytes: way.spill_bytes,
            tiers: TierOptions {
                host_bytes: if way.tier == Tier::Host { 1 << 30 } else { 0 },
                directory: (way.tier == Tier::Disk).then(|| folder.0.clone()),
                disk_bytes: 1 << 30,
                ..TierOptions::default()
            },
            ..EngineOptions::default()
        };
        let small = way.small_cache || way.tier == Tier::Host;
        let layout = CacheLayout::new(&checkpoint.config, formats);
        let cache_bytes = if small { least(&layout, requests, way.seats) } else { 1 << 30 };
        let (seats, step_tokens, context) = (way.seats.max(1), way.step_tokens, 8192);
        let drafts = if way.forced.is_some() && !drafter { 0 } else { way.drafts };
        if gpu {
            let (ranks, cache_bytes) = (args.tensor_parallel_size, Some(cache_bytes));
            let options =
                CudaOptions { gpu: 0, ranks, seats, step_tokens, context, cache_bytes, formats, drafts, streams: 2 };
            let open = || Ok(CudaBackend::open(Load::Checkpoint(checkpoint.clone()), options, |_| ())?);
            return serve_drafted(open, &engine_options, way, requests, plain);
        }
        let options = CpuOptions { seats, step_tokens, context, cache_bytes, drafts };
        let open = || Ok(CpuBackend::new(Model::new(checkpoint, args.numerics, formats), options)?);
        serve_drafted(open, &engine_options, way, requests, plain)
    });
    simd::set_level(Level::Avx512);
    served
}

/// The way with its drafts: forced ones, or the backend's own.
fn serve_drafted<B: Backend>(
    open: impl Fn() -> Result<B>,
    options: &EngineOptions,
    way: &Way,
    requests: &[Request],
    plain: &[Answer],
) -> Result<Served> {
    match way.forced {
        Some(forced) => {
            let wrapped = || Ok(ForcedDrafts::new(open()?, forced, way.drafts, requests, plain));
            serve_on(wrapped, options, way, requests)
        }
        None => serve_on(open, options, way, requests),
    }
}

/// The way itself, over backends from `open`.
fn serve_on<B: Backend>(
    open: impl Fn() -> Result<B>,
    options: &EngineOptions,
    way: &Way,
    requests: &[Request],
) -> Result<Served> {
    let mut engine = Engine::open(open()?, options.clone())?;
    if way.again {
        proof::serve(&mut engine, requests, 2);
    }
    if way.forget {
        engine.drop_checkpoints();
    }
    if way.tier == Tier::Host {
        proof::serve(&mut engine, &others(requests), 1);
    }
    if way.tier == Tier::Disk {
        engine.stop("a restart");
        drop(engine);
        engine = Engine::open(open()?, options.clone())?;
    }
    let before = engine.status();
    let answers = if way.urgent {
        let urgent = |(i, r): (usize, &Request)| Request { priority: -(i as i32), ..r.clone() };
        let requests: Vec<Request> = requests.iter().enumerate().map(urgent).collect();
        proof::serve_slowly(&mut engine, &requests, 1, 5)
    } else if way.seats == 0 {
        requests.iter().map(|r| proof::serve(&mut engine, std::slice::from_ref(r), 1).remove(0)).collect()
    } else {
        proof::serve(&mut engine, requests, 2)
    };
    let after = engine.status();
    let missing = way.must.iter().find(|m| !(m.happened)(&before, &after)).map(|m| m.what);
    Ok(Served { answers, missing })
}

fn longest(requests: &[Request]) -> usize {
    requests.iter().map(|r| r.prompt.len()).max().unwrap_or(0)
}

/// Bytes of a cache that holds the long-lived blocks of the longest request and hardly more, and windows for all seats.
fn least(layout: &CacheLayout, requests: &[Request], seats: u32) -> u64 {
    let outputs = requests.iter().map(|r| r.max_tokens as usize).max().unwrap_or(0);
    let blocks = (longest(requests) + outputs).div_ceil(LOGICAL_BLOCK as usize) as u64;
    layout.bytes(layout.sliding_units(0).map(|u| 2 * u * seats))
        + layout.bytes(layout.long_lived_units()) * (blocks + 1)
}

/// Requests that push everything out of such a cache: as long as the longest, with other texts.
fn others(requests: &[Request]) -> Vec<Request> {
    let Some(longest) = requests.iter().max_by_key(|r| r.prompt.len()) else { return Vec::new() };
    let other = |i: usize| {
        let mut request = longest.clone();
        request.prompt.reverse();
        request.prompt.rotate_left(i);
        request
    };
    (0..2).map(other).collect()
}

/// A folder for one way, removed with what is in it.
struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    fn new() -> Result<TemporaryFolder> {
        let path = std::env::temp_dir().join(format!("longwave-prove-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("{} cannot be made", path.display()))?;
        Ok(TemporaryFolder(path))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn header() -> String {
    format!(
        "{:<36}{:>9}{:>9}{:>13}{:>22}{:>9}\n",
        "way", "requests", "tokens", "differences", "max logit difference", "seconds"
    )
}

fn line(row: &Row) -> String {
    let (c, name) = (&row.comparison, row.name);
    let idle = row.missing.map(|what| format!("  not exercised: no {what}; ask for more --requests"));
    format!(
        "{name:<36}{:>9}{:>9}{:>13}{:>22}{:>9.1}{}\n",
        c.requests,
        c.tokens,
        c.differences,
        c.max_logit_difference,
        row.seconds,
        idle.unwrap_or_default()
    )
}
