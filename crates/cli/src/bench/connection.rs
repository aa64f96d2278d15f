//! Connections to the measured server: plain HTTP/1.1, kept open and used again.
//!
//! Opening one is part of the time of the request that needs it, as for any client. Assumes a server that is near:
//! `https` is refused, because TLS would be measured with it.

use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// Most bytes of an answer that is read whole.
const WHOLE_BYTES: usize = 16 << 20;

/// A server and the connections to it that are idle.
pub struct Server {
    /// `host:port`.
    authority: String,
    /// What comes before `/v1`, without a slash at its end.
    path: String,
    key: Option<String>,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

/// An answer whose body is still to come, and its connection.
pub struct Answer {
    /// Status and headers have come.
    pub response: Response<Incoming>,
    connection: SendRequest<Full<Bytes>>,
}

impl Server {
    /// Reads `http://host:port`, with or without `/v1` at its end.
    pub fn new(url: &str, key: Option<String>) -> Result<Server> {
        let form = "give the address of a server, for example http://127.0.0.1:8000";
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some(("https", _)) => bail!(
                "{url}: TLS would be measured together with the server; give the http:// address behind it, or one of a local proxy"
            ),
            Some((other, _)) => bail!("{url}: {other} is not spoken here; {form}"),
            None => url,
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("v1").unwrap_or(path).trim_end_matches('/');
        if authority.is_empty() || authority.contains(char::is_whitespace) {
            bail!("{url:?} has no host; {form}");
        }
        let port_at = authority.rfind(':').filter(|at| !authority[*at..].contains(']'));
        let authority = match port_at {
            Some(at) if authority[at + 1..].parse::<u16>().is_err() => bail!("{url}: the port is no number; {form}"),
            Some(_) => authority.to_owned(),
            None => format!("{authority}:80"),
        };
        let path = if path.is_empty() { String::new() } else { format!("/{path}") };
        Ok(Server { authority, path, key, idle: Mutex::default() })
    }

    /// The address, as one may write it again.
    pub fn url(&self) -> String {
        format!("http://{}{}", self.authority, self.path)
    }

    /// Sends a request and waits for the head of the answer.
    pub async fn send(&self, method: Method, route: &str, body: Bytes) -> Result<Answer> {
        // A connection that the server closed meanwhile fails at once: then a new one is opened, once.
        while let Some(mut connection) = self.take() {
            if connection.ready().await.is_err() {
                continue;
            }
            match connection.try_send_request(self.request(method.clone(), route, body.clone())?).await {
                Ok(response) => return Ok(Answer { response, connection }),
                Err(mut error) => {
                    // A request that comes back was not sent.
                    if error.take_message().is_none() {
                        return Err(error.into_error()).context("the connection broke");
                    }
                }
            }
        }
        let stream = TcpStream::connect(&self.authority).await;
        let stream = stream.with_context(|| format!("cannot connect to {}", self.authority))?;
        stream.set_nodelay(true)?;
        let (mut connection, driver) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(driver);
        let request = self.request(method, route, body)?;
        let response = connection.send_request(request).await.context("the connection broke")?;
        Ok(Answer { response, connection })
    }

    /// Keeps the connection of an answer that was read to its end.
    pub fn give_back(&self, answer: Answer) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(answer.connection);
    }

    /// A whole JSON answer; another status than 200 is an error that shows what the server said.
    pub async fn json(&self, method: Method, route: &str, body: Option<&Value>) -> Result<Value> {
        let body = body.map_or(Bytes::new(), |body| Bytes::from(body.to_string()));
        let mut answer = self.send(method, route, body).await?;
        let status = answer.response.status();
        let text = read(&mut answer).await?;
        self.give_back(answer);
        if status != StatusCode::OK {
            bail!("{} answers {route} with {status}: {}", self.url(), shorten(&text));
        }
        serde_json::from_slice(&text).with_context(|| format!("{route} gave no JSON: {}", shorten(&text)))
    }

    fn take(&self) -> Option<SendRequest<Full<Bytes>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn request(&self, method: Method, route: &str, body: Bytes) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{route}", self.path))
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        Ok(request.body(Full::new(body))?)
    }
}

/// What is left of a body, [`WHOLE_BYTES`] at most.
pub async fn read(answer: &mut Answer) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    while let Some(frame) = answer.response.body_mut().frame().await {
        if let Ok(data) = frame.context("the answer broke off")?.into_data() {
            text.extend_from_slice(&data);
        }
        if text.len() > WHOLE_BYTES {
            bail!("the answer has more than {WHOLE_BYTES} bytes");
        }
    }
    Ok(text)
}

/// The beginning of a body, for messages.
pub fn shorten(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let short: String = text.trim().chars().take(300).collect();
    if short.len() < text.trim().len() { format!("{short} …") } else { short }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_as_people_write_them() {
        for (url, meant) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://localhost:8000/v1/", "http://localhost:8000"),
            ("localhost:8000", "http://localhost:8000"),
            ("http://host/some/v1", "http://host:80/some"),
            ("http://[::1]:9", "http://[::1]:9"),
            ("http://[::1]", "http://[::1]:80"),
        ] {
            assert_eq!(Server::new(url, None).unwrap().url(), meant);
        }
        for (url, part) in [
            ("https://host", "TLS would be measured"),
            ("ftp://host", "ftp is not spoken"),
            ("http://", "has no host"),
            ("http://host:many", "the port is no number"),
        ] {
            let error = Server::new(url, None).err().unwrap().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
