//! `longwave bench latency`: time to the first token and per token, by batch and depth of context, without HTTP.
//!
//! Each point serves a batch of random prompts of one length, together. The time per token counts only steps in which the
//! whole batch decodes. Refuses points whose batch does not fit the cache or the seats at once.

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use longwave_engine::request::Request;
use serde_json::{Value, json};

use crate::bench::engine::{self, Timing};
use crate::bench::percentiles::{Distribution, label, percent};
use crate::load::{self, Loaded};
use crate::model_args::ModelArgs;
use crate::units::grouped;
use crate::{output, units};

/// Arguments of `longwave bench latency`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Requests that are served together, one point each.
    #[arg(long, alias = "batch-size", value_delimiter = ',', default_value = "1,4,16", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: Vec<u32>,
    /// Tokens of context before the answer, one point each, for example 256,4K,32K.
    #[arg(long, alias = "input-len", value_delimiter = ',', default_value = "256,4K", value_parser = units::tokens)]
    depth: Vec<u32>,
    /// Tokens of an answer.
    #[arg(long, default_value = "32", value_parser = units::tokens)]
    output_len: u32,
    /// Times that each point is measured; the median run is shown.
    #[arg(long, alias = "num-iters", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Percentiles of whole requests in the JSON.
    #[arg(long, value_delimiter = ',', default_value = "50,90,99", value_parser = percent)]
    percentiles: Vec<f64>,
    /// Other numbers give other prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One run of a point.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    /// Until every request had its first token, s.
    prefill_s: f64,
    /// Time per token while all decode, s.
    tpot_s: f64,
    /// Tokens per second of all requests then.
    output_per_s: f64,
    /// Until the last token, s.
    total_s: f64,
}

/// Measures all points.
pub fn run(mut args: Args) -> Result<()> {
    if args.output_len < 2 {
        bail!("--output-len {}: a time per token needs at least 2", args.output_len);
    }
    if let Some(depth) = args.depth.iter().find(|depth| **depth == 0) {
        bail!("--depth {depth}: a prompt has at least 1 token");
    }
    args.model.max_num_seqs = args.batch.iter().copied().max().unwrap_or(1).max(args.model.max_num_seqs);
    let model = load::open(&args.model, Default::default())?;
    if !args.json {
        output::text(&format!("{}\n\n{}", model.summary, header()))?;
    }
    let bar = ProgressBar::new(args.batch.len() as u64 * args.depth.len() as u64 * u64::from(args.repeats));
    bar.set_style(
        ProgressStyle::with_template("Measuring {bar:40} {pos}/{len} {elapsed}").expect("a constant template"),
    );
    // Pages of memory are touched and buffers grow before anything counts.
    point(&model, &args, 1, args.depth[0], 0)?;
    let (mut points, mut index) = (Vec::new(), 1);
    for &depth in &args.depth {
        for &batch in &args.batch {
            let mut runs = Vec::new();
            for _ in 0..args.repeats {
                runs.push(point(&model, &args, batch, depth, index)?);
                index += 1;
                bar.inc(1);
            }
            let line = line(batch, depth, &runs);
            if !args.json {
                bar.suspend(|| output::text(&line))?;
            }
            points.push(json_point(&args, batch, depth, &runs));
        }
    }
    bar.finish_and_clear();
    model.engine.shutdown();
    if args.json {
        output::json(&json!({"model_id": model.name, "summary": model.summary, "points": points}))?;
    }
    Ok(())
}

fn point(model: &Loaded, args: &Args, batch: u32, depth: u32, index: u64) -> Result<Run> {
    let prompt = |i: u32| engine::prompt(model, args.seed, index << 32 | u64::from(i), depth);
    let requests = (0..batch).map(|i| Request::greedy(prompt(i), args.output_len)).collect();
    let timings = engine::serve(&model.engine, requests, |_| ())?;
    Run::of(&timings).ok_or_else(|| {
        anyhow::anyhow!(
            "{batch} requests of {} tokens do not decode at the same time: they do not fit the cache together, or their \
             prompts take longer than {} answers; raise --kv-cache-memory-bytes or --output-len",
            grouped(depth.into()),
            args.output_len
        )
    })
}

impl Run {
    /// `None` when there is no time at which all decode.
    fn of(timings: &[Timing]) -> Option<Run> {
        let all_began = timings.iter().map(Timing::first_s).fold(0.0, f64::max);
        let first_ended = timings.iter().map(Timing::last_s).fold(f64::INFINITY, f64::min);
        let within = |at_s: f64| at_s > all_began && at_s <= first_ended;
        let count: u32 = timings.iter().flat_map(|t| &t.tokens).filter(|(at, _)| within(*at)).map(|(_, n)| n).sum();
        let span_s = first_ended - all_began;
        if count == 0 || span_s <= 0.0 {
            return None;
        }
        let output_per_s = f64::from(count) / span_s;
        let total_s = timings.iter().map(Timing::last_s).fold(0.0, f64::max);
        Some(Run { prefill_s: all_began, tpot_s: timings.len() as f64 / output_per_s, output_per_s, total_s })
    }
}

/// The middle of `of` over the runs.
fn median(runs: &[Run], of: fn(&Run) -> f64) -> f64 {
    Distribution::of(runs.iter().map(of).collect()).map_or(0.0, |d| d.median())
}

fn header() -> String {
    format!(
        "{:>8}{:>10}{:>14}{:>16}{:>14}{:>16}\n",
        "batch", "depth", "first, ms", "prompt tok/s", "token, ms", "output tok/s"
    )
}

fn line(batch: u32, depth: u32, runs: &[Run]) -> String {
    let first_s = median(runs, |run| run.prefill_s);
    format!(
        "{batch:>8}{:>10}{:>14.1}{:>16.0}{:>14.3}{:>16.1}\n",
        grouped(depth.into()),
        first_s * 1e3,
        f64::from(batch) * f64::from(depth) / first_s,
        median(runs, |run| run.tpot_s) * 1e3,
        median(runs, |run| run.output_per_s)
    )
}

fn json_point(args: &Args, batch: u32, depth: u32, runs: &[Run]) -> Value {
    let latencies: Vec<f64> = runs.iter().map(|run| run.total_s).collect();
    let first_s = median(runs, |run| run.prefill_s);
    let mut out = json!({
        "batch_size": batch, "input_len": depth, "output_len": args.output_len,
        "median_ttft_ms": first_s * 1e3,
        "input_throughput": f64::from(batch) * f64::from(depth) / first_s,
        "median_tpot_ms": median(runs, |run| run.tpot_s) * 1e3,
        "output_throughput": median(runs, |run| run.output_per_s),
        "latencies": latencies,
    });
    if let Some(d) = Distribution::of(latencies) {
        out["avg_latency"] = d.mean.into();
        out["percentiles"] = args.percentiles.iter().map(|p| (label(*p), Value::from(d.at(*p)))).collect();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_per_token_counts_steps_in_which_all_decode() {
        let timing = |times: &[(f64, u32)]| Timing { tokens: times.to_vec() };
        // The second begins later and ends later; both decode from 2 to 4 s, one of them two tokens at once.
        let a = timing(&[(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]);
        let b = timing(&[(2.0, 1), (3.0, 2), (4.0, 1), (5.0, 1)]);
        let run = Run::of(&[a.clone(), b]).unwrap();
        assert_eq!(run, Run { prefill_s: 2.0, output_per_s: 2.5, tpot_s: 0.8, total_s: 5.0 });
        // One after the other: nothing to measure.
        assert_eq!(Run::of(&[a, timing(&[(5.0, 1), (6.0, 1)])]), None);
    }
}
