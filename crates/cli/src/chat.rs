//! `longwave chat`: a line REPL over a model in this process. `/reset` forgets the conversation, Ctrl-C stops an answer
//! (or, at the prompt, ends the program), the end of input leaves.

use std::io::{BufRead, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use longwave_engine::request::{Event, FinishReason, Request};
use longwave_engine::step::Sampling;
use longwave_text::{ChatDefaults, ChatPlan, Reply, ReplyEnd, ReplyEvent};
use serde_json::{Map, Value, json};

use crate::load::{self, Loaded};
use crate::model_args::ModelArgs;
use crate::tiers::TierArgs;
use crate::units;

/// Arguments of `longwave chat`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tiers: TierArgs,
    /// Text that the conversation starts with.
    #[arg(long)]
    system: Option<String>,
    /// Answer this one message and leave.
    #[arg(long, short)]
    quick: Option<String>,
    /// Let the model think before it answers.
    #[arg(long)]
    thinking: bool,
    /// 0 always takes the likeliest token.
    #[arg(long, value_parser = units::temperature)]
    temperature: Option<f32>,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 2048)]
    max_tokens: u32,
    /// Print tokens and tokens per second after each answer.
    #[arg(long)]
    stats: bool,
}

/// An answer is streaming: Ctrl-C stops it instead of the program.
static ANSWERING: AtomicBool = AtomicBool::new(false);
/// Set by Ctrl-C while an answer streams.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Runs the REPL.
pub fn run(args: Args) -> Result<()> {
    let tiers = args.tiers.check(!args.model.no_enable_prefix_caching)?;
    let model = load::open(&args.model, tiers)?;
    watch_interrupts()?;
    let mut messages: Vec<Value> = args.system.iter().map(|s| json!({"role": "system", "content": s})).collect();
    let first = messages.len();
    if let Some(text) = &args.quick {
        messages.push(json!({"role": "user", "content": text}));
        let answered = answer(&model, &args, &messages);
        model.engine.shutdown();
        return answered.map(drop);
    }
    let tty = std::io::stdin().is_terminal();
    if tty {
        eprintln!("{}\n/reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D leaves.", model.summary);
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if tty {
            eprint!("> ");
        }
        let Some(line) = lines.next() else { break };
        match line?.trim() {
            "" if tty => continue,
            "" => break,
            "/reset" => {
                messages.truncate(first);
                eprintln!("(forgotten)");
            }
            text => {
                messages.push(json!({"role": "user", "content": text}));
                INTERRUPTED.store(false, Ordering::SeqCst);
                ANSWERING.store(true, Ordering::SeqCst);
                let answered = answer(&model, &args, &messages);
                ANSWERING.store(false, Ordering::SeqCst);
                match answered {
                    Ok(reply) => messages.push(reply),
                    Err(error) => {
                        // The question stays answerable: the conversation is as it was before it.
                        messages.pop();
                        eprintln!("longwave: {error:#}");
                    }
                }
            }
        }
    }
    // What is to be kept is on disk before the process ends.
    model.engine.shutdown();
    Ok(())
}

/// Streams one answer to the terminal and returns it as a message of the conversation.
fn answer(model: &Loaded, args: &Args, messages: &[Value]) -> Result<Value> {
    let mut body = Map::new();
    body.insert("model".into(), Value::from(model.name.as_str()));
    body.insert("messages".into(), Value::from(messages));
    let defaults = ChatDefaults { thinking: args.thinking, table: model.efforts, ..ChatDefaults::default() };
    let plan = ChatPlan::from_body(&body, defaults)?;
    let prompt = plan.prompt().encode(&model.tokenizer)?;
    let eos = model.tokenizer.markers().eos;
    let sampling = Sampling {
        temperature: args.temperature.unwrap_or(model.sampling.temperature),
        top_p: model.sampling.top_p,
        top_k: model.sampling.top_k,
        min_p: model.sampling.min_p,
        seed: prompt.len() as u64,
        ..Sampling::default()
    };
    let request = Request { stop_tokens: vec![eos], sampling, ..Request::greedy(prompt, args.max_tokens) };
    let (sender, events) = mpsc::channel();
    let started = Instant::now();
    let id = model.engine.submit(request, Box::new(move |e| drop(sender.send(e))))?;

    let mut reply = Reply::new(plan.reply.clone());
    let mut shown = Shown::default();
    let mut out = Vec::new();
    let mut first_token = None;
    loop {
        if INTERRUPTED.load(Ordering::SeqCst) {
            model.engine.cancel(id);
        }
        let event = match events.recv_timeout(Duration::from_millis(50)) {
            Ok(event) => event,
            Err(mpsc::RecvTimeoutError::Timeout) => continue,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(anyhow!("the engine dropped the request")),
        };
        match event {
            Event::Tokens { tokens, .. } => {
                first_token.get_or_insert_with(Instant::now);
                for t in tokens.into_iter().filter(|t| *t != eos) {
                    reply.push_token(&model.tokenizer, t, &mut out);
                }
                shown.print(&mut out)?;
            }
            Event::Finished { reason, prompt_tokens, output_tokens, .. } => {
                let end = if matches!(reason, FinishReason::Stop(_)) { ReplyEnd::Stop } else { ReplyEnd::Length };
                reply.finish(end, &mut out);
                shown.print(&mut out)?;
                println!();
                match reason {
                    FinishReason::Refused(why) => return Err(why.into()),
                    FinishReason::Failed(why) | FinishReason::Constraint(why) => return Err(anyhow!(why)),
                    FinishReason::Stalled { seconds } => {
                        return Err(anyhow!("the engine made no step for {seconds} s"));
                    }
                    FinishReason::Cancelled => eprintln!("(stopped)"),
                    FinishReason::Stop(_) | FinishReason::Complete | FinishReason::Length => {}
                }
                if args.stats {
                    let ttft = first_token.map_or(started.elapsed(), |t| t - started);
                    let rest = started.elapsed() - ttft;
                    eprintln!(
                        "({prompt_tokens} prompt tokens, first token after {:.0} ms, {output_tokens} tokens, {:.1} tokens/s)",
                        ttft.as_secs_f64() * 1e3,
                        f64::from(output_tokens.saturating_sub(1)) / rest.as_secs_f64().max(1e-9),
                    );
                }
                return Ok(shown.message());
            }
            Event::Scheduled { .. } | Event::Logits { .. } | Event::Attention(_) => {}
        }
    }
}

/// What was printed of an answer.
#[derive(Default)]
struct Shown {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
}

impl Shown {
    /// Prints and keeps events; reasoning is dimmed on a terminal.
    fn print(&mut self, events: &mut Vec<ReplyEvent>) -> Result<()> {
        let mut stdout = std::io::stdout().lock();
        let tty = stdout.is_terminal();
        for event in events.drain(..) {
            match event {
                ReplyEvent::Reasoning(text) => {
                    if tty {
                        write!(stdout, "\x1b[2m{text}\x1b[0m")?
                    } else {
                        write!(stdout, "{text}")?
                    }
                    self.reasoning.push_str(&text);
                }
                ReplyEvent::Content(text) => {
                    if self.content.is_empty() && !self.reasoning.is_empty() {
                        writeln!(stdout)?;
                    }
                    write!(stdout, "{text}")?;
                    self.content.push_str(&text);
                }
                ReplyEvent::ToolCallStart { name, .. } => {
                    write!(stdout, "[call {name} ")?;
                    self.calls.push((name, String::new()));
                }
                ReplyEvent::ToolCallArguments { delta, .. } => {
                    write!(stdout, "{delta}")?;
                    if let Some(call) = self.calls.last_mut() {
                        call.1.push_str(&delta);
                    }
                }
            }
        }
        stdout.flush()?;
        Ok(())
    }

    fn message(self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = Value::from(self.reasoning);
        }
        message
    }
}

/// Ctrl-C stops the answer that streams; a second one before it has ended, or one at the prompt, ends the program.
fn watch_interrupts() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("interrupts".into()).spawn(move || {
        runtime.block_on(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                if !ANSWERING.load(Ordering::SeqCst) || INTERRUPTED.swap(true, Ordering::SeqCst) {
                    eprintln!();
                    std::process::exit(130);
                }
            }
        });
    })?;
    Ok(())
}
