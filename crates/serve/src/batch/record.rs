//! What is remembered of a file and of a batch: as kept on disk, and as shown to clients.
//! Times are Unix seconds. Shows nothing of other tenants: whoever looks something up compares the tenant first.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::server::unix_seconds;

/// A file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct FileRecord {
    pub(super) id: String,
    pub(super) tenant: u64,
    pub(super) bytes: u64,
    pub(super) created_at: u64,
    pub(super) filename: String,
    /// `batch` or `batch_output`.
    pub(super) purpose: String,
}

impl FileRecord {
    pub(super) fn json(&self) -> Value {
        json!({
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at, "expires_at": null,
            "filename": self.filename, "purpose": self.purpose, "status": "processed", "status_details": null,
        })
    }
}

/// How far a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Completed,
    Expired,
    Cancelling,
    Cancelled,
}

impl State {
    /// Whether nothing more happens.
    pub(super) fn is_final(self) -> bool {
        matches!(self, State::Failed | State::Completed | State::Expired | State::Cancelled)
    }
}

/// What is wrong with an input file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct LineError {
    pub(super) code: String,
    pub(super) message: String,
    pub(super) param: Option<String>,
    /// From 1.
    pub(super) line: Option<u64>,
}

/// Lines of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Counts {
    pub(super) total: u64,
    pub(super) completed: u64,
    pub(super) failed: u64,
}

/// A batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct BatchRecord {
    pub(super) id: String,
    pub(super) tenant: u64,
    pub(super) endpoint: String,
    pub(super) input_file_id: String,
    pub(super) completion_window: String,
    pub(super) metadata: Option<Map<String, Value>>,
    pub(super) state: State,
    pub(super) counts: Counts,
    pub(super) errors: Vec<LineError>,
    /// Names of the files with good and bad answers; shown when they exist.
    pub(super) output: String,
    pub(super) failures: String,
    pub(super) has_output: bool,
    pub(super) has_failures: bool,
    pub(super) created_at: u64,
    pub(super) expires_at: u64,
    /// When it reached a state, in the order of time.
    pub(super) reached: Vec<(State, u64)>,
}

impl BatchRecord {
    /// Moves on to a state.
    pub(super) fn reach(&mut self, state: State) {
        self.state = state;
        self.reached.push((state, unix_seconds()));
    }

    pub(super) fn json(&self) -> Value {
        let at = |state| self.reached.iter().find(|(reached, _)| *reached == state).map(|(_, at)| at);
        let errors = (!self.errors.is_empty()).then(|| json!({"object": "list", "data": self.errors}));
        json!({
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "errors": errors,
            "input_file_id": self.input_file_id, "completion_window": self.completion_window, "status": self.state,
            "output_file_id": self.has_output.then_some(&self.output),
            "error_file_id": self.has_failures.then_some(&self.failures),
            "created_at": self.created_at, "in_progress_at": at(State::InProgress), "expires_at": self.expires_at,
            "finalizing_at": at(State::Finalizing), "completed_at": at(State::Completed),
            "failed_at": at(State::Failed), "expired_at": at(State::Expired),
            "cancelling_at": at(State::Cancelling), "cancelled_at": at(State::Cancelled),
            "request_counts": self.counts, "metadata": self.metadata,
        })
    }
}
