//! A place to run blocks of commands in: a temporary folder, a free port, `longwave` and `cargo` on the path.
//!
//! The folder looks like the root of the repository to a block. `longwave` is this build, told the port. `cargo` is a
//! stand-in: `cargo run -- ARGS` runs this build, so that `tools/run.sh` can be tried without a second build. Everything
//! that was started ends when the place is dropped.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::root;

/// Longest run of a block, and longest start of a server, seconds.
const LIMIT_S: u64 = 300;

const LONGWAVE: &str = r#"#!/bin/sh
# A server on the port of this test, unless the command names one.
case "$1 $*" in
    *" --port "* | "explore "*--export*) exec "$PROGRAM" "$@" ;;
    "serve "* | "explore "*) exec "$PROGRAM" "$@" --port "$PORT" ;;
    *) exec "$PROGRAM" "$@" ;;
esac
"#;

const CARGO: &str = r#"#!/bin/sh
[ "$1" = run ] || { echo "the stand-in for cargo does not know: cargo $*" >&2; exit 1; }
while [ "$1" != -- ]; do shift; done
shift
exec longwave "$@"
"#;

/// Requests that are refused are failures.
const CURLRC: &str = "fail-with-body\nno-progress-meter\nmax-time = 120\n";

/// The place.
pub struct Place {
    // Ended before its folder goes.
    server: Option<Server>,
    folder: tempfile::TempDir,
    port: u16,
    blocks: usize,
}

/// A group of processes that go on running.
struct Server {
    child: Child,
    log: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        // All of its group, whatever it has started; a group that has ended is none any more.
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        let _ = self.child.wait();
    }
}

/// A port that nobody listens on now.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Place {
    /// Makes a place.
    pub fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        for name in ["home", "bin", "repository"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        std::fs::write(folder.path().join("home/.curlrc"), CURLRC).unwrap();
        for (name, text) in [("longwave", LONGWAVE), ("cargo", CARGO)] {
            let path = folder.path().join("bin").join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        }
        for name in ["tools", "testdata", "deploy"] {
            symlink(root().join(name), folder.path().join("repository").join(name)).unwrap();
        }
        Place { server: None, folder, port: free_port(), blocks: 0 }
    }

    /// A program that runs `text` with this place's port in place of 8000, and the file with what it prints.
    fn prepared(&mut self, program: &[&str], text: &str) -> (Command, PathBuf) {
        self.blocks += 1;
        let file = |end: &str| self.folder.path().join(format!("block{}.{end}", self.blocks));
        let (script, log) = (file("script"), file("log"));
        std::fs::write(&script, text.replace("8000", &self.port.to_string())).unwrap();
        let out = std::fs::File::create(&log).unwrap();
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).arg(script);
        command.current_dir(self.folder.path().join("repository"));
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.folder.path().join("bin").display()));
        command.env("HOME", self.folder.path().join("home")).env("PORT", self.port.to_string());
        command.env("PROGRAM", env!("CARGO_BIN_EXE_longwave")).env("NO_COLOR", "1").env_remove("RUST_LOG");
        command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out);
        (command, log)
    }

    /// Runs commands to their end; what they printed, and whether all went well.
    pub fn run(&mut self, program: &[&str], text: &str) -> Result<String, String> {
        let limit = LIMIT_S.to_string();
        // `timeout` ends all that the block has started.
        let timeout = ["timeout", "--kill-after=5", &limit];
        let (mut command, log) = self.prepared(&[&timeout, program].concat(), text);
        let status = command.status().map_err(|error| error.to_string())?;
        let printed = String::from_utf8_lossy(&std::fs::read(log).unwrap()).into_owned();
        if status.success() { Ok(printed) } else { Err(format!("{status}; it printed:\n{printed}")) }
    }

    /// Runs the commands of a shell block.
    pub fn shell(&mut self, text: &str) -> Result<String, String> {
        self.run(&["bash", "-euo", "pipefail"], text)
    }

    /// Starts commands that do not end, in place of those before, and waits until they listen.
    pub fn serve(&mut self, text: &str) -> Result<(), String> {
        let mut result = self.try_serve(text);
        // A port that was free may be taken by the time the server asks for it.
        while result.as_ref().is_err_and(|printed| printed.contains("in use")) {
            self.port = free_port();
            result = self.try_serve(text);
        }
        result
    }

    fn try_serve(&mut self, text: &str) -> Result<(), String> {
        self.server = None;
        let (mut command, log) = self.prepared(&["bash", "-euo", "pipefail"], text);
        let child = command.process_group(0).spawn().map_err(|error| error.to_string())?;
        let mut server = Server { child, log };
        let deadline = Instant::now() + Duration::from_secs(LIMIT_S);
        loop {
            let said = std::fs::read_to_string(&server.log).unwrap_or_default();
            if said.contains("ready on http") || said.contains("the explorer is on http") {
                self.server = Some(server);
                return Ok(());
            }
            if server.child.try_wait().map_err(|error| error.to_string())?.is_some() || Instant::now() > deadline {
                return Err(format!("it does not listen; it printed:\n{said}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether a server runs here.
    pub fn serves(&self) -> bool {
        self.server.is_some()
    }
}
