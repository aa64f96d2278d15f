//! An engine that plays a script, and a server over it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longwave_engine::Status;
use longwave_engine::attention::{LayerKind, Reads};
use longwave_engine::report::PrefixReport;
use longwave_engine::request::{Event, EventSink, FinishReason, Request, RequestId, SubmitError};
use longwave_engine::step::{Limits, TokenLogprobs};
use longwave_serve::{App, EngineApi, ServerOptions};
use longwave_text::Tokenizer;

/// What the engine does with a request.
#[derive(Clone)]
pub struct Script {
    /// Token events, in order.
    pub steps: Vec<Vec<u32>>,
    pub end: FinishReason,
    pub cached: u32,
    /// Before each step.
    pub pause: Duration,
    pub refuse_submit: Option<SubmitError>,
    /// What can be told of attention, and what is told of every request that asks.
    pub attention_layers: Vec<LayerKind>,
    pub reads: Vec<Reads>,
    /// What the pools hold; by default as much as the context.
    pub most_tokens: Option<u32>,
}

impl Script {
    /// One token per step, then the end of sentence.
    pub fn text(output: &str) -> Script {
        let tokenizer = tokenizer();
        let eos = tokenizer.markers().eos;
        let mut steps: Vec<Vec<u32>> =
            tokenizer.encode_output(output).unwrap().into_iter().map(|id| vec![id]).collect();
        steps.push(vec![eos]);
        Script {
            steps,
            end: FinishReason::Stop(eos),
            cached: 0,
            pause: Duration::ZERO,
            refuse_submit: None,
            attention_layers: Vec::new(),
            reads: Vec::new(),
            most_tokens: None,
        }
    }
}

pub fn tokenizer() -> Arc<Tokenizer> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny/tokenizer.json");
    Arc::new(Tokenizer::from_file(&path).unwrap())
}

/// What the engine saw.
#[derive(Default)]
pub struct Seen {
    pub requests: Mutex<Vec<Request>>,
    pub cancelled: Mutex<Vec<RequestId>>,
    pub dead: AtomicBool,
    pub stalled: AtomicBool,
    /// Whether new requests are turned away for lack of room.
    pub full: AtomicBool,
}

pub struct Server {
    pub port: u16,
    pub seen: Arc<Seen>,
    pub tokenizer: Arc<Tokenizer>,
    shutdown: Option<tokio::sync::oneshot::Sender<()>>,
    pub task: tokio::task::JoinHandle<()>,
}

impl Server {
    pub async fn start(script: Script) -> Server {
        Server::with(script, 4096, |_| {}).await
    }

    pub async fn with(script: Script, context: u32, change: impl FnOnce(&mut ServerOptions)) -> Server {
        Server::with_app(script, context, change, |app| app).await
    }

    pub async fn with_app(
        script: Script,
        context: u32,
        change: impl FnOnce(&mut ServerOptions),
        complete: impl FnOnce(App) -> App,
    ) -> Server {
        let tokenizer = tokenizer();
        let seen = Arc::new(Seen::default());
        let engine = engine(script, context, tokenizer.vocab_size(), seen.clone());
        Server::over(engine, tokenizer, seen, change, complete).await
    }

    /// A server over the engine that `longwave serve --script` has.
    pub async fn playing(script: &str, change: impl FnOnce(&mut ServerOptions)) -> Server {
        let tokenizer = tokenizer();
        let lines = longwave_serve::read_script(script).unwrap();
        let engine = longwave_serve::scripted(lines, tokenizer.clone(), 16_384);
        Server::over(engine, tokenizer, Arc::default(), change, |app| app).await
    }

    async fn over(
        engine: EngineApi,
        tokenizer: Arc<Tokenizer>,
        seen: Arc<Seen>,
        change: impl FnOnce(&mut ServerOptions),
        complete: impl FnOnce(App) -> App,
    ) -> Server {
        let mut options =
            ServerOptions { port: 0, served_model_names: vec!["Tiny".into()], ..ServerOptions::default() };
        change(&mut options);
        let listener = longwave_serve::bind(&options).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let app =
            Arc::new(complete(App::new(options, engine, tokenizer.clone()).with_explorer(crate::explore::explorer())));
        let (shutdown, stopped) = tokio::sync::oneshot::channel();
        let task = tokio::spawn(async move {
            let stop = async move { drop(stopped.await) };
            longwave_serve::run(listener, app, stop).await.unwrap();
        });
        Server { port, seen, tokenizer, shutdown: Some(shutdown), task }
    }

    pub fn shut_down(&mut self) {
        let _ = self.shutdown.take().unwrap().send(());
    }

    pub fn last_request(&self) -> Request {
        self.seen.requests.lock().unwrap().last().unwrap().clone()
    }

    /// Waits until a request was cancelled.
    pub async fn cancelled(&self) -> bool {
        for _ in 0..200 {
            if !self.seen.cancelled.lock().unwrap().is_empty() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }
}

fn engine(script: Script, context: u32, vocab: u32, seen: Arc<Seen>) -> EngineApi {
    let attention_layers = script.attention_layers.clone();
    let next = AtomicU64::new(1);
    let most = script.most_tokens;
    let submit = {
        let seen = seen.clone();
        move |request: Request, sink: EventSink| {
            if let Some(error) = &script.refuse_submit {
                return Err(error.clone());
            }
            if seen.full.load(Ordering::Relaxed) {
                return Err(SubmitError::QueueFull { waiting: 1, retry_after_s: 1 });
            }
            let id = RequestId(next.fetch_add(1, Ordering::Relaxed));
            seen.requests.lock().unwrap().push(request.clone());
            let (script, seen) = (script.clone(), seen.clone());
            std::thread::spawn(move || play(&script, &request, id, &seen, sink));
            Ok(id)
        }
    };
    let cancel = {
        let seen = seen.clone();
        move |id| seen.cancelled.lock().unwrap().push(id)
    };
    let limits = Limits { seats: 4, step_tokens: 256, context, units: [64; 3], drafts: 0, in_flight: 1, vocab };
    let idle = Status::new(limits.clone());
    let status = move || Status {
        alive: !seen.dead.load(Ordering::Relaxed),
        stalled: seen.stalled.load(Ordering::Relaxed),
        ..idle.clone()
    };
    let most_tokens = move |prompt: u32| most.unwrap_or(context.saturating_sub(prompt));
    EngineApi {
        submit: Arc::new(submit),
        cancel: Arc::new(cancel),
        limits,
        attention_layers,
        most_tokens: Arc::new(most_tokens),
        look: Arc::new(drop),
        status: Arc::new(status),
    }
}

fn play(script: &Script, request: &Request, id: RequestId, seen: &Seen, mut sink: EventSink) {
    let prompt_tokens = request.prompt.len() as u32;
    let mut output_tokens = 0;
    let mut end = script.end.clone();
    if !matches!(end, FinishReason::Refused(_)) {
        sink(Event::Scheduled { cached_tokens: script.cached, prefix: PrefixReport::default() });
        if request.attention.is_some() {
            sink(Event::Attention(script.reads.clone()));
        }
        'steps: for step in &script.steps {
            std::thread::sleep(script.pause);
            if seen.cancelled.lock().unwrap().contains(&id) {
                end = FinishReason::Cancelled;
                break;
            }
            for &token in step {
                if output_tokens == request.max_tokens {
                    end = FinishReason::Length;
                    break 'steps;
                }
                output_tokens += 1;
                let logprobs = request.sampling.top_logprobs.map(|top| TokenLogprobs {
                    chosen: -0.5,
                    top: (0..top).map(|rank| (token + rank, -0.5 - rank as f32)).collect(),
                });
                sink(Event::Tokens { tokens: vec![token], logprobs: logprobs.into_iter().collect() });
            }
        }
    }
    sink(Event::Finished { reason: end, prompt_tokens, cached_tokens: script.cached, output_tokens });
}
