//! Products with bf16 weights: compressors, router, indexer weights and the output head.
//! Assumes columns that are a multiple of 128. A token has the same bits for any number of tokens.

use super::parts;
use crate::cubins;
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream, TensorMap};

/// Up to so many tokens, or as long as blocks of as many are no more than WAVES on each multiprocessor, the weights are
/// streamed; beyond, both operands are tiled in shared memory.
const FEW: u32 = 32;
const WAVES: u32 = 4;
/// Rows and tokens of a block for many tokens.
const TILE: (u32, u32) = (128, 64);
/// Shared memory of such a block: four stages of 64 columns of both operands.
const MANY_BYTES: u32 = 4 * (TILE.0 + TILE.1) * 128;

/// Whether many tokens take Hopper's warpgroups ([`Form::Wide`]). They have not been measured yet.
const WIDE: bool = false;
/// A kernel of these: weight rows of a tile, tokens of a tile, stages. The last one is for matrices of few rows.
const WIDE_SHAPES: [(u32, u32, u32); 4] = [(128, 128, 6), (128, 64, 8), (128, 32, 10), (64, 64, 12)];

/// Which kernel; all give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Streamed weights for few tokens, tiles for many.
    Plain,
    /// Hopper's warpgroups, for any number of tokens: one of four kernels, which differ in their tiles. Needs 2,048 columns.
    Wide(usize),
}

/// The kernels, each for long rows and short ones.
pub struct LinearBf16 {
    /// For at most 8, 16 and 32 tokens.
    few: [[Kernel; 2]; 3],
    /// For at most 8 tokens, long rows and no more blocks than multiprocessors.
    deep: Kernel,
    many: [Kernel; 2],
    three: Kernel,
    /// Hopper's, by [`WIDE_SHAPES`].
    wide: Option<[Kernel; 4]>,
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
        let is_hopper = cubins::find("linear_bf16_wide", context.gpu().major, context.gpu().minor).is_some();
        let wide = || {
            let module = Module::load(context, "linear_bf16_wide")?;
            let kernel = |name, which: usize| module.kernel(name, wide_bytes(which));
            Ok([
                kernel("linear_bf16_wide_128", 0)?,
                kernel("linear_bf16_wide_64", 1)?,
                kernel("linear_bf16_wide_32", 2)?,
                kernel("linear_bf16_wide_low", 3)?,
            ])
        };
        Ok(LinearBf16 {
            few: [
                [kernel("linear_bf16_1_8")?, kernel("linear_bf16_1_2")?],
                [kernel("linear_bf16_2_8")?, kernel("linear_bf16_2_2")?],
                [kernel("linear_bf16_4_8")?, kernel("linear_bf16_4_2")?],
            ],
            deep: kernel("linear_bf16_deep")?,
            multiprocessors: context.gpu().multiprocessors,
            three: kernel("linear_bf16_three")?,
            wide: is_hopper.then(wide).transpose()?,
            many: [many("linear_bf16_many_8")?, many("linear_bf16_many_2")?],
        })
    }

    /// Launches three with the same inputs, as one where that is faster; the bits are the same.
    pub fn launch_three(&self, stream: &Stream, products: [Bf16Product; 3]) -> Result<(), DriverError> {
        let form = self.form(&products.map(|p| p.rows), products[0].cols, products[0].tokens);
        self.launch_three_as(stream, products, form)
    }

    /// The same in this form; up to eight tokens are one launch in both, more tokens in [`Form::Wide`] alone.
    pub fn launch_three_as(&self, stream: &Stream, products: [Bf16Product; 3], form: Form) -> Result<(), DriverError> {
        let one = products[0];
        let same = products.iter().all(|p| (p.x, p.cols, p.tokens) == (one.x, one.cols, one.tokens));
        assert!(same, "products that are launched as one have the same inputs");
        if one.tokens == 0 {
            return Ok(());
        }
        if let Form::Wide(which) = form {
            return self.launch_wide(stream, &products, which);
        }
        if one.tokens > 8 || parts(one.cols) != 8 {
            return products.iter().try_for_each(|p| self.launch_as(stream, p, form));
        }
        assert!(one.cols.is_multiple_of(128), "bf16 products have a multiple of 128 columns, not {}", one.cols);
        let tiles: u32 = products.iter().map(|p| p.rows.div_ceil(16)).sum();
        let (w, y) = (products.map(|p| Argument::Pointer(p.w)), products.map(|p| Argument::Pointer(p.y)));
        let rows = products.map(|p| Argument::U32(p.rows));
        let rest = [Argument::Pointer(one.x), one.cols.into(), one.tokens.into()];
        stream.launch(&self.three, Grid::new(tiles, 256), &[&w[..], &y, &rows, &rest].concat())
    }

    /// The forms that the GPU has for so many columns.
    pub fn forms(&self, cols: u32) -> Vec<Form> {
        let wide = if self.wide.is_some() && parts(cols) == 8 { WIDE_SHAPES.len() } else { 0 };
        [Form::Plain].into_iter().chain((0..wide).map(Form::Wide)).collect()
    }

    /// The one that is taken for matrices of so many rows.
    fn form(&self, rows: &[u32], cols: u32, tokens: u32) -> Form {
        if WIDE && self.wide.is_some() && parts(cols) == 8 { self.wide_form(rows, tokens) } else { Form::Plain }
    }

    /// The largest tiles of which most multiprocessors have one. Few tokens are left to streamed weights where these have no more rows
    /// than are read in one go.
    fn wide_form(&self, rows: &[u32], tokens: u32) -> Form {
        let tiles = |which: usize| -> u32 {
            let (tile, of, _) = WIDE_SHAPES[which];
            rows.iter().map(|rows| rows.div_ceil(tile)).sum::<u32>() * tokens.div_ceil(of)
        };
        let most = self.multiprocessors * 3 / 4;
        match tokens {
            9..=32 if tiles(2) >= 2 * self.multiprocessors => Form::Wide(2),
            ..=32 => Form::Plain,
            65.. if tiles(0) >= most => Form::Wide(0),
            _ if tiles(1) >= most => Form::Wide(1),
            _ => Form::Wide(3),
        }
    }

    /// Launches it.
    pub fn launch(&self, stream: &Stream, p: &Bf16Product) -> Result<(), DriverError> {
        self.launch_as(stream, p, self.form(&[p.rows], p.cols, p.tokens))
    }

    /// Up to three products with the same inputs.
    fn launch_wide(&self, stream: &Stream, products: &[Bf16Product], which: usize) -> Result<(), DriverError> {
        let cols = products[0].cols;
        assert!(parts(cols) == 8 && cols.is_multiple_of(128), "{cols} columns for warpgroups");
        let kernels = self.wide.as_ref().expect("only a GPU that has its forms is asked for one");
        let (one, (rows, tokens, _)) = (products[0], WIDE_SHAPES[which]);
        let map = |i: usize| {
            let p = products.get(i).unwrap_or(&one);
            TensorMap::new(p.w, p.rows, 2 * p.cols, rows).map(Argument::from)
        };
        let maps = [map(0)?, map(1)?, map(2)?];
        let y = [0, 1, 2].map(|i| Argument::Pointer(products.get(i).map_or(0, |p| p.y)));
        let sizes = [0, 1, 2].map(|i| Argument::U32(products.get(i).map_or(0, |p| p.rows)));
        let rest = [Argument::Pointer(one.x), one.cols.into(), one.tokens.into()];
        let tiles = products.iter().map(|p| p.rows.div_ceil(rows)).sum::<u32>() * one.tokens.div_ceil(tokens);
        let grid = Grid::new(tiles.min(self.multiprocessors), 2 * rows + 128);
        let grid = Grid { shared_bytes: wide_bytes(which), ..grid };
        stream.launch(&kernels[which], grid, &[&maps[..], &y, &sizes, &rest].concat())
    }

    /// Launches it in this form.
    pub fn launch_as(&self, stream: &Stream, p: &Bf16Product, form: Form) -> Result<(), DriverError> {
        assert!(p.cols.is_multiple_of(128), "bf16 products have a multiple of 128 columns, not {}", p.cols);
        if p.tokens == 0 {
            return Ok(());
        }
        if let Form::Wide(which) = form {
            return self.launch_wide(stream, &[*p], which);
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

/// Shared memory of a block of [`WIDE_SHAPES`]: rows of 128 bytes, two barriers for each stage.
fn wide_bytes(which: usize) -> u32 {
    let (rows, tokens, stages) = WIDE_SHAPES[which];
    stages * ((rows + tokens) * 128 + 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_a_multiprocessor() {
        assert!((0..WIDE_SHAPES.len()).all(|which| wide_bytes(which) <= 227 << 10));
    }
}
