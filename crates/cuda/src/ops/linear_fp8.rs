//! Products with fp8 weights and inputs, one matrix or groups of them.
//! Assumes rows that are a multiple of 16 (of 128 with several groups) and columns that are a multiple of 128. A token has
//! the same bits for any number of tokens.

use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Up to so many tokens the weights are streamed; beyond, both operands are tiled in shared memory.
const FEW: u32 = 32;
/// Shared memory of a block for many tokens: three stages of both operands and of the inputs' scales, and the sums.
const LARGE_BYTES: u32 = 3 * (256 * 128 + 256 + 128 * 4) + 128 * 128 * 4;
const SMALL_BYTES: u32 = 3 * (128 * 128 + 256 + 64 * 4) + 64 * 64 * 4;

/// The kernels.
pub struct LinearFp8 {
    /// By tokens (8, 16, 32), then by parts of the columns (8, 2).
    few: [[Kernel; 2]; 3],
    large: Kernel,
    small: Kernel,
    multiprocessors: u32,
}

/// `y = W x`; with several groups each has its own weights, inputs and results.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Product {
    /// Address of the weights, e4m3 `[groups, rows, cols]`.
    pub w: u64,
    /// Address of their scales, float `[groups, rows / 128, cols / 128]`, the middle rounded up.
    pub w_scales: u64,
    /// Address of the inputs, e4m3 `[tokens, groups, cols]`.
    pub x: u64,
    /// Address of their scales, float `[tokens, groups, cols / 128]`.
    pub x_scales: u64,
    /// Address of the results, float `[tokens, groups, rows]`.
    pub y: u64,
    /// Rows of a group's weights.
    pub rows: u32,
    /// Columns of a group.
    pub cols: u32,
    /// Groups; 1 for a plain product.
    pub groups: u32,
    /// Tokens.
    pub tokens: u32,
}

/// Parts of the columns: by the shape alone.
fn parts(cols: u32) -> u32 {
    if cols >= 2048 { 8 } else { 2 }
}

impl LinearFp8 {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<LinearFp8, DriverError> {
        let module = Module::load(context, "linear_fp8")?;
        let kernel = |name| module.kernel(name, 0);
        Ok(LinearFp8 {
            few: [
                [kernel("linear_fp8_1_8")?, kernel("linear_fp8_1_2")?],
                [kernel("linear_fp8_2_8")?, kernel("linear_fp8_2_2")?],
                [kernel("linear_fp8_4_8")?, kernel("linear_fp8_4_2")?],
            ],
            large: module.kernel("linear_fp8_large", LARGE_BYTES)?,
            small: module.kernel("linear_fp8_small", SMALL_BYTES)?,
            multiprocessors: context.gpu().multiprocessors,
        })
    }

    /// Launches it.
    pub fn launch(&self, stream: &Stream, p: &Fp8Product) -> Result<(), DriverError> {
        let fits = p.rows.is_multiple_of(if p.groups > 1 { 128 } else { 16 }) && p.cols.is_multiple_of(128);
        assert!(fits, "an fp8 product of {} x {} in {} groups", p.rows, p.cols, p.groups);
        if p.tokens == 0 {
            return Ok(());
        }
        let parts = parts(p.cols);
        let [w, w_scales, x, x_scales, y] = [p.w, p.w_scales, p.x, p.x_scales, p.y].map(Argument::Pointer);
        let [rows, cols, tokens, split] = [p.rows, p.cols, p.tokens, parts].map(Argument::U32);
        let arguments = [w, w_scales, x, x_scales, y, rows, cols, tokens, split];
        if p.tokens <= FEW {
            let tiles = if p.tokens <= 8 { 0 } else { usize::from(p.tokens > 16) + 1 };
            let blocks = [(p.rows / 16).div_ceil(8 / parts), p.groups, 1];
            let grid = Grid { blocks, ..Grid::new(1, 256) };
            return stream.launch(&self.few[tiles][usize::from(parts == 2)], grid, &arguments[..8]);
        }
        let tiles = |edge: u32| [p.tokens.div_ceil(edge), p.rows.div_ceil(edge), p.groups];
        let large = tiles(128);
        if large.iter().product::<u32>() >= self.multiprocessors {
            let grid = Grid { blocks: large, shared_bytes: LARGE_BYTES, ..Grid::new(1, 256) };
            stream.launch(&self.large, grid, &arguments)
        } else {
            let grid = Grid { blocks: tiles(64), shared_bytes: SMALL_BYTES, ..Grid::new(1, 128) };
            stream.launch(&self.small, grid, &arguments)
        }
    }
}
