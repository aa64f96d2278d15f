//! A minimal HTTP/1.1 client: one request per connection, bodies by length, by chunks or to the end.

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub struct Response {
    pub status: u16,
    pub headers: String,
    pub body: String,
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// Name and data of every event of a stream with named events.
    pub fn named(&self) -> Vec<(String, Value)> {
        assert!(self.headers.contains("text/event-stream"), "{}\n{}", self.headers, self.body);
        let event = |event: &str| {
            let (name, data) = event.strip_prefix("event: ")?.split_once("\ndata: ")?;
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["type"], name, "the name is the type");
            Some((name.to_owned(), data))
        };
        self.body.split("\n\n").filter_map(event).collect()
    }

    /// The data of every event; the last must be `[DONE]`, which is left out.
    pub fn events(&self) -> Vec<Value> {
        assert!(self.headers.contains("text/event-stream"), "{}\n{}", self.headers, self.body);
        let mut data: Vec<&str> = self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

pub async fn open(port: u16, method: &str, path: &str, body: &[u8]) -> TcpStream {
    open_with(port, method, path, "", body).await
}

/// With more headers, each ended by a line break.
async fn open_with(port: u16, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n\
         {headers}content-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    // A server that refuses a large body may close before all of it is sent.
    let _ = socket.write_all(body).await;
    socket
}

pub async fn send(port: u16, method: &str, path: &str, body: &[u8]) -> Response {
    send_with(port, method, path, "", body).await
}

/// With more headers, each ended by a line break.
pub async fn send_with(port: u16, method: &str, path: &str, headers: &str, body: &[u8]) -> Response {
    read(&mut open_with(port, method, path, headers, body).await).await
}

/// A form; the headers hold its type.
pub async fn send_form(port: u16, path: &str, headers: &str, body: &[u8]) -> Response {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let length = body.len();
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n");
    socket.write_all(head.as_bytes()).await.unwrap();
    let _ = socket.write_all(body).await;
    read(&mut socket).await
}

/// Reads an answer to the end of the connection.
pub async fn read(socket: &mut (impl AsyncRead + Unpin)) -> Response {
    let mut bytes = Vec::new();
    // A reset after the answer is no failure of the answer.
    let _ = socket.read_to_end(&mut bytes).await;
    let text = String::from_utf8(bytes).unwrap();
    let (headers, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let headers = headers.to_lowercase();
    let status = headers.split(' ').nth(1).unwrap().parse().unwrap();
    let body = if headers.contains("transfer-encoding: chunked") { dechunk(body) } else { body.to_owned() };
    Response { status, headers, body }
}

pub async fn post_to(port: u16, path: &str, body: &Value) -> Response {
    send(port, "POST", path, body.to_string().as_bytes()).await
}

pub async fn post(port: u16, body: Value) -> Response {
    send(port, "POST", "/v1/chat/completions", body.to_string().as_bytes()).await
}

pub async fn get(port: u16, path: &str) -> Response {
    send(port, "GET", path, b"").await
}

fn dechunk(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        text.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
    text
}
