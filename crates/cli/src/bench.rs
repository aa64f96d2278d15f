//! `longwave bench`: how fast a server answers, and how fast an engine computes.
//!
//! `serve` puts load on a running server and looks at it as clients do; it needs no model. `latency` and `throughput` open
//! a model in this process and leave HTTP out; `kernels` leaves the engine out as well and looks into the steps. Numbers
//! have the names of vLLM's bench where it has them. Refuses what it could not measure before anything is sent or loaded.

pub mod connection;
mod depth;
mod engine;
mod kernels;
mod load;
mod operators;
mod percentiles;
mod plot;
mod record;
mod report;
mod serve;
mod stream;
mod summary;
mod sweep;
mod throughput;
mod workload;

use anyhow::Result;
use clap::Subcommand;

/// Arguments of `longwave bench`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Put load on a server that speaks OpenAI's API, and measure what its clients see.
    Serve(Box<serve::Args>),
    /// Time to the first token and per token by batch and depth of context, in this process.
    Latency(Box<sweep::Args>),
    /// Tokens per second of many requests at once, in this process.
    Throughput(Box<throughput::Args>),
    /// What each operator of a step takes beside its floor, in this process.
    Kernels(Box<kernels::Args>),
}

/// Measures and prints.
pub fn run(args: Args) -> Result<()> {
    match args.what {
        What::Serve(args) => serve::run(*args),
        What::Latency(args) => sweep::run(*args),
        What::Throughput(args) => throughput::run(*args),
        What::Kernels(args) => kernels::run(*args),
    }
}
