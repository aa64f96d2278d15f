//! Tensors of a checkpoint on the GPU, in the forms that kernels read: rows of several tensors one after the other, block
//! scales as floats, vectors as floats.
//!
//! Assumes a checked [`Checkpoint`] and an arena of at least [`bytes`]. Refuses routed experts that are not fp4, with what
//! to do.

use longwave_model::checkpoint::Tensor;
use longwave_model::formats::ue8m0;
use longwave_model::tensors::{self, DType};
use longwave_model::{Checkpoint, ModelConfig};

use crate::driver::{Arena, DeviceSlice, DriverError, Stream};

/// A bf16 matrix `[rows, cols]`.
pub struct Plain {
    /// Values.
    pub values: DeviceSlice<u16>,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

/// An e4m3 matrix `[rows, cols]` with a float scale per 128 x 128 block.
pub struct Scaled {
    /// Codes.
    pub codes: DeviceSlice<u8>,
    /// Scales `[rows / 128, cols / 128]`.
    pub scales: DeviceSlice<f32>,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

/// Packed e2m1 matrices `[experts, rows, cols]` with a ue8m0 scale per 32 columns, as they are stored.
pub struct Packed {
    /// Codes, two a byte.
    pub codes: DeviceSlice<u8>,
    /// Scales `[experts, rows, cols / 32]`.
    pub scales: DeviceSlice<u8>,
    /// Rows of one expert.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

/// Where tensors come from and where they go.
pub struct Loader<'a> {
    /// Tensors.
    pub checkpoint: &'a Checkpoint,
    /// Copies run on it.
    pub stream: &'a Stream,
    /// Room.
    pub arena: &'a mut Arena,
    /// Called with the bytes of each tensor that arrived.
    pub progress: &'a mut dyn FnMut(u64),
}

/// Bytes of the arena that all weights of `config` need at most: vectors and block scales grow to floats.
pub fn bytes(config: &ModelConfig) -> u64 {
    let one = |spec: &tensors::TensorSpec| {
        let widens = spec.shape.len() == 1 || spec.name.ends_with(".scale") && !spec.name.contains(".experts.");
        spec.bytes() * if widens { 4 } else { 1 } + 256
    };
    tensors::all(config).iter().map(|(_, spec)| one(spec)).sum()
}

impl Loader<'_> {
    fn tensor(&mut self, name: &str) -> Tensor {
        let tensor = self.checkpoint.tensor(name);
        (self.progress)(tensor.bytes().len() as u64);
        tensor
    }

    /// Bytes of tensors, one after the other.
    fn stacked(&mut self, names: &[String]) -> Result<DeviceSlice<u8>, DriverError> {
        let tensors: Vec<Tensor> = names.iter().map(|name| self.tensor(name)).collect();
        let to = self.arena.slice(tensors.iter().map(|t| t.bytes().len()).sum())?;
        let mut at = 0;
        for tensor in &tensors {
            let bytes = tensor.bytes();
            to.part(at..at + bytes.len()).write(self.stream, bytes)?;
            at += bytes.len();
        }
        Ok(to)
    }

    /// Floats on the GPU.
    pub fn floats(&mut self, values: &[f32]) -> Result<DeviceSlice<f32>, DriverError> {
        let to = self.arena.slice(values.len())?;
        to.write(self.stream, values)?;
        Ok(to)
    }

    /// A vector or matrix of f32 or bf16, widened.
    pub fn vector(&mut self, name: &str) -> Result<DeviceSlice<f32>, DriverError> {
        let values = self.tensor(name).to_f32();
        self.floats(&values)
    }

    /// A table of int64, as u32.
    pub fn table(&mut self, name: &str) -> Result<DeviceSlice<u32>, DriverError> {
        let values: Vec<u32> = self.tensor(name).to_i64().into_iter().map(|v| v as u32).collect();
        let to = self.arena.slice(values.len())?;
        to.write(self.stream, &values)?;
        Ok(to)
    }

    /// The rows of bf16 matrices with the same columns.
    pub fn plain(&mut self, names: &[&str]) -> Result<Plain, DriverError> {
        let names: Vec<String> = names.iter().map(|name| format!("{name}.weight")).collect();
        let (mut rows, mut cols) = (0, 0);
        for name in &names {
            let shape = self.checkpoint.tensor(name).shape;
            (rows, cols) = (rows + shape[0] as u32, shape[1] as u32);
        }
        let bytes = self.stacked(&names)?;
        Ok(Plain { values: bytes.cast(), rows, cols })
    }

    /// The rows of e4m3 matrices with the same columns. Each has a multiple of 128 rows, or is the last.
    pub fn scaled(&mut self, names: &[&str]) -> Result<Scaled, DriverError> {
        let (mut rows, mut cols, mut scales) = (0, 0, Vec::new());
        for name in names {
            let shape = self.checkpoint.tensor(&format!("{name}.weight")).shape;
            (rows, cols) = (rows + shape[0] as u32, shape[1] as u32);
            let tensor = self.tensor(&format!("{name}.scale"));
            match tensor.dtype {
                DType::F8E8M0 => scales.extend(tensor.bytes().iter().map(|&byte| ue8m0::value(byte))),
                _ => scales.extend(tensor.to_f32()),
            }
        }
        let weights: Vec<String> = names.iter().map(|name| format!("{name}.weight")).collect();
        Ok(Scaled { codes: self.stacked(&weights)?, scales: self.floats(&scales)?, rows, cols })
    }

    /// The same matrices of all experts: for each expert the rows of `names` under `prefix.<expert>.`.
    pub fn experts(&mut self, prefix: &str, experts: usize, names: &[&str]) -> Result<Packed, DriverError> {
        let of = |kind: &str| -> Vec<String> {
            let one = |e: usize| names.iter().map(move |name| format!("{prefix}.{e}.{name}.{kind}"));
            (0..experts).flat_map(one).collect()
        };
        let (weights, scales) = (of("weight"), of("scale"));
        let first = self.checkpoint.tensor(&weights[0]);
        if first.dtype != DType::I8 {
            return Err(DriverError {
                call: "loading experts",
                what: format!("{} is {}", weights[0], first.dtype.name()),
                name: "the CUDA backend reads fp4 experts; use the released checkpoint and not the Base one, or --backend cpu".into(),
            });
        }
        let rows = (first.shape[0] * names.len()) as u32;
        let cols = 2 * first.shape[1] as u32;
        Ok(Packed { codes: self.stacked(&weights)?, scales: self.stacked(&scales)?, rows, cols })
    }
}
