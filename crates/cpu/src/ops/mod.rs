//! The steps of model.md as pure functions on slices. They are the oracle of every GPU kernel.
//!
//! Every sum has one order, whatever the number of rows around it: dot products in sixteen lanes and a fixed tree,
//! weighted sums of rows from the first row to the last. Shapes are in the docs; a wrong shape panics.

pub mod attend;
pub mod compress;
pub mod dots;
pub mod expert;
pub mod hadamard;
pub mod index;
pub mod linear;
pub mod matrix;
pub mod mhc;
pub mod noise;
pub mod norm;
pub mod penalties;
pub mod rope;
pub mod router;
pub mod rows;
pub mod sample;
