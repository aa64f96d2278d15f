//! Products of weights with a batch (model.md 2.3): e4m3 with block scales, and bf16. Kernels: linear_fp8.cu, linear_bf16.cu.
//!
//! Up to 32 tokens the weights stream past the tokens, above that tiles of both meet in shared memory. The sums are the
//! same, bit for bit.

use crate::driver::{Argument, Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};
use crate::loader::{Plain, Scaled};
use crate::scratch::Codes;

/// Most tokens for which weights are streamed.
const FEW: u32 = 32;
/// Rows and tokens of a block of the kernels for many.
const TILE: (u32, u32) = (128, 64);
/// Stages of the kernels for many.
const STAGES: u32 = 4;

/// Kernels of one storage type: for at most 8, 16 and 32 tokens, and for many; each for long rows and short ones.
struct Family {
    few: [[Kernel; 2]; 3],
    many: [Kernel; 2],
    shared_bytes: u32,
}

/// All kernels.
pub struct Linear {
    fp8: Family,
    bf16: Family,
}

/// Warps that share a row: by the shape alone, so that sums have one order.
fn split(cols: u32) -> u32 {
    if cols >= 2048 { 8 } else { 2 }
}

impl Family {
    fn new(
        context: &Context,
        name: &str,
        few: [[&'static str; 2]; 3],
        many: [&'static str; 2],
        row_bytes: u32,
    ) -> Result<Family, DriverError> {
        let module = Module::load(context, name)?;
        let shared_bytes = STAGES * (TILE.0 + TILE.1) * 128 + STAGES * row_bytes;
        let pair = |names: [&'static str; 2], bytes| -> Result<[Kernel; 2], DriverError> {
            Ok([module.kernel(names[0], bytes)?, module.kernel(names[1], bytes)?])
        };
        Ok(Family {
            few: [pair(few[0], 0)?, pair(few[1], 0)?, pair(few[2], 0)?],
            many: pair(many, shared_bytes)?,
            shared_bytes,
        })
    }

    /// Kernel and grid for a product of `rows` rows in each of `groups` groups.
    fn launch(&self, rows: u32, cols: u32, groups: u32, tokens: u32) -> (&Kernel, Grid) {
        let short = usize::from(split(cols) == 2);
        if tokens > FEW {
            let blocks = [rows.div_ceil(TILE.0), tokens.div_ceil(TILE.1), groups];
            return (&self.many[short], Grid { blocks, shared_bytes: self.shared_bytes, ..Grid::new(1, 256) });
        }
        let kernel = match tokens {
            ..=8 => &self.few[0][short],
            9..=16 => &self.few[1][short],
            _ => &self.few[2][short],
        };
        let blocks = [rows.div_ceil(16).div_ceil(8 / split(cols)), groups, 1];
        (kernel, Grid { blocks, ..Grid::new(1, 256) })
    }
}

impl Linear {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Linear, DriverError> {
        let fp8 = Family::new(
            context,
            "linear_fp8",
            [
                ["linear_fp8_1_8", "linear_fp8_1_2"],
                ["linear_fp8_2_8", "linear_fp8_2_2"],
                ["linear_fp8_4_8", "linear_fp8_4_2"],
            ],
            ["linear_fp8_many_8", "linear_fp8_many_2"],
            TILE.1 * 4,
        )?;
        let bf16 = Family::new(
            context,
            "linear_bf16",
            [
                ["linear_bf16_1_8", "linear_bf16_1_2"],
                ["linear_bf16_2_8", "linear_bf16_2_2"],
                ["linear_bf16_4_8", "linear_bf16_4_2"],
            ],
            ["linear_bf16_many_8", "linear_bf16_many_2"],
            0,
        )?;
        Ok(Linear { fp8, bf16 })
    }

    /// `y` float `[T, rows]` of quantised inputs `[T, cols]`.
    pub fn fp8(
        &self,
        stream: &Stream,
        w: &Scaled,
        x: &Codes,
        y: &DeviceSlice<f32>,
        tokens: u32,
    ) -> Result<(), DriverError> {
        self.grouped(stream, w, 1, x, y, tokens)
    }

    /// The same with `groups` matrices of `w.rows / groups` rows, each with inputs of its own: `x` `[T, groups, cols]`, `y`
    /// `[T, groups, rows / groups]`. The rows of a group are a multiple of 128.
    pub fn grouped(
        &self,
        stream: &Stream,
        w: &Scaled,
        groups: u32,
        x: &Codes,
        y: &DeviceSlice<f32>,
        tokens: u32,
    ) -> Result<(), DriverError> {
        let rows = w.rows / groups;
        assert!(groups == 1 || rows.is_multiple_of(128), "{rows} rows in a group");
        let (kernel, grid) = self.fp8.launch(rows, w.cols, groups, tokens);
        let arguments: [Argument; 8] = [
            (&w.codes).into(),
            (&w.scales).into(),
            (&x.codes).into(),
            (&x.scales).into(),
            y.into(),
            rows.into(),
            w.cols.into(),
            tokens.into(),
        ];
        stream.launch(kernel, grid, &arguments)
    }

    /// `y` float `[T, rows]` of bf16 inputs `[T, cols]`.
    pub fn bf16(
        &self,
        stream: &Stream,
        w: &Plain,
        x: &DeviceSlice<u16>,
        y: &DeviceSlice<f32>,
        tokens: u32,
    ) -> Result<(), DriverError> {
        let (kernel, grid) = self.bf16.launch(w.rows, w.cols, 1, tokens);
        let arguments: [Argument; 6] =
            [(&w.values).into(), x.into(), y.into(), w.rows.into(), w.cols.into(), tokens.into()];
        stream.launch(kernel, grid, &arguments)
    }
}
