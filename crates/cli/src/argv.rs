//! The command line before clap sees it, so that the spellings of `vllm serve` work here.
//!
//! Flag names may have underscores (`--kv_cache_dtype`), two-letter short flags become their long forms (`-tp`), and
//! `--attention-config`, dotted or as JSON, becomes `--index-cache-dtype`. Values are never touched. A key of
//! `--attention-config` that has no meaning here is refused with what to use.

use std::ffi::{OsStr, OsString};

use anyhow::{Result, anyhow, bail};

/// Rewrites `args` (program name first).
pub fn normalise(args: impl IntoIterator<Item = OsString>) -> Result<Vec<OsString>> {
    let mut args = args.into_iter();
    let mut out: Vec<OsString> = args.by_ref().take(1).collect();
    while let Some(arg) = args.next() {
        if arg == "--" {
            out.push(arg);
            out.extend(args.by_ref());
            break;
        }
        let Some((name, value)) = flag(&arg) else {
            out.push(arg);
            continue;
        };
        if let Some(key) = name.strip_prefix("--compilation-config.") {
            // Accepted and ignored like the whole option; `key=value` keeps it one argument.
            out.push(format!("--compilation-config={key}={}", value.unwrap_or_default()).into());
        } else if let Some(key) = name.strip_prefix("--attention-config.") {
            let value = value.or_else(|| args.next().and_then(|v| v.into_string().ok()));
            let value = value.ok_or_else(|| anyhow!("{name} needs a value, for example {name}=True"))?;
            out.extend(index_format(key, &value)?);
        } else if name == "--attention-config" {
            let value = value.or_else(|| args.next().and_then(|v| v.into_string().ok())).unwrap_or_default();
            let json: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&value).map_err(|e| {
                anyhow!("--attention-config {value}: not a JSON object ({e}); use --index-cache-dtype fp4|fp8|bf16")
            })?;
            for (key, value) in json {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                out.extend(index_format(&key.replace('_', "-"), &text)?);
            }
        } else {
            out.push(value.map_or_else(|| name.clone(), |v| format!("{name}={v}")).into());
        }
    }
    Ok(out)
}

/// Splits `--a_b=v` into `--a-b` and `v`; `None` for everything that is not a flag.
fn flag(arg: &OsStr) -> Option<(String, Option<String>)> {
    let text = arg.to_str()?;
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (text, None),
    };
    let short = [
        ("-tp", "--tensor-parallel-size"),
        ("-dp", "--data-parallel-size"),
        ("-cc", "--compilation-config"),
        ("-ac", "--attention-config"),
    ];
    if let Some((_, long)) = short.iter().find(|(s, _)| *s == name) {
        return Some((long.to_string(), value));
    }
    let body = name.strip_prefix("--")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_name = body.starts_with(|c: char| c.is_ascii_alphabetic()) && body.chars().all(plain);
    is_name.then(|| (format!("--{}", body.replace('_', "-")), value))
}

/// `--index-cache-dtype` for one key of vLLM's attention configuration; nothing where its default is meant.
fn index_format(key: &str, value: &str) -> Result<Option<OsString>> {
    let format = match (key, value.to_ascii_lowercase().as_str()) {
        ("use-fp4-indexer-cache", "true" | "1") | ("indexer-kv-dtype", "mxfp4" | "fp4") => "fp4",
        ("use-fp4-indexer-cache", "false" | "0") | ("indexer-kv-dtype", "fp8") => "fp8",
        ("indexer-kv-dtype", "bf16" | "bfloat16") => "bf16",
        ("indexer-kv-dtype", "auto") => return Ok(None),
        ("use-fp4-indexer-cache", _) => bail!("--attention-config.{key}={value}: use True or False"),
        ("indexer-kv-dtype", _) => bail!("--attention-config.{key}={value}: use mxfp4 or fp8"),
        _ => bail!(
            "--attention-config.{key} has no meaning here; only the indexer's cache format can be chosen, with \
             --index-cache-dtype fp4|fp8|bf16"
        ),
    };
    Ok(Some(format!("--index-cache-dtype={format}").into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &[&str]) -> Vec<String> {
        let args = std::iter::once("longwave").chain(line.iter().copied()).map(OsString::from);
        let out = normalise(args).unwrap();
        out.into_iter().skip(1).map(|a| a.into_string().unwrap()).collect()
    }

    fn refusal(line: &[&str]) -> String {
        normalise(line.iter().map(OsString::from)).unwrap_err().to_string()
    }

    #[test]
    fn underscores_in_names_become_dashes_and_values_stay() {
        assert_eq!(
            rewritten(&[
                "serve",
                "my_model",
                "--kv_cache_dtype",
                "fp8_e4m3",
                "--served_model_name=a_b=c_d",
                "-q",
                "x_y"
            ]),
            ["serve", "my_model", "--kv-cache-dtype", "fp8_e4m3", "--served-model-name=a_b=c_d", "-q", "x_y"]
        );
        assert_eq!(rewritten(&["kv", "--", "--a_b"]), ["kv", "--", "--a_b"]);
        assert_eq!(rewritten(&["chat", "--system", "--- a_b"]), ["chat", "--system", "--- a_b"]);
        assert_eq!(rewritten(&["-tp", "8", "-O3"]), ["--tensor-parallel-size", "8", "-O3"]);
        assert_eq!(rewritten(&["--compilation_config.mode=3"]), ["--compilation-config=mode=3"]);
    }

    #[test]
    fn attention_config_becomes_the_index_format() {
        for (line, format) in [
            (&["--attention-config.use-fp4-indexer-cache=True"][..], "fp4"),
            (&["--attention_config.use_fp4_indexer_cache=True"], "fp4"),
            (&["--attention_config.use_fp4_indexer_cache=False"], "fp8"),
            (&["--attention_config.use_fp4_indexer_cache", "true"], "fp4"),
            (&["--attention-config", r#"{"indexer_kv_dtype":"mxfp4"}"#], "fp4"),
            (&["--attention-config", r#"{"indexer_kv_dtype":"fp8"}"#], "fp8"),
            (&[r#"--attention_config={"use_fp4_indexer_cache": true}"#], "fp4"),
            (&["-ac", r#"{"use_fp4_indexer_cache": false}"#], "fp8"),
        ] {
            assert_eq!(rewritten(line), [format!("--index-cache-dtype={format}")], "{line:?}");
        }
        assert!(rewritten(&["--attention-config.indexer_kv_dtype=auto"]).is_empty());
    }

    #[test]
    fn attention_config_without_a_meaning_is_refused_with_what_to_use() {
        assert!(refusal(&["longwave", "--attention-config.backend=FLASH"]).contains("--index-cache-dtype"));
        assert!(refusal(&["longwave", "--attention-config", "fp4"]).contains("--index-cache-dtype"));
        assert!(refusal(&["longwave", "--attention-config.use_fp4_indexer_cache=maybe"]).contains("True or False"));
        assert!(refusal(&["longwave", "--attention-config", r#"{"indexer_kv_dtype":"int4"}"#]).contains("mxfp4"));
        assert!(refusal(&["longwave", "--attention-config.indexer_kv_dtype"]).contains("needs a value"));
    }
}
