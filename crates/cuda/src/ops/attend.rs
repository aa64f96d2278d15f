//! The core of attention (model.md 6.3, 6.6, 6.7) over window rows and entries in pages, for decode and prefill alike.
//!
//! A job is some tokens of one sequence. Assumes window pages with a position's row and, with `Entries::Picked`, one token
//! per job. Refuses f32 entries.

use longwave_model::MainFormat;

use super::{Pages, no_kernels};
use crate::cubins;
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Blocks that share the tiles of a row.
const PARTS: u32 = 8;
/// Query rows (tokens x heads) of a block, by kernel.
const ROWS: [u32; 3] = [64, 32, 16];

/// Time of a block of each, relative to each other, with the 512 picks of a c4 layer.
const COST: [u64; 3] = [22, 15, 12];

/// Query rows of a block that does all parts, and its time beside `COST`.
const ALONE_ROWS: u32 = 32;
const ALONE_COST: u64 = 22;

/// Query rows of a cluster of two blocks on Hopper, its time beside `COST`, and its shared memory.
const WIDE_ROWS: u32 = 64;
const WIDE_COST: u64 = 24;
const WIDE_BYTES: u32 = 229_836;

/// Which kernel: all give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Clusters of eight blocks, of 64, 32 or 16 rows (the index in that order).
    Cluster(usize),
    /// Blocks of 32 rows that do all parts.
    Alone,
    /// Clusters of two blocks that stay and take 64 rows in turn, on Hopper.
    Wide,
}

/// The kernels for one format of entries.
pub struct Attend {
    by_rows: [Kernel; 3],
    /// For many rows: blocks that are no cluster and do all parts.
    alone: Kernel,
    /// In its place on Hopper, and in that of clusters that need several waves.
    wide: Option<Kernel>,
    multiprocessors: u32,
}

/// Some tokens of a sequence, as eight `u32` in memory of the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Job {
    /// Row of the block tables.
    pub seat: u32,
    /// Row of the batch that holds the first token.
    pub row: u32,
    /// Tokens, at most the launch's `job_tokens`; 0 for a padded job, which writes nothing.
    pub tokens: u32,
    /// Position of the first token.
    pub position: u32,
    /// First position that has a window row.
    pub oldest: u32,
    /// Padding.
    pub unused: [u32; 3],
}

/// Entries besides the window.
#[derive(Debug, Clone, Copy)]
pub enum Entries {
    /// None.
    Window,
    /// All complete entries of `ratio` positions each.
    All {
        /// Where they are.
        pages: Pages,
        /// Positions per entry.
        ratio: u32,
    },
    /// Those in a list.
    Picked {
        /// Where they are.
        pages: Pages,
        /// u32 `[T, len]`.
        picks: u64,
        /// Entries that a row of `picks` has room for.
        len: u32,
        /// u32 `[T]`: how many are picked.
        counts: u64,
    },
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// bf16 `[T, heads, 512]`, normed and rotated.
    pub queries: u64,
    /// f32 `[heads]`.
    pub sinks: u64,
    /// f32 `[T, 64]`.
    pub angles: u64,
    /// [`Job`]s.
    pub jobs: u64,
    /// How many, padded ones included.
    pub job_count: u32,
    /// Most tokens of a job: 1, 2 or 4.
    pub job_tokens: u32,
    /// Window rows.
    pub window: Pages,
    /// Positions before its own that a query sees.
    pub reach: u32,
    /// What else it sees.
    pub entries: Entries,
    /// Query heads.
    pub heads: u32,
    /// Rotated back, bf16 `[T, heads, 512]`; 0 for none.
    pub out: u64,
    /// The same as e4m3 `[T, heads * 512]`; 0 for none.
    pub codes: u64,
    /// Scales of the codes, f32 `[T, heads * 4]`.
    pub scales: u64,
}

/// Dynamic shared memory of a block: queries, two tiles, scores of both halves, three numbers per row.
fn shared_bytes(rows: u32) -> u32 {
    rows * 1024 + 2 * 64 * 1024 + rows * 544 + rows * 12
}

impl Attend {
    /// Loads the kernels for entries in `format`.
    pub fn new(context: &Context, format: MainFormat) -> Result<Attend, DriverError> {
        let (names, alone, wide) = match format {
            MainFormat::Fp8 => {
                (["attend_fp8_64", "attend_fp8_32", "attend_fp8_16"], "attend_fp8_alone", "attend_wide_fp8")
            }
            MainFormat::Bf16 => {
                (["attend_bf16_64", "attend_bf16_32", "attend_bf16_16"], "attend_bf16_alone", "attend_wide_bf16")
            }
            MainFormat::F32 => return Err(no_kernels("entries", format.name())),
        };
        let module = Module::load(context, "attend")?;
        let kernel = |i: usize| module.kernel(names[i], shared_bytes(ROWS[i]));
        let by_rows = [kernel(0)?, kernel(1)?, kernel(2)?];
        let alone = module.kernel(alone, shared_bytes(ALONE_ROWS))?;
        let hopper = cubins::find("attend_wide", context.gpu().major, context.gpu().minor).is_some();
        let wide = || Module::load(context, "attend_wide")?.kernel(wide, WIDE_BYTES);
        let wide = hopper.then(wide).transpose()?;
        Ok(Attend { by_rows, alone, wide, multiprocessors: context.gpu().multiprocessors })
    }

    /// The forms that the GPU has.
    pub fn forms(&self) -> Vec<Form> {
        let all = [Form::Cluster(0), Form::Cluster(1), Form::Cluster(2), Form::Alone, Form::Wide];
        all.into_iter().filter(|form| self.wide.is_some() || *form != Form::Wide).collect()
    }

    /// Attends for all jobs. Bits do not depend on how tokens are cut into jobs.
    pub fn attend(&self, stream: &Stream, a: &Attention) -> Result<(), DriverError> {
        self.attend_as(stream, a, self.form(a))
    }

    /// Attends in this form, one of those the GPU has.
    pub fn attend_as(&self, stream: &Stream, a: &Attention, form: Form) -> Result<(), DriverError> {
        assert!([1, 2, 4].contains(&a.job_tokens), "jobs of {} tokens", a.job_tokens);
        let nowhere = Pages { pool: 0, table: 0, unit_bytes: 0, table_len: 0, shift: 0 };
        let (pages, ratio, picks, len, counts) = match a.entries {
            Entries::Window => (nowhere, 0, 0, 0, 0),
            Entries::All { pages, ratio } => (pages, ratio, 0, 0, 0),
            Entries::Picked { pages, picks, len, counts } => {
                assert_eq!(a.job_tokens, 1, "picks belong to one token");
                (pages, 4, picks, len, counts)
            }
        };
        let (kernel, rows) = match form {
            Form::Cluster(i) => (&self.by_rows[i], ROWS[i]),
            Form::Alone => (&self.alone, ALONE_ROWS),
            Form::Wide => (self.wide.as_ref().expect("only a GPU that has the form is asked for it"), WIDE_ROWS),
        };
        let groups = a.heads.div_ceil(rows / a.job_tokens);
        let [w0, w1, w2, w3, w4] = a.window.arguments();
        let [e0, e1, e2, e3, e4] = pages.arguments();
        let arguments = [
            Argument::Pointer(a.queries),
            Argument::Pointer(a.sinks),
            Argument::Pointer(a.angles),
            Argument::Pointer(a.jobs),
            w0,
            w1,
            w2,
            w3,
            w4,
            e0,
            e1,
            e2,
            e3,
            e4,
            Argument::Pointer(picks),
            len.into(),
            Argument::Pointer(counts),
            Argument::Pointer(a.out),
            Argument::Pointer(a.codes),
            Argument::Pointer(a.scales),
            a.heads.into(),
            a.job_tokens.into(),
            a.reach.into(),
            ratio.into(),
            (groups * a.job_count).into(),
        ];
        if form == Form::Wide {
            let clusters = (groups * a.job_count).min(self.multiprocessors / 2);
            let grid = Grid { shared_bytes: WIDE_BYTES, cluster: 2, ..Grid::new(2 * clusters, 512) };
            return stream.launch(kernel, grid, &arguments);
        }
        let parts = if form == Form::Alone { 1 } else { PARTS };
        let blocks = [parts, groups, a.job_count];
        let grid = Grid { blocks, shared_bytes: shared_bytes(rows), cluster: parts, ..Grid::new(1, 256) };
        stream.launch(kernel, grid, &arguments[..arguments.len() - 1])
    }

    /// The form of this launch: the one that should take the least time.
    pub fn form(&self, a: &Attention) -> Form {
        // Two clusters fewer than multiprocessors allow were seen to run at once: some groups of them are not whole.
        let at_once = (self.multiprocessors / PARTS).saturating_sub(2).max(1);
        let cost = |which: &usize| {
            let block_heads = ROWS[*which] / a.job_tokens;
            // A kernel with more heads per block than there are computes zeros.
            let clusters = a.heads.div_ceil(block_heads) * a.job_count;
            u64::from(clusters.div_ceil(at_once)) * COST[*which]
        };
        let Some(best) = (0..3).min_by_key(cost) else { return Form::Alone };
        let clustered = cost(&best);
        let blocks = |rows: u32| a.heads.div_ceil(rows / a.job_tokens) * a.job_count;
        if self.wide.is_some() {
            let turns = blocks(WIDE_ROWS).div_ceil(self.multiprocessors / 2);
            return if u64::from(turns) * WIDE_COST < clustered { Form::Wide } else { Form::Cluster(best) };
        }
        // Fewer blocks would leave multiprocessors idle for as long as the longest context takes.
        let few = blocks(ALONE_ROWS) < 2 * self.multiprocessors / 3;
        let alone = u64::from(blocks(ALONE_ROWS).div_ceil(self.multiprocessors)) * ALONE_COST;
        if few || clustered <= alone { Form::Cluster(best) } else { Form::Alone }
    }
}
