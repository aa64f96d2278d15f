//! `longwave render`: the prompt of a request, as text and as token ids, without a model.
//! Takes a body of any protocol from a file or standard input, and a checkpoint's tokenizer in place of the embedded one.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use longwave_text::{ChatDefaults, ChatPlan, EffortTable, Tokenizer};
use serde_json::{Map, Value, json};

use crate::load::tiny;

/// Whose form a request has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Protocol {
    /// OpenAI's Chat Completions.
    Chat,
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
}

/// Arguments of `longwave render`.
#[derive(clap::Args)]
pub struct Args {
    /// The request body, JSON; - is standard input.
    request: PathBuf,
    /// Form of the request.
    #[arg(long, value_enum, default_value = "chat")]
    protocol: Protocol,
    /// Folder of a checkpoint, for its tokenizer and its texts for reasoning efforts; by default the embedded tiny model.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Print one JSON object in place of text.
    #[arg(long)]
    json: bool,
}

/// Prints the prompt.
pub fn run(args: Args) -> Result<()> {
    let body = read_body(&args.request)?;
    let (tokenizer, defaults) = of_model(args.model.as_deref())?;
    let plan = plan(args.protocol, &body, defaults)?;
    let prompt = plan.prompt();
    let ids = prompt.encode(&tokenizer)?;
    if args.json {
        println!("{}", json!({"prompt": prompt.text, "prompt_token_ids": ids, "count": ids.len()}));
    } else {
        println!("{}\n\n{} tokens: {ids:?}", prompt.text, ids.len());
    }
    Ok(())
}

/// A JSON object from a file, or from standard input for `-`.
pub fn read_body(path: &Path) -> Result<Map<String, Value>> {
    let name = path.display();
    let mut text = String::new();
    if path.as_os_str() == "-" {
        std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
    } else {
        text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    }
    match serde_json::from_str(&text).with_context(|| format!("{name} is not JSON"))? {
        Value::Object(body) => Ok(body),
        _ => bail!("{name} must hold one JSON object, the body of a request"),
    }
}

/// Reads a body.
pub fn plan(protocol: Protocol, body: &Map<String, Value>, defaults: ChatDefaults) -> Result<ChatPlan> {
    Ok(match protocol {
        Protocol::Chat => ChatPlan::from_body(body, defaults),
        Protocol::Responses => ChatPlan::from_responses(body, defaults),
        Protocol::Messages => ChatPlan::from_messages(body, defaults),
    }?)
}

/// Tokenizer and defaults of a checkpoint folder, or of the embedded model.
pub fn of_model(folder: Option<&Path>) -> Result<(Tokenizer, ChatDefaults)> {
    let Some(folder) = folder else {
        let defaults = ChatDefaults { table: EffortTable::April, ..ChatDefaults::default() };
        return Ok((Tokenizer::from_bytes(tiny::TOKENIZER)?, defaults));
    };
    let config = longwave_model::ModelConfig::read(folder).map_err(|error| anyhow!("{error}"))?;
    let table = if config.dspark.is_some() { EffortTable::July } else { EffortTable::April };
    Ok((Tokenizer::from_file(folder)?, ChatDefaults { table, ..ChatDefaults::default() }))
}
