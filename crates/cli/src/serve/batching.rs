//! Flags about files and batches.
//! Assumes that the directory is on a disk of its own or large enough; refuses limits that hold nothing.

use std::path::PathBuf;

use anyhow::{Result, bail};
use longwave_serve::{BatchOptions, Batches};

use crate::units;

/// Flags of `longwave serve` about files and batches.
#[derive(clap::Args)]
#[command(next_help_heading = "Batches")]
pub struct BatchingArgs {
    /// Directory for /v1/files and /v1/batches; without it there are none. Made if it does not exist. Batches that were
    /// unfinished go on at the next start.
    #[arg(long, value_name = "DIR")]
    batch_dir: Option<PathBuf>,
    /// Lines of batches that run at once; half of --max-num-seqs by default.
    #[arg(long, value_name = "N", requires = "batch_dir", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch_concurrency: Option<u32>,
    /// Largest file that may be uploaded.
    #[arg(long, value_name = "SIZE", default_value = "200M", value_parser = units::bytes)]
    batch_max_file_bytes: u64,
    /// Most bytes of all files together.
    #[arg(long, value_name = "SIZE", default_value = "20G", value_parser = units::bytes)]
    batch_max_bytes: u64,
}

impl BatchingArgs {
    /// The directory, open, if there is one.
    pub fn open(&self) -> Result<Option<Batches>> {
        let Some(directory) = self.batch_dir.clone() else { return Ok(None) };
        if self.batch_max_file_bytes == 0 || self.batch_max_bytes < self.batch_max_file_bytes {
            bail!("--batch-max-file-bytes must be above 0, and --batch-max-bytes at least as large");
        }
        let batches = Batches::open(BatchOptions {
            directory,
            concurrency: self.batch_concurrency.unwrap_or(0) as usize,
            max_file_bytes: self.batch_max_file_bytes,
            max_bytes: self.batch_max_bytes,
        })?;
        Ok(Some(batches))
    }
}
