//! `longwave batch`: a file of requests answered into another file, without a server.
//!
//! The lines are those of OpenAI's batches. Started again with the same files it goes on where it was, after Ctrl-C as
//! after a crash. Refuses an input file with faults before a model is loaded.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use longwave_serve::{App, EngineApi, OfflineOptions, ServerOptions, check_file, run_file};

use crate::load;
use crate::model_args::ModelArgs;
use crate::tiers::TierArgs;

/// Arguments of `longwave batch`.
#[derive(clap::Args)]
pub struct Args {
    /// Requests, one JSON object per line: {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}.
    input: PathBuf,
    /// Answers, one line each in the order in which they come; an unfinished file of an earlier run is continued.
    output: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tiers: TierArgs,
    /// Names that requests may use for the model.
    #[arg(long, num_args = 1..)]
    served_model_name: Vec<String>,
    /// Requests that run at once; --max-num-seqs by default.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: Option<u32>,
}

/// Runs until all requests have an answer or Ctrl-C is pressed.
pub fn run(args: Args) -> Result<()> {
    let tiers = args.tiers.check(!args.model.no_enable_prefix_caching)?;
    let mut options = ServerOptions { log_stats: false, ..ServerOptions::default() };
    check_file(&args.input, options.max_body_bytes)?;
    let model = load::open(&args.model, tiers)?;
    eprintln!("{}", model.summary);
    options.served_model_names =
        if args.served_model_name.is_empty() { vec![model.name.clone()] } else { args.served_model_name };
    options.sampling = model.sampling;
    options.chat.table = model.efforts;
    let app = Arc::new(App::new(options, EngineApi::of(&model.engine), model.tokenizer.clone()));

    let bar = ProgressBar::new(0);
    let style = "Answering {bar:40} {pos}/{len} {elapsed} left {eta}{msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("a constant template"));
    let shown = bar.clone();
    let progress = move |done: u64, failed: u64, total: u64| {
        // What an earlier run did says nothing about the speed of this one.
        if shown.length() == Some(0) {
            shown.set_length(total);
            shown.set_position(done);
            shown.reset_eta();
        }
        shown.set_position(done);
        if failed > 0 {
            shown.set_message(format!(", {failed} failed"));
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let concurrency = args.concurrency.unwrap_or(args.model.max_num_seqs) as usize;
    let work = OfflineOptions { input: args.input, output: args.output, concurrency };
    let stop = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let result = runtime.block_on(run_file(app, &work, stop, progress));
    bar.finish_and_clear();
    model.engine.shutdown();
    let result = result?;
    let (done, output) = (result.completed + result.failed, work.output.display());
    if done < result.total {
        bail!("stopped with {done} of {} answers in {output}; the same command goes on from there", result.total);
    }
    let before = if result.found > 0 { format!(", {} of them found there", result.found) } else { String::new() };
    eprintln!("{} answers in {output}{before}; {} have an error", result.total, result.failed);
    Ok(())
}
