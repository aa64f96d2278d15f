//! The CUDA backend of Longwave: driver layer and kernels. The layers of the model come next.
//!
//! Everything foreign is loaded at run time: the program starts on a machine without CUDA and says what is missing.
//! Kernels are compiled when this crate is built, one cubin per file and architecture; there is no code for other GPUs,
//! so a GPU that they do not fit is refused with its name.

pub mod batch;
pub mod cubins;
pub mod driver;
pub mod lists;
pub mod loader;
pub mod ops;
pub mod pools;
pub mod scratch;
pub mod source;
pub mod weights;
