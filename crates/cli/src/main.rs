//! `longwave`: one binary, one file per subcommand. This file only dispatches and prints the error chain once.
//!
//! Exit codes: 0 done, 1 the user can mend it (wrong model, port, flag), 2 wrong command line (clap's own).

mod argv;
mod backend;
mod batch;
mod bench;
mod chat;
mod doctor;
mod explore;
mod inspect;
mod kv;
mod libraries;
mod load;
mod model_args;
mod output;
mod parse;
mod prove;
mod render;
mod script;
mod serve;
mod source;
mod tiers;
mod top;
mod units;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Serve DeepSeek-V4 at contexts up to one million tokens.
#[derive(Parser)]
#[command(name = "longwave", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a model over HTTP: the APIs of OpenAI (chat, completions, responses) and Anthropic (messages).
    Serve(Box<serve::Args>),
    /// Answer a file of requests into another file, without a server.
    Batch(Box<batch::Args>),
    /// Talk to a model in the terminal.
    Chat(Box<chat::Args>),
    /// Show that requests give the same tokens and logits however they are served.
    Prove(Box<prove::Args>),
    /// Measure a running server, or an engine in this process.
    Bench(bench::Args),
    /// Watch a running server in the terminal.
    Top(top::Args),
    /// Show the prompt of a request: text and token ids.
    Render(render::Args),
    /// Feed a model's output to the stream parser and show the message.
    Parse(parse::Args),
    /// Memory calculator: where the bytes of the cache go.
    Kv(kv::Args),
    /// Show in a browser how V4's attention works and what its cache takes.
    Explore(explore::Args),
    /// Show a checkpoint: configuration, layers, tensors, totals.
    Inspect(inspect::Args),
    /// Show what this machine offers and what is missing.
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    let result = argv::normalise(std::env::args_os()).and_then(|args| match Cli::parse_from(args).command {
        Command::Serve(args) => serve::run(*args),
        Command::Batch(args) => batch::run(*args),
        Command::Chat(args) => chat::run(*args),
        Command::Prove(args) => prove::run(*args),
        Command::Bench(args) => bench::run(args),
        Command::Top(args) => top::run(args),
        Command::Render(args) => render::run(args),
        Command::Parse(args) => parse::run(args),
        Command::Kv(args) => kv::run(args),
        Command::Explore(args) => explore::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Doctor(args) => doctor::run(args),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("longwave: {error:#}");
            ExitCode::from(1)
        }
    }
}
