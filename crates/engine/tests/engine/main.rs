//! Tests of the engine through its public surface, on the simulated backend.

// Test code may stop at the first surprise.
#![allow(clippy::unwrap_used)]

mod allocations;
mod contract;
mod cost;
mod handle;
mod memory;
mod null;
mod preemption;
mod prefix;
mod replay;
mod requests;
mod simulation;
mod world;
