//! Views of a server as they come, on a thread of their own.
//! The first connection must succeed; one that ends later is opened again, and that is said.

use std::sync::mpsc::Sender;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Method, StatusCode};
use serde_json::Value;

use crate::bench::connection::{self, Answer, Server, shorten};

/// Before the server is asked again.
const AGAIN: Duration = Duration::from_secs(2);
/// Longest wait for the head of an answer.
const HEAD: Duration = Duration::from_secs(10);

/// What comes from a server.
pub enum News {
    /// A view.
    View(Value),
    /// Something to tell instead.
    Said(String),
}

/// Opens the stream and follows it until nobody listens.
pub fn start(server: Server, every_ms: u32, send: Sender<News>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let route = format!("/explore/api/live?every_ms={every_ms}");
    let mut answer = runtime.block_on(open(&server, &route))?;
    let work = async move {
        loop {
            let ended =
                follow(&mut answer, &send).await.map_or_else(|e| format!("{e:#}"), |()| "the stream ended".into());
            if send.send(News::Said(format!("{ended}; asking again"))).is_err() {
                return;
            }
            answer = loop {
                tokio::time::sleep(AGAIN).await;
                match open(&server, &route).await {
                    Ok(answer) => break answer,
                    Err(error) if send.send(News::Said(format!("{error:#}; asking again"))).is_err() => return,
                    Err(_) => {}
                }
            };
        }
    };
    let name = "longwave-top".to_owned();
    std::thread::Builder::new().name(name).spawn(move || runtime.block_on(work))?;
    Ok(())
}

async fn open(server: &Server, route: &str) -> Result<Answer> {
    let asked = tokio::time::timeout(HEAD, server.send(Method::GET, route, Bytes::new())).await;
    let mut answer = asked.map_err(|_| anyhow::anyhow!("{} does not answer", server.url()))??;
    match answer.response.status() {
        StatusCode::OK => Ok(answer),
        StatusCode::UNAUTHORIZED => bail!("{} asks for a key; give one with --api-key or OPENAI_API_KEY", server.url()),
        StatusCode::NOT_FOUND => bail!("{} has no live view; is it a Longwave server of this version?", server.url()),
        status => {
            let text = connection::read(&mut answer).await?;
            bail!("{} answers with {status}: {}", server.url(), shorten(&text))
        }
    }
}

/// Hands views on until the stream ends.
async fn follow(answer: &mut Answer, send: &Sender<News>) -> Result<()> {
    let mut line = Vec::new();
    while let Some(frame) = answer.response.body_mut().frame().await {
        let Ok(data) = frame.context("the connection broke")?.into_data() else { continue };
        for part in data.split_inclusive(|byte| *byte == b'\n') {
            line.extend_from_slice(part);
            if !part.ends_with(b"\n") {
                continue;
            }
            if let Some(text) = line.strip_prefix(b"data: ") {
                let view: Value = serde_json::from_slice(text).context("a view is no JSON")?;
                let said = ["gone", "late"].iter().find_map(|name| view[*name].as_str());
                let news = said.map_or_else(|| News::View(view.clone()), |said| News::Said(said.to_owned()));
                if send.send(news).is_err() {
                    return Ok(());
                }
            }
            line.clear();
        }
    }
    Ok(())
}
