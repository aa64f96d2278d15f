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

/// Runs to the end; one minute at most.
pub fn run<S: AsRef<OsStr>>(args: &[S]) -> Run {
    typed(args, "")
}

/// Runs to the end with `input` typed at its standard input; one minute at most.
pub fn typed<S: AsRef<OsStr>>(args: &[S], input: &str) -> Run {
    let mut child = command(args).stdin(Stdio::piped()).spawn().unwrap();
    // A program that does not read its input closes the pipe: no failure here.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let id = child.id();
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || send.send(child.wait_with_output()));
    let output = receive.recv_timeout(Duration::from_secs(60));
    let output = output.unwrap_or_else(|_| {
        // The handle is inside the waiting thread; end the process by its number.
        let _ = Command::new("kill").arg(id.to_string()).status();
        panic!("still running after a minute: {:?}", args.iter().map(|a| a.as_ref().to_owned()).collect::<Vec<_>>())
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

/// Starts `longwave serve` on a free port and waits until it is ready; what it logged until then. Ends it.
#[track_caller]
pub fn served<S: AsRef<OsStr>>(args: &[S]) -> String {
    struct End(Child);
    impl Drop for End {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let mut command = command(&["serve", "--port", "0", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "2"]);
    let mut server = End(command.args(args).spawn().unwrap());
    let (send, receive) = std::sync::mpsc::channel();
    let lines = BufReader::new(server.0.stderr.take().unwrap()).lines();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut log = String::new();
    while !log.contains("ready on http://") {
        let line = receive.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        log += &line.unwrap_or_else(|e| panic!("not ready ({e}): {log}"));
        log.push('\n');
    }
    log
}
