//! Health, disconnects, binding and shutdown.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use longwave_serve::ServerOptions;
use serde_json::json;
use tokio::io::AsyncReadExt;

use crate::client::{get, open, post};
use crate::scripted::{Script, Server};

fn slow() -> Script {
    let mut script = Script::text(&"word ".repeat(400));
    script.pause = Duration::from_millis(10);
    script
}

#[tokio::test]
async fn health_follows_the_engine() {
    let server = Server::start(Script::text("x")).await;
    assert_eq!(get(server.port, "/health").await.status, 200);
    assert_eq!(get(server.port, "/ready").await.status, 200);
    assert_eq!(get(server.port, "/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    server.seen.dead.store(true, Ordering::Relaxed);
    assert_eq!(get(server.port, "/health").await.status, 503);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    for stream in [true, false] {
        let server = Server::start(slow()).await;
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream}).to_string();
        let mut socket = open(server.port, "POST", "/v1/chat/completions", body.as_bytes()).await;
        if stream {
            let mut some = [0; 64];
            socket.read_exact(&mut some).await.unwrap();
        } else {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        assert!(server.seen.cancelled.lock().unwrap().is_empty());
        drop(socket);
        assert!(server.cancelled().await, "stream: {stream}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_the_first_token_cancels_too() {
    let mut script = slow();
    script.pause = Duration::from_secs(1);
    let server = Server::start(script).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true}).to_string();
    let socket = open(server.port, "POST", "/v1/chat/completions", body.as_bytes()).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(socket);
    assert!(server.cancelled().await);
}

#[tokio::test]
async fn a_finished_request_is_not_cancelled() {
    let server = Server::start(Script::text("a</think>b")).await;
    for stream in [true, false] {
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream});
        assert_eq!(post(server.port, body).await.status, 200);
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(server.seen.cancelled.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_port_in_use_names_the_flag() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = longwave_serve::bind(&ServerOptions { port, ..ServerOptions::default() }).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("--port") && text.contains(&port.to_string()), "{text}");
    let nowhere = ServerOptions { host: "no.such.host.invalid".into(), ..ServerOptions::default() };
    assert!(longwave_serve::bind(&nowhere).await.unwrap_err().to_string().contains("--host"));
}

#[tokio::test]
async fn shutdown_finishes_what_runs() {
    let mut script = Script::text("a</think>the whole answer");
    script.pause = Duration::from_millis(20);
    let mut server = Server::start(script).await;
    let port = server.port;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    let running = tokio::spawn(async move { post(port, body).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.shut_down();
    let events = running.await.unwrap().events();
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    tokio::time::timeout(Duration::from_secs(5), server.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_megabyte_prompt_is_encoded_off_the_event_loop() {
    let server = Server::with(Script::text("x"), 1 << 20, |_| {}).await;
    let port = server.port;
    let long = json!({"messages": [{"role": "user", "content": "some words of text, ".repeat(50_000)}]});
    let started = Instant::now();
    let big = tokio::spawn(async move { (post(port, long).await, started.elapsed()) });
    tokio::time::sleep(Duration::from_millis(20)).await;
    // The test runtime has one thread: a blocked loop could not answer meanwhile.
    let asked = Instant::now();
    assert_eq!(get(port, "/health").await.status, 200);
    let health = asked.elapsed();
    let (response, whole) = big.await.unwrap();
    assert_eq!(response.status, 200, "{}", response.body);
    assert!(health * 2 < whole, "health took {health:?}, the long request {whole:?}");
}
