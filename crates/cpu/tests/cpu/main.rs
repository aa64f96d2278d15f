//! Tests of the CPU backend in one binary.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod drafts;
mod golden;
mod invariance;
mod rig;
mod served;
mod spy;
mod tiers;
