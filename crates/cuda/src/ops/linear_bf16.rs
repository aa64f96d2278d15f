//! Products with bf16 weights: compressors, router, indexer weights and the output head.
//! Assumes columns that are a multiple of 128. A token has the same bits for any number of tokens.

use super::parts;
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Up to so many tokens, or as long as blocks of as many are no more than WAVES on each multiprocessor, the weights are
/// streamed; beyond, both operands are tiled in shared memory.
const FEW: u32 = 32;
const WAVES: u32 = 4;
/// Rows and tokens of a block for many tokens.
const TILE: (u32, u32) = (128, 64);
/// Shared memory of such a block: four stages of 64 columns of both operands.
const MANY_BYTES: u32 = 4 * (TILE.0 + TILE.1) * 128;

/// The kernels, each for long rows and short ones.
pub struct LinearBf16 {
    /// For at most 8, 16 and 32 tokens.
    few: [[Kernel; 2]; 3],
    /// For at most 8 tokens, long rows and no more blocks than multiprocessors.
    deep: Kernel,
    many: [Kernel; 2],
    three: Kernel,
    multiprocessors: u32,
}

/// `y = W x`.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Product {
    /// Address of the weights, bf16 `[rows, cols]`.
    pub w: u64,
    /// Address of the inputs, bf16 `[tokens, cols]`.
    pub x: u64,
    /// Address of the results, float `[tokens, rows]`.
    pub y: u64,
    /// Rows of the weights.
    pub rows: u32,
    /// Columns, a multiple of 128.
    pub cols: u32,
    /// Tokens.
    pub tokens: u32,
}

impl LinearBf16 {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<LinearBf16, DriverError> {
        let module = Module::load(context, "linear_bf16")?;
        let kernel = |name| module.kernel(name, 0);
        let many = |name| module.kernel(name, MANY_BYTES);
        Ok(LinearBf16 {
            few: [
                [kernel("linear_bf16_1_8")?, kernel("linear_bf16_1_2")?],
                [kernel("linear_bf16_2_8")?, kernel("linear_bf16_2_2")?],
                [kernel("linear_bf16_4_8")?, kernel("linear_bf16_4_2")?],
            ],
            deep: kernel("linear_bf16_deep")?,
            multiprocessors: context.gpu().multiprocessors,
            three: kernel("linear_bf16_three")?,
            many: [many("linear_bf16_many_8")?, many("linear_bf16_many_2")?],
        })
    }

    /// Launches three with the same inputs, as one where that is faster; the bits are the same.
    pub fn launch_three(&self, stream: &Stream, products: [Bf16Product; 3]) -> Result<(), DriverError> {
        let one = products[0];
        let same = products.iter().all(|p| (p.x, p.cols, p.tokens) == (one.x, one.cols, one.tokens));
        assert!(same, "products that are launched as one have the same inputs");
        assert!(one.cols.is_multiple_of(128), "bf16 products have a multiple of 128 columns, not {}", one.cols);
        if one.tokens == 0 || one.tokens > 8 || parts(one.cols) != 8 {
            return products.iter().try_for_each(|p| self.launch(stream, p));
        }
        let tiles: u32 = products.iter().map(|p| p.rows.div_ceil(16)).sum();
        let (w, y) = (products.map(|p| Argument::Pointer(p.w)), products.map(|p| Argument::Pointer(p.y)));
        let rows = products.map(|p| Argument::U32(p.rows));
        let rest = [Argument::Pointer(one.x), one.cols.into(), one.tokens.into()];
        stream.launch(&self.three, Grid::new(tiles, 256), &[&w[..], &y, &rows, &rest].concat())
    }

    /// Launches it.
    pub fn launch(&self, stream: &Stream, p: &Bf16Product) -> Result<(), DriverError> {
        assert!(p.cols.is_multiple_of(128), "bf16 products have a multiple of 128 columns, not {}", p.cols);
        if p.tokens == 0 {
            return Ok(());
        }
        let short = usize::from(parts(p.cols) == 2);
        let [w, x, y] = [p.w, p.x, p.y].map(Argument::Pointer);
        let arguments = [w, x, y, p.rows.into(), p.cols.into(), p.tokens.into()];
        let row_tiles = p.rows.div_ceil(16).div_ceil(8 / parts(p.cols));
        if p.tokens > FEW && row_tiles * p.tokens.div_ceil(FEW) > WAVES * self.multiprocessors {
            let blocks = [p.rows.div_ceil(TILE.0), p.tokens.div_ceil(TILE.1), 1];
            let grid = Grid { blocks, shared_bytes: MANY_BYTES, ..Grid::new(1, 256) };
            return stream.launch(&self.many[short], grid, &arguments);
        }
        let tiles = if p.tokens <= 8 { 0 } else { usize::from(p.tokens > 16) + 1 };
        let grid = Grid { blocks: [row_tiles, p.tokens.div_ceil(FEW), 1], ..Grid::new(1, 256) };
        let deep = (tiles, short) == (0, 0) && row_tiles <= self.multiprocessors;
        stream.launch(if deep { &self.deep } else { &self.few[tiles][short] }, grid, &arguments)
    }
}
