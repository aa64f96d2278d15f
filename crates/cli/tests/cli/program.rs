//! Running the binary: to its end, or until it says that it is ready. A run that hangs is ended and fails the test.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How a run ended.
pub struct Run {
    /// Exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

fn command<S: AsRef<OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longwave"));
    command.args(args).env("NO_COLOR", "1").env_remove("RUST_LOG").env_remove("LONGWAVE_LIB_PATH");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs to the end; three minutes at most.
pub fn run<S: AsRef<OsStr>>(args: &[S]) -> Run {
    typed(args, "")
}

/// Runs to the end with `input` typed at its standard input; three minutes at most.
pub fn typed<S: AsRef<OsStr>>(args: &[S], input: &str) -> Run {
    let mut child = command(args).stdin(Stdio::piped()).spawn().unwrap();
    // A program that does not read its input closes the pipe: no failure here.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let id = child.id();
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || send.send(child.wait_with_output()));
    let output = receive.recv_timeout(Duration::from_secs(180));
    let output = output.unwrap_or_else(|_| {
        // The handle is inside the waiting thread; end the process by its number.
        let _ = Command::new("kill").arg(id.to_string()).status();
        panic!(
            "still running after three minutes: {:?}",
            args.iter().map(|a| a.as_ref().to_owned()).collect::<Vec<_>>()
        )
    });
    let output = output.unwrap();
    let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
    Run { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Runs a command that must succeed; its standard output.
pub fn printed<S: AsRef<OsStr>>(args: &[S]) -> String {
    let run = run(args);
    assert_eq!(run.code, Some(0), "{}", run.err);
    run.out
}

/// The same, as JSON.
pub fn printed_json<S: AsRef<OsStr>>(args: &[S]) -> serde_json::Value {
    serde_json::from_str(&printed(args)).unwrap()
}

/// Runs a command that must be refused with exit code 1 and every one of `parts` in its message.
#[track_caller]
pub fn refused<S: AsRef<OsStr>>(args: &[S], parts: &[&str]) {
    let run = run(args);
    let message = run.err;
    assert_eq!(run.code, Some(1), "{message}");
    assert!(message.contains("longwave: "), "{message}");
    assert!(!message.contains("panicked") && !message.contains("RUST_BACKTRACE"), "{message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// A running `longwave serve`; dropping it ends it.
pub struct Server {
    child: Child,
    /// What it logged until it was ready.
    pub log: String,
    lines: std::sync::mpsc::Receiver<String>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts it on a free port and waits until it is ready.
    #[track_caller]
    pub fn start<S: AsRef<OsStr>>(args: &[S]) -> Server {
        let mut command = command(&["serve", "--port", "0", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "2"]);
        let mut child = command.args(args).spawn().unwrap();
        let (send, lines) = std::sync::mpsc::channel();
        let err = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || err.map_while(Result::ok).try_for_each(|line| send.send(line)));
        let mut server = Server { child, log: String::new(), lines };
        server.log = server.wait_for("ready on http://");
        server
    }

    /// Waits for a log line with `part`; everything logged until then.
    #[track_caller]
    pub fn wait_for(&mut self, part: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut log = String::new();
        while !log.contains(part) {
            let line = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            log += &line.unwrap_or_else(|e| panic!("no {part:?} ({e}): {log}"));
            log.push('\n');
        }
        log
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        self.log.split("ready on http://").nth(1).unwrap().split_whitespace().next().unwrap()
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        assert!(Command::new("kill").arg(self.child.id().to_string()).status().unwrap().success());
    }

    /// Waits for its end, ten seconds at most; its exit code.
    pub fn ended(&mut self) -> Option<i32> {
        for _ in 0..200 {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("still running ten seconds later");
    }
}

/// Starts `longwave serve` on a free port and waits until it is ready; what it logged until then. Ends it.
#[track_caller]
pub fn served<S: AsRef<OsStr>>(args: &[S]) -> String {
    Server::start(args).log.clone()
}
