//! `cargo xtask NAME`: dispatches to the chores and prints what went wrong once.
//!
//! Exit codes: 0 done, 1 a chore failed, 2 there is no such chore.

use std::process::ExitCode;

const HELP: &str = "\
cargo xtask NAME

  test [--no-client]   everything that must pass before a commit: format, lints, a real client, all tests
  tidy                 the rules of the source tree (also part of the tests)
  cuda-toolkit         nvcc from PyPI into target/cuda; then a build compiles the GPU kernels
  fuzz TARGET [SECONDS]  the stream parser (reply) or request bodies (requests), with coverage feedback
  performance          docs/performance.md from bench/results
  golden [ARGS]        vectors from transformers, compared with testdata/golden (tools/golden/README.md)
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (name, rest) = match args.split_first() {
        Some((name, rest)) => (name.as_str(), rest),
        None => ("help", args.as_slice()),
    };
    let result = match name {
        "test" => xtask::test::run(rest),
        "tidy" => xtask::tidy::run(),
        "cuda-toolkit" => xtask::cuda_toolkit::run(),
        "fuzz" => xtask::fuzz::run(rest),
        "golden" => xtask::golden::run(rest),
        "performance" => xtask::performance::run(),
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        other => {
            eprint!("xtask: there is no chore {other:?}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}
