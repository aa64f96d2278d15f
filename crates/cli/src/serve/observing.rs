//! Flags about what the server writes to its log.
//! Assumes that nobody's text belongs there unless somebody asked for it.

/// Flags of `longwave serve` about logs.
#[derive(clap::Args)]
#[command(next_help_heading = "Logs")]
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
