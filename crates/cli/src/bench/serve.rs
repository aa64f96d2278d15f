//! `longwave bench serve`: load on a server that speaks OpenAI's API, and what its clients see.
//!
//! Sends seeded requests in a closed or open loop and prints latencies and throughput, also as JSON (with the field names
//! of vLLM's bench) and as a picture. Refuses options that contradict each other before anything is sent; exits with 1 when no
//! request succeeded.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hyper::Method;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value};

use crate::bench::connection::Server;
use crate::bench::load::{self, Plan};
use crate::bench::percentiles::percent;
use crate::bench::plot;
use crate::bench::report::{self, Setting};
use crate::bench::summary::{Summary, Targets};
use crate::bench::workload::{Endpoint, Scale, Workload};
use crate::{output, units};

/// Arguments of `longwave bench serve`.
#[derive(clap::Args)]
pub struct Args {
    /// Address of the server, for example http://127.0.0.1:8000.
    url: String,
    /// Model to ask for; by default the first one that the server lists.
    #[arg(long)]
    model: Option<String>,
    /// What to ask.
    #[arg(long, value_enum, default_value = "chat")]
    endpoint: Endpoint,
    /// Sessions that run at once: each sends its next request when the last one has ended. With --rate, the most that run at
    /// once. 8 by default.
    #[arg(long, alias = "max-concurrency", alias = "concurrency", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    sessions: Option<u32>,
    /// Requests that arrive per second whatever the server does (a Poisson process); with --turns, agents.
    #[arg(long, alias = "request-rate", value_name = "PER_SECOND", value_parser = positive)]
    rate: Option<f64>,
    /// Requests in all, or agents with --turns; 200 by default, without limit when --duration is given.
    #[arg(long, alias = "num-prompts", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    requests: Option<u32>,
    /// Seconds after which nothing new is sent.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    duration: Option<f64>,
    /// Tokens of a prompt, the server's frame around it included, for example 8K.
    #[arg(long, alias = "random-input-len", value_name = "TOKENS", default_value = "256", value_parser = units::tokens)]
    input_len: u32,
    /// Tokens of an answer.
    #[arg(long, alias = "random-output-len", value_name = "TOKENS", default_value = "64", value_parser = units::tokens)]
    output_len: u32,
    /// Draw lengths from within this share above and below, 0 to 0.99.
    #[arg(long, alias = "random-range-ratio", default_value_t = 0.0, value_parser = ratio)]
    range_ratio: f64,
    /// Requests of one agent: each holds the conversation so far and --turn-len tokens more.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    turns: u32,
    /// Tokens that all prompts begin with.
    #[arg(long, value_name = "TOKENS", default_value = "0", value_parser = units::tokens)]
    system_len: u32,
    /// Tokens that each turn of an agent adds beside the answer.
    #[arg(long, value_name = "TOKENS", default_value = "128", value_parser = units::tokens)]
    turn_len: u32,
    /// Seconds between an answer and the agent's next request.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    think_time: f64,
    /// Count the requests that meet all of these, in ms: ttft:500 tpot:50 itl:80 e2el:5000.
    #[arg(long, num_args = 1.., value_name = "TARGET")]
    goodput: Vec<String>,
    /// Percentiles to report.
    #[arg(long, value_delimiter = ',', default_value = "50,90,99", value_parser = percent)]
    percentiles: Vec<f64>,
    /// Other numbers give other texts and arrivals.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Let answers end where the model ends them; by default every answer has its full length.
    #[arg(long)]
    stop_at_eos: bool,
    /// Fields for every request, as a JSON object.
    #[arg(long, value_name = "JSON", value_parser = object)]
    extra_body: Option<Map<String, Value>>,
    /// Seconds after which a request counts as failed.
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = positive)]
    timeout: f64,
    /// Key of the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Write the numbers as JSON to this file; - is the standard output, instead of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Put the times of every request into the JSON.
    #[arg(long, requires = "json")]
    save_detailed: bool,
    /// Draw the distributions and the course of the load into this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|n: &f64| n.is_finite()).ok_or_else(|| format!("{text:?} is not a number"))
}

fn positive(text: &str) -> Result<f64, String> {
    number(text).and_then(|n| if n > 0.0 && n <= 1e9 { Ok(n) } else { Err("expected a number above 0".into()) })
}

fn seconds(text: &str) -> Result<f64, String> {
    number(text).and_then(|n| if (0.0..=86_400.0).contains(&n) { Ok(n) } else { Err("expected 0 to 86400".into()) })
}

fn ratio(text: &str) -> Result<f64, String> {
    number(text).and_then(|n| if (0.0..=0.99).contains(&n) { Ok(n) } else { Err("expected 0 to 0.99".into()) })
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|e| format!("not a JSON object ({e}); write for example {{\"top_p\": 0.9}}"))
}

impl Args {
    fn workload(&self, model: &str) -> Result<Workload> {
        for (name, tokens) in [("--input-len", self.input_len), ("--output-len", self.output_len)] {
            if tokens == 0 {
                bail!("{name} must be at least 1");
            }
        }
        let mut fields = Map::new();
        fields.insert("model".into(), model.into());
        fields.insert("temperature".into(), 0.into());
        if !self.stop_at_eos {
            fields.insert("ignore_eos".into(), true.into());
        }
        for (name, value) in self.extra_body.iter().flatten() {
            if ["messages", "prompt", "stream", "stream_options", "max_tokens"].contains(&name.as_str()) {
                bail!("--extra-body: {name} is set by the load itself; take it out");
            }
            fields.insert(name.clone(), value.clone());
        }
        Ok(Workload {
            endpoint: self.endpoint,
            input_tokens: self.input_len,
            output_tokens: self.output_len,
            range_ratio: self.range_ratio,
            turns: self.turns,
            system_tokens: self.system_len,
            turn_tokens: self.turn_len.max(1),
            seed: self.seed,
            fields,
        })
    }

    fn plan(&self) -> Plan {
        let sessions = self.sessions.or(self.rate.is_none().then_some(8));
        let count = self.requests.unwrap_or(if self.duration.is_some() { u32::MAX } else { 200 });
        Plan {
            sessions: sessions.map(|n| n as usize),
            rate: self.rate,
            count: count as usize,
            duration: self.duration.map(Duration::from_secs_f64),
            think: Duration::from_secs_f64(self.think_time),
            timeout: Duration::from_secs_f64(self.timeout),
        }
    }
}

/// Puts load on the server and reports.
pub fn run(args: Args) -> Result<()> {
    let targets = Targets::read(&args.goodput)?;
    let server = Server::new(&args.url, args.api_key.clone())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (url, plan) = (server.url(), args.plan());
    let (model, outcome) = runtime.block_on(async {
        let model = match &args.model {
            Some(model) => model.clone(),
            None => first_model(&server).await?,
        };
        let workload = args.workload(&model)?;
        let scale = Scale::measure(&server, &workload).await?;
        workload.check(scale)?;
        let total = plan.count as u64 * u64::from(args.turns);
        let bar = bar((args.requests.is_some() || args.duration.is_none()).then_some(total));
        let outcome = load::run(server, workload, scale, plan.clone(), bar.clone()).await;
        bar.finish_and_clear();
        anyhow::Ok((model, outcome))
    })?;
    if outcome.interrupted {
        eprintln!("stopped; what was answered until then:");
    }
    let summary = Summary::of(&outcome.records, outcome.duration_s, &targets);
    let setting =
        Setting { url, model, endpoint: args.endpoint, plan, turns: args.turns, percentiles: args.percentiles };
    if let Some(path) = &args.json {
        let json = report::json(&setting, &summary, args.save_detailed.then_some(&outcome.records[..]));
        match path.as_os_str() == "-" {
            true => output::json(&json)?,
            false => write(path, &format!("{}\n", serde_json::to_string_pretty(&json)?))?,
        }
    }
    if args.json.as_ref().is_none_or(|path| path.as_os_str() != "-") {
        output::text(&report::table(&setting, &summary))?;
    }
    if let Some(path) = &args.plot {
        write(path, &plot::svg(&setting, &summary, &outcome.records))?;
    }
    match outcome.records.iter().find_map(|record| record.error.as_deref()) {
        Some(error) if summary.completed == 0 => bail!("no request succeeded; the first failed with: {error}"),
        None if summary.completed == 0 => bail!("no request was answered in this time"),
        _ => Ok(()),
    }
}

fn write(path: &PathBuf, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

async fn first_model(server: &Server) -> Result<String> {
    let list = server.json(Method::GET, "/v1/models", None).await?;
    let first = list["data"][0]["id"].as_str();
    first.map(str::to_owned).with_context(|| format!("{} lists no model; name one with --model", server.url()))
}

fn bar(total: Option<u64>) -> ProgressBar {
    let (bar, style) = match total {
        Some(total) => (ProgressBar::new(total), "Asking {bar:40} {pos}/{len} {elapsed} left {eta}"),
        None => (ProgressBar::new_spinner(), "Asking {spinner} {pos} {elapsed}"),
    };
    bar.set_style(ProgressStyle::with_template(style).expect("a constant template"));
    bar
}
