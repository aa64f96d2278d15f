//! /v1/files and /v1/batches: the whole way, faults, limits, tenants, cancelling, expiry, and going on after a restart.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use longwave_serve::{ApiKeys, BatchError, BatchOptions, Batches};
use serde_json::{Value, json};

use crate::client::{Response, post, send_with};
use crate::scripted::{Script, Server};

const CHAT: &str = "/v1/chat/completions";
const ONE: &str = "x-api-key: sk-one\r\n";
const TWO: &str = "x-api-key: sk-two\r\n";

fn options(folder: &Path) -> BatchOptions {
    BatchOptions { directory: folder.to_owned(), concurrency: 2, max_file_bytes: 20_000, max_bytes: 50_000 }
}

async fn start(folder: &Path, script: Script) -> Server {
    // The server before may still be closing the directory.
    let mut opened = Batches::open(options(folder));
    for _ in 0..100 {
        if !matches!(opened, Err(BatchError::InUse(_))) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        opened = Batches::open(options(folder));
    }
    let batches = opened.unwrap();
    let keys = |options: &mut longwave_serve::ServerOptions| {
        options.security.keys = ApiKeys::new(["sk-one", "sk-two"]).unwrap();
    };
    Server::with_app(script, 4096, keys, |app| app.with_batches(batches)).await
}

async fn call(server: &Server, method: &str, path: &str, key: &str, body: &Value) -> Response {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    send_with(server.port, method, path, key, body.as_bytes()).await
}

async fn upload(server: &Server, key: &str, purpose: &str, content: &str) -> Response {
    let part = |disposition: &str, text: &str| {
        format!("--edge\r\ncontent-disposition: form-data; {disposition}\r\n\r\n{text}\r\n")
    };
    // The SDK sends the file last.
    let form =
        part("name=\"purpose\"", purpose) + &part("name=\"file\"; filename=\"in.jsonl\"", content) + "--edge--\r\n";
    let headers = format!("{key}content-type: multipart/form-data; boundary=edge\r\n");
    crate::client::send_form(server.port, "/v1/files", &headers, form.as_bytes()).await
}

async fn uploaded(server: &Server, content: &str) -> String {
    let response = upload(server, ONE, "batch", content).await;
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()["id"].as_str().unwrap().to_owned()
}

fn request(id: &str, body: Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": CHAT, "body": body}).to_string()
}

fn requests(count: usize) -> String {
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    (0..count).map(|i| request(&format!("r{i}"), body.clone()) + "\n").collect()
}

async fn create(server: &Server, file: &str) -> String {
    let body = json!({"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "b"}});
    let response = call(server, "POST", "/v1/batches", ONE, &body).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let batch = response.json();
    assert_eq!((batch["object"].as_str(), batch["status"].as_str()), (Some("batch"), Some("validating")));
    batch["id"].as_str().unwrap().to_owned()
}

/// Waits until a batch is as wanted.
async fn until(server: &Server, id: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..1000 {
        let batch = call(server, "GET", &format!("/v1/batches/{id}"), ONE, &Value::Null).await.json();
        if wanted(&batch) {
            return batch;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{id} did not get there");
}

async fn ended(server: &Server, id: &str) -> Value {
    let over = ["completed", "failed", "expired", "cancelled"];
    until(server, id, |batch| over.contains(&batch["status"].as_str().unwrap())).await
}

async fn lines(server: &Server, file: &Value) -> Vec<Value> {
    let Some(file) = file.as_str() else { return Vec::new() };
    let content = call(server, "GET", &format!("/v1/files/{file}/content"), ONE, &Value::Null).await;
    assert_eq!(content.status, 200, "{}", content.body);
    content.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ids(lines: &[Value]) -> BTreeSet<&str> {
    let ids: BTreeSet<&str> = lines.iter().map(|line| line["custom_id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), lines.len(), "an id twice");
    ids
}

#[tokio::test]
async fn a_batch_runs_from_upload_to_output() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(folder.path(), Script::text("a</think>b")).await;
    let input = requests(5) + &request("bad", json!({"messages": [], "temperature": "hot"})) + "\n";
    let file = uploaded(&server, &input).await;
    let about = call(&server, "GET", &format!("/v1/files/{file}"), ONE, &Value::Null).await.json();
    assert_eq!((about["bytes"].as_u64(), about["filename"].as_str()), (Some(input.len() as u64), Some("in.jsonl")));
    let content = call(&server, "GET", &format!("/v1/files/{file}/content"), ONE, &Value::Null).await;
    assert_eq!(content.body, input);

    let id = create(&server, &file).await;
    let batch = ended(&server, &id).await;
    assert_eq!(batch["status"], "completed");
    assert_eq!(batch["request_counts"], json!({"total": 6, "completed": 5, "failed": 1}));
    assert_eq!(batch["metadata"], json!({"a": "b"}));
    for at in ["created_at", "in_progress_at", "finalizing_at", "completed_at", "expires_at"] {
        assert!(batch[at].as_u64().is_some_and(|at| at > 1_600_000_000), "{at}: {batch}");
    }
    assert!(batch["failed_at"].is_null() && batch["errors"].is_null());
    let (good, bad) = (lines(&server, &batch["output_file_id"]).await, lines(&server, &batch["error_file_id"]).await);
    assert_eq!(ids(&good), ["r0", "r1", "r2", "r3", "r4"].into());
    assert_eq!(ids(&bad), ["bad"].into());
    assert_eq!(good[0]["response"]["status_code"], 200);
    assert_eq!(good[0]["response"]["body"]["choices"][0]["message"]["content"], "b");
    assert!(good[0]["error"].is_null());
    assert_eq!(bad[0]["response"]["status_code"], 400);
    assert!(bad[0]["response"]["body"]["error"]["message"].is_string());

    assert!(server.seen.requests.lock().unwrap().iter().all(|request| request.priority == 8), "behind all others");
    let list = call(&server, "GET", "/v1/batches?limit=1", ONE, &Value::Null).await.json();
    assert_eq!((list["data"][0]["id"].as_str(), list["has_more"].as_bool()), (Some(id.as_str()), Some(false)));
    let files = call(&server, "GET", "/v1/files?purpose=batch_output", ONE, &Value::Null).await.json();
    assert_eq!(files["data"].as_array().unwrap().len(), 2);
    let gone = call(&server, "DELETE", &format!("/v1/files/{file}"), ONE, &Value::Null).await.json();
    assert_eq!(gone["deleted"], true);
    assert_eq!(call(&server, "GET", &format!("/v1/files/{file}"), ONE, &Value::Null).await.status, 404);
}

#[tokio::test]
async fn a_file_with_faults_fails_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(folder.path(), Script::text("x")).await;
    let file = uploaded(&server, &(requests(1) + &requests(1) + "{\n")).await;
    let batch = ended(&server, &create(&server, &file).await).await;
    assert_eq!(batch["status"], "failed");
    let errors = batch["errors"]["data"].as_array().unwrap();
    assert_eq!((errors[0]["code"].as_str(), errors[0]["line"].as_u64()), (Some("duplicate_custom_id"), Some(2)));
    assert_eq!((errors[1]["code"].as_str(), errors[1]["line"].as_u64()), (Some("invalid_line"), Some(3)));
    assert!(batch["output_file_id"].is_null() && batch["failed_at"].is_u64());
    assert!(server.seen.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn bad_calls_name_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(folder.path(), Script::text("x")).await;
    let file = uploaded(&server, &requests(1)).await;
    let good = json!({"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"});
    for (field, value, status) in [
        ("input_file_id", json!("file-none"), 404),
        ("input_file_id", json!("../../etc/passwd"), 404),
        ("input_file_id", json!(5), 400),
        ("endpoint", json!("/v1/embeddings"), 400),
        ("completion_window", json!("1d"), 400),
        ("completion_window", json!("9999h"), 400),
        ("metadata", json!({"a": 1}), 400),
    ] {
        let mut body = good.clone();
        body[field] = value.clone();
        let response = call(&server, "POST", "/v1/batches", ONE, &body).await;
        assert_eq!(response.status, status, "{field} {value}: {}", response.body);
        assert_eq!(response.json()["error"]["param"], field);
    }
    for (purpose, content, status, words) in [
        ("fine-tune", "{}", 400, "batch"),
        ("batch", &"x".repeat(30_000), 413, "20000"),
        ("batch", &"x".repeat(200_000), 413, "20000"),
    ] {
        let response = upload(&server, ONE, purpose, content).await;
        assert_eq!(response.status, status, "{}", response.body);
        assert!(response.json()["error"]["message"].as_str().unwrap().contains(words), "{}", response.body);
    }
    for _ in 0..2 {
        assert_eq!(upload(&server, ONE, "batch", &"x".repeat(19_000)).await.status, 200);
    }
    let full = upload(&server, ONE, "batch", &"x".repeat(19_000)).await;
    assert_eq!(full.json()["error"]["code"], "storage_full");
    let none = call(&server, "POST", "/v1/files", ONE, &json!({})).await;
    assert_eq!(none.status, 400, "{}", none.body);
    for path in ["/v1/batches/batch_none", "/v1/files/file-none", "/v1/files/..%2Flock/content"] {
        assert_eq!(call(&server, "GET", path, ONE, &Value::Null).await.status, 404, "{path}");
    }
    assert_eq!(call(&server, "GET", "/v1/batches?limit=0", ONE, &Value::Null).await.status, 400);
    let left = std::fs::read_dir(folder.path().join("files")).unwrap().count();
    assert_eq!(left, 6, "three files with a record each; nothing of refused uploads");
}

#[tokio::test]
async fn without_a_directory_the_flag_is_named() {
    let server = Server::start(Script::text("x")).await;
    for (method, path) in [("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches")]
    {
        let response = call(&server, method, path, "", &json!({})).await;
        assert_eq!(response.status, 404, "{method} {path}");
        assert!(response.body.contains("--batch-dir"), "{}", response.body);
    }
}

#[tokio::test]
async fn tenants_see_their_own_only() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(folder.path(), Script::text("x")).await;
    let file = uploaded(&server, &requests(1)).await;
    let id = create(&server, &file).await;
    let body = json!({"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"});
    assert_eq!(call(&server, "POST", "/v1/batches", TWO, &body).await.status, 404);
    for (method, path) in [
        ("GET", format!("/v1/files/{file}")),
        ("GET", format!("/v1/files/{file}/content")),
        ("DELETE", format!("/v1/files/{file}")),
        ("GET", format!("/v1/batches/{id}")),
        ("POST", format!("/v1/batches/{id}/cancel")),
    ] {
        assert_eq!(call(&server, method, &path, TWO, &Value::Null).await.status, 404, "{method} {path}");
    }
    for path in ["/v1/files", "/v1/batches"] {
        assert_eq!(call(&server, "GET", path, TWO, &Value::Null).await.json()["data"], json!([]));
    }
}

#[tokio::test]
async fn a_cancelled_batch_keeps_what_was_answered() {
    let folder = tempfile::tempdir().unwrap();
    let mut script = Script::text("a</think>b");
    script.pause = Duration::from_millis(15);
    let server = start(folder.path(), script).await;
    let file = uploaded(&server, &requests(60)).await;
    let id = create(&server, &file).await;
    until(&server, &id, |batch| batch["request_counts"]["completed"].as_u64() > Some(2)).await;
    let busy = call(&server, "DELETE", &format!("/v1/files/{file}"), ONE, &Value::Null).await;
    assert_eq!((busy.status, busy.json()["error"]["code"].as_str()), (409, Some("file_in_use")));
    let path = format!("/v1/batches/{id}/cancel");
    assert_eq!(call(&server, "POST", &path, ONE, &Value::Null).await.json()["status"], "cancelling");
    let batch = ended(&server, &id).await;
    assert_eq!(batch["status"], "cancelled");
    let done = batch["request_counts"]["completed"].as_u64().unwrap();
    assert!(done > 2 && done < 60, "{batch}");
    assert_eq!(ids(&lines(&server, &batch["output_file_id"]).await).len() as u64, done);
    assert_eq!(call(&server, "POST", &path, ONE, &Value::Null).await.status, 200, "cancelling twice changes nothing");
    let other = create(&server, &uploaded(&server, &requests(1)).await).await;
    ended(&server, &other).await;
    assert_eq!(call(&server, "POST", &format!("/v1/batches/{other}/cancel"), ONE, &Value::Null).await.status, 409);
}

#[tokio::test]
async fn a_batch_goes_on_after_a_restart_and_answers_nothing_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut script = Script::text("a</think>b");
    script.pause = Duration::from_millis(5);
    let mut server = start(folder.path(), script.clone()).await;
    let file = uploaded(&server, &requests(40)).await;
    let id = create(&server, &file).await;
    for round in 1..=3 {
        let before = round * 8;
        until(&server, &id, |batch| batch["request_counts"]["completed"].as_u64() >= Some(before)).await;
        server.shut_down();
        server.task.await.unwrap();
        // A crash may leave the beginning of a line.
        let record: Value =
            serde_json::from_slice(&std::fs::read(folder.path().join(format!("batches/{id}.json"))).unwrap()).unwrap();
        assert_eq!(record["state"], "in_progress");
        let output = folder.path().join(format!("files/{}.jsonl", record["output"].as_str().unwrap()));
        let mut text = std::fs::read(&output).unwrap();
        text.extend(br#"{"id":"batch_req_0","custom_id":"r39","resp"#);
        std::fs::write(&output, text).unwrap();
        server = start(folder.path(), script.clone()).await;
    }
    let batch = ended(&server, &id).await;
    assert_eq!(batch["request_counts"], json!({"total": 40, "completed": 40, "failed": 0}));
    assert_eq!(ids(&lines(&server, &batch["output_file_id"]).await).len(), 40);
}

#[tokio::test]
async fn a_batch_that_is_late_says_so_for_each_line() {
    let folder = tempfile::tempdir().unwrap();
    let mut script = Script::text("a</think>b");
    script.pause = Duration::from_millis(15);
    let mut server = start(folder.path(), script.clone()).await;
    let file = uploaded(&server, &requests(30)).await;
    let id = create(&server, &file).await;
    until(&server, &id, |batch| batch["request_counts"]["completed"].as_u64() > Some(2)).await;
    server.shut_down();
    server.task.await.unwrap();
    let path = folder.path().join(format!("batches/{id}.json"));
    let mut record: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    record["expires_at"] = json!(1);
    std::fs::write(&path, record.to_string()).unwrap();

    let server = start(folder.path(), script).await;
    let batch = ended(&server, &id).await;
    assert_eq!(batch["status"], "expired");
    let (good, late) = (lines(&server, &batch["output_file_id"]).await, lines(&server, &batch["error_file_id"]).await);
    assert!(good.len() > 2 && late.len() > 2 && good.len() + late.len() == 30);
    assert!(ids(&good).is_disjoint(&ids(&late)));
    assert!(late.iter().all(|line| line["error"]["code"] == "batch_expired" && line["response"].is_null()));
}

#[tokio::test]
async fn a_line_without_room_is_asked_again() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(folder.path(), Script::text("a</think>b")).await;
    server.seen.full.store(true, Ordering::Relaxed);
    let file = uploaded(&server, &requests(2)).await;
    let id = create(&server, &file).await;
    until(&server, &id, |batch| batch["status"] == "in_progress").await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.seen.full.store(false, Ordering::Relaxed);
    assert_eq!(ended(&server, &id).await["request_counts"], json!({"total": 2, "completed": 2, "failed": 0}));
}

#[tokio::test]
async fn one_directory_is_of_one_server() {
    let folder = tempfile::tempdir().unwrap();
    let _first = Batches::open(options(folder.path())).unwrap();
    let second = Batches::open(options(folder.path())).err().unwrap().to_string();
    assert!(second.contains("--batch-dir") && second.contains("another server"), "{second}");
    // A server without batches is not disturbed.
    let server = Server::start(Script::text("x")).await;
    assert_eq!(post(server.port, json!({"messages": [{"role": "user", "content": "hi"}]})).await.status, 200);
}
