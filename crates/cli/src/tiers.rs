//! Options of the tiers below the cache: host memory and a directory on disk.
//!
//! Takes vLLM's spelling of the host tier as well. Refuses sizes that hold nothing and a directory that cannot be used
//! before a model is loaded.

use std::path::PathBuf;

use anyhow::{Result, bail};
use longwave_engine::tier::{self, TierOptions};
use longwave_model::CacheLayout;

use crate::units;

/// Bytes of `--disk-cache` when only the directory is given.
const DISK_BYTES: u64 = 32 << 30;

/// Options of the tiers, shared by `serve` and `chat`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TierArgs {
    /// Directory that keeps what was computed of prompts and answers, so that a restarted server goes on with them. Made
    /// if it does not exist; of one server at a time.
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Most bytes in the cache directory, for example 100G; 32G if only the directory is given.
    #[arg(long, value_name = "SIZE", value_parser = units::bytes, requires = "cache_dir")]
    disk_cache: Option<u64>,
    /// Host memory for what has to leave the cache, for example 16G. 0 by default: on a CPU the cache itself is host
    /// memory, and --kv-cache-memory-bytes makes it larger without a second copy.
    #[arg(long, value_name = "SIZE", value_parser = units::bytes)]
    host_cache: Option<u64>,
    /// vLLM's --host-cache, in GiB.
    #[arg(long, value_name = "GIB", hide_short_help = true, conflicts_with = "host_cache")]
    kv_offloading_size: Option<f64>,
    /// native: records in host memory.
    #[arg(long, hide_short_help = true)]
    kv_offloading_backend: Option<String>,
}

impl TierArgs {
    /// Where the tiers are. Refuses what cannot work.
    pub fn check(&self, prefix_caching: bool) -> Result<TierOptions> {
        if let Some(backend) = self.kv_offloading_backend.as_deref().filter(|b| *b != "native") {
            bail!(
                "--kv-offloading-backend {backend}: only native is here; use it with --host-cache SIZE, and --cache-dir DIR for a disk"
            );
        }
        let host_bytes = match self.kv_offloading_size {
            Some(gib) if !(gib.is_finite() && gib > 0.0 && gib < (1u64 << 30) as f64) => {
                bail!("--kv-offloading-size {gib}: a number of GiB, for example 16; --host-cache takes 16G")
            }
            Some(gib) => (gib * (1u64 << 30) as f64) as u64,
            None => self.host_cache.unwrap_or(0),
        };
        if self.disk_cache == Some(0) {
            bail!("--disk-cache 0 keeps nothing; give it room, or leave --cache-dir out");
        }
        let options = TierOptions {
            host_bytes,
            directory: self.cache_dir.clone(),
            disk_bytes: self.disk_cache.unwrap_or(DISK_BYTES),
            ..TierOptions::default()
        };
        let any = options.host_bytes > 0 || options.directory.is_some();
        if any && !prefix_caching {
            bail!(
                "--cache-dir and --host-cache keep prefixes, and --no-enable-prefix-caching turns these off; leave one of them out"
            );
        }
        if let Some(directory) = &options.directory {
            // Taken again when the engine opens.
            drop(tier::lock(directory)?);
        }
        Ok(options)
    }
}

/// Refuses tiers that cannot hold the least that is ever reused of a model.
pub fn check_sizes(options: &TierOptions, layout: &CacheLayout) -> Result<()> {
    let least = layout.bytes(layout.long_lived_units()) + layout.bytes(layout.checkpoint_units());
    let disk = options.directory.as_ref().map(|_| options.disk_bytes);
    let host = Some(options.host_bytes).filter(|&n| n > 0);
    for (flag, size) in [("--host-cache", host), ("--disk-cache", disk)] {
        if let Some(size) = size.filter(|&n| n < least) {
            let (size, least) = (units::show_bytes(size), units::show_bytes(least));
            bail!("{flag} is {size}, and one block of 256 tokens with what is needed to go on behind it takes {least}");
        }
    }
    Ok(())
}

/// One line about the tiers of a running engine; `None` when there are none.
pub fn describe(options: &TierOptions, status: &tier::TiersStatus) -> Option<String> {
    let host = (options.host_bytes > 0).then(|| format!("{} of host memory", units::show_bytes(options.host_bytes)));
    let disk = options.directory.as_ref().map(|directory| {
        let (held, limit) = (units::show_bytes(status.disk.bytes), units::show_bytes(options.disk_bytes));
        let found = format!("{} records, {held} of {limit}", status.disk.records);
        let discarded = match status.discarded_files {
            0 => String::new(),
            n => format!(", {n} broken files removed"),
        };
        format!("{} ({found}{discarded})", directory.display())
    });
    let all: Vec<String> = host.into_iter().chain(disk).collect();
    (!all.is_empty()).then(|| format!("evicted prefixes go to {}", all.join(" and ")))
}
