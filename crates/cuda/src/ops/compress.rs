//! Compressors (model.md 6.4): entries and index keys of groups that rows of a step end, and the state of open groups.
//!
//! Input are plain products; what earlier steps left is in state pages. Rows, sums and entries whose page is not mapped are
//! not stored: a replay hides its entries by a table without blocks. Refuses f32 entries and keys.

use longwave_model::{IndexFormat, MainFormat};

use super::keys::Projected;
use super::{Pages, no_kernels};
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// The kernels for one pair of formats.
pub struct Compress {
    main4: Kernel,
    index4: Kernel,
    main128: Kernel,
    /// Both of ratio 4 with the rows of [`Keys::project`](super::keys::Keys::project).
    rows4: Kernel,
}

/// A compressor over the rows of a step.
#[derive(Debug, Clone, Copy)]
pub struct Compressor {
    /// f32 `[T, 2n]`, values then scores: n is 1,024 (c4 main), 256 (c4 index) or 512 (c128).
    pub products: u64,
    /// f32 `[ratio, n]`.
    pub ape: u64,
    /// f32 `[T, 64]`: rotation of the first position of each row's group, see [`rope`](super::rope).
    pub angles: u64,
    /// f32 `[512]` or `[128]`.
    pub norm: u64,
    /// State: rows (c4), or sums and rows of drafts (c128, one page per 128 positions).
    pub state: Pages,
    /// Entries, or index keys.
    pub entries: Pages,
    /// Of the norm.
    pub eps: f32,
}

/// Rows of one sequence in a step, as eight `u32` in memory of the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Sequence {
    /// Row of the block tables; [`UNMAPPED`](super::UNMAPPED) for none.
    pub seat: u32,
    /// Position of its first row.
    pub start: u32,
    /// That row in the batch.
    pub start_row: u32,
    /// Rows.
    pub rows: u32,
    /// How many of them, at the end, are drafts.
    pub drafts: u32,
    /// Padding.
    pub unused: [u32; 3],
}

impl Compress {
    /// Loads the kernels for entries in `main` and index keys in `index`.
    pub fn new(context: &Context, main: MainFormat, index: IndexFormat) -> Result<Compress, DriverError> {
        let (main4, main128) = match main {
            MainFormat::Fp8 => ("compress4_main_fp8", "compress128_fp8"),
            MainFormat::Bf16 => ("compress4_main_bf16", "compress128_bf16"),
            MainFormat::F32 => return Err(no_kernels("entries", main.name())),
        };
        let index4 = match index {
            IndexFormat::Fp8 => "compress4_index_fp8",
            IndexFormat::Fp4 => "compress4_index_fp4",
            IndexFormat::Bf16 => "compress4_index_bf16",
            IndexFormat::F32 => return Err(no_kernels("index keys", index.name())),
        };
        let rows4 = match (main, index) {
            (MainFormat::Fp8, IndexFormat::Fp8) => "c4_rows_fp8_fp8",
            (MainFormat::Fp8, IndexFormat::Fp4) => "c4_rows_fp8_fp4",
            (MainFormat::Fp8, _) => "c4_rows_fp8_bf16",
            (_, IndexFormat::Fp8) => "c4_rows_bf16_fp8",
            (_, IndexFormat::Fp4) => "c4_rows_bf16_fp4",
            _ => "c4_rows_bf16_bf16",
        };
        let (module, rows) = (Module::load(context, "compress")?, Module::load(context, "c4_rows")?);
        let kernel = |name| module.kernel(name, 0);
        let [main4, index4, main128] = [main4, index4, main128].map(kernel);
        Ok(Compress { main4: main4?, index4: index4?, main128: main128?, rows4: rows.kernel(rows4, 0)? })
    }

    /// Ratio 4, entries; `rows` are [`BatchRow`](super::BatchRow)s `[tokens]`.
    pub fn main4(&self, stream: &Stream, c: &Compressor, rows: u64, tokens: u32) -> Result<(), DriverError> {
        launch(stream, &self.main4, Grid::new(tokens, 256), c, rows)
    }

    /// Ratio 4, index keys.
    pub fn index4(&self, stream: &Stream, c: &Compressor, rows: u64, tokens: u32) -> Result<(), DriverError> {
        launch(stream, &self.index4, Grid::new(tokens, 128), c, rows)
    }

    /// [`Keys::project`](super::keys::Keys::project), `main4` and `index4` in one launch: none of them needs what another one writes. The
    /// three have as many tokens, and both compressors have the same `closing` rows, angles and `eps`.
    pub fn rows4(
        &self,
        stream: &Stream,
        projected: &Projected,
        main: &Compressor,
        index: &Compressor,
        closing: u64,
    ) -> Result<(), DriverError> {
        assert!(main.angles == index.angles && main.eps == projected.eps && index.eps == projected.eps);
        let of = |c: &Compressor| {
            let weights = [c.products, c.ape, c.norm].map(Argument::Pointer);
            [&weights[..], &c.state.arguments(), &c.entries.arguments()].concat()
        };
        let shared = [closing, main.angles].map(Argument::Pointer);
        let arguments = [&projected.arguments()[..], &shared, &of(main), &of(index)].concat();
        let grid = Grid { blocks: [projected.tokens, 4, 1], ..Grid::new(1, 256) };
        stream.launch(&self.rows4, grid, &arguments)
    }

    /// Ratio 128; `sequences` are [`Sequence`]s `[count]` of at most `most_rows` rows each.
    pub fn main128(
        &self,
        stream: &Stream,
        c: &Compressor,
        sequences: u64,
        count: u32,
        most_rows: u32,
    ) -> Result<(), DriverError> {
        // Groups that so many neighbouring positions can touch.
        let groups = (most_rows + 126) / 128 + 1;
        launch(stream, &self.main128, Grid { blocks: [count, groups, 1], ..Grid::new(1, 512) }, c, sequences)
    }
}

fn launch(stream: &Stream, kernel: &Kernel, grid: Grid, c: &Compressor, list: u64) -> Result<(), DriverError> {
    let [s0, s1, s2, s3, s4] = c.state.arguments();
    let [e0, e1, e2, e3, e4] = c.entries.arguments();
    let arguments = [
        Argument::Pointer(c.products),
        Argument::Pointer(c.ape),
        Argument::Pointer(list),
        Argument::Pointer(c.angles),
        Argument::Pointer(c.norm),
        s0,
        s1,
        s2,
        s3,
        s4,
        e0,
        e1,
        e2,
        e3,
        e4,
        c.eps.into(),
    ];
    stream.launch(kernel, grid, &arguments)
}
