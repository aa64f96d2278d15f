//! What the prefix cache did for a request, and why it did no more.
//!
//! Plain data for logs and clients; printed, it is one sentence. Positions count prompt tokens from 0. It tells a tenant
//! nothing about the texts of others: prompts with another salt are never compared.

use std::fmt;

use longwave_model::geometry::{Bucket, LOGICAL_BLOCK};

/// What was reused of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixReport {
    /// Prompt tokens that were not computed again in any layer.
    pub cached_tokens: u32,
    /// Prompt tokens behind them that some layers compute again, to rebuild windows where no checkpoint was left.
    pub replayed_tokens: u32,
    /// Of them, those that came back from host memory.
    pub host_tokens: u32,
    /// Of them, those that came back from disk.
    pub disk_tokens: u32,
    /// Prompt tokens whose long-lived blocks were found; more than `cached_tokens` when a checkpoint was missing.
    pub matched_tokens: u32,
    /// Position of the first token that differs from the closest cached text behind `matched_tokens`, if there is one.
    pub first_difference: Option<u32>,
    /// What ended the reuse.
    pub ended_by: PrefixEnd,
}

/// Why no more of a prompt was reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefixEnd {
    /// The prefix cache is off.
    #[default]
    Off,
    /// Logits of every position are asked for, so every position is computed.
    EveryPositionWanted,
    /// The prompt is not longer than a block, the least that is reused.
    TooShort,
    /// Nothing is cached for this tenant.
    Empty,
    /// No cached text begins with the prompt's first block.
    NoSuchPrefix,
    /// A cached text goes on differently.
    Diverged,
    /// The cached text was no longer.
    CachedTextEnds,
    /// The next block was cached and had to go.
    Evicted {
        /// The pool that needed room.
        pool: Bucket,
    },
    /// The blocks are there; no window and compressor state was kept where they end.
    CheckpointMissing,
    /// The blocks are there; window and compressor state had to go.
    CheckpointEvicted {
        /// The pool that needed room.
        pool: Bucket,
    },
    /// All of the prompt that can be reused was reused.
    PromptEnd,
}

impl PrefixEnd {
    /// Its name in reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            PrefixEnd::Off => "off",
            PrefixEnd::EveryPositionWanted => "every_position_wanted",
            PrefixEnd::TooShort => "too_short",
            PrefixEnd::Empty => "empty",
            PrefixEnd::NoSuchPrefix => "no_such_prefix",
            PrefixEnd::Diverged => "diverged",
            PrefixEnd::CachedTextEnds => "cached_text_ends",
            PrefixEnd::Evicted { .. } => "evicted",
            PrefixEnd::CheckpointMissing => "checkpoint_missing",
            PrefixEnd::CheckpointEvicted { .. } => "checkpoint_evicted",
            PrefixEnd::PromptEnd => "prompt_end",
        }
    }
}

impl fmt::Display for PrefixReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cached, matched) = (self.cached_tokens, self.matched_tokens);
        write!(f, "{cached} prompt tokens came from the cache")?;
        match (self.host_tokens, self.disk_tokens) {
            (0, 0) => {}
            (host, 0) => write!(f, " ({host} of them from host memory)")?,
            (0, disk) => write!(f, " ({disk} of them from disk)")?,
            (host, disk) => write!(f, " ({host} of them from host memory, {disk} from disk)")?,
        }
        match self.replayed_tokens {
            0 => write!(f, ": "),
            replayed => write!(f, " and {replayed} more were replayed to rebuild the windows behind token {matched}: "),
        }?;
        match self.ended_by {
            PrefixEnd::Off => write!(f, "it is off"),
            PrefixEnd::EveryPositionWanted => write!(f, "the logits of every position are asked for"),
            PrefixEnd::TooShort => {
                write!(f, "the least prompt that can reuse anything has {} tokens", LOGICAL_BLOCK + 1)
            }
            PrefixEnd::Empty => write!(f, "it holds nothing for this tenant"),
            PrefixEnd::NoSuchPrefix => write!(f, "no cached text begins with the first {LOGICAL_BLOCK} tokens"),
            PrefixEnd::Diverged => write!(f, "no cached text goes on like the block behind token {matched}"),
            PrefixEnd::CachedTextEnds => write!(f, "the cached text ends there"),
            PrefixEnd::Evicted { pool } => {
                write!(f, "the block behind token {matched} was evicted when the {} pool was full", pool.name())
            }
            PrefixEnd::CheckpointMissing => {
                write!(f, "{matched} match, but no window and compressor state was kept where they end")
            }
            PrefixEnd::CheckpointEvicted { pool } => write!(
                f,
                "{matched} match, but the window and compressor state where they end was evicted when the {} pool was full",
                pool.name()
            ),
            PrefixEnd::PromptEnd => write!(f, "all that a prompt of this length can reuse"),
        }?;
        match self.first_difference {
            Some(position) => write!(f, "; the closest cached text differs first at token {position}"),
            None => Ok(()),
        }
    }
}

/// What the prefix cache did so far and holds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixStatus {
    /// Requests that were looked up, once each.
    pub queries: u64,
    /// Their prompt tokens.
    pub query_tokens: u64,
    /// Of the requests, those that reused something.
    pub hits: u64,
    /// Prompt tokens that were not computed again.
    pub hit_tokens: u64,
    /// Of the requests, those whose windows had to be rebuilt.
    pub replays: u64,
    /// Prompt tokens that were replayed for it.
    pub replayed_tokens: u64,
    /// Of them, those that came back from host memory.
    pub host_tokens: u64,
    /// Of them, those that came back from disk.
    pub disk_tokens: u64,
    /// Blocks of tokens that are cached.
    pub nodes: u64,
    /// Checkpoints that are cached.
    pub checkpoints: u64,
    /// Blocks evicted to make room.
    pub evicted_nodes: u64,
    /// Checkpoints evicted to make room.
    pub evicted_checkpoints: u64,
    /// Checkpoints of a running answer that gave way to a later one of the same answer.
    pub replaced_checkpoints: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_sentence() {
        let report = PrefixReport {
            cached_tokens: 512,
            replayed_tokens: 0,
            matched_tokens: 768,
            first_difference: Some(800),
            ended_by: PrefixEnd::CheckpointEvicted { pool: Bucket::Large },
            ..PrefixReport::default()
        };
        assert_eq!(
            report.to_string(),
            "512 prompt tokens came from the cache: 768 match, but the window and compressor state where they end was \
             evicted when the large pool was full; the closest cached text differs first at token 800"
        );
        let replayed =
            PrefixReport { cached_tokens: 389, replayed_tokens: 635, matched_tokens: 1024, ..PrefixReport::default() };
        assert_eq!(
            PrefixReport { ended_by: PrefixEnd::PromptEnd, ..replayed }.to_string(),
            "389 prompt tokens came from the cache and 635 more were replayed to rebuild the windows behind token 1024: \
             all that a prompt of this length can reuse"
        );
        let report = PrefixReport { cached_tokens: 512, disk_tokens: 256, ..PrefixReport::default() };
        assert!(report.to_string().starts_with("512 prompt tokens came from the cache (256 of them from disk): "));
        assert_eq!(PrefixReport::default().to_string(), "0 prompt tokens came from the cache: it is off");
    }
}
