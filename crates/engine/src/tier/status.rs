//! What the tiers did so far and hold now.
//!
//! Plain data for logs and metrics. Counts start at zero when an engine is opened; what a restarted engine finds on disk
//! is in `records` and `bytes`.

/// One tier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierStatus {
    /// Most bytes that it may hold; 0 when there is no such tier.
    pub limit_bytes: u64,
    /// Bytes that it holds.
    pub bytes: u64,
    /// Records that it holds: cached blocks and checkpoints.
    pub records: u64,
    /// Records written to it.
    pub stored: u64,
    /// Records that became cached blocks again.
    pub restored: u64,
    /// Records that were not written: their blocks were evicted before there was time, or they are larger than the tier.
    pub skipped: u64,
    /// Writes and reads that failed, reads that took too long and records that were not what they should be.
    pub failed: u64,
    /// Records that gave way to others.
    pub evicted: u64,
}

/// Both tiers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TiersStatus {
    /// Host memory.
    pub host: TierStatus,
    /// Disk.
    pub disk: TierStatus,
    /// Files of ours that were removed at opening: cut off, changed or left by a writer that died.
    pub discarded_files: u64,
    /// Requests that wait for records to be read from disk.
    pub loading: u32,
    /// Published blocks and checkpoints that are still to be copied to a tier.
    pub pending: u64,
    /// The last failure of the disk.
    pub disk_fault: Option<String>,
    /// Whether writing to the disk was given up; what is there is still read.
    pub disk_read_only: bool,
}
