//! Clients that leave at any moment of a request: the server goes on and every block comes home (M19).

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::program::Server;

/// Tokens of an answer that nobody cuts off: far more than the test has time for.
const ANSWER: u64 = 20_000;

fn connect(server: &Server, method: &str, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes()).unwrap();
    stream
}

/// A streamed request of about `words` tokens; with tools, the answer is a call.
fn ask(server: &Server, text: u64, words: usize, tools: bool) -> TcpStream {
    let filler: Vec<String> = (0..words).map(|i| format!("{}", (text + i as u64) % 97)).collect();
    let mut body = serde_json::json!({
        "stream": true, "max_tokens": ANSWER, "ignore_eos": true, "temperature": 0, "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": filler.join(" ")}],
    });
    if tools {
        body["ignore_eos"] = false.into();
        body["messages"][0]["content"] = "What is the weather in Lisbon?".into();
        body["tools"] = serde_json::json!([{"type": "function", "function": {"name": "get_weather",
            "description": "Get the current weather in a city.", "parameters": {"type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}}, "required": ["city"]}}}]);
    }
    connect(server, "POST", "/v1/chat/completions", &body.to_string())
}

/// Reads until `part` was seen or the answer has ended.
fn read_to(stream: &mut TcpStream, part: &str) -> bool {
    let (mut seen, mut piece) = (String::new(), [0; 256]);
    while !seen.contains(part) {
        match stream.read(&mut piece) {
            Ok(n) if n > 0 => seen += &String::from_utf8_lossy(&piece[..n]),
            _ => return false,
        }
    }
    true
}

fn debug(server: &Server, route: &str) -> serde_json::Value {
    let mut text = String::new();
    connect(server, "GET", route, "").read_to_string(&mut text).unwrap();
    serde_json::from_str(text[text.find('{').unwrap()..=text.rfind('}').unwrap()].trim()).unwrap()
}

#[test]
fn m19_clients_that_leave_take_nothing_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let server = Server::start(&["--cache-dir", path, "--max-num-batched-tokens", "64"]);
    let mut started = 0;
    for round in 0..6u64 {
        // In the middle of a call, at the first token, in prefill and while records are written, in the queue, at once.
        // There are two seats, so nobody may wait for an answer that has none.
        let mut call = ask(&server, round, 0, true);
        started += usize::from(read_to(&mut call, "arguments"));
        drop(call);
        let mut first = ask(&server, 0, 40, false);
        started += usize::from(read_to(&mut first, "\"content\":\""));
        let long = ask(&server, 31 * round, 900, false);
        let short = ask(&server, round, 30, false);
        drop(ask(&server, 7 * round, 300, false));
        std::thread::sleep(Duration::from_millis(40 * round));
        if round % 2 == 0 { drop((long, short, first)) } else { drop((first, short, long)) }
    }
    assert!(started > 6, "hardly anything was under way: {started}");
    let home = (0..200).any(|_| {
        let (engine, prefix) = (debug(&server, "/debug/engine"), debug(&server, "/debug/prefix"));
        std::thread::sleep(Duration::from_millis(50));
        (&engine["running"], &engine["waiting"]) == (&0.into(), &0.into())
            && prefix["units_used"] == prefix["units_cached"]
    });
    assert!(home, "blocks did not come home: {} {}", debug(&server, "/debug/engine"), debug(&server, "/debug/prefix"));
    // Eighteen answers of that length were begun.
    let outputs = debug(&server, "/debug/engine")["output_tokens"].as_u64().unwrap();
    assert!(outputs < ANSWER, "{outputs} tokens: requests of clients that had left went on");
    assert!(read_to(&mut ask(&server, 1, 0, true), "[DONE]"), "the server does not answer any more");
}
