//! `longwave bench throughput`: how many tokens per second an engine computes when there is always work, without HTTP.
//! All requests are handed over at once. Refuses lengths that the model's context does not hold.

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use longwave_engine::request::Request;
use serde_json::json;

use crate::bench::engine::{self, Timing};
use crate::model_args::ModelArgs;
use crate::units::grouped;
use crate::{load, output, units};

/// Arguments of `longwave bench throughput`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Requests in all.
    #[arg(long, alias = "num-prompts", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Tokens of a prompt.
    #[arg(long, default_value = "512", value_parser = units::tokens)]
    input_len: u32,
    /// Tokens of an answer.
    #[arg(long, default_value = "128", value_parser = units::tokens)]
    output_len: u32,
    /// Other numbers give other prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measures.
pub fn run(args: Args) -> Result<()> {
    if args.input_len == 0 || args.output_len == 0 {
        bail!("--input-len and --output-len must be at least 1");
    }
    let model = load::open(&args.model, Default::default())?;
    // Buffers grow before anything counts.
    let warm = engine::prompt(&model, args.seed, u64::MAX, args.input_len);
    engine::serve(&model.engine, vec![Request::greedy(warm, args.output_len.min(4))], |_| ())?;
    let bar = ProgressBar::new(args.requests.into());
    let style = "Serving {bar:40} {pos}/{len} {elapsed} left {eta}";
    bar.set_style(ProgressStyle::with_template(style).expect("a constant template"));
    let prompt = |i: u32| engine::prompt(&model, args.seed, i.into(), args.input_len);
    let requests = (0..args.requests).map(|i| Request::greedy(prompt(i), args.output_len)).collect();
    let timings = engine::serve(&model.engine, requests, |ended| bar.set_position(ended))?;
    bar.finish_and_clear();
    model.engine.shutdown();

    let elapsed_s = timings.iter().map(Timing::last_s).fold(0.0, f64::max);
    let (requests, input, answer) = (u64::from(args.requests), u64::from(args.input_len), u64::from(args.output_len));
    let (input, answer) = (requests * input, requests * answer);
    let rate = |count: u64| count as f64 / elapsed_s;
    if args.json {
        return output::json(&json!({
            "model_id": model.name, "summary": model.summary,
            "elapsed_time": elapsed_s, "num_requests": requests,
            "total_num_tokens": input + answer, "total_input_tokens": input, "total_output_tokens": answer,
            "requests_per_second": rate(requests), "tokens_per_second": rate(input + answer),
            "output_tokens_per_second": rate(answer),
        }));
    }
    output::text(&format!(
        "{}\n\n{:<16}{} in {elapsed_s:.2} s, {:.2}/s\n{:<16}{}, {:.1}/s\n{:<16}{}, {:.1}/s\n{:<16}{}, {:.1}/s\n",
        model.summary,
        "requests",
        grouped(requests),
        rate(requests),
        "prompt tokens",
        grouped(input),
        rate(input),
        "output tokens",
        grouped(answer),
        rate(answer),
        "tokens in all",
        grouped(input + answer),
        rate(input + answer)
    ))
}
