//! `longwave explore`: the explorer without a server, and as files for documentation.
//!
//! Its model runs on the CPU, for what tokens read, and answers nothing else. Counts through `longwave kv`'s own code, also for the explorer of `longwave serve`. Takes released configurations and the
//! model that is served, never a path from a query. Refuses to write into a folder that holds other files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use longwave_engine::tier::TierOptions;
use longwave_model::{CacheFormats, IndexFormat, MainFormat, presets};
use longwave_serve::explore::{self, Explorer, Place, Refused};
use longwave_serve::{App, EngineApi, ServerOptions, bind};
use serde_json::{Value, json};

use crate::kv::{self, Wanted};
use crate::model_args::{self, BackendName, ModelArgs};
use crate::{load, source, units};

/// Contexts of a table: powers of two up to the model's own.
const LEAST_CONTEXT: u32 = 1024;
/// GPUs of a table: bytes of one in GB (10^9), as they are sold, and how many.
const GPUS_GB: [u64; 4] = [80, 141, 192, 288];
const GPU_COUNTS: [u32; 5] = [1, 2, 4, 8, 16];
/// What a table keeps of a GPU, percent.
const KEPT_PERCENT: u32 = 10;

/// Arguments of `longwave explore`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Write the explorer into this folder instead, for any web server.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["host", "port", "model"])]
    export: Option<PathBuf>,
}

/// What the attention view needs for a text; a page asks for one at a time.
const SEATS: u32 = 2;

/// A text and the layer to look at, with room to spare.
const MOST_BODY_BYTES: usize = 64 << 10;

/// Serves the page until Ctrl-C, or writes it.
pub fn run(args: Args) -> Result<()> {
    if let Some(folder) = &args.export {
        return export(folder);
    }
    if args.model.backend == BackendName::Cuda {
        bail!("the CUDA backend does not tell what a token reads; leave --backend out, and the model runs on the CPU");
    }
    let mut options =
        ServerOptions { host: args.host, port: args.port, max_body_bytes: MOST_BODY_BYTES, ..ServerOptions::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = bind(&options).await?;
        let (name, folder) = (load::name(&args.model), args.model.model.clone());
        let on_cpu =
            ModelArgs { backend: BackendName::Cpu, max_num_seqs: SEATS.min(args.model.max_num_seqs), ..args.model };
        let model = load::open(&on_cpu, TierOptions::default())?;
        eprintln!("{}", model.summary);
        options.served_model_names = vec![model.name];
        let app = App::new(options, EngineApi::of(&model.engine), model.tokenizer);
        eprintln!("the explorer is on http://{}/explore/ (Ctrl-C ends it)", listener.local_addr()?);
        let stop = async {
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        explore::serve(listener, explorer(Some((name, folder))), Some(Arc::new(app)), stop).await;
        model.engine.shutdown();
        Ok(())
    })
}

/// What can be counted: the released configurations and what is served, by name and path.
pub fn explorer(served: Option<(String, Option<PathBuf>)>) -> Explorer {
    let mut models: Vec<(String, Option<PathBuf>)> =
        presets::NAMES.iter().map(|name| ((*name).to_owned(), Some(PathBuf::from(name)))).collect();
    models.extend(served);
    let listed = models.iter().filter_map(|(name, path)| {
        let (_, config) = source::find(path.as_deref()).ok()?;
        let (context, topk) = (config.max_position_embeddings, config.index_topk);
        Some(json!({"name": name, "describes": config.describe(), "context": context, "index_topk": topk}))
    });
    let listed: Vec<Value> = listed.collect();
    let models = Arc::new(models);
    let of_table = models.clone();
    Explorer {
        models: json!({"models": listed}),
        memory: Box::new(move |query| memory(&models, query)),
        table: Box::new(move |query| table(&of_table, query)),
    }
}

type Models = [(String, Option<PathBuf>)];
type Asked = HashMap<String, String>;

fn refused(field: &str, message: impl Into<String>) -> Refused {
    Refused { field: field.to_owned(), message: message.into() }
}

/// A value of the query through a parser of the command line.
fn read<T>(query: &Asked, field: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, Refused> {
    query.get(field).map(|text| parse(text).map_err(|message| refused(field, message))).transpose()
}

fn number(least: u64, most: u64) -> impl Fn(&str) -> Result<u64, String> {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
    }
}

fn model<'a>(models: &'a Models, query: &Asked) -> Result<Option<&'a Path>, Refused> {
    let names = || models.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    let wanted = query.get("model").ok_or_else(|| refused("model", format!("name one of {}", names())))?;
    let found = models.iter().find(|(name, _)| name == wanted);
    found.map(|(_, path)| path.as_deref()).ok_or_else(|| refused("model", format!("expected one of {}", names())))
}

fn formats(query: &Asked) -> Result<CacheFormats, Refused> {
    Ok(CacheFormats {
        main: read(query, "cache", model_args::main_format)?.unwrap_or(MainFormat::Fp8),
        index: read(query, "index", model_args::index_format)?.unwrap_or(IndexFormat::Fp4),
    })
}

/// The JSON of `longwave kv` for a query.
fn memory(models: &Models, query: &Asked) -> Result<Value, Refused> {
    let gpus = read(query, "gpu_memory", units::bytes)?.map(|bytes| {
        let gpus = read(query, "gpus", number(1, 1024))?.unwrap_or(1);
        let kept = read(query, "keep_percent", number(0, 99))?.unwrap_or(u64::from(KEPT_PERCENT));
        Ok((gpus as u32, bytes, kept as u32))
    });
    let wanted = Wanted {
        model: model(models, query)?,
        context: read(query, "context", units::tokens)?,
        formats: formats(query)?,
        users: read(query, "users", number(1, 1_000_000))?.unwrap_or(1),
        gpus: gpus.transpose()?,
    };
    // All else was checked before.
    kv::json(&wanted).map_err(|error| refused("context", error.to_string().trim_start_matches("--context ").to_owned()))
}

/// The same for powers of two, with what fits into usual GPUs.
fn table(models: &Models, query: &Asked) -> Result<Value, Refused> {
    let (model, formats) = (model(models, query)?, formats(query)?);
    let fail = |error: anyhow::Error| refused("model", error.to_string());
    let most = source::find(model).map_err(fail)?.1.max_position_embeddings;
    let contexts = std::iter::successors(Some(LEAST_CONTEXT), |context| context.checked_mul(2));
    let rows = contexts.take_while(|context| *context <= most).map(|context| {
        let wanted = Wanted { model, context: Some(context), formats, users: 1, gpus: None };
        let (name, describes, memory) = kv::count(&wanted).map_err(fail)?;
        let mut row = kv::json_of(&wanted, &name, &describes, &memory).map_err(fail)?;
        let mut fits = Vec::new();
        for gb in GPUS_GB {
            for count in GPU_COUNTS {
                fits.push(json!(memory.fit(count, gb * 1_000_000_000, KEPT_PERCENT)));
            }
        }
        row["fits"] = fits.into();
        Ok(row)
    });
    rows.collect()
}

/// Writes the page with tables of all released configurations.
fn export(folder: &Path) -> Result<()> {
    let cannot = || format!("cannot write into {}", folder.display());
    let ours = |name: &str| name == "memory" || explore::files(Place::Files).iter().any(|(known, _)| *known == name);
    if folder.exists() {
        for entry in std::fs::read_dir(folder).with_context(cannot)? {
            let name = entry.with_context(cannot)?.file_name();
            if !name.to_str().is_some_and(ours) {
                bail!(
                    "{} holds {}, which is not the explorer's; give a new folder, or one that it was exported into",
                    folder.display(),
                    name.display()
                );
            }
        }
    }
    let tables = folder.join("memory");
    std::fs::create_dir_all(&tables).with_context(cannot)?;
    for (name, text) in explore::files(Place::Files) {
        std::fs::write(folder.join(name), text).with_context(cannot)?;
    }
    let explorer = explorer(None);
    let write = |name: &str, value: &Value| std::fs::write(tables.join(name), value.to_string()).with_context(cannot);
    write("models.json", &explorer.models)?;
    for name in presets::NAMES {
        for (cache, index) in
            [("fp8", "fp4"), ("fp8", "fp8"), ("fp8", "bf16"), ("bf16", "fp4"), ("bf16", "fp8"), ("bf16", "bf16")]
        {
            let query = [("model", *name), ("cache", cache), ("index", index)];
            let query = query.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
            match (explorer.table)(&query) {
                Ok(table) => write(&format!("{name}-{cache}-{index}.json"), &table)?,
                Err(refused) => bail!("{}: {}", refused.field, refused.message),
            }
        }
    }
    eprintln!("the explorer is in {}; serve that folder with any web server", folder.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(pairs: &[(&str, &str)]) -> Result<Value, Refused> {
        let query = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        (explorer(Some(("mine".into(), None))).memory)(&query)
    }

    #[test]
    fn queries_are_counted_by_the_calculator_and_bad_values_are_named() {
        let counted =
            ask(&[("model", "flash"), ("context", "128K"), ("gpu_memory", "141000000000"), ("gpus", "2")]).unwrap();
        assert_eq!(counted["payload"]["total_bytes"], 463_834_112_u64);
        assert!(counted["fit"]["requests"].as_u64().unwrap() > 0);
        assert!(ask(&[("model", "mine")]).unwrap()["payload"]["total_bytes"].as_u64().unwrap() > 0);
        for (field, value) in [
            ("model", "testdata/tiny"),
            ("context", "0"),
            ("context", "2M"),
            ("context", "x"),
            ("cache", "fp2"),
            ("index", "int8"),
            ("users", "0"),
            ("gpu_memory", "much"),
        ] {
            let mut query = vec![("model", "flash")];
            query.retain(|(name, _)| *name != field);
            query.push((field, value));
            assert_eq!(ask(&query).unwrap_err().field, field, "{value}");
        }
        assert_eq!(ask(&[]).unwrap_err().field, "model");
    }
}
