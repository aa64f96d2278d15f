//! Options of a model and its cache, as most subcommands take them, in vLLM's spelling where it has one.
//!
//! Says what was asked for and looks at no file and no machine. Refuses names and numbers that mean nothing here and says
//! what to write; whether they fit the model is seen when it is opened.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use longwave_cpu::numerics::Profile;
use longwave_model::{CacheFormats, IndexFormat, MainFormat};

use crate::units;

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// The best one that this machine and program have.
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// Where weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// The checkpoint.
    Auto,
    /// The same.
    Safetensors,
    /// Random numbers.
    Dummy,
}

/// Options of the model and its cache, shared by `serve` and `chat`.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// Folder of a DeepSeek-V4 checkpoint; without it the embedded tiny model runs.
    pub model: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendName,
    /// Where the weights come from: the checkpoint (auto or safetensors), or random numbers of the same shapes, for
    /// measurements on a GPU (dummy; MODEL may then be a configuration's name, for example flash).
    #[arg(long, value_enum, default_value = "auto")]
    pub load_format: LoadFormat,
    /// GPUs that share the model, from the first on: each has its part of query heads and experts, and a whole cache.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub tensor_parallel_size: u32,
    /// With --load-format dummy: keep so many layers, so that a large model fits one GPU.
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Format of the main cache: fp8 (or auto, fp8_e4m3, fp8_ds_mla) or bf16.
    #[arg(long, default_value = "auto", value_parser = main_format)]
    pub kv_cache_dtype: MainFormat,
    /// Format of the indexer cache: fp4 (or auto), fp8 or bf16.
    #[arg(long, default_value = "auto", value_parser = index_format)]
    pub index_cache_dtype: IndexFormat,
    /// Largest context of a request in tokens, for example 128K; by default the model's own.
    #[arg(long, value_parser = units::tokens)]
    pub max_model_len: Option<u32>,
    /// Requests that run at once.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_num_seqs: u32,
    /// Tokens of one step, prefill and decode together; by default 512 on the CPU and 2048 on a GPU. More make long prompts
    /// faster, and other requests wait longer for a step.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_num_batched_tokens: Option<u32>,
    /// Bytes for the cache, for example 8G; by default a quarter of the free memory, or what weights leave of a GPU's, and at
    /// most what the context and the number of requests can use.
    #[arg(long, value_parser = units::bytes)]
    pub kv_cache_memory_bytes: Option<u64>,
    /// Rounding of intermediate values on the CPU: serving (as GPU engines round) or reference (as the released program).
    #[arg(long, default_value = "serving", value_parser = profile)]
    pub numerics: Profile,
    /// Compute every prompt from its first token instead of reusing what earlier ones left in the cache.
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    /// Tokens between checkpoints inside long prompts; 0 keeps those at the ends of prompts and answers only.
    #[arg(long, default_value_t = 8192)]
    pub checkpoint_interval: u32,
    /// Host memory for windows and state of requests that give up their seats to more urgent ones (`priority` in a
    /// request), for example 2G; with 0 they are computed again.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::bytes)]
    pub spill_memory: u64,
    /// vLLM's --spill-memory, in GiB.
    #[arg(long, value_name = "GIB", hide_short_help = true, conflicts_with = "spill_memory", value_parser = gibibytes)]
    pub swap_space: Option<u64>,
    /// Seconds without a completed step after which /health is bad and waiting requests fail; 0 waits for ever.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub stall_timeout: u32,
    /// Tokens that the model's MTP module drafts per step, 0 to 7. Drafts change the speed, never the tokens.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=MOST_DRAFTS))]
    pub num_speculative_tokens: u32,
    /// The same as vLLM writes it: {"method": "mtp", "num_speculative_tokens": 3}.
    #[arg(long, value_parser = speculative_config, conflicts_with = "num_speculative_tokens")]
    pub speculative_config: Option<u32>,
}

const MOST_DRAFTS: i64 = longwave_model::geometry::MAX_DRAFTS as i64;

impl ModelArgs {
    /// Drafts per sequence and step.
    pub fn drafts(&self) -> u32 {
        self.speculative_config.unwrap_or(self.num_speculative_tokens)
    }
}

/// A number of GiB as bytes.
fn gibibytes(text: &str) -> Result<u64, String> {
    units::bytes(&format!("{text}G")).map_err(|_| format!("{text:?} is not a number of GiB; write for example 4"))
}

/// Reads vLLM's JSON. What is not known here is refused: it would have changed something there.
fn speculative_config(text: &str) -> Result<u32, String> {
    let form = r#"{"method": "mtp", "num_speculative_tokens": 3}"#;
    let json: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|e| format!("it is not a JSON object ({e}); write {form}"))?;
    if let Some(key) = json.keys().find(|k| !["method", "num_speculative_tokens"].contains(&k.as_str())) {
        return Err(format!("the key {key:?} has no meaning here; write {form}"));
    }
    match json.get("method").and_then(|v| v.as_str()) {
        Some("mtp" | "deepseek_mtp") => {}
        Some(other) => {
            return Err(format!(
                "the method {other:?} is not supported; mtp is, which drafts with the checkpoint's own module"
            ));
        }
        None => return Err(format!("the method is missing; write {form}")),
    }
    let count = json.get("num_speculative_tokens").and_then(|v| v.as_i64());
    let count = count.filter(|n| (0..=MOST_DRAFTS).contains(n)).and_then(|n| u32::try_from(n).ok());
    count.ok_or_else(|| format!("num_speculative_tokens must be a number from 0 to {MOST_DRAFTS}"))
}

/// Format of the main cache, by the names of `--kv-cache-dtype`.
pub fn main_format(name: &str) -> Result<MainFormat, String> {
    match name {
        "auto" | "fp8" | "fp8_e4m3" | "fp8_ds_mla" => Ok(MainFormat::Fp8),
        "bf16" | "bfloat16" => Ok(MainFormat::Bf16),
        _ => Err("DeepSeek-V4's cache is fp8 (584 bytes an entry) or bf16; use fp8".into()),
    }
}

/// Format of the index keys, by the names of `--index-cache-dtype`.
pub fn index_format(name: &str) -> Result<IndexFormat, String> {
    match name {
        "auto" | "fp4" | "mxfp4" => Ok(IndexFormat::Fp4),
        "fp8" => Ok(IndexFormat::Fp8),
        "bf16" | "bfloat16" => Ok(IndexFormat::Bf16),
        _ => Err("index keys are fp4, fp8 or bf16; fp4 is what the model was trained with".into()),
    }
}

fn profile(name: &str) -> Result<Profile, String> {
    Profile::by_name(name).filter(|p| p.rounds()).ok_or_else(|| "numerics are serving or reference".into())
}

/// Cache formats that were asked for.
pub fn formats(args: &ModelArgs) -> CacheFormats {
    CacheFormats { main: args.kv_cache_dtype, index: args.index_cache_dtype }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speculative_config_is_read_or_says_what_to_write() {
        assert_eq!(speculative_config(r#"{"method":"mtp","num_speculative_tokens":3}"#), Ok(3));
        assert_eq!(speculative_config(r#"{"num_speculative_tokens": 0, "method": "deepseek_mtp"}"#), Ok(0));
        let refused = |text: &str, part: &str| {
            let e = speculative_config(text).unwrap_err();
            assert!(e.contains(part), "{text}: {e}");
        };
        refused(r#"{"method":"ngram","num_speculative_tokens":3}"#, "\"ngram\" is not supported; mtp is");
        refused(r#"{"num_speculative_tokens":3}"#, "the method is missing");
        refused(r#"{"method":"mtp"}"#, "a number from 0 to 7");
        refused(r#"{"method":"mtp","num_speculative_tokens":8}"#, "a number from 0 to 7");
        refused(r#"{"method":"mtp","num_speculative_tokens":"3"}"#, "a number from 0 to 7");
        refused(r#"{"method":"mtp","num_speculative_tokens":3,"model":"x"}"#, "\"model\" has no meaning here");
        refused("mtp", "not a JSON object");
    }
}
