//! A server with a cache directory that is killed while it writes, fifty times: it always starts again and answers as
//! a server that keeps nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::program::Server;

const KILLS: u64 = 50;
/// Different texts.
const TEXTS: u64 = 6;

/// splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A greedy request of some hundred tokens.
fn body(text: u64) -> String {
    let mut state = text;
    let words = ["day", "night", "Norway", "the", "capital", "model", "of", "opposite"];
    let text: Vec<&str> = (0..420).map(|_| words[random(&mut state) as usize % words.len()]).collect();
    serde_json::json!({
        "model": "longwave-tiny", "temperature": 0, "max_tokens": 6, "logprobs": true, "top_logprobs": 3,
        "messages": [{"role": "user", "content": text.join(" ")}], "thinking": {"type": "disabled"},
    })
    .to_string()
}

/// Sends a request and leaves the answer to be read.
fn send(server: &Server, text: u64) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let body = body(text);
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    stream
}

/// Whether a record is being written, or was when a server died.
fn has_half_a_file(folder: &Path) -> bool {
    let mut names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
    names.any(|name| name.to_string_lossy().ends_with(".tmp"))
}

/// What was chosen and how likely it was, and how many prompt tokens were reused.
fn answer(mut stream: TcpStream) -> (serde_json::Value, u64) {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let at = text.find('{').unwrap_or_else(|| panic!("no answer: {text}"));
    let json: serde_json::Value = serde_json::from_str(text[at..=text.rfind('}').unwrap()].trim()).unwrap();
    let cached = json["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (json["choices"][0].clone(), cached.unwrap_or_else(|| panic!("no usage: {json}")))
}

#[test]
fn fifty_kills_while_records_are_written_never_give_a_wrong_hit() {
    let plain = Server::start(&["--no-enable-prefix-caching"]);
    let right: Vec<serde_json::Value> = (0..TEXTS).map(|text| answer(send(&plain, text)).0).collect();
    assert!(right.iter().all(|r| r["logprobs"]["content"].as_array().is_some_and(|c| !c.is_empty())));
    drop(plain);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let mut state = 7;
    let (mut restored, mut cut_short, mut thrown_away, mut half_written) = (0, 0, 0, 0);
    for kill in 0..KILLS {
        // Sometimes the directory is too small for all texts, so that files are removed as well.
        let size = if kill % 3 == 0 { "3M" } else { "1G" };
        let mut server = Server::start(&["--cache-dir", path, "--disk-cache", size]);
        thrown_away += u64::from(server.log.contains("broken files removed"));
        let checked = random(&mut state) % TEXTS;
        let (got, cached) = answer(send(&server, checked));
        assert_eq!(got, right[checked as usize], "kill {kill}: {cached} tokens were reused");
        restored += u64::from(cached > 0);
        let started = Instant::now();
        // One text that may be there already and one that is new, so that something is written.
        let others = [random(&mut state) % TEXTS, 1000 + kill].map(|text| send(&server, text));
        if kill % 2 == 0 {
            // From before the prompts are computed to after the last file was written.
            let moment = Duration::from_micros(random(&mut state) % 400_000);
            std::thread::sleep(moment.saturating_sub(started.elapsed()));
        } else {
            // In the middle of a file.
            while !has_half_a_file(folder.path()) && started.elapsed() < Duration::from_secs(2) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        let mut early = [0; 1];
        cut_short += others.iter().filter(|o| o.set_nonblocking(true).is_ok() && o.peek(&mut early).is_err()).count();
        server.kill();
        half_written += u64::from(has_half_a_file(folder.path()));
    }
    println!(
        "{restored} of {KILLS} runs reused records, {cut_short} requests were cut short, {half_written} kills left half a \
         file, {thrown_away} starts threw files away"
    );
    assert!(restored >= KILLS / 5, "only {restored} runs reused a record");
    assert!(cut_short > 0, "no request was under way when its server died");
    // The last kill has no start after it.
    assert!(half_written.abs_diff(thrown_away) <= 1, "{half_written} left half a file, {thrown_away} starts found one");
}
