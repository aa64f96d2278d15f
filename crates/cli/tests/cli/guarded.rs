//! A server with keys: what it says when it starts, what it refuses, and what its log never holds.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::program::{Server, refused};

/// An answer to a chat request, status line and all.
fn chat(server: &Server, key: &str, text: &str) -> String {
    let body = format!(r#"{{"messages": [{{"role": "user", "content": "{text}"}}], "max_tokens": 4}}"#);
    let mut socket = TcpStream::connect(server.address()).unwrap();
    let length = body.len();
    write!(
        socket,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn keys_guard_the_server_and_neither_keys_nor_prompts_are_logged() {
    for logged in [false, true] {
        let mut args = vec!["--api-key", "sk-of-this-test", "--api-key", "sk-second"];
        if logged {
            args.extend(["--enable-log-requests", "--max-log-len", "4000"]);
        }
        let mut server = Server::start(&args);
        assert!(chat(&server, "sk-wrong-one", "a word: zebrafish").starts_with("HTTP/1.1 401"));
        let answer = chat(&server, "sk-of-this-test", "a word: zebrafish");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(chat(&server, "sk-second", "a word: zebrafish").starts_with("HTTP/1.1 200"));
        let start = server.log.clone();
        server.terminate();
        let log = start + &server.wait_for("finishing the running requests");
        assert!(!log.contains("sk-"), "{log}");
        assert_eq!(log.contains("zebrafish"), logged, "{log}");
    }
}

#[test]
fn an_open_address_without_a_key_is_warned_about() {
    let open = Server::start(&["--host", "0.0.0.0"]).log.clone();
    assert!(open.contains("no API key is set"), "{open}");
    let guarded = Server::start(&["--host", "0.0.0.0", "--api-key", "sk-of-this-test"]).log.clone();
    assert!(!guarded.contains("no API key is set") && guarded.contains("unencrypted"), "{guarded}");
    let local = Server::start(&[] as &[&str]).log.clone();
    assert!(!local.contains("WARN"), "{local}");
}

#[test]
fn bad_security_flags_say_what_to_use() {
    for (args, parts) in [
        (&["--api-key", ""][..], &["--api-key", "empty"][..]),
        (&["--api-key-file", "/no/such/keys"], &["--api-key-file", "/no/such/keys"]),
        (&["--ssl-certfile", "/no/cert.pem", "--ssl-keyfile", "/no/key.pem"], &["--ssl-certfile", "/no/cert.pem"]),
        (&["--allowed-origins", "example.org"], &["--allowed-origins", "scheme://host"]),
        (&["--max-header-bytes", "1"], &["--max-header-bytes", "between 4K and 1M"]),
        (&["--batch-dir", "/proc/no/such"], &["--batch-dir", "/proc/no/such"]),
        (&["--batch-dir", "/nowhere", "--batch-max-file-bytes", "30G"], &["--batch-max-bytes"]),
    ] {
        let line: Vec<&str> = ["serve", "--port", "0"].iter().chain(args).copied().collect();
        refused(&line, parts);
    }
}
