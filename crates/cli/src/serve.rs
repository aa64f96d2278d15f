//! `longwave serve`: a model behind HTTP.
//!
//! Takes the flags of `vllm serve` that mean something here, so that a command line works by replacing the program's
//! name; a value without a meaning is an error that says what to use, and a flag without an effect says so once.

mod batching;
mod observing;
mod security;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use longwave_engine::EngineOptions;
use longwave_serve::{App, Batches, EngineApi, ServerOptions};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::model_args::ModelArgs;
use crate::tiers::{self, TierArgs};
use crate::{explore, load, script, units};

/// Arguments of `longwave serve`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tiers: TierArgs,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Names under which the model is served; the first one is shown by /v1/models.
    #[arg(long, num_args = 1..)]
    served_model_name: Vec<String>,
    /// Largest request body, for example 64M.
    #[arg(long, default_value = "64M", value_parser = units::bytes)]
    max_body_bytes: u64,
    /// Answer from a file of JSON lines instead of running a model, to test clients: each line may hold match (text in
    /// the last user message), reply (the model's raw output), delay_ms, token_delay_ms, finish, error.
    #[arg(long, value_name = "FILE")]
    script: Option<PathBuf>,
    #[command(flatten)]
    vllm: VllmFlags,
    #[command(flatten)]
    security: security::SecurityArgs,
    #[command(flatten)]
    observing: observing::ObservingArgs,
    #[command(flatten)]
    batching: batching::BatchingArgs,
}

/// Flags of `vllm serve` that have one meaning here.
#[derive(clap::Args)]
struct VllmFlags {
    /// Positions of a logical block; V4's is 256.
    #[arg(long, hide_short_help = true)]
    block_size: Option<u32>,
    /// deepseek_v4 or auto: the prompt format is the model's own.
    #[arg(long, hide_short_help = true)]
    tokenizer_mode: Option<String>,
    /// deepseek_v4: reasoning is always split off.
    #[arg(long, hide_short_help = true)]
    reasoning_parser: Option<String>,
    /// deepseek_v4: tool calls are always parsed.
    #[arg(long, hide_short_help = true)]
    tool_call_parser: Option<String>,
    /// Always on.
    #[arg(long, hide_short_help = true)]
    enable_auto_tool_choice: bool,
    /// Not needed: no code of a checkpoint is ever run.
    #[arg(long, hide_short_help = true)]
    trust_remote_code: bool,
    /// 1: requests are not spread over engines.
    #[arg(long, hide_short_help = true)]
    data_parallel_size: Option<u32>,
    /// Without effect on a CPU.
    #[arg(long, hide_short_help = true)]
    enable_expert_parallel: bool,
    /// Without effect on a CPU.
    #[arg(long, hide_short_help = true)]
    gpu_memory_utilization: Option<f32>,
    /// On unless --no-enable-prefix-caching is given.
    #[arg(long, hide_short_help = true, conflicts_with = "no_enable_prefix_caching")]
    enable_prefix_caching: bool,
    /// Always on.
    #[arg(long, hide_short_help = true)]
    enable_chunked_prefill: bool,
    /// Always on.
    #[arg(long, hide_short_help = true)]
    async_scheduling: bool,
    /// Not needed: nothing is compiled at start.
    #[arg(long, hide_short_help = true)]
    compilation_config: Option<String>,
    /// Not needed: nothing is compiled at start.
    #[arg(short = 'O', long, hide_short_help = true)]
    optimization_level: Option<String>,
}

impl VllmFlags {
    /// Refuses values that mean nothing here; returns the notes to print.
    fn check(&self) -> Result<Vec<&'static str>> {
        if let Some(n) = self.block_size.filter(|n| *n != 256) {
            bail!("--block-size {n}: V4's logical block is 256 positions; use 256 or leave the flag out");
        }
        let named = [
            ("--tokenizer-mode", &self.tokenizer_mode),
            ("--reasoning-parser", &self.reasoning_parser),
            ("--tool-call-parser", &self.tool_call_parser),
        ];
        for (flag, value) in named {
            if let Some(v) = value.as_deref().filter(|v| !["deepseek_v4", "auto"].contains(v)) {
                bail!("{flag} {v}: only V4's own format is spoken; use deepseek_v4 or leave the flag out");
            }
        }
        if let Some(n) = self.data_parallel_size.filter(|n| *n != 1) {
            bail!("--data-parallel-size {n}: there is one engine; use 1, or --tensor-parallel-size for several GPUs");
        }
        let mut notes = Vec::new();
        if self.trust_remote_code {
            notes.push("--trust-remote-code is not needed: Longwave never runs code from a checkpoint");
        }
        if self.enable_expert_parallel || self.gpu_memory_utilization.is_some() {
            notes.push("--enable-expert-parallel and --gpu-memory-utilization have no effect: experts are spread by rank, and --kv-cache-memory-bytes bounds the cache");
        }
        if self.enable_auto_tool_choice {
            notes.push("--enable-auto-tool-choice is always on: tool calls are parsed whenever a request has tools");
        }
        if self.enable_prefix_caching {
            notes.push("--enable-prefix-caching is the default");
        }
        if self.enable_chunked_prefill {
            notes.push("--enable-chunked-prefill is always on; answers do not depend on the chunks");
        }
        if self.async_scheduling {
            notes.push("--async-scheduling is not needed: the engine has a thread of its own");
        }
        if self.compilation_config.is_some() || self.optimization_level.is_some() {
            notes.push("--compilation-config and -O are not needed: nothing is compiled at start");
        }
        Ok(notes)
    }
}

/// Runs until Ctrl-C or SIGTERM.
pub fn run(args: Args) -> Result<()> {
    let started = Instant::now();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // Colours are for a terminal; NO_COLOR turns them off there too.
    log.with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()).init();
    let tiers = args.tiers.check(!args.model.no_enable_prefix_caching)?;
    for note in args.vllm.check()?.into_iter().chain(args.observing.notes()) {
        tracing::info!("{note}");
    }
    let security = args.security.check()?;
    for warning in security::warnings(&args.host, &security) {
        tracing::warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // The port first: a user should not wait for a model to load only to hear that the port is taken.
    let mut options = ServerOptions {
        host: args.host,
        port: args.port,
        max_body_bytes: args.max_body_bytes as usize,
        security,
        log_stats: args.observing.log_stats(),
        log_requests: args.observing.log_requests(),
        ..ServerOptions::default()
    };
    let listener = runtime.block_on(longwave_serve::bind(&options))?;
    let batches = args.batching.open()?;
    if let Some(file) = &args.script {
        if args.observing.operator_times() {
            tracing::info!("--operator-times has no effect with --script: nothing is computed");
        }
        let tokenizer = load::tokenizer(&args.model)?;
        let context = args.model.max_model_len.unwrap_or(longwave_model::presets::flash().max_position_embeddings);
        let engine = script::engine(file, tokenizer.clone(), context)?;
        options.served_model_names =
            if args.served_model_name.is_empty() { vec![load::name(&args.model)] } else { args.served_model_name };
        let explorer = explore::explorer(None);
        let app = App::new(options, engine, tokenizer).with_explorer(explorer);
        return serve(&runtime, listener, app, batches, started);
    }
    let operator_times = args.observing.operator_times();
    let engine_options = EngineOptions { tiers: tiers.clone(), operator_times, ..EngineOptions::default() };
    let model = load::open_with(&args.model, engine_options)?;
    tracing::info!("{}", model.summary);

    options.served_model_names =
        if args.served_model_name.is_empty() { vec![model.name.clone()] } else { args.served_model_name };
    options.sampling = model.sampling;
    options.chat.table = model.efforts;
    let api = EngineApi::of(&model.engine);
    let status = model.engine.status();
    let [large, middle, small] = status.units_total;
    tracing::info!(
        "cache pools: {large} large, {middle} middle, {small} small units; context {}",
        status.limits.context
    );
    if let Some(line) = tiers::describe(&tiers, &status.tiers) {
        tracing::info!("{line}");
    }
    let explorer = explore::explorer(Some((model.name.clone(), args.model.model.clone())));
    let app = App::new(options, api, model.tokenizer).with_explorer(explorer);
    serve(&runtime, listener, app, batches, started)?;
    model.engine.shutdown();
    if let Some(fault) = model.engine.status().tiers.disk_fault {
        tracing::warn!("the cache directory failed at least once: {fault}");
    }
    Ok(())
}

/// Serves until a signal comes and the running requests have ended.
fn serve(runtime: &Runtime, listener: TcpListener, app: App, batches: Option<Batches>, started: Instant) -> Result<()> {
    let app = Arc::new(match batches {
        Some(batches) => app.with_batches(batches),
        None => app,
    });
    let address = listener.local_addr()?;
    // Before anybody is told that the server is ready and may stop it.
    let signals = {
        let _inside = runtime.enter();
        Signals::listen()
    };
    tracing::info!(
        "ready on {scheme}://{address} after {:.2} s (try: curl {scheme}://{address}/v1/models)",
        started.elapsed().as_secs_f64(),
        scheme = app.scheme(),
    );
    runtime.block_on(longwave_serve::run(listener, app, shutdown_signal(signals)))?;
    Ok(())
}

/// How long running requests may take after the first signal, seconds.
const GRACE_S: u64 = 30;

/// Resolves at Ctrl-C or SIGTERM. A second signal, or [`GRACE_S`] later, ends the process whatever still runs: a client
/// that reads nothing must not keep a server alive.
async fn shutdown_signal(mut signals: Signals) {
    signals.next().await;
    tracing::info!("finishing the running requests, {GRACE_S} s at most; another signal ends at once");
    tokio::spawn(async move {
        tokio::select! {
            () = signals.next() => {}
            () = tokio::time::sleep(std::time::Duration::from_secs(GRACE_S)) => {}
        }
        tracing::warn!("leaving with requests still running");
        std::process::exit(0);
    });
}

/// Ctrl-C and SIGTERM from the moment of listening on, so that none is lost between two waits.
struct Signals {
    #[cfg(unix)]
    streams: [Option<tokio::signal::unix::Signal>; 2],
}

impl Signals {
    #[cfg(unix)]
    fn listen() -> Signals {
        use tokio::signal::unix::{SignalKind, signal};
        Signals { streams: [SignalKind::interrupt(), SignalKind::terminate()].map(|kind| signal(kind).ok()) }
    }

    #[cfg(unix)]
    async fn next(&mut self) {
        async fn one(stream: &mut Option<tokio::signal::unix::Signal>) {
            match stream {
                Some(stream) => drop(stream.recv().await),
                // The system refused this signal: wait for the other one.
                None => std::future::pending().await,
            }
        }
        let [interrupt, terminate] = &mut self.streams;
        tokio::select! {
            () = one(interrupt) => {}
            () = one(terminate) => {}
        }
    }

    #[cfg(not(unix))]
    fn listen() -> Signals {
        Signals {}
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        drop(tokio::signal::ctrl_c().await);
    }
}
