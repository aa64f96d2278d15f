//! Products with fp8 weights and inputs, one matrix or groups of them.
//! Assumes rows that are a multiple of 16 (of 128 with several groups) and columns that are a multiple of 128. A token has
//! the same bits for any number of tokens. Hopper multiplies codes as they are, and its sums of 128 columns keep about 14 bits;
//! other GPUs widen codes to halves.

use super::parts;
use crate::cubins;
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream, TensorMap};

/// Up to so many tokens the weights are streamed; beyond, both operands are tiled in shared memory. Without Hopper's kernels, and with
/// them.
const FEW: u32 = 32;
const STREAMED: u32 = 64;
/// Shared memory of a block for many tokens: three stages of both operands and of the inputs' scales, and the sums.
const LARGE_BYTES: u32 = 3 * (256 * 128 + 256 + 128 * 4) + 128 * 128 * 4;
const SMALL_BYTES: u32 = 3 * (128 * 128 + 256 + 64 * 4) + 64 * 64 * 4;

/// Hopper's tiles of 128 tokens: weight rows, blocks of a cluster, stages.
const TILES: [(u32, u32, u32); 4] = [(128, 2, 6), (64, 2, 8), (32, 4, 10), (16, 4, 10)];
/// Whether tiles have fewer weight rows where large ones are too few ([`Form::Tiles`]). Not measured yet.
const NARROW_TILES: bool = false;
/// Shared memory for stages of weights that stream, about.
const STREAM_BYTES: u32 = 80 << 10;
/// Columns at most: on Hopper sums of as many column blocks of eight tokens fit shared memory.
pub const MOST_COLS: u32 = 128 * 128;
/// Up to so many tokens weights can go straight to registers. That is faster from 2,048 columns on; beyond 4,096 columns for two tokens
/// only, since inputs of more leave room for one block on a multiprocessor.
const EIGHT: u32 = 8;
const EIGHT_COLS: [u32; 2] = [2048, 4096];
/// Behind the stages lies what products of 64 rows read of fewer tokens.
const STREAM_BEHIND: u32 = 8 << 10;
/// What a block takes at most: eight stages of 64 rows and 64 tokens.
const STREAM_MOST_BYTES: u32 = 8 * ((64 + 64) * 128 + 16) + STREAM_BEHIND;
/// Weight rows of a tile of streamed weights.
const STREAM_ROWS: [u32; 3] = [16, 32, 64];
/// Stages at least, by [`STREAM_ROWS`], where two warpgroups take turns with the column blocks of a tile: each holds two of them while the
/// others are on their way.
const TURNS_STAGES: [u32; 3] = [16, 12, 8];
/// What a block of them takes at most: sixteen stages of 16 rows and 64 tokens, and products of 16 rows on their way.
const TURNS_MOST_BYTES: u32 = 16 * ((16 + 64) * 128 + 16) + 512 * 16 + 32;
/// Whether two warpgroups of a block share its work, where one works by itself otherwise ([`Form::Stream`]): [`Form::Teams`] if there are
/// two tiles for each multiprocessor, else [`Form::Turns`]. Neither has been measured yet.
const TWO_WARPGROUPS: bool = false;

/// Which kernel. Those of Hopper give the same bits, and so do the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Weights stream past up to 32 tokens.
    Few,
    /// Tiles of 64 x 64.
    Small,
    /// Tiles of 128 x 128.
    Large,
    /// Weights stream past up to eight tokens, on Hopper.
    Eight,
    /// Weights stream past up to 64 tokens, on Hopper.
    Stream,
    /// The same with two warpgroups of a block, each of which has tiles of its own.
    Teams,
    /// The same with two warpgroups that take turns with the column blocks of a tile, which are an even number.
    Turns,
    /// Tiles of 128 tokens and 128, 64, 32 or 16 rows, on Hopper.
    Tiles(usize),
}

/// The kernels.
pub struct LinearFp8 {
    /// By tokens (8, 16, 32), then by parts of the columns (8, 2).
    few: [[Kernel; 2]; 3],
    large: Kernel,
    small: Kernel,
    hopper: Option<Hopper>,
    multiprocessors: u32,
}

/// Hopper's kernels.
struct Hopper {
    /// By column blocks of a warp (2, 4 and more), then for two tokens and eight.
    eight: [[Kernel; 2]; 2],
    /// These three by [`STREAM_ROWS`].
    stream: [Kernel; 3],
    teams: [Kernel; 3],
    turns: [Kernel; 3],
    /// By [`TILES`], and clusters that run at once.
    tiles: [(Kernel, u32); 4],
}

/// `y = W x`; with several groups each has its own weights, inputs and results.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Product {
    /// Address of the weights, e4m3 `[groups, rows, cols]`, a multiple of 16 on Hopper, as that of the inputs.
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
        let hopper = || {
            let module = Module::load(context, "linear_fp8_wide")?;
            let stream = |name| module.kernel(name, STREAM_MOST_BYTES);
            let tiles = |name, which| {
                let kernel = module.kernel(name, tiles_bytes(which))?;
                let clusters = kernel.clusters_at_once(tiles_grid(which, 1))?;
                Ok((kernel, clusters.max(1)))
            };
            let turns = Module::load(context, "linear_fp8_turns")?;
            let turns = |name| turns.kernel(name, TURNS_MOST_BYTES);
            let eight = Module::load(context, "linear_fp8_eight")?;
            let eight = |name, blocks, tokens| eight.kernel(name, eight_bytes(blocks, 1, tokens).1);
            let most = MOST_COLS / 128;
            Ok(Hopper {
                eight: [
                    [eight("linear_fp8_eight_2_2", 16, 2)?, eight("linear_fp8_eight_2_8", 16, 8)?],
                    [eight("linear_fp8_eight_4_2", most, 2)?, eight("linear_fp8_eight_4_8", most, 8)?],
                ],
                stream: [
                    stream("linear_fp8_stream_16")?,
                    stream("linear_fp8_stream_32")?,
                    stream("linear_fp8_stream_64")?,
                ],
                teams: [stream("linear_fp8_teams_16")?, stream("linear_fp8_teams_32")?, stream("linear_fp8_teams_64")?],
                turns: [turns("linear_fp8_turns_16")?, turns("linear_fp8_turns_32")?, turns("linear_fp8_turns_64")?],
                tiles: [
                    tiles("linear_fp8_tiles", 0)?,
                    tiles("linear_fp8_tiles_64", 1)?,
                    tiles("linear_fp8_tiles_32", 2)?,
                    tiles("linear_fp8_tiles_16", 3)?,
                ],
            })
        };
        let is_hopper = cubins::find("linear_fp8_wide", context.gpu().major, context.gpu().minor).is_some();
        Ok(LinearFp8 {
            hopper: is_hopper.then(hopper).transpose()?,
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

    /// The forms that the GPU has, by the bits they give.
    pub fn forms(&self) -> Vec<Vec<Form>> {
        let mut forms = vec![vec![Form::Few, Form::Small, Form::Large]];
        let few = [Form::Eight, Form::Stream, Form::Teams, Form::Turns];
        let hopper = few.into_iter().chain((0..TILES.len()).map(Form::Tiles)).collect();
        forms.extend(self.hopper.as_ref().map(|_| hopper));
        forms
    }

    /// The one that is fastest for a product.
    pub fn form(&self, p: &Fp8Product) -> Form {
        let large = p.tokens.div_ceil(128) * p.rows.div_ceil(128) * p.groups >= self.multiprocessors;
        match (self.hopper.is_some(), p.tokens) {
            (true, ..=2) if p.cols >= EIGHT_COLS[0] => Form::Eight,
            (true, ..=EIGHT) if (EIGHT_COLS[0]..=EIGHT_COLS[1]).contains(&p.cols) => Form::Eight,
            (true, ..=STREAMED) if TWO_WARPGROUPS => self.of_two_warpgroups(p),
            (true, ..=STREAMED) => Form::Stream,
            (true, _) => Form::Tiles(self.tiles(p)),
            (false, ..=FEW) => Form::Few,
            _ if large => Form::Large,
            _ => Form::Small,
        }
    }

    /// Which of [`TILES`]: the largest of which most multiprocessors have one.
    fn tiles(&self, p: &Fp8Product) -> usize {
        let enough = |&(rows, cluster, _): &(u32, u32, u32)| {
            cluster * tile_clusters(p, rows, cluster) >= self.multiprocessors * 3 / 4
        };
        if NARROW_TILES { TILES.iter().position(enough).unwrap_or(TILES.len() - 1) } else { 0 }
    }

    /// The form of two warpgroups a block for a product, or that of one where the product is not cut evenly.
    fn of_two_warpgroups(&self, p: &Fp8Product) -> Form {
        let which = stream_rows(p, self.multiprocessors);
        if stream_tiles(p, STREAM_ROWS[which]) >= 2 * self.multiprocessors {
            Form::Teams
        } else if takes_turns(p) {
            Form::Turns
        } else {
            Form::Stream
        }
    }

    /// Launches it.
    pub fn launch(&self, stream: &Stream, p: &Fp8Product) -> Result<(), DriverError> {
        self.launch_as(stream, p, self.form(p))
    }

    /// Launches it in this form, of which `Eight` and `Few` take no more than 8 and 32 tokens, `Stream`, `Teams` and `Turns` no more than
    /// 64; `Turns` takes columns that are a multiple of 256.
    pub fn launch_as(&self, stream: &Stream, p: &Fp8Product, form: Form) -> Result<(), DriverError> {
        let fits = p.rows.is_multiple_of(if p.groups > 1 { 128 } else { 16 })
            && p.cols.is_multiple_of(128)
            && p.cols <= MOST_COLS;
        assert!(fits, "an fp8 product of {} x {} in {} groups", p.rows, p.cols, p.groups);
        if p.tokens == 0 {
            return Ok(());
        }
        let parts = parts(p.cols);
        let [w, w_scales, x, x_scales, y] = [p.w, p.w_scales, p.x, p.x_scales, p.y].map(Argument::Pointer);
        let [rows, cols, tokens, split, groups] = [p.rows, p.cols, p.tokens, parts, p.groups].map(Argument::U32);
        let arguments = [w, w_scales, x, x_scales, y, rows, cols, tokens, split];
        let few = [w, w_scales, x, x_scales, y, rows, cols, tokens, groups];
        let tiles = |edge: u32| [p.tokens.div_ceil(edge), p.rows.div_ceil(edge), p.groups];
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
                stream.launch(&self.small, grid, &arguments)
            }
            Form::Large => {
                let grid = Grid { blocks: tiles(128), shared_bytes: LARGE_BYTES, ..Grid::new(1, 256) };
                stream.launch(&self.large, grid, &arguments)
            }
            Form::Eight | Form::Stream | Form::Teams | Form::Turns | Form::Tiles(_) => {
                self.hopper().launch(stream, p, form, self.multiprocessors)
            }
        }
    }

    fn hopper(&self) -> &Hopper {
        self.hopper.as_ref().expect("only a GPU that has its forms is asked for one")
    }
}

/// Which of the kernels for few tokens takes so many column blocks, and shared memory of a block with inputs of `tokens`: those of all
/// column blocks that its warps walk through and their sums (twice, if a warp has less than four).
fn eight_bytes(blocks: u32, groups: u32, tokens: u32) -> (usize, u32) {
    let (which, steps, buffers) = match blocks {
        ..=16 if groups == 1 => (0, 2, 2),
        _ => (1, blocks.div_ceil(32) * 4, 1),
    };
    (which, tokens * (8 * steps * 128 + buffers * 16 * (8 * steps + 4) * 4))
}

/// Stages of `rows` weight rows and `held` tokens for each of a block's teams (1 or 2), and shared memory of a block. Of each `4 / teams`
/// a thread that copies has one.
fn stream_bytes(rows: u32, held: u32, teams: u32) -> (u32, u32) {
    let stage_bytes = (rows + held) * 128;
    let stages = (STREAM_BYTES / stage_bytes / 4 * 4).max(8) / teams;
    (stages, teams * stages * (stage_bytes + 16) + STREAM_BEHIND)
}

/// The same of two warpgroups that take turns: behind the stages lie two slots for products each way, of half a tile of 64 tokens, and
/// their barriers.
fn turns_bytes(which: usize, held: u32) -> (u32, u32) {
    let (rows, least) = (STREAM_ROWS[which], TURNS_STAGES[which]);
    let stage_bytes = (rows + held) * 128;
    let stages = (STREAM_BYTES / stage_bytes / 4 * 4).max(least);
    (stages, stages * (stage_bytes + 16) + 512 * rows + 32)
}

/// Tiles of so many weight rows.
fn stream_tiles(p: &Fp8Product, rows: u32) -> u32 {
    p.rows.div_ceil(rows) * p.groups
}

/// Which of [`STREAM_ROWS`]: the largest tiles of which nearly every multiprocessor has one.
fn stream_rows(p: &Fp8Product, multiprocessors: u32) -> usize {
    let enough = |rows: &u32| stream_tiles(p, *rows) >= multiprocessors * 7 / 8;
    STREAM_ROWS.iter().rposition(enough).unwrap_or(0)
}

/// Whether two warpgroups can take turns: column blocks come in pairs, and so do their scales.
fn takes_turns(p: &Fp8Product) -> bool {
    p.cols.is_multiple_of(256) && p.w_scales.is_multiple_of(8) && p.x_scales.is_multiple_of(8)
}

/// Shared memory of a block of [`TILES`]: stages of both operands and barriers.
fn tiles_bytes(which: usize) -> u32 {
    let (rows, _, stages) = TILES[which];
    stages * ((rows + 128) * 128 + 16)
}

/// The grid of so many clusters of [`TILES`].
fn tiles_grid(which: usize, clusters: u32) -> Grid {
    let cluster = TILES[which].1;
    Grid { shared_bytes: tiles_bytes(which), cluster, ..Grid::new(cluster * clusters, 384) }
}

/// Clusters that have tiles of so many rows.
fn tile_clusters(p: &Fp8Product, rows: u32, cluster: u32) -> u32 {
    p.tokens.div_ceil(128) * p.rows.div_ceil(cluster * rows) * p.groups
}

impl Hopper {
    fn launch_eight(&self, stream: &Stream, p: &Fp8Product, multiprocessors: u32) -> Result<(), DriverError> {
        assert!(p.tokens <= EIGHT, "{} tokens are more than eight", p.tokens);
        let many = usize::from(p.tokens > 2);
        let (which, shared_bytes) = eight_bytes(p.cols / 128, p.groups, [2, 8][many]);
        let blocks = (p.rows / 16 * p.groups).min(2 * multiprocessors);
        let grid = Grid { shared_bytes, ..Grid::new(blocks, 256) };
        let pointers = [p.w, p.w_scales, p.x, p.x_scales, p.y].map(Argument::Pointer);
        let sizes = [p.rows, p.cols, p.tokens, p.groups].map(Argument::U32);
        stream.launch(&self.eight[which][many], grid, &[&pointers[..], &sizes].concat())
    }

    fn launch(&self, stream: &Stream, p: &Fp8Product, form: Form, multiprocessors: u32) -> Result<(), DriverError> {
        if form == Form::Eight {
            return self.launch_eight(stream, p, multiprocessors);
        }
        let maps = |rows: u32, held: u32| -> Result<[Argument; 2], DriverError> {
            let w = TensorMap::new(p.w, p.groups * p.rows, p.cols, rows)?;
            Ok([w.into(), TensorMap::new(p.x, p.tokens, p.groups * p.cols, held)?.into()])
        };
        let pointers = [p.w_scales, p.x_scales, p.y].map(Argument::Pointer);
        let sizes = [p.rows, p.cols, p.tokens, p.groups].map(Argument::U32);
        if let Form::Tiles(which) = form {
            let (rows, cluster, _) = TILES[which];
            let (kernel, at_once) = &self.tiles[which];
            let grid = tiles_grid(which, tile_clusters(p, rows, cluster).min(*at_once));
            return stream.launch(kernel, grid, &[&maps(rows, 128 / cluster)?[..], &pointers, &sizes].concat());
        }
        assert!(p.tokens <= STREAMED, "{} tokens are not few", p.tokens);
        let which = stream_rows(p, multiprocessors);
        let (rows, held) = (STREAM_ROWS[which], p.tokens.next_power_of_two().max(8));
        let (kernels, warpgroups, (stages, shared_bytes)) = match form {
            Form::Teams => (&self.teams, 2, stream_bytes(rows, held, 2)),
            Form::Turns => {
                assert!(takes_turns(p), "no turns with {p:x?}");
                (&self.turns, 2, turns_bytes(which, held))
            }
            _ => (&self.stream, 1, stream_bytes(rows, held, 1)),
        };
        let blocks = stream_tiles(p, rows).min(multiprocessors);
        let grid = Grid { shared_bytes, ..Grid::new(blocks, 128 * (warpgroups + 1)) };
        let sizes = [&sizes[..], &[held.into(), stages.into()]].concat();
        stream.launch(&kernels[which], grid, &[&maps(rows, held)?[..], &pointers, &sizes].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block's shared memory on Hopper, less what is fixed of the kernels for few tokens.
    const MOST_BYTES: u32 = (227 << 10) - (6 << 10);

    #[test]
    fn no_launch_asks_for_more_shared_memory_than_its_kernel_may_have() {
        for (which, rows) in STREAM_ROWS.into_iter().enumerate() {
            for held in [8, 16, 32, 64] {
                for teams in [1, 2] {
                    let (stages, bytes) = stream_bytes(rows, held, teams);
                    assert!(bytes <= STREAM_MOST_BYTES, "{rows} rows, {held} tokens: {bytes}");
                    assert!(stages >= 4 && stages.is_multiple_of(4 / teams), "{rows} rows, {held} tokens: {stages}");
                }
                let (stages, bytes) = turns_bytes(which, held);
                assert!(bytes <= TURNS_MOST_BYTES, "turns, {rows} rows, {held} tokens: {bytes}");
                assert!(stages >= 8 && stages.is_multiple_of(4), "turns, {rows} rows, {held} tokens: {stages}");
                // What products of 64 rows read behind a stage is the block's.
                assert!(stages * (rows + held) * 128 + (64 - held) * 128 <= bytes, "turns, {rows} rows, {held} tokens");
            }
        }
        const { assert!(STREAM_MOST_BYTES <= MOST_BYTES && TURNS_MOST_BYTES <= MOST_BYTES) };
        assert!((0..TILES.len()).all(|which| tiles_bytes(which) <= MOST_BYTES));
        for (groups, tokens) in [(1, 2), (1, 8), (8, 2), (8, 8)] {
            for blocks in 1..=MOST_COLS / 128 {
                let (which, bytes) = eight_bytes(blocks, groups, tokens);
                let may = eight_bytes([16, MOST_COLS / 128][which], 1, tokens).1;
                assert!(
                    bytes <= may && may <= MOST_BYTES,
                    "{blocks} column blocks in {groups} groups: {bytes} of {may}"
                );
            }
        }
    }
}
