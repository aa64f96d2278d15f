//! Tests of the engine through its public surface, on the simulated backend.

// Test code may stop at the first surprise.
#![allow(clippy::unwrap_used)]

mod contract;
mod cost;
mod handle;
mod prefix;
mod record_files;
mod requests;
mod simulation;
mod tiers;
mod world;
