//! Where tensors come from: a checkpoint, or random numbers of the same shapes (`--load-format dummy`). What is seen of
//! them is the part that one rank has.
//!
//! Random weights have about unit gain, so that activations stay finite in every layer; they mean nothing. A part of them
//! has the values that the whole tensor has there. Assumes names that `tensors::all` lists.

use std::collections::HashMap;
use std::ops::Range;

use longwave_model::ModelConfig;
use longwave_model::checkpoint::Checkpoint;
use longwave_model::formats::ue8m0;
use longwave_model::tensors::{self, DType, TensorSpec};

use crate::driver::{Argument, Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};
use crate::split::{Part, Share};

/// Tensors by name.
pub struct Source<'a> {
    from: Origin<'a>,
    config: &'a ModelConfig,
    specs: HashMap<String, TensorSpec>,
    /// Whose parts they are.
    pub share: Share,
}

/// What they are.
pub enum Origin<'a> {
    /// As released.
    Checkpoint(&'a Checkpoint),
    /// Random.
    Dummy(Dummy),
}

/// Makes random tensors.
pub struct Dummy {
    kernel: Kernel,
}

impl Dummy {
    /// On the GPU of `context`.
    pub fn new(context: &Context) -> Result<Dummy, DriverError> {
        Ok(Dummy { kernel: Module::load(context, "dummy")?.kernel("dummy_words", 0)? })
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

/// Whether scales of a row, ue8m0, are so far apart that e4m3 codes relative to the largest cannot hold the smallest exactly
/// (model.md 2.5).
fn far_apart(scales: &[u8]) -> bool {
    const POWERS: u8 = 14;
    let (least, most) = scales.iter().fold((u8::MAX, 0), |(least, most), &s| (least.min(s), most.max(s)));
    most.saturating_sub(least) > POWERS
}

impl<'a> Source<'a> {
    /// The tensors of `config` that `share` has parts of.
    pub fn new(from: Origin<'a>, config: &'a ModelConfig, share: Share) -> Source<'a> {
        let specs = tensors::all(config).into_iter().map(|(_, spec)| (spec.name.clone(), spec)).collect();
        Source { from, config, specs, share }
    }

    fn spec(&self, name: &str) -> &TensorSpec {
        &self.specs[name]
    }

    /// Ids of the routed experts that are there.
    pub fn experts(&self) -> Range<usize> {
        self.share.experts(self.config)
    }

    /// The part that is there; an empty one where the rank has none.
    fn part(&self, name: &str) -> Part {
        let none = Part { rows: 0..0, cols: 0..0 };
        self.share.part(self.config, self.spec(name)).unwrap_or(none)
    }

    /// Elements of a row of the whole tensor.
    fn row(&self, name: &str) -> usize {
        self.spec(name).shape[1..].iter().product()
    }

    /// Rows and columns of the part.
    pub fn shape(&self, name: &str) -> [usize; 2] {
        let part = self.part(name);
        [part.rows.len(), part.cols.len()]
    }

    /// Type in which it is stored.
    pub fn dtype(&self, name: &str) -> DType {
        match &self.from {
            Origin::Checkpoint(checkpoint) => checkpoint.tensor(name).dtype,
            Origin::Dummy(_) => self.spec(name).dtypes[0],
        }
    }

    /// Bytes in which the part is stored.
    pub fn bytes(&self, name: &str) -> usize {
        self.shape(name).iter().product::<usize>() * self.dtype(name).size()
    }

    /// Copies codes, packed experts and their scales, or bf16 values to the GPU as they are stored.
    pub fn copy(&self, name: &str, to: &DeviceSlice<u8>, stream: &Stream) -> Result<(), DriverError> {
        if to.is_empty() {
            return Ok(());
        }
        let (part, row) = (self.part(name), self.row(name));
        let size = self.dtype(name).size();
        let dummy = match &self.from {
            Origin::Checkpoint(checkpoint) => {
                let tensor = checkpoint.tensor(name);
                let rows = &tensor.bytes()[part.rows.start * row * size..part.rows.end * row * size];
                if part.cols.len() == row {
                    return to.write(stream, rows);
                }
                let own = |row: &[u8]| row[part.cols.start * size..part.cols.end * size].to_vec();
                return to.write(stream, &rows.chunks(row * size).flat_map(own).collect::<Vec<u8>>());
            }
            Origin::Dummy(dummy) => dummy,
        };
        let spec = self.spec(name);
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
        // Whole rows are one long row.
        let (first, width, stride) = match part.cols.len() == row {
            true => (part.rows.start * row, to.len() / size, 0),
            false => (part.rows.start * row + part.cols.start, part.cols.len(), row),
        };
        let [first, width, stride] = [first, width, stride].map(|elements| (elements * size / 4) as u64);
        let arguments = [
            Argument::from(to),
            Argument::U64(words),
            Argument::U64(first),
            Argument::U64(width),
            Argument::U64(stride),
            Argument::U64(seed(name)),
            kept.into(),
            set.into(),
        ];
        stream.launch(&dummy.kernel, Grid::new(2048.min(words.div_ceil(256).max(1) as u32), 256), &arguments)
    }

    /// Those of the values of a whole tensor that are in the part.
    fn cut<T: Copy>(&self, name: &str, whole: Vec<T>) -> Vec<T> {
        let (part, row) = (self.part(name), self.row(name));
        if part.rows.len() * part.cols.len() == whole.len() {
            return whole;
        }
        let rows = part.rows.flat_map(|r| r * row + part.cols.start..r * row + part.cols.end);
        rows.map(|i| whole[i]).collect()
    }

    /// Rows of the part of routed experts' scales that are [`far_apart`]. Random ones are all alike.
    pub fn rows_far_apart(&self, name: &str) -> usize {
        let Origin::Checkpoint(checkpoint) = &self.from else { return 0 };
        let (part, row) = (self.part(name), self.row(name));
        let tensor = checkpoint.tensor(name);
        let rows = tensor.bytes().chunks_exact(row).skip(part.rows.start).take(part.rows.len());
        rows.filter(|scales| far_apart(&scales[part.cols.clone()])).count()
    }

    /// Block scales of an e4m3 matrix, as floats.
    pub fn block_scales(&self, name: &str) -> Vec<f32> {
        let whole = match &self.from {
            Origin::Checkpoint(checkpoint) => {
                let tensor = checkpoint.tensor(name);
                match tensor.dtype {
                    DType::F8E8M0 => tensor.bytes().iter().map(|&byte| ue8m0::value(byte)).collect(),
                    _ => tensor.to_f32(),
                }
            }
            Origin::Dummy(_) => {
                let shape = &self.spec(name).shape;
                vec![2f32.powi(gain_exponent(128 * shape[1])); shape[0] * shape[1]]
            }
        };
        self.cut(name, whole)
    }

    /// A small f32 or bf16 tensor, widened.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.cut(name, self.whole_floats(name))
    }

    fn whole_floats(&self, name: &str) -> Vec<f32> {
        if let Origin::Checkpoint(checkpoint) = &self.from {
            return checkpoint.tensor(name).to_f32();
        }
        let len = self.spec(name).shape.iter().product();
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
        match &self.from {
            Origin::Checkpoint(checkpoint) => {
                checkpoint.tensor(name).to_i64().into_iter().map(|expert| expert as u32).collect()
            }
            Origin::Dummy(_) => {
                let (shape, experts) = (&self.spec(name).shape, self.config.n_routed_experts);
                let row = |token: usize| {
                    (0..shape[1]).map(move |j| ((token * 7919 + j * (experts / shape[1])) % experts) as u32)
                };
                (0..shape[0]).flat_map(row).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_far_apart_beyond_fourteen_powers_of_two() {
        assert!(!far_apart(&[]) && !far_apart(&[119]) && !far_apart(&[0, 14, 7]) && !far_apart(&[254, 240]));
        assert!(far_apart(&[120, 105, 120]) && far_apart(&[0, 255]));
    }

    #[test]
    fn rows_of_a_checkpoint_are_looked_at_on_every_rank() {
        let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny"));
        let checkpoint = Checkpoint::open(folder, &mut |_| ()).unwrap();
        for share in [Share { rank: 0, ranks: 1 }, Share { rank: 1, ranks: 2 }] {
            let source = Source::new(Origin::Checkpoint(&checkpoint), &checkpoint.config, share);
            for name in source.experts().map(|expert| format!("layers.1.ffn.experts.{expert}.w2.scale")) {
                let [rows, cols] = source.shape(&name);
                let whole = checkpoint.tensor(&name).bytes().chunks_exact(cols).filter(|row| far_apart(row)).count();
                assert!(rows > 0 && source.rows_far_apart(&name) == whole, "{name}");
            }
        }
    }
}
