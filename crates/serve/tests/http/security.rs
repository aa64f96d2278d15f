//! Keys, limits per key, sizes, slow senders, other origins, tenants, TLS.

use std::sync::Arc;
use std::time::Duration;

use longwave_serve::{ApiKeys, SecurityOptions, ServerOptions, TlsFiles};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

use crate::client::{Response, get, read, send, send_with};
use crate::scripted::{Script, Server};

const CHAT: &str = "/v1/chat/completions";

async fn guarded(script: Script, change: impl FnOnce(&mut SecurityOptions)) -> Server {
    Server::with(script, 4096, |options| {
        options.security.keys = ApiKeys::new(["sk-one", "sk-two"]).unwrap();
        change(&mut options.security);
    })
    .await
}

fn body(stream: bool) -> Vec<u8> {
    json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream}).to_string().into_bytes()
}

async fn ask(server: &Server, headers: &str) -> Response {
    send_with(server.port, "POST", CHAT, headers, &body(false)).await
}

#[tokio::test]
async fn everything_but_probes_needs_a_key() {
    let server = guarded(Script::text("x"), |_| {}).await;
    for path in ["/health", "/ready", "/ping", "/version", "/load", "/metrics"] {
        assert_eq!(get(server.port, path).await.status, 200, "{path}");
    }
    for path in ["/v1/models", "/debug/prefix", "/debug/engine", "/v1/nowhere", "/", "/health/", "//v1/models"] {
        let response = get(server.port, path).await;
        assert_eq!(response.status, 401, "{path}");
        assert!(response.headers.contains("www-authenticate: bearer"), "{}", response.headers);
        assert_eq!(response.json()["error"]["code"], "invalid_api_key");
        assert_eq!(response.json()["error"]["type"], "authentication_error");
    }
    assert_eq!(ask(&server, "").await.status, 401);
    assert_eq!(ask(&server, "authorization: Bearer sk-three\r\n").await.status, 401);
    assert_eq!(ask(&server, "authorization: Bearer sk-two\r\n").await.status, 200);
    assert_eq!(ask(&server, "x-api-key: sk-one\r\n").await.status, 200);
    assert_eq!(server.seen.requests.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn messages_get_the_refusal_in_their_own_form() {
    let server = guarded(Script::text("x"), |_| {}).await;
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let response = send(server.port, "POST", path, b"{}").await;
        assert_eq!(response.status, 401);
        let body = response.json();
        assert_eq!(
            (body["type"].as_str(), body["error"]["type"].as_str()),
            (Some("error"), Some("authentication_error"))
        );
        assert!(body["error"]["message"].as_str().unwrap().contains("x-api-key"));
    }
}

#[tokio::test]
async fn a_key_has_so_many_requests_at_once() {
    let mut script = Script::text(&"word ".repeat(40));
    script.pause = Duration::from_millis(20);
    let server = guarded(script, |security| security.max_concurrent_per_key = Some(1)).await;
    let one = "authorization: Bearer sk-one\r\n";
    let port = server.port;
    let long = tokio::spawn(async move { send_with(port, "POST", CHAT, one, &body(true)).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let refused = ask(&server, one).await;
    assert_eq!(refused.status, 429, "the stream that runs holds its place");
    assert!(refused.headers.contains("retry-after: 1"), "{}", refused.headers);
    assert_eq!(refused.json()["error"]["code"], "concurrency_limit_exceeded");
    let models = send_with(port, "GET", "/v1/models", one, b"").await;
    assert_eq!(models.status, 200, "reading is not limited");
    let other = tokio::spawn(async move { send_with(port, "POST", CHAT, "x-api-key: sk-two\r\n", &body(true)).await });
    assert_eq!(long.await.unwrap().status, 200);
    assert_eq!(ask(&server, one).await.status, 200, "its place is free again");
    assert_eq!(other.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_key_has_so_many_requests_per_minute() {
    let server = guarded(Script::text("x"), |security| security.requests_per_minute_per_key = Some(2)).await;
    let one = "authorization: Bearer sk-one\r\n";
    assert_eq!(ask(&server, one).await.status, 200);
    assert_eq!(ask(&server, one).await.status, 200);
    let refused = ask(&server, one).await;
    assert_eq!(refused.status, 429);
    let seconds = refused.headers.split("retry-after: ").nth(1).unwrap().split('\r').next().unwrap();
    assert!((1..=30).contains(&seconds.parse::<u32>().unwrap()), "{seconds}");
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!(ask(&server, "x-api-key: sk-two\r\n").await.status, 200);
    let messages = send_with(server.port, "POST", "/v1/messages", one, b"{}").await;
    assert_eq!((messages.status, messages.json()["error"]["type"].as_str()), (429, Some("rate_limit_error")));
}

#[tokio::test]
async fn large_headers_are_431_with_the_limit() {
    let server = guarded(Script::text("x"), |security| security.max_header_bytes = 8192).await;
    let response = send_with(server.port, "GET", "/health", &format!("x-long: {}\r\n", "x".repeat(9000)), b"").await;
    assert_eq!(response.status, 431);
    assert!(response.json()["error"]["message"].as_str().unwrap().contains("8192"), "{}", response.body);
    let response = send_with(server.port, "GET", "/health", &format!("x-long: {}\r\n", "x".repeat(60_000)), b"").await;
    assert_eq!(response.status, 431);
    let many = send_with(server.port, "GET", "/health", &"x-a: b\r\n".repeat(400), b"").await;
    assert_eq!(many.status, 431);
    assert_eq!(get(server.port, "/health").await.status, 200);
}

#[tokio::test]
async fn a_slow_head_is_cut_off_and_a_slow_body_is_408() {
    let server = guarded(Script::text("x"), |security| {
        security.header_timeout = Duration::from_millis(300);
        security.body_timeout = Duration::from_millis(300);
    })
    .await;
    let mut socket = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    socket.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: te").await.unwrap();
    let mut rest = Vec::new();
    let cut = tokio::time::timeout(Duration::from_secs(10), socket.read_to_end(&mut rest)).await;
    assert!(cut.is_ok(), "a head that never ends keeps its connection");

    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\nx-api-key: sk-one\r\n\
                content-length: 500\r\n\r\n{\"messages\":";
    let mut socket = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    socket.write_all(head.as_bytes()).await.unwrap();
    let answer = tokio::time::timeout(Duration::from_secs(10), read(&mut socket)).await.unwrap();
    assert_eq!(answer.status, 408, "{}", answer.body);
    assert_eq!(answer.json()["error"]["code"], "body_timeout");
}

#[tokio::test]
async fn other_origins_may_ask_only_when_they_are_allowed() {
    let preflight = "origin: https://a.example\r\naccess-control-request-method: POST\r\n\
                     access-control-request-headers: authorization,content-type\r\n";
    let closed = guarded(Script::text("x"), |_| {}).await;
    let response = send_with(closed.port, "OPTIONS", CHAT, preflight, b"").await;
    assert!(!response.headers.contains("access-control"), "{}", response.headers);
    let get = send_with(closed.port, "GET", "/health", "origin: https://a.example\r\n", b"").await;
    assert!(!get.headers.contains("access-control"), "{}", get.headers);

    let open = guarded(Script::text("x"), |security| {
        security.allowed_origins = vec!["https://a.example".into(), "https://b.example".into()];
    })
    .await;
    let response = send_with(open.port, "OPTIONS", CHAT, preflight, b"").await;
    assert_eq!(response.status, 200, "a preflight has no key");
    for part in ["allow-origin: https://a.example", "allow-methods: post", "allow-headers: authorization,content-type"]
    {
        assert!(response.headers.contains(&format!("access-control-{part}")), "{}", response.headers);
    }
    let refused = send_with(open.port, "POST", CHAT, "origin: https://b.example\r\n", &body(false)).await;
    assert_eq!(refused.status, 401);
    assert!(refused.headers.contains("allow-origin: https://b.example"), "scripts can read why: {}", refused.headers);
    let other = send_with(open.port, "GET", "/health", "origin: https://c.example\r\n", b"").await;
    assert!(!other.headers.contains("allow-origin"), "{}", other.headers);
    let all = guarded(Script::text("x"), |security| security.allowed_origins = vec!["*".into()]).await;
    let response = send_with(all.port, "GET", "/health", "origin: https://c.example\r\n", b"").await;
    assert!(response.headers.contains("access-control-allow-origin: *"), "{}", response.headers);
}

#[tokio::test]
async fn isolated_tenants_share_no_salt() {
    let salts = async |isolation: bool| -> Vec<u64> {
        let server = guarded(Script::text("x"), |security| security.tenant_isolation = isolation).await;
        let with = |salt: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
            body["cache_salt"] = salt;
            body.to_string().into_bytes()
        };
        for (key, salt) in
            [("one", Value::Null), ("one", Value::Null), ("two", Value::Null), ("one", json!("s")), ("two", json!("s"))]
        {
            let headers = format!("x-api-key: sk-{key}\r\n");
            assert_eq!(send_with(server.port, "POST", CHAT, &headers, &with(salt)).await.status, 200);
        }
        server.seen.requests.lock().unwrap().iter().map(|request| request.salt).collect()
    };
    let shared = salts(false).await;
    assert!(shared[0] == shared[2] && shared[3] == shared[4] && shared[0] != shared[3], "{shared:?}");
    let apart = salts(true).await;
    assert_eq!(apart[0], apart[1], "a tenant finds its own prefixes");
    let different: std::collections::BTreeSet<u64> = apart.iter().copied().collect();
    assert_eq!(different.len(), 4, "{apart:?}");
}

#[tokio::test]
async fn tls_serves_what_a_client_can_verify() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let files = TlsFiles { certificates: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    std::fs::write(&files.certificates, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    let server = guarded(Script::text("a</think>b"), |security| security.tls = Some(files.clone())).await;

    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(made.cert.der().to_vec())).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(config));
    let socket = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let mut stream = connector.connect(ServerName::try_from("localhost").unwrap(), socket).await.unwrap();
    let body = body(true);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-api-key: sk-one\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&body).await.unwrap();
    let events = read(&mut stream).await.events();
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");

    // Somebody who speaks no TLS is turned away and harms nobody.
    let mut plain = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
    let mut bytes = Vec::new();
    let _ = plain.read_to_end(&mut bytes).await;
    assert!(!String::from_utf8_lossy(&bytes).contains("HTTP/1.1 200"));
    assert!(!server.task.is_finished());
}

#[tokio::test]
async fn files_that_give_no_tls_are_named_with_their_flag() {
    let folder = tempfile::tempdir().unwrap();
    let (empty, missing) = (folder.path().join("empty.pem"), folder.path().join("missing.pem"));
    std::fs::write(&empty, "nothing").unwrap();
    let made = [0, 1].map(|_| rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap());
    let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&certificate, made[0].cert.pem()).unwrap();
    std::fs::write(&key, made[1].signing_key.serialize_pem()).unwrap();
    for (certificates, key, parts) in [
        (&missing, &key, ["--ssl-certfile", "missing.pem"]),
        (&empty, &key, ["--ssl-certfile", "empty.pem"]),
        (&certificate, &empty, ["--ssl-keyfile", "empty.pem"]),
        (&certificate, &key, ["--ssl-certfile", "--ssl-keyfile"]),
    ] {
        let tls = Some(TlsFiles { certificates: certificates.clone(), key: key.clone() });
        let security = SecurityOptions { tls, ..SecurityOptions::default() };
        let error = longwave_serve::bind(&ServerOptions { port: 0, security, ..ServerOptions::default() }).await;
        let text = error.unwrap_err().to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}
