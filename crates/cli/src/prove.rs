//! `longwave prove`: the same tokens and logits however they are served, shown on this machine with this model.
//!
//! A seeded set of requests runs plainly, one after the other, then again in every other way. Any difference is printed
//! and makes the exit code 1. Assumes a CPU; the model is opened once per way.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::simd::{self, Level};
use longwave_engine::proof::{self, Answer, Comparison};
use longwave_engine::request::Request;
use longwave_engine::tier::TierOptions;
use longwave_engine::{Engine, EngineOptions, Status};
use longwave_model::geometry::LOGICAL_BLOCK;
use longwave_model::{CacheFormats, CacheLayout, Checkpoint};
use serde_json::json;

use crate::load::{self, ModelArgs};
use crate::output;

/// Arguments of `longwave prove`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Other numbers give other requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Requests of the set.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..))]
    requests: u16,
    /// More and longer requests: minutes instead of seconds.
    #[arg(long)]
    thorough: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What a way must have made happen, and where it is counted.
type Must = (&'static str, fn(&Status) -> u64);

/// One way of serving the set.
struct Way {
    name: &'static str,
    /// Tokens of a step.
    step_tokens: u32,
    /// Sequences at once; 0 means one after the other.
    seats: u32,
    /// Largest chunk of a prompt.
    chunk: Option<u32>,
    /// Draft tokens per sequence and step.
    drafts: u32,
    /// Serve the set twice and compare the second time, which finds prefixes of the first.
    again: bool,
    /// Before that, forget all checkpoints, so that windows are rebuilt. The prompts begin with one long text.
    forget: bool,
    /// Bytes for the cache.
    cache_bytes: u64,
    /// Each request is more urgent than those before it, and finds them at work.
    urgent: bool,
    /// Host memory for the state of requests that lose their seats.
    spill_bytes: u64,
    /// What must have happened, counted; without it the way proves nothing.
    must: Option<Must>,
    /// Where evicted prefixes go; then the second serving must find some there.
    tier: Tier,
    /// Instruction set.
    level: Level,
    /// Threads; 0 means all.
    threads: usize,
}

/// A tier below the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tier {
    None,
    /// Host memory, below a cache that is too small for the set.
    Host,
    /// A directory, and another engine over it for the second serving.
    Disk,
}

const PLAIN: Way = Way {
    name: "plain",
    step_tokens: 4096,
    seats: 0,
    chunk: None,
    drafts: 0,
    again: false,
    forget: false,
    cache_bytes: 1 << 30,
    urgent: false,
    spill_bytes: 1 << 30,
    must: None,
    tier: Tier::None,
    level: Level::Avx512,
    threads: 0,
};

impl Way {
    fn named(self, name: &'static str) -> Way {
        Way { name, ..self }
    }
}

const REPLAY: Option<Must> = Some(("window replay", |s| s.prefix.replays));

/// Every way but the plain one.
fn ways() -> Vec<Way> {
    let chunks = |name, n| Way { name, chunk: Some(n), ..PLAIN };
    let batch = |name, step_tokens, seats| Way { name, step_tokens, seats, ..PLAIN };
    vec![
        chunks("chunks of 1", 1),
        chunks("chunks of 3", 3),
        chunks("chunks of 64", 64),
        chunks("chunks of 129", 129),
        batch("batch of 4, 33 tokens a step", 33, 4),
        batch("batch of all, 256 tokens a step", 256, 64),
        Way { again: true, must: Some(("prefix hit", |s| s.prefix.hits)), ..batch("reused prefixes", 256, 64) },
        Way { again: true, drafts: 3, ..batch("reused prefixes, drafts of 3", 64, 8) },
        Way { again: true, cache_bytes: 12 << 20, ..batch("reused prefixes, constant eviction", 128, 4) },
        Way { urgent: true, must: Some(("resumed request", |s| s.resumed)), ..batch("preemption, state kept", 64, 1) },
        Way {
            urgent: true,
            spill_bytes: 0,
            drafts: 1,
            must: Some(("preempted request", |s| s.preempted)),
            ..batch("preemption, state lost, drafts of 1", 64, 2)
        },
        Way { must: REPLAY, again: true, forget: true, ..batch("evicted checkpoints, window replay", 256, 4) },
        Way { must: REPLAY, again: true, forget: true, drafts: 3, ..batch("the same, drafts of 3", 100, 4) },
        Way {
            again: true,
            tier: Tier::Host,
            must: Some(("token from host memory", |s| s.prefix.host_tokens)),
            ..batch("tier round trip, host", 256, 1)
        },
        Way {
            again: true,
            tier: Tier::Disk,
            must: Some(("token from disk", |s| s.prefix.disk_tokens)),
            ..batch("tier round trip, disk and restart", 256, 8)
        },
        Way { drafts: 1, ..batch("drafts of 1", 512, 64) },
        Way { drafts: 3, ..batch("drafts of 3, 33 tokens a step", 33, 4) },
        Way { drafts: 7, ..PLAIN.named("drafts of 7, one by one") },
        Way { threads: 1, ..batch("batch of all, one thread", 512, 64) },
        Way { level: Level::Avx2, ..batch("batch of all, AVX2", 512, 64) },
    ]
}

/// Runs the proof.
pub fn run(args: Args) -> Result<()> {
    let (count, longest, outputs) =
        if args.thorough { (args.requests.max(48), 3000, 96) } else { (args.requests, 700, 24) };
    let checkpoint = load::checkpoint(&args.model)?;
    let vocab = checkpoint.config.vocab_size as u32;
    let requests = proof::workload(args.seed, usize::from(count), longest, outputs, 16.min(vocab - 1), vocab);
    let prompt_tokens: usize = requests.iter().map(|r| r.prompt.len()).sum();
    let title = format!("{} requests of {} prompt tokens in all, seed {}", requests.len(), prompt_tokens, args.seed);
    if !args.json {
        output::text(&format!("{title}\n\n{}", header()))?;
    }
    let started = Instant::now();
    let plain = serve(&args.model, &checkpoint, &PLAIN, &requests)?;
    let mut rows = Vec::new();
    let mut equal = true;
    let mut report = |name: &'static str, c: Comparison, seconds: f64| -> Result<()> {
        if !args.json {
            output::text(&line(name, &c, seconds))?;
        }
        equal &= c.is_equal();
        rows.push((name, c, seconds));
        Ok(())
    };
    report("plain", proof::compare(&plain, &plain), started.elapsed().as_secs_f64())?;
    let (long, started) = (behind_a_triangle(&args, &checkpoint, &requests), Instant::now());
    let plain_long = serve(&args.model, &checkpoint, &PLAIN, &long)?;
    report("plain, behind one long text", proof::compare(&plain_long, &plain_long), started.elapsed().as_secs_f64())?;
    let drafter = checkpoint.config.num_nextn_predict_layers > 0;
    for way in ways().into_iter().filter(|w| w.drafts == 0 || drafter) {
        let started = Instant::now();
        let (requests, plain) = if way.forget { (&long, &plain_long) } else { (&requests, &plain) };
        let answers = serve(&args.model, &checkpoint, &way, requests)?;
        report(way.name, proof::compare(plain, &answers), started.elapsed().as_secs_f64())?;
    }
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(name, c, seconds)| {
                json!({"way": name, "requests": c.requests, "tokens": c.tokens, "differences": c.differences,
                       "logit_differences": c.logit_differences, "max_logit_difference": c.max_logit_difference, "seconds": seconds})
            })
            .collect();
        output::json(
            &json!({"requests": requests.len(), "prompt_tokens": prompt_tokens, "seed": args.seed, "ways": rows, "equal": equal}),
        )?;
    }
    if !equal {
        bail!("not all ways gave the same tokens and logits; please report this with the model and the seed");
    }
    if !args.json {
        output::text(&format!("\nNo token and no bit of a logit differs. {:.0} s\n", started.elapsed().as_secs_f64()))?;
    }
    Ok(())
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

/// Serves the set in one way.
fn serve(args: &ModelArgs, checkpoint: &Checkpoint, way: &Way, requests: &[Request]) -> Result<Vec<Answer>> {
    simd::set_level(way.level);
    let folder = TemporaryFolder::new()?;
    let mut pool = rayon::ThreadPoolBuilder::new();
    if way.threads > 0 {
        pool = pool.num_threads(way.threads);
    }
    let answers: Result<Vec<Answer>> = pool.build()?.install(|| {
        let formats = CacheFormats { main: args.kv_cache_dtype, index: args.index_cache_dtype };
        let model = Model::new(checkpoint, args.numerics, formats);
        let options = CpuOptions {
            seats: way.seats.max(1),
            step_tokens: way.step_tokens,
            context: 8192,
            cache_bytes: if way.tier == Tier::Host { least(&model, requests) } else { way.cache_bytes },
            drafts: way.drafts,
        };
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
        let mut engine = Engine::open(CpuBackend::new(model, options)?, engine_options.clone())?;
        if way.seats == 0 {
            let one = |r: &Request| proof::serve(&mut engine, std::slice::from_ref(r), 1).remove(0);
            return Ok(requests.iter().map(one).collect());
        }
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
            let model = Model::new(checkpoint, args.numerics, formats);
            engine = Engine::open(CpuBackend::new(model, options)?, engine_options)?;
        }
        let happened = |engine: &Engine<CpuBackend>| way.must.map_or(0, |(_, count)| count(&engine.status()));
        let before = happened(&engine);
        let answers = if way.urgent {
            let urgent = |(i, r): (usize, &Request)| Request { priority: -(i as i32), ..r.clone() };
            let requests: Vec<Request> = requests.iter().enumerate().map(urgent).collect();
            proof::serve_slowly(&mut engine, &requests, 1, 5)
        } else {
            proof::serve(&mut engine, requests, 2)
        };
        // Prompts of one block or less reuse nothing.
        let possible = !way.again || longest(requests) > LOGICAL_BLOCK as usize;
        if let Some((what, _)) = way.must
            && possible
            && happened(&engine) == before
        {
            bail!("{}: there was no {what}, so nothing was proved; ask for more --requests", way.name);
        }
        Ok(answers)
    });
    simd::set_level(Level::Avx512);
    answers
}

fn longest(requests: &[Request]) -> usize {
    requests.iter().map(|r| r.prompt.len()).max().unwrap_or(0)
}

/// Bytes of a cache that holds the longest request and hardly more.
fn least(model: &Model, requests: &[Request]) -> u64 {
    let layout = CacheLayout::new(&model.config, model.formats);
    let outputs = requests.iter().map(|r| r.max_tokens as usize).max().unwrap_or(0);
    let blocks = (longest(requests) + outputs).div_ceil(LOGICAL_BLOCK as usize) as u64;
    layout.bytes(layout.sliding_units(0).map(|u| 2 * u)) + layout.bytes(layout.long_lived_units()) * (blocks + 1)
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
        "{:<34}{:>9}{:>9}{:>13}{:>22}{:>9}\n",
        "way", "requests", "tokens", "differences", "max logit difference", "seconds"
    )
}

fn line(name: &str, c: &Comparison, seconds: f64) -> String {
    format!(
        "{name:<34}{:>9}{:>9}{:>13}{:>22}{seconds:>9.1}\n",
        c.requests, c.tokens, c.differences, c.max_logit_difference
    )
}
