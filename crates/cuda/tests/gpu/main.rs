//! Everything that needs a GPU, in one program with its kernels inside: it can be carried to a GPU machine and run alone.
//!
//! Without a GPU every test says why it is skipped. Outputs are filled with NaN before each run, inputs are fresh.

// Test code may stop at the first surprise.
#![allow(clippy::unwrap_used)]

mod attend;
mod attend_data;
mod attend_prefill;
mod c4_rows;
mod compress;
mod depth;
mod driver;
mod ends;
mod experts;
mod flash;
mod index;
mod index_few;
mod index_wide;
mod keys;
mod linear;
mod linear_bf16;
mod mhc;
mod model;
mod moe;
mod mtp;
mod paged;
mod quantise;
mod ranks;
mod rig;
mod roofs;
mod rope;
mod router;
mod sample;
