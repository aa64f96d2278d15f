//! The CPU backend of Longwave, and the oracle of every GPU kernel.
//!
//! `ops/` holds pure functions on slices, one per step of model.md, with a fixed order of every sum. The backend runs
//! them over whole steps; its logits do not depend on batch, chunk, thread count or instruction set.

pub mod backend;
pub mod cache;
pub mod forward;
pub mod numerics;
pub mod ops;
pub mod plan;
pub mod reads;
pub mod roofs;
pub mod scratch;
pub mod simd;
pub mod weights;

mod attention;
mod compressors;
mod drafts;
pub mod fingerprint;
mod moe;
mod mtp;
mod replay;
mod timers;
mod window;
mod work;
