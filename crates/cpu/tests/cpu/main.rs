//! Tests of the CPU backend in one binary.

mod golden;
mod invariance;
mod rig;
mod served;
