//! Batches: many requests in a file, answered in the background, with files in and out on disk.
//!
//! OpenAI's `/v1/files` and `/v1/batches`, and the same work for `longwave batch`. Lines run through the server's own routes
//! at the lowest priorities. Survives a crash at any moment: what was answered is in the output file, once, and the rest is
//! answered after the next start. Assumes a directory of its own; refuses one that another server uses.

mod batches;
mod files;
mod journal;
mod line;
mod lines;
mod offline;
mod record;
mod run;
mod store;
mod validate;

pub(crate) use batches::routes as batch_routes;
pub(crate) use files::routes as file_routes;
pub use offline::{OfflineError, OfflineOptions, OfflineResult, check_file, run_file};
pub(crate) use run::serve;
pub use store::{BatchError, BatchOptions, Batches};
