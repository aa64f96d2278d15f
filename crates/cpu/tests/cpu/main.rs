//! Tests of the CPU backend in one binary.

#![allow(clippy::unwrap_used)]

mod golden;
mod invariance;
mod rig;
mod served;
