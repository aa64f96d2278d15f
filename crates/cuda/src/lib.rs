//! The CUDA backend of Longwave: the model's steps on a GPU behind the seam of the engine.
//!
//! Everything foreign is loaded at run time: the program starts on a machine without CUDA and says what is missing.
//! Kernels are compiled when this crate is built, one cubin per file and architecture; there is no code for other GPUs,
//! so a GPU that they do not fit is refused with its name.

mod attention;
pub mod backend;
pub mod batch;
mod beside;
pub mod choices;
pub mod cubins;
pub mod drafts;
pub mod driver;
#[cfg(test)]
mod emulated;
pub mod fit;
pub mod forward;
pub mod graphs;
pub mod lists;
pub mod loader;
pub mod meeting;
pub mod mtp;
pub mod ops;
pub mod pools;
mod ranks;
pub mod roofs;
pub mod scratch;
pub mod source;
pub mod split;
pub mod stepper;
pub mod timers;
pub mod weights;
mod worker;
