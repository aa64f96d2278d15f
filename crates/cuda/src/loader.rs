//! Tensors of a checkpoint on the GPU, in the forms that kernels read: rows of several tensors one after the other, block
//! scales as floats, vectors as floats. Of tensors that ranks share, the rank's part.
//!
//! Assumes an arena of at least [`bytes`]. Refuses routed experts that are not fp4, with what
//! to do.

use longwave_model::ModelConfig;
use longwave_model::tensors::{self, DType, Place};

use crate::driver::{Arena, DeviceSlice, DriverError, Stream};
use crate::source::Source;
use crate::split::Share;

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

/// Packed e2m1 matrices `[experts, rows, cols]` with a ue8m0 scale per 32 columns, as they are stored until they are arranged.
pub struct Packed {
    /// Codes, two a byte.
    pub codes: DeviceSlice<u8>,
    /// Scales `[experts, rows, cols / 32]`.
    pub scales: DeviceSlice<u8>,
    /// Room for a factor of each row of all experts, which arranging fills on Hopper.
    pub factors: DeviceSlice<f32>,
    /// Rows of one expert.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

/// Where tensors come from and where they go.
pub struct Loader<'a> {
    /// Tensors.
    pub source: &'a Source<'a>,
    /// Copies run on it.
    pub stream: &'a Stream,
    /// Room.
    pub arena: &'a mut Arena,
    /// Called with the bytes of each tensor that arrived.
    pub progress: &'a mut dyn FnMut(u64),
    /// Rows of routed experts so far, and those of them whose scales are so far apart that Hopper's codes round the smallest weights.
    pub expert_rows: [usize; 2],
}

/// Bytes of the arena that a rank's part of all weights of `config` needs at most, the MTP module's if it `drafts`: vectors
/// and block scales grow to floats, rows of routed experts get one.
pub fn bytes(config: &ModelConfig, share: Share, drafts: bool) -> u64 {
    let one = |spec: &tensors::TensorSpec| {
        let (scale, routed) = (spec.name.ends_with(".scale"), spec.name.contains(".experts."));
        let widens = spec.shape.len() == 1 || scale && !routed;
        let size = spec.dtypes[0].size() * if widens { 4 } else { 1 };
        let factor = if scale && routed { 4 } else { 0 };
        share.part(config, spec).map_or(0, |part| (part.rows.len() * (part.cols.len() * size + factor)) as u64 + 256)
    };
    let loaded = |place: &Place| drafts || !matches!(place, Place::Draft(_));
    tensors::all(config).iter().filter(|(place, _)| loaded(place)).map(|(_, spec)| one(spec)).sum()
}

impl Loader<'_> {
    /// Bytes of tensors, one after the other.
    fn stacked(&mut self, names: &[String]) -> Result<DeviceSlice<u8>, DriverError> {
        let to = self.arena.slice(names.iter().map(|name| self.source.bytes(name)).sum())?;
        let mut at = 0;
        for name in names {
            let bytes = self.source.bytes(name);
            self.source.copy(name, &to.part(at..at + bytes), self.stream)?;
            (self.progress)(bytes as u64);
            at += bytes;
        }
        Ok(to)
    }

    /// Floats on the GPU.
    pub fn floats(&mut self, values: &[f32]) -> Result<DeviceSlice<f32>, DriverError> {
        let to = self.arena.slice(values.len())?;
        if !values.is_empty() {
            to.write(self.stream, values)?;
        }
        Ok(to)
    }

    /// A vector or matrix of f32 or bf16, widened.
    pub fn vector(&mut self, name: &str) -> Result<DeviceSlice<f32>, DriverError> {
        (self.progress)(self.source.bytes(name) as u64);
        self.floats(&self.source.floats(name))
    }

    /// A table of int64, as u32.
    pub fn table(&mut self, name: &str) -> Result<DeviceSlice<u32>, DriverError> {
        (self.progress)(self.source.bytes(name) as u64);
        let values = self.source.table(name);
        let to = self.arena.slice(values.len())?;
        to.write(self.stream, &values)?;
        Ok(to)
    }

    /// The rows of bf16 matrices with the same columns.
    pub fn plain(&mut self, names: &[&str]) -> Result<Plain, DriverError> {
        let names: Vec<String> = names.iter().map(|name| format!("{name}.weight")).collect();
        let (mut rows, mut cols) = (0, 0);
        for name in &names {
            let shape = self.source.shape(name);
            (rows, cols) = (rows + shape[0] as u32, shape[1] as u32);
        }
        let bytes = self.stacked(&names)?;
        Ok(Plain { values: bytes.cast(), rows, cols })
    }

    /// The rows of e4m3 matrices with the same columns. Each has a multiple of 128 rows, or is the last.
    pub fn scaled(&mut self, names: &[&str]) -> Result<Scaled, DriverError> {
        let (mut rows, mut cols, mut scales) = (0, 0, Vec::new());
        for name in names {
            let shape = self.source.shape(&format!("{name}.weight"));
            (rows, cols) = (rows + shape[0] as u32, shape[1] as u32);
            scales.extend(self.source.block_scales(&format!("{name}.scale")));
        }
        let weights: Vec<String> = names.iter().map(|name| format!("{name}.weight")).collect();
        Ok(Scaled { codes: self.stacked(&weights)?, scales: self.floats(&scales)?, rows, cols })
    }

    /// The same matrices of all experts of the rank: for each the rows of `names` under `prefix.<expert>.`.
    pub fn experts(&mut self, prefix: &str, names: &[&str]) -> Result<Packed, DriverError> {
        let of = |kind: &str| -> Vec<String> {
            let one = |e: usize| names.iter().map(move |name| format!("{prefix}.{e}.{name}.{kind}"));
            self.source.experts().flat_map(one).collect()
        };
        let (weights, scales) = (of("weight"), of("scale"));
        let (dtype, shape) = (self.source.dtype(&weights[0]), self.source.shape(&weights[0]));
        if dtype != DType::I8 {
            return Err(DriverError {
                call: "loading experts",
                what: format!("{} is {}", weights[0], dtype.name()),
                name: "the CUDA backend reads fp4 experts; use the released checkpoint and not the Base one, or --backend cpu".into(),
            });
        }
        let rows = (shape[0] * names.len()) as u32;
        let cols = 2 * shape[1] as u32;
        for name in &scales {
            self.expert_rows[0] += self.source.shape(name)[0];
            self.expert_rows[1] += self.source.rows_far_apart(name);
        }
        let factors = self.arena.slice(rows as usize * self.source.experts().len())?;
        Ok(Packed { codes: self.stacked(&weights)?, scales: self.stacked(&scales)?, factors, rows, cols })
    }
}
