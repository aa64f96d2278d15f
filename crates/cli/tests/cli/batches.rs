//! `longwave batch`, and batches of a server that is killed: what was answered stays, once, and the rest follows.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::program::{Server, refused, run};

fn requests(count: usize, max_tokens: u32) -> String {
    let one = |i: usize| {
        let messages = json!([{"role": "user", "content": format!("What is {i} and {i}?")}]);
        let body =
            json!({"messages": messages, "max_tokens": max_tokens, "temperature": 0, "thinking": {"type": "disabled"}});
        json!({"custom_id": format!("r{i}"), "method": "POST", "url": "/v1/chat/completions", "body": body}).to_string()
    };
    (0..count).map(|i| one(i) + "\n").collect()
}

/// Contents by id; an id twice is a fault.
fn answers(path: &Path) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'), "a line is not whole");
    let mut ids = BTreeSet::new();
    let mut all: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["response"]["status_code"], 200, "{line}");
        let id = line["custom_id"].as_str().unwrap().to_owned();
        assert!(ids.insert(id.clone()), "{id} twice");
        let content = line["response"]["body"]["choices"][0]["message"]["content"].as_str().unwrap();
        all.push((id, content.to_owned()));
    }
    all.sort();
    all
}

#[test]
fn a_batch_that_is_killed_goes_on_and_ends_with_the_same_answers() {
    let folder = tempfile::tempdir().unwrap();
    let [input, whole, killed] = ["in.jsonl", "whole.jsonl", "killed.jsonl"].map(|name| folder.path().join(name));
    std::fs::write(&input, requests(30, 24)).unwrap();
    let args = |output: &Path| {
        let files = [input.to_str().unwrap(), output.to_str().unwrap()].map(str::to_owned);
        let sizes = ["--kv-cache-memory-bytes", "64M", "--max-num-seqs", "2"].map(str::to_owned);
        ["batch".to_owned()].into_iter().chain(files).chain(sizes).collect::<Vec<String>>()
    };
    let done = run(&args(&whole));
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.err.contains("30 answers") && done.err.contains("0 have an error"), "{}", done.err);

    let mut kills = 0;
    for lines in [3, 11, 20] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_longwave"))
            .args(args(&killed))
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        let enough = || std::fs::read(&killed).is_ok_and(|text| text.iter().filter(|b| **b == b'\n').count() >= lines);
        while !enough() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        kills += u32::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        // As a loss of power would leave it.
        let mut file = std::fs::OpenOptions::new().append(true).open(&killed).unwrap();
        file.write_all(br#"{"id":"batch_req_1","custom_id":"r29","respon"#).unwrap();
    }
    assert!(kills > 0, "all runs had ended before they were killed");
    let resumed = run(&args(&killed));
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
    assert!(resumed.err.contains("of them found there"), "{}", resumed.err);
    assert_eq!(answers(&killed), answers(&whole));
    let again = run(&args(&killed));
    assert!(again.err.contains("30 of them found there"), "{}", again.err);
}

#[test]
fn a_batch_refuses_bad_files_before_a_model_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in.jsonl", "out.jsonl"].map(|name| folder.path().join(name));
    let files = ["batch", input.to_str().unwrap(), output.to_str().unwrap()];
    refused(&files, &["in.jsonl", "No such file"]);
    std::fs::write(&input, requests(1, 1) + "{}\n").unwrap();
    refused(&files, &["in.jsonl", "line 2", "custom_id"]);
    std::fs::write(&input, requests(1, 1)).unwrap();
    std::fs::write(&output, "my notes\n").unwrap();
    refused(&files, &["out.jsonl", "choose another name"]);
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "my notes\n");
}

/// One request to a server; the body of the answer.
fn ask(server: &Server, method: &str, path: &str, kind: &str, body: &str) -> String {
    let mut socket = TcpStream::connect(server.address()).unwrap();
    let length = body.len();
    write!(
        socket,
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    text.split_once("\r\n\r\n").unwrap().1.to_owned()
}

#[test]
fn a_server_that_is_killed_finishes_its_batch_after_the_next_starts() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--batch-dir", folder.path().to_str().unwrap()];
    let mut server = Server::start(&args);
    let form = format!(
        "--edge\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--edge\r\n\
         content-disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n{}\r\n--edge--\r\n",
        requests(40, 24)
    );
    let file: Value =
        serde_json::from_str(&ask(&server, "POST", "/v1/files", "multipart/form-data; boundary=edge", &form)).unwrap();
    let body = json!({"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"});
    let batch: Value =
        serde_json::from_str(&ask(&server, "POST", "/v1/batches", "application/json", &body.to_string())).unwrap();
    let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
    let look = |server: &Server| -> Value {
        serde_json::from_str(&ask(server, "GET", &path, "application/json", "")).unwrap()
    };
    let wait = |server: &Server, wanted: &dyn Fn(&Value) -> bool| {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let batch = look(server);
            if wanted(&batch) {
                return batch;
            }
            assert!(Instant::now() < deadline, "{batch}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    for least in [5, 15, 25] {
        wait(&server, &|batch| batch["request_counts"]["completed"].as_u64().unwrap() >= least);
        server.kill();
        server = Server::start(&args);
    }
    let batch = wait(&server, &|batch| batch["status"] == "completed");
    assert_eq!(batch["request_counts"], json!({"total": 40, "completed": 40, "failed": 0}));
    let output = folder.path().join(format!("files/{}.jsonl", batch["output_file_id"].as_str().unwrap()));
    assert_eq!(answers(&output).len(), 40);
}
