//! Tests of the CPU backend in one binary.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod attention;
mod bounds;
mod drafts;
mod golden;
mod invariance;
mod replay;
mod rig;
mod rollback;
mod sampled;
mod served;
mod spy;
mod tiers;
mod timers;
