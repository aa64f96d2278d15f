//! Products with bf16 weights: compressors, router, indexer weights and the output head.
//! Assumes columns that are a multiple of 64. A token has the same bits for any number of tokens.

use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Up to so many tokens the weights are streamed; beyond, both operands are tiled in shared memory.
const FEW: u32 = 32;
/// From so many rows on, one warp has whole rows.
const LONG: u32 = 16384;

/// The kernels.
pub struct LinearBf16 {
    /// By tokens (8, 16, 32), then by parts of the columns (8, 4, 1).
    few: [[Kernel; 3]; 3],
    large: Kernel,
    small: Kernel,
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
    /// Columns, a multiple of 64.
    pub cols: u32,
    /// Tokens.
    pub tokens: u32,
}

/// Parts of the columns: by the shape alone.
fn parts(rows: u32, cols: u32) -> u32 {
    match () {
        () if rows >= LONG => 1,
        () if cols.is_multiple_of(512) => 8,
        () if cols.is_multiple_of(256) => 4,
        () => 1,
    }
}

impl LinearBf16 {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<LinearBf16, DriverError> {
        let module = Module::load(context, "linear_bf16")?;
        let kernel = |name| module.kernel(name, 0);
        Ok(LinearBf16 {
            few: [
                [kernel("linear_bf16_1_8")?, kernel("linear_bf16_1_4")?, kernel("linear_bf16_1_1")?],
                [kernel("linear_bf16_2_8")?, kernel("linear_bf16_2_4")?, kernel("linear_bf16_2_1")?],
                [kernel("linear_bf16_4_8")?, kernel("linear_bf16_4_4")?, kernel("linear_bf16_4_1")?],
            ],
            large: module.kernel("linear_bf16_large", 128 << 10)?,
            small: module.kernel("linear_bf16_small", 64 << 10)?,
            multiprocessors: context.gpu().multiprocessors,
        })
    }

    /// Launches it.
    pub fn launch(&self, stream: &Stream, p: &Bf16Product) -> Result<(), DriverError> {
        assert!(p.cols.is_multiple_of(64), "bf16 products have a multiple of 64 columns, not {}", p.cols);
        if p.tokens == 0 {
            return Ok(());
        }
        let parts = parts(p.rows, p.cols);
        let pointers = [p.w, p.x, p.y].map(Argument::Pointer);
        let [w, x, y] = pointers;
        let sizes: [Argument; 3] = [p.rows.into(), p.cols.into(), p.tokens.into()];
        if p.tokens <= FEW {
            let tiles = if p.tokens <= 8 { 0 } else { usize::from(p.tokens > 16) + 1 };
            let split = [8, 4, 1].iter().position(|&s| s == parts).expect("one of the three");
            let grid = Grid::new(p.rows.div_ceil(16).div_ceil(8 / parts), 256);
            return stream.launch(&self.few[tiles][split], grid, &[w, x, y, sizes[0], sizes[1], sizes[2]]);
        }
        let tiles = |edge: u32| [p.tokens.div_ceil(edge), p.rows.div_ceil(edge), 1];
        let large = tiles(128);
        let arguments = [w, x, y, sizes[0], sizes[1], sizes[2], parts.into()];
        if large[0] * large[1] >= self.multiprocessors {
            let grid = Grid { blocks: large, shared_bytes: 128 << 10, ..Grid::new(1, 512) };
            stream.launch(&self.large, grid, &arguments)
        } else {
            let grid = Grid { blocks: tiles(64), shared_bytes: 64 << 10, ..Grid::new(1, 128) };
            stream.launch(&self.small, grid, &arguments)
        }
    }
}
