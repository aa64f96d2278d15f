//! Products with fp8 weights and inputs, one matrix or groups of them.
//! Assumes rows that are a multiple of 16 (of 128 with several groups) and columns that are a multiple of 128. A token has
//! the same bits for any number of tokens.

use super::parts;
use crate::cubins;
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Up to so many tokens the weights are streamed; beyond, both operands are tiled in shared memory.
const FEW: u32 = 32;
/// Shared memory of a block for many tokens: three stages of both operands and of the inputs' scales, and the sums.
const LARGE_BYTES: u32 = 3 * (256 * 128 + 256 + 128 * 4) + 128 * 128 * 4;
const SMALL_BYTES: u32 = 3 * (128 * 128 + 256 + 64 * 4) + 64 * 64 * 4;

/// Shared memory of a wide block for `n` tokens: three stages of halves and three of codes, with scales, sums of 128 rows,
/// barriers.
const fn wide_bytes(n: u32) -> u32 {
    3 * n * 260 + 3 * n * 132 + 128 * n * 4 + 64
}

/// Which kernel: all give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Weights stream past up to 32 tokens.
    Few,
    /// Tiles of 64 x 64.
    Small,
    /// Tiles of 128 x 128.
    Large,
    /// Tiles of 128 rows and 64 tokens, on Hopper.
    Wide64,
    /// Tiles of 128 rows and 128 tokens, on Hopper.
    Wide128,
}

/// The kernels.
pub struct LinearFp8 {
    /// By tokens (8, 16, 32), then by parts of the columns (8, 2).
    few: [[Kernel; 2]; 3],
    large: Kernel,
    small: Kernel,
    /// For 64 and 128 tokens at once; on Hopper.
    wide: Option<[Kernel; 2]>,
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

impl LinearFp8 {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<LinearFp8, DriverError> {
        let module = Module::load(context, "linear_fp8")?;
        let kernel = |name| module.kernel(name, 0);
        let wide = || {
            let module = Module::load(context, "linear_fp8_wide")?;
            let kernel = |name, tokens| module.kernel(name, wide_bytes(tokens));
            Ok([kernel("linear_fp8_wide_64", 64)?, kernel("linear_fp8_wide_128", 128)?])
        };
        let hopper = cubins::find("linear_fp8_wide", context.gpu().major, context.gpu().minor).is_some();
        Ok(LinearFp8 {
            wide: hopper.then(wide).transpose()?,
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

    /// The forms that the GPU has.
    pub fn forms(&self) -> Vec<Form> {
        let all = [Form::Few, Form::Small, Form::Large, Form::Wide64, Form::Wide128];
        all.into_iter().filter(|form| self.wide.is_some() || !matches!(form, Form::Wide64 | Form::Wide128)).collect()
    }

    /// The one that is fastest for a product.
    pub fn form(&self, p: &Fp8Product) -> Form {
        let waves = |edge: u32| {
            let tiles = p.tokens.div_ceil(edge) * p.rows.div_ceil(128) * p.groups;
            tiles.div_ceil(self.multiprocessors)
        };
        let large = p.tokens.div_ceil(128) * p.rows.div_ceil(128) * p.groups >= self.multiprocessors;
        match p.tokens {
            ..=FEW => Form::Few,
            // A tile of 64 tokens takes five eighths of the time of one of 128.
            _ if self.wide.is_some() && 8 * waves(128) <= 5 * waves(64) => Form::Wide128,
            _ if self.wide.is_some() => Form::Wide64,
            _ if large => Form::Large,
            _ => Form::Small,
        }
    }

    /// Launches it.
    pub fn launch(&self, stream: &Stream, p: &Fp8Product) -> Result<(), DriverError> {
        self.launch_as(stream, p, self.form(p))
    }

    /// Launches it in this form, of which `Few` takes no more than 32 tokens.
    pub fn launch_as(&self, stream: &Stream, p: &Fp8Product, form: Form) -> Result<(), DriverError> {
        let fits = p.rows.is_multiple_of(if p.groups > 1 { 128 } else { 16 }) && p.cols.is_multiple_of(128);
        assert!(fits, "an fp8 product of {} x {} in {} groups", p.rows, p.cols, p.groups);
        if p.tokens == 0 {
            return Ok(());
        }
        let parts = parts(p.cols);
        let [w, w_scales, x, x_scales, y] = [p.w, p.w_scales, p.x, p.x_scales, p.y].map(Argument::Pointer);
        let [rows, cols, tokens, split, groups] = [p.rows, p.cols, p.tokens, parts, p.groups].map(Argument::U32);
        let arguments = [w, w_scales, x, x_scales, y, rows, cols, tokens, split, groups];
        let few = [w, w_scales, x, x_scales, y, rows, cols, tokens, groups];
        let tiles = |edge: u32| [p.tokens.div_ceil(edge), p.rows.div_ceil(edge), p.groups];
        let wide = |index: usize, edge: u32| {
            let all = p.tokens.div_ceil(edge) * p.rows.div_ceil(128) * p.groups;
            let grid = Grid { shared_bytes: wide_bytes(edge), ..Grid::new(all.min(self.multiprocessors), 384) };
            let kernels = self.wide.as_ref().expect("only a GPU that has wide forms is asked for one");
            stream.launch(&kernels[index], grid, &arguments)
        };
        match form {
            Form::Few => {
                assert!(p.tokens <= FEW, "{} tokens are not few", p.tokens);
                let tiles = if p.tokens <= 8 { 0 } else { usize::from(p.tokens > 16) + 1 };
                let all = (p.rows / 16).div_ceil(8 / parts) * p.groups;
                let grid = Grid::new(all.min(2 * self.multiprocessors), 256);
                stream.launch(&self.few[tiles][usize::from(parts == 2)], grid, &few)
            }
            Form::Small => {
                let grid = Grid { blocks: tiles(64), shared_bytes: SMALL_BYTES, ..Grid::new(1, 128) };
                stream.launch(&self.small, grid, &arguments[..9])
            }
            Form::Large => {
                let grid = Grid { blocks: tiles(128), shared_bytes: LARGE_BYTES, ..Grid::new(1, 256) };
                stream.launch(&self.large, grid, &arguments[..9])
            }
            Form::Wide64 => wide(0, 64),
            Form::Wide128 => wide(1, 128),
        }
    }
}
