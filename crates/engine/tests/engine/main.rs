//! Tests of the engine through its public surface, on the simulated backend.

// Test code may stop at the first surprise.
#![allow(clippy::unwrap_used)]

mod allocations;
mod constraint;
mod contract;
mod cost;
mod handle;
mod memory;
mod null;
mod preemption;
mod prefix;
mod record_files;
mod replay;
mod requests;
mod sessions;
mod simulation;
mod tiers;
mod view;
mod world;
