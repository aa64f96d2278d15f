//! Where tensors come from: a checkpoint, or random numbers of the same shapes (`--load-format dummy`).
//!
//! Random weights have about unit gain, so that activations stay finite in every layer; they mean nothing. Assumes names
//! that `tensors::all` lists.

use std::collections::HashMap;

use longwave_model::ModelConfig;
use longwave_model::checkpoint::Checkpoint;
use longwave_model::formats::ue8m0;
use longwave_model::tensors::{self, DType, TensorSpec};

use crate::driver::{Argument, Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};

/// Tensors by name.
pub enum Source<'a> {
    /// As released.
    Checkpoint(&'a Checkpoint),
    /// Random.
    Dummy(Dummy),
}

/// Random tensors.
pub struct Dummy {
    specs: HashMap<String, TensorSpec>,
    kernel: Kernel,
    experts: usize,
}

impl Dummy {
    /// Tensors of `config`, made on the GPU of `context`.
    pub fn new(context: &Context, config: &ModelConfig) -> Result<Dummy, DriverError> {
        let specs = tensors::all(config).into_iter().map(|(_, spec)| (spec.name.clone(), spec)).collect();
        let kernel = Module::load(context, "dummy")?.kernel("dummy_words", 0)?;
        Ok(Dummy { specs, kernel, experts: config.n_routed_experts })
    }

    fn spec(&self, name: &str) -> &TensorSpec {
        &self.specs[name]
    }
}

/// A number that depends on the name alone.
fn seed(name: &str) -> u64 {
    name.bytes().fold(1469598103934665603, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(1099511628211))
}

/// `-log2(sqrt(cols))`, rounded.
fn gain_exponent(cols: usize) -> i32 {
    -((cols as f64).log2() / 2.0).round() as i32
}

impl Source<'_> {
    /// Shape, rows first.
    pub fn shape(&self, name: &str) -> Vec<usize> {
        match self {
            Source::Checkpoint(checkpoint) => checkpoint.tensor(name).shape,
            Source::Dummy(dummy) => dummy.spec(name).shape.clone(),
        }
    }

    /// Type in which it is stored.
    pub fn dtype(&self, name: &str) -> DType {
        match self {
            Source::Checkpoint(checkpoint) => checkpoint.tensor(name).dtype,
            Source::Dummy(dummy) => dummy.spec(name).dtypes[0],
        }
    }

    /// Bytes in which it is stored.
    pub fn bytes(&self, name: &str) -> usize {
        match self {
            Source::Checkpoint(checkpoint) => checkpoint.tensor(name).bytes().len(),
            Source::Dummy(dummy) => dummy.spec(name).bytes() as usize,
        }
    }

    /// Copies codes, packed experts and their scales, or bf16 values to the GPU as they are stored.
    pub fn copy(&self, name: &str, to: &DeviceSlice<u8>, stream: &Stream) -> Result<(), DriverError> {
        let dummy = match self {
            Source::Checkpoint(checkpoint) => return to.write(stream, checkpoint.tensor(name).bytes()),
            Source::Dummy(dummy) => dummy,
        };
        let spec = dummy.spec(name);
        let cols = spec.shape.last().copied().unwrap_or(1);
        let (kept, set) = match spec.dtypes[0] {
            // Between 1/8 and 2.
            DType::F8E4M3 => (0xbfbf_bfbf, 0x2020_2020),
            DType::F8E8M0 => {
                // A code of packed experts has a mean square of 7.6, and 32 of its columns share a scale.
                let byte = (127 + gain_exponent(32 * cols) - 1) as u32;
                (0, byte * 0x0101_0101)
            }
            DType::BF16 => {
                let exponent = (127 + gain_exponent(cols)) as u32 & !1;
                (0x80ff_80ff, (exponent << 7) * 0x0001_0001)
            }
            _ => (u32::MAX, 0),
        };
        let words = (to.len() / 4) as u64;
        let arguments = [Argument::from(to), Argument::U64(words), Argument::U64(seed(name)), kept.into(), set.into()];
        stream.launch(&dummy.kernel, Grid::new(2048.min(words.div_ceil(256).max(1) as u32), 256), &arguments)
    }

    /// Block scales of an e4m3 matrix, as floats.
    pub fn block_scales(&self, name: &str) -> Vec<f32> {
        match self {
            Source::Checkpoint(checkpoint) => {
                let tensor = checkpoint.tensor(name);
                match tensor.dtype {
                    DType::F8E8M0 => tensor.bytes().iter().map(|&byte| ue8m0::value(byte)).collect(),
                    _ => tensor.to_f32(),
                }
            }
            Source::Dummy(dummy) => {
                let shape = &dummy.spec(name).shape;
                vec![2f32.powi(gain_exponent(128 * shape[1])); shape[0] * shape[1]]
            }
        }
    }

    /// A small f32 or bf16 tensor, widened.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let dummy = match self {
            Source::Checkpoint(checkpoint) => return checkpoint.tensor(name).to_f32(),
            Source::Dummy(dummy) => dummy,
        };
        let len = dummy.spec(name).shape.iter().product();
        if name.ends_with("norm.weight") || name.ends_with("_scale") {
            return vec![1.0; len];
        }
        let mut state = seed(name);
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let size = if name.ends_with("_fn") { 0.02 } else { 0.1 };
        (0..len).map(|_| size * next()).collect()
    }

    /// A table of experts by token id, `[V, k]`.
    pub fn table(&self, name: &str) -> Vec<u32> {
        match self {
            Source::Checkpoint(checkpoint) => {
                checkpoint.tensor(name).to_i64().into_iter().map(|expert| expert as u32).collect()
            }
            Source::Dummy(dummy) => {
                let (shape, experts) = (&dummy.spec(name).shape, dummy.experts);
                let row = |token: usize| {
                    (0..shape[1]).map(move |j| ((token * 7919 + j * (experts / shape[1])) % experts) as u32)
                };
                (0..shape[0]).flat_map(row).collect()
            }
        }
    }
}
