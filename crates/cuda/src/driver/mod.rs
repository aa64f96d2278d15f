//! A thin layer over the CUDA driver: contexts, streams, events, graphs, memory, launches.
//!
//! Raw bindings underneath, resolved when they are first called. One thread owns a GPU: nothing here is `Send`. Memory is
//! taken once, when a backend opens. Every error names the call and what it was for.

mod alarm;
mod context;
mod error;
mod graph;
mod launch;
mod memory;
mod module;
mod stream;
mod tensor_map;
pub mod timeline;

pub use alarm::{Alarm, Bell};
pub use context::{Context, Gpu, Missing, can_reach, probe};
pub use error::DriverError;
pub use graph::Graph;
pub use launch::{Argument, Grid};
pub use memory::{Arena, DeviceSlice, Element, Pinned};
pub use module::{Kernel, Module};
pub use stream::{Event, Stream};
pub use tensor_map::TensorMap;
