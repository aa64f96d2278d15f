//! DeepSeek-V4 as data: what a checkpoint says and holds, the number formats it uses, and how large its cache is.
//!
//! Nothing here computes a model or starts a thread; the only I/O is reading checkpoint files. A configuration or a
//! tensor that this crate does not know is refused with a sentence that says what was found, never guessed.

pub mod checkpoint;
pub mod config;
pub mod digest;
pub mod floors;
pub mod formats;
pub mod geometry;
pub mod inventory;
pub mod memory;
pub mod payload;
pub mod presets;
pub mod rope;
pub mod tensors;

mod config_json;

pub use checkpoint::{Checkpoint, CheckpointError};
pub use config::{ConfigError, LayerKind, ModelConfig};
pub use geometry::{CacheFormats, CacheLayout, IndexFormat, MainFormat};
