//! Clients that leave at any moment of a request: the server goes on and every block comes home (M19).

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::program::Server;

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
        "stream": true, "max_tokens": 400, "min_tokens": 300, "temperature": 0, "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": filler.join(" ")}],
    });
    if tools {
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

fn debug(server: &Server) -> serde_json::Value {
    let mut text = String::new();
    connect(server, "GET", "/debug/prefix", "").read_to_string(&mut text).unwrap();
    serde_json::from_str(text[text.find('{').unwrap()..=text.rfind('}').unwrap()].trim()).unwrap()
}

#[test]
fn m19_clients_that_leave_take_nothing_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let server = Server::start(&["--cache-dir", path, "--max-num-batched-tokens", "64"]);
    let mut started = 0;
    for round in 0..6u64 {
        // In prefill, while records are written, at once, at the first token, in the middle of a call.
        let mut long = ask(&server, 31 * round, 900, false);
        let short = ask(&server, round, 30, false);
        drop(ask(&server, 7 * round, 300, false));
        let mut first = ask(&server, 0, 40, false);
        let mut call = ask(&server, round, 0, true);
        started += usize::from(read_to(&mut first, "\"content\":\"")) + usize::from(read_to(&mut call, "arguments"));
        std::thread::sleep(Duration::from_millis(40 * round));
        if round % 2 == 0 {
            drop(long);
        } else {
            started += usize::from(read_to(&mut long, "data: "));
        }
        drop((short, first, call));
    }
    assert!(started > 6, "hardly anything was under way: {started}");
    let home = (0..600).any(|_| {
        let status = debug(&server);
        std::thread::sleep(Duration::from_millis(50));
        status["units_used"] == status["units_cached"]
    });
    assert!(home, "blocks did not come home: {}", debug(&server));
    assert!(read_to(&mut ask(&server, 1, 20, false), "[DONE]"), "the server does not answer any more");
}
