//! Requests, blocks and time: the scheduler and the hybrid cache manager of Longwave.
//!
//! This crate decides what is computed when and where its cache rows live. It holds no tensor, opens no file or socket,
//! knows no async runtime and no CUDA type; it builds and tests in seconds. Computing is a [`step::Backend`].

pub mod request;
pub mod step;
pub mod tables;
