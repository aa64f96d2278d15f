//! Flags about what the server writes to its log and what it measures.
//! Assumes that nobody's text belongs into a log unless somebody asked for it, and that speed comes before times.

/// Flags of `longwave serve` about logs and times.
#[derive(clap::Args)]
#[command(next_help_heading = "Logs and times")]
pub struct ObservingArgs {
    /// Do not log the line about the engine that comes every ten seconds while there is work.
    #[arg(long)]
    disable_log_stats: bool,
    /// Log the prompt of every request. Off by default: prompts are the users' texts.
    #[arg(long)]
    enable_log_requests: bool,
    /// Most characters of a logged prompt; all by default.
    #[arg(long, value_name = "N", requires = "enable_log_requests")]
    max_log_len: Option<usize>,
    /// Time the operators of steps (kernels on a GPU) while somebody looks at the explorer's live view or `longwave top`, which
    /// then show them. Whoever looks makes all requests slower: until 10 s after the last look, steps run without CUDA
    /// graphs and with a timer behind every operator. Answers stay the same.
    #[arg(long)]
    operator_times: bool,
    /// Not needed: HTTP requests are counted (GET /metrics) and not logged.
    #[arg(long, hide_short_help = true)]
    disable_uvicorn_access_log: bool,
    /// Not needed: /load always counts.
    #[arg(long, hide_short_help = true)]
    enable_server_load_tracking: bool,
}

impl ObservingArgs {
    /// Whether the line about the engine is wanted.
    pub fn log_stats(&self) -> bool {
        !self.disable_log_stats
    }

    /// Characters of each prompt to log, if any.
    pub fn log_requests(&self) -> Option<usize> {
        self.enable_log_requests.then(|| self.max_log_len.unwrap_or(usize::MAX))
    }

    /// Whether operators may be timed.
    pub fn operator_times(&self) -> bool {
        self.operator_times
    }

    /// What to say about flags without an effect.
    pub fn notes(&self) -> Vec<&'static str> {
        let mut notes = Vec::new();
        if self.disable_uvicorn_access_log {
            notes.push("--disable-uvicorn-access-log is not needed: HTTP requests are not logged one by one");
        }
        if self.enable_server_load_tracking {
            notes.push("--enable-server-load-tracking is not needed: /load always counts");
        }
        notes
    }
}
