//! Flags about who may ask: keys, limits per key, TLS, other origins.
//!
//! Keys come from flags, a file or the environment; the environment counts only when neither flag is given, as in vLLM.
//! Refuses empty keys, half a TLS configuration and origins that no browser sends. Never prints a key.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use longwave_serve::{ApiKeys, SecurityOptions, TlsFiles};

use crate::units;

/// Variables that may hold a key, the first one that is set counts.
const VARIABLES: [&str; 2] = ["LONGWAVE_API_KEY", "VLLM_API_KEY"];

/// Flags of `longwave serve` about who may ask.
#[derive(clap::Args)]
#[command(next_help_heading = "Security")]
pub struct SecurityArgs {
    /// A key that clients must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`; may be given several times. Other
    /// users of the machine can see it in the list of processes: prefer --api-key-file. Without it LONGWAVE_API_KEY or
    /// VLLM_API_KEY counts.
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with one key per line; lines that begin with # are comments.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Most requests of one key that run at once.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_concurrent_per_key: Option<u32>,
    /// Most requests of one key in a minute.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests_per_minute_per_key: Option<u32>,
    /// Keep cached prefixes of keys apart, so that nobody can find out by timing what another key has asked. Texts that
    /// several keys share are then computed once for each.
    #[arg(long)]
    tenant_isolation: bool,
    /// Certificate chain in PEM form; together with --ssl-keyfile it turns TLS on.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    ssl_certfile: Option<PathBuf>,
    /// Private key in PEM form.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    ssl_keyfile: Option<PathBuf>,
    /// Web pages whose scripts may ask, for example https://chat.example.org; several times, or a JSON list as in vLLM.
    /// "*" is all pages. None by default.
    #[arg(long, value_name = "ORIGIN")]
    allowed_origins: Vec<String>,
    /// Largest headers of a request.
    #[arg(long, value_name = "SIZE", default_value = "32K", value_parser = units::bytes)]
    max_header_bytes: u64,
    /// Seconds in which the head of a request must arrive; idle connections are closed after it as well.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    header_timeout: u64,
    /// Longest pause inside the body of a request, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    body_timeout: u64,
}

impl SecurityArgs {
    /// What the server needs. Refuses what cannot work.
    pub fn check(&self) -> Result<SecurityOptions> {
        if !(4096..=1 << 20).contains(&self.max_header_bytes) {
            bail!("--max-header-bytes {} must be between 4K and 1M", self.max_header_bytes);
        }
        let tls = self.ssl_certfile.clone().zip(self.ssl_keyfile.clone());
        Ok(SecurityOptions {
            keys: self.keys(|name| std::env::var(name).ok())?,
            max_concurrent_per_key: self.max_concurrent_per_key,
            requests_per_minute_per_key: self.requests_per_minute_per_key,
            tenant_isolation: self.tenant_isolation,
            allowed_origins: origins(&self.allowed_origins)?,
            tls: tls.map(|(certificates, key)| TlsFiles { certificates, key }),
            max_header_bytes: self.max_header_bytes as usize,
            header_timeout: Duration::from_secs(self.header_timeout),
            body_timeout: Duration::from_secs(self.body_timeout),
        })
    }

    fn keys(&self, variable: impl Fn(&str) -> Option<String>) -> Result<ApiKeys> {
        if self.api_key.is_empty() && self.api_key_file.is_none() {
            let Some((name, key)) = VARIABLES.iter().find_map(|name| Some((name, variable(name)?))) else {
                return Ok(ApiKeys::default());
            };
            return ApiKeys::new([key.as_str()]).with_context(|| format!("the variable {name}"));
        }
        let text = self.api_key_file.as_deref().map(read).transpose()?.unwrap_or_default();
        let of_file: Vec<&str> = ApiKeys::lines(&text).collect();
        if let Some(path) = self.api_key_file.as_deref().filter(|_| of_file.is_empty()) {
            bail!("--api-key-file {}: there is no key in it; write one per line", path.display());
        }
        // Apart, so that an error names the place in its own source.
        ApiKeys::new(self.api_key.iter().map(String::as_str)).context("--api-key")?;
        ApiKeys::new(of_file.iter().copied()).context("--api-key-file")?;
        Ok(ApiKeys::new(self.api_key.iter().map(String::as_str).chain(of_file))?)
    }
}

fn read(path: &Path) -> Result<String> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        if std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0) {
            tracing::warn!("every user of this machine can read the keys in {}; chmod o-r it", path.display());
        }
    }
    std::fs::read_to_string(path).with_context(|| format!("--api-key-file {}", path.display()))
}

/// Each value is an origin or a JSON list of them.
fn origins(values: &[String]) -> Result<Vec<String>> {
    let mut origins = Vec::new();
    for value in values {
        if value.trim_start().starts_with('[') {
            let list: Vec<String> = serde_json::from_str(value)
                .with_context(|| format!("--allowed-origins {value}: write a JSON list of texts, or one origin"))?;
            origins.extend(list);
        } else {
            origins.push(value.clone());
        }
    }
    for origin in &origins {
        let host = origin.split_once("://").map(|(_, host)| host);
        let plain = |host: &str| !host.is_empty() && host.chars().all(|c| c.is_ascii_graphic() && !"/?#*".contains(c));
        if origin != "*" && origin != "null" && !host.is_some_and(plain) {
            bail!("--allowed-origins {origin}: an origin is scheme://host or scheme://host:port without a path, or *");
        }
    }
    Ok(origins)
}

/// What a user should know before the server listens.
pub fn warnings(host: &str, options: &SecurityOptions) -> Vec<String> {
    let mut warnings = Vec::new();
    let local = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    if !local && options.keys.is_empty() {
        warnings.push(format!(
            "{host} is reachable from other machines and no API key is set: whoever reaches the port can use the model; \
             set --api-key-file, or listen on {} or {}",
            Ipv4Addr::LOCALHOST,
            Ipv6Addr::LOCALHOST
        ));
    }
    if !local && options.tls.is_none() && !options.keys.is_empty() {
        warnings.push(format!(
            "API keys and texts travel unencrypted to {host}; set --ssl-certfile and --ssl-keyfile, or put a proxy with TLS \
             in front"
        ));
    }
    if options.keys.is_empty() && options.tenant_isolation {
        warnings.push("--tenant-isolation has no effect without API keys".to_owned());
    }
    if options.keys.is_empty() && options.allowed_origins.iter().any(|origin| origin == "*") {
        warnings.push(
            "with --allowed-origins \"*\" and no API key, every web page that a user of this machine opens can use the model"
                .to_owned(),
        );
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SecurityArgs,
    }

    fn args(line: &[&str]) -> SecurityArgs {
        Line::parse_from(std::iter::once(&"x").chain(line)).args
    }

    #[test]
    fn keys_come_from_flags_and_file_or_else_from_the_environment() {
        let set = |name: &str| (name == "VLLM_API_KEY").then(|| "of-the-environment".to_owned());
        let keys = |line: &[&str]| args(line).keys(set).unwrap();
        assert_eq!(keys(&[]), ApiKeys::new(["of-the-environment"]).unwrap());
        assert_eq!(keys(&["--api-key", "a", "--api-key", "b"]), ApiKeys::new(["a", "b"]).unwrap());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# ours\nc\n\nd\n").unwrap();
        let path = file.path().to_str().unwrap();
        assert_eq!(keys(&["--api-key-file", path, "--api-key", "a"]), ApiKeys::new(["a", "c", "d"]).unwrap());
        std::fs::write(file.path(), "# none\n").unwrap();
        let error = args(&["--api-key-file", path]).keys(set).unwrap_err().to_string();
        assert!(error.contains("no key in it"), "{error}");
        let error = format!("{:#}", args(&["--api-key", "two words"]).keys(set).unwrap_err());
        assert!(error.contains("--api-key") && !error.contains("two words"), "{error}");
        assert!(args(&["--api-key-file", "/nowhere"]).keys(set).unwrap_err().to_string().contains("/nowhere"));
    }

    #[test]
    fn origins_are_repeated_or_a_list() {
        let given = |values: &[&str]| origins(&values.iter().map(|v| v.to_string()).collect::<Vec<_>>());
        assert_eq!(given(&[r#"["*"]"#]).unwrap(), ["*"]);
        assert_eq!(given(&["https://a.example", r#"["http://b:3000", "null"]"#]).unwrap().len(), 3);
        for bad in ["a.example", "https://a.example/path", "https://*.example", "", "[1]", "[\"x\""] {
            assert!(given(&[bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_open_port_without_a_key_is_warned_about() {
        let none = SecurityOptions::default();
        for host in ["127.0.0.1", "::1", "localhost"] {
            assert!(warnings(host, &none).is_empty(), "{host}");
        }
        assert!(warnings("0.0.0.0", &none)[0].contains("no API key is set"));
        let keys = SecurityOptions { keys: ApiKeys::new(["a"]).unwrap(), ..none };
        assert!(warnings("0.0.0.0", &keys)[0].contains("unencrypted"));
    }

    #[test]
    fn one_half_of_tls_is_refused() {
        let half = Line::try_parse_from(["x", "--ssl-certfile", "a"]).err().map(|error| error.to_string());
        assert!(half.is_some_and(|error| error.contains("--ssl-keyfile")));
    }
}
