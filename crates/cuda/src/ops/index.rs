//! The indexer of c4 layers (model.md 6.5): queries and head weights, scores of all visible keys, the exact k best.
//!
//! For few rows one kernel scores all keys and one picks; for more, blocks keep the best of segments, which are merged; for many
//! rows on Hopper, neighbouring rows share keys, segment by segment: the same picks. Scratch is sized once, for a few rows of the
//! model's longest context and for segments of many. Assumes at most 64 heads, k at most 1,024 and pages of at least 32 keys.
//! Refuses f32 keys.

use longwave_model::IndexFormat;

use super::{Pages, no_kernels};
use crate::cubins;
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Blocks that a launch is cut into, if its rows are fewer: twice the multiprocessors of an H200.
const BLOCKS: u32 = 264;
/// Up to so many rows are scored as a whole, if they see no more keys than these.
const FEW: u32 = 16;
const FEW_KEYS: u32 = 1 << 18;
/// Keys of a block of these at once, and of a group whose largest score is kept.
const SCORERS: u32 = 128;
/// So many of these blocks fit an H200 at once.
const SCORER_BLOCKS: u32 = 4 * 132;
const GROUP: u32 = 16;
/// Which kernels score and pick few rows on Hopper: those of `index_few_beside.cu` and `index_few_bins.cu`, whose picks are the same in
/// fewer trips to memory and barriers, or those of `index_few.cu`. The former have not been measured yet.
const FEW_BESIDE: bool = false;
/// Threads of their blocks, keys of a block that scores where a row sees few, and so many of these blocks fit an H200 at once.
const BESIDE_THREADS: u32 = 256;
const BESIDE_KEYS: u32 = 64;
const BESIDE_BLOCKS: u32 = 2 * 132;
const BIN_THREADS: u32 = 512;
/// Most segments of a row's entries, and most candidates of all of them, which one block merges.
const SEGMENTS: u32 = 64;
const CANDIDATES: u32 = 24_576;
/// More rows than these share keys on Hopper.
const WIDE: u32 = 128;
/// Rows of a block that share keys, keys of its warpgroups at once, and what filling its shared memory takes in their time.
const WIDE_ROWS: u32 = 8;
const WIDE_KEYS: u32 = 192;
const WIDE_FILL: u32 = 1;
/// Its shared memory: heads of eight rows as bf16, their gates, what they see.
const WIDE_BYTES: u32 = WIDE_ROWS * (64 * 256 + 80 * 4 + 8);
/// Scores of a segment of all rows, 64 MiB, and the least keys of a segment, which more than 16,384 rows have.
const WIDE_SCORES: u32 = 1 << 24;
const WIDE_SEGMENT: u32 = 1024;

/// The kernels for one format of keys.
pub struct Index {
    queries: Kernel,
    row: Kernel,
    pick: Kernel,
    /// Scores and picks of few rows in their second form, on Hopper.
    beside: Option<[Kernel; 2]>,
    scores: Kernel,
    merge: Kernel,
    /// Scores of a segment and the best of them, on Hopper.
    wide: Option<[Kernel; 2]>,
    multiprocessors: u32,
}

/// Queries and head weights, from their products.
#[derive(Debug, Clone, Copy)]
pub struct Queries {
    /// f32 `[T, heads, 128]`.
    pub products: u64,
    /// Products with `weights_proj`, f32 `[T, heads]`.
    pub gates: u64,
    /// [`BatchRow`](super::BatchRow)s `[T]`.
    pub rows: u64,
    /// f32 `[T, 64]`.
    pub angles: u64,
    /// bf16 `[T, heads, 128]`: values on the grid of the keys.
    pub out: u64,
    /// f32 `[T, heads]`.
    pub weights: u64,
    /// Rows, padded ones included.
    pub tokens: u32,
    /// Index heads.
    pub heads: u32,
}

/// A selection.
#[derive(Debug, Clone, Copy)]
pub struct Selection {
    /// bf16 `[T, heads, 128]`.
    pub queries: u64,
    /// f32 `[T, heads]`.
    pub weights: u64,
    /// [`BatchRow`](super::BatchRow)s `[T]`; a row at position `p` sees `(p + 1) / 4` keys.
    pub rows: u64,
    /// Index keys.
    pub keys: Pages,
    /// Rows of their table, at least one.
    pub seats: u32,
    /// [`scratch_bytes`] bytes, aligned to 16.
    pub scratch: u64,
    /// u32 `[T, k]`, ascending.
    pub picks: u64,
    /// u32 `[T]`: how many were picked, `min(k, visible)`.
    pub counts: u64,
    /// Rows, padded ones included.
    pub tokens: u32,
    /// Index heads.
    pub heads: u32,
    /// Most entries to pick.
    pub k: u32,
    /// Keys that a row sees at most in any step: what scratch is for.
    pub most: u32,
    /// Keys that a row of this batch sees at most, where many rows are of few sequences and share keys; launches that must not
    /// depend on the batch, and batches of single rows, have none.
    pub seen: Option<u32>,
}

/// Bytes of scratch for selections of `k` of at most `most` entries over at most `tokens` rows.
pub fn scratch_bytes(tokens: u32, k: u32, most: u32) -> u64 {
    let (few, stride) = (u64::from(tokens.min(FEW)), u64::from(stride(most.min(FEW_KEYS))));
    let candidates = u64::from(tokens.max(BLOCKS)) * (u64::from(k) * 8 + 4);
    let wide =
        if tokens > WIDE { wide_scores(tokens, most) * 4 + u64::from(tokens) * (u64::from(k) * 8 + 4) } else { 0 };
    candidates.max(4 * few * (stride + stride / u64::from(GROUP))).max(wide)
}

/// Keys of a segment of many rows that see at most `most`, a multiple of 64.
fn wide_segment(tokens: u32, most: u32) -> u32 {
    (WIDE_SCORES / tokens).max(WIDE_SEGMENT).min(most.next_multiple_of(64)) / 64 * 64
}

/// Scores of a segment of any number of rows up to `tokens`.
fn wide_scores(tokens: u32, most: u32) -> u64 {
    let all = u64::from(tokens) * u64::from(most.next_multiple_of(64));
    all.min((u64::from(tokens) * u64::from(WIDE_SEGMENT)).max(u64::from(WIDE_SCORES)))
}

/// Parts that blocks have of `span` keys: as many as end earliest on `multiprocessors`, one block each.
fn wide_parts(tokens: u32, span: u32, multiprocessors: u32) -> u32 {
    let (tiles, rounds) = (tokens.div_ceil(WIDE_ROWS), span.div_ceil(WIDE_KEYS));
    let time = |parts: &u32| (tiles * parts).div_ceil(multiprocessors) * (rounds.div_ceil(*parts) + WIDE_FILL);
    (1..=rounds.clamp(1, 16)).min_by_key(time).unwrap_or(1)
}

/// Scores of a row in scratch: four maxima of groups at a time are aligned to 16 bytes.
fn stride(most: u32) -> u32 {
    most.next_multiple_of(4 * GROUP)
}

/// Segments of each row's entries.
fn segments(tokens: u32, k: u32) -> u32 {
    (BLOCKS / tokens.max(1)).clamp(1, SEGMENTS.min(CANDIDATES / k))
}

impl Index {
    /// Loads the kernels for keys in `format`.
    pub fn new(context: &Context, format: IndexFormat) -> Result<Index, DriverError> {
        let [queries, scores, row, beside, wide] = match format {
            IndexFormat::Fp8 => {
                ["index_queries_fp8", "index_scores_fp8", "index_row_fp8", "index_beside_fp8", "index_wide_scores_fp8"]
            }
            IndexFormat::Fp4 => {
                ["index_queries_fp4", "index_scores_fp4", "index_row_fp4", "index_beside_fp4", "index_wide_scores_fp4"]
            }
            IndexFormat::Bf16 => [
                "index_queries_bf16",
                "index_scores_bf16",
                "index_row_bf16",
                "index_beside_bf16",
                "index_wide_scores_bf16",
            ],
            IndexFormat::F32 => return Err(no_kernels("index keys", format.name())),
        };
        let (module, few) = (Module::load(context, "index")?, Module::load(context, "index_few")?);
        let kernel = |name| module.kernel(name, 0);
        let (row, pick) = (few.kernel(row, 0)?, few.kernel("index_pick", 0)?);
        let hopper = cubins::find("index_wide", context.gpu().major, context.gpu().minor).is_some();
        let beside = || {
            let (scores, picks) =
                (Module::load(context, "index_few_beside")?, Module::load(context, "index_few_bins")?);
            Ok([scores.kernel(beside, 0)?, picks.kernel("index_pick_bins", 0)?])
        };
        let wide = || {
            let module = Module::load(context, "index_wide")?;
            Ok([module.kernel(wide, WIDE_BYTES)?, module.kernel("index_wide_cut", 0)?])
        };
        Ok(Index {
            queries: kernel(queries)?,
            row,
            pick,
            beside: hopper.then(beside).transpose()?,
            scores: kernel(scores)?,
            merge: kernel("index_merge")?,
            wide: hopper.then(wide).transpose()?,
            multiprocessors: context.gpu().multiprocessors,
        })
    }

    /// Rotates and rounds queries, scales head weights.
    pub fn queries(&self, stream: &Stream, q: &Queries) -> Result<(), DriverError> {
        let weight_scale = (128f64.powf(-0.5) * f64::from(q.heads).powf(-0.5)) as f32;
        let arguments = [
            Argument::Pointer(q.products),
            Argument::Pointer(q.gates),
            Argument::Pointer(q.rows),
            Argument::Pointer(q.angles),
            Argument::Pointer(q.out),
            Argument::Pointer(q.weights),
            q.heads.into(),
            weight_scale.into(),
        ];
        let blocks = [q.heads.div_ceil(8), q.tokens, 1];
        stream.launch(&self.queries, Grid { blocks, ..Grid::new(1, 256) }, &arguments)
    }

    /// Picks the k best entries of every row.
    pub fn select(&self, stream: &Stream, s: &Selection) -> Result<(), DriverError> {
        assert!(s.heads <= 64 && (1..=1024).contains(&s.k) && s.keys.shift >= 5, "{s:?}");
        match s.seen {
            _ if s.tokens == 0 => Ok(()),
            Some(seen) if s.tokens > WIDE && self.wide.is_some() => {
                self.select_wide(stream, s, wide_segment(s.tokens, seen.min(s.most)))
            }
            _ => self.select_by_row(stream, s),
        }
    }

    /// [`Index::select`] of each row by itself.
    pub fn select_by_row(&self, stream: &Stream, s: &Selection) -> Result<(), DriverError> {
        self.select_by_row_as(stream, s, FEW_BESIDE)
    }

    /// The same, few rows with their second form or not; without kernels for it they have the first.
    pub fn select_by_row_as(&self, stream: &Stream, s: &Selection, beside: bool) -> Result<(), DriverError> {
        // In scratch the scores of rows and then the largest of their groups; or the candidates of segments and how many each has.
        let few = s.tokens <= FEW && s.most <= FEW_KEYS;
        let beside = self.beside.as_ref().filter(|_| few && beside);
        let stride = stride(s.most);
        let blocks = |of_gpu: u32, keys| [(of_gpu / s.tokens).min(s.most.div_ceil(keys)).max(1), s.tokens, 1];
        let (kernels, size, behind, grid, pickers) = match beside {
            Some([row, pick]) => {
                let blocks = blocks(BESIDE_BLOCKS, BESIDE_KEYS);
                let grid = Grid { blocks, ..Grid::new(1, BESIDE_THREADS) };
                ([row, pick], stride, 4 * u64::from(stride), grid, BIN_THREADS)
            }
            None if few => {
                let grid = Grid { blocks: blocks(SCORER_BLOCKS, SCORERS), ..Grid::new(1, SCORERS) };
                ([&self.row, &self.pick], stride, 4 * u64::from(stride), grid, 1024)
            }
            None => {
                let segments = segments(s.tokens, s.k);
                let candidates = 8 * u64::from(segments) * u64::from(s.k);
                let grid = Grid { blocks: [segments, s.tokens, 1], ..Grid::new(1, 256) };
                ([&self.scores, &self.merge], segments, candidates, grid, 1024)
            }
        };
        let [queries, weights, rows, scratch, second, picks, counts] =
            [s.queries, s.weights, s.rows, s.scratch, s.scratch + u64::from(s.tokens) * behind, s.picks, s.counts]
                .map(Argument::Pointer);
        let [size, heads, k, seats] = [size, s.heads, s.k, s.seats].map(Argument::U32);
        let stride = if few { &[size][..] } else { &[] };
        let seats = if beside.is_some() { &[seats][..] } else { &[] };
        let keys = s.keys.arguments();
        let arguments = [&[queries, weights, rows][..], &keys, &[scratch, second], stride, &[heads, k], seats].concat();
        stream.launch(kernels[0], grid, &arguments)?;
        stream.launch(kernels[1], Grid::new(s.tokens, pickers), &[rows, scratch, second, picks, counts, size, k])
    }

    /// [`Index::select`] of rows that share keys, in segments of `segment` keys, a multiple of 64 whose scores scratch holds.
    /// Does nothing where there are no kernels for it.
    pub fn select_wide(&self, stream: &Stream, s: &Selection, segment: u32) -> Result<(), DriverError> {
        let Some([score, cut]) = &self.wide else { return Ok(()) };
        let most = s.seen.map_or(s.most, |seen| seen.min(s.most));
        assert!(segment.is_multiple_of(64) && (segment > 0 || most == 0), "segments of {segment} keys");
        // Scores of a segment, then candidates of each row, then their bars.
        let found = s.scratch + 4 * u64::from(s.tokens) * u64::from(segment);
        let bars = found + 8 * u64::from(s.tokens) * u64::from(s.k);
        let [queries, weights, rows, scores, found, bars, picks, picked] =
            [s.queries, s.weights, s.rows, s.scratch, found, bars, s.picks, s.counts].map(Argument::Pointer);
        let keys = s.keys.arguments();
        // Rows that see few keys get their picks with the first segment.
        for first in (0..most.max(1)).step_by(segment.max(1) as usize) {
            let span = segment.min(most - first);
            let of_segment = [first, span, segment].map(Argument::U32);
            let sizes = [s.tokens, s.heads, s.k].map(Argument::U32);
            if most > s.k {
                let blocks = [wide_parts(s.tokens, span, self.multiprocessors), s.tokens.div_ceil(WIDE_ROWS), 1];
                let grid = Grid { blocks, shared_bytes: WIDE_BYTES, ..Grid::new(1, 384) };
                let arguments = [&[queries, weights, rows][..], &keys, &[scores], &of_segment, &sizes].concat();
                stream.launch(score, grid, &arguments)?;
            }
            let arguments = [&[rows, scores, found, bars, picks, picked][..], &of_segment, &[s.k.into()]].concat();
            stream.launch(cut, Grid::new(s.tokens, 256), &arguments)?;
            if most <= s.k {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_holds_the_candidates_of_every_number_of_rows_and_the_scores_of_few() {
        for k in [512, 1024] {
            for tokens in 1..=2000 {
                let candidates = u64::from(tokens) * u64::from(segments(tokens, k));
                assert!(candidates * (u64::from(k) * 8 + 4) <= scratch_bytes(2000, k, 0), "{tokens} {k}");
            }
        }
        for most in [1, 31, 33, 40_000, FEW_KEYS] {
            let (rows, stride) = (u64::from(FEW), u64::from(stride(most)));
            assert!(stride >= u64::from(most) && stride.is_multiple_of(64));
            assert!(4 * rows * (stride + stride / 16) <= scratch_bytes(2000, 512, most), "{most}");
        }
    }

    #[test]
    fn scratch_holds_a_segment_of_every_number_of_many_rows() {
        for most in [1, 200, 10_000, 262_144] {
            for (all, k) in [(129, 512), (2048, 512), (5000, 1024)] {
                for tokens in WIDE + 1..=all {
                    let segment = wide_segment(tokens, most);
                    assert!(segment.is_multiple_of(64) && segment >= most.min(WIDE_SEGMENT), "{tokens} {most}");
                    let bytes = u64::from(tokens) * (4 * u64::from(segment) + 8 * u64::from(k) + 4);
                    assert!(bytes <= scratch_bytes(all, k, most), "{tokens} of {all}, {k} of {most}");
                }
            }
        }
    }

    #[test]
    fn parts_of_a_segment_leave_few_multiprocessors_idle() {
        for tokens in [129u32, 256, 512, 1000, 1536, 2048, 4096] {
            let (span, tiles) = (wide_segment(tokens, 262_144), tokens.div_ceil(WIDE_ROWS));
            let parts = wide_parts(tokens, span, 132);
            let rounds = (tiles * parts).div_ceil(132) * span.div_ceil(WIDE_KEYS * parts);
            let least = f64::from(tiles) * f64::from(span) / f64::from(WIDE_KEYS) / 132.0;
            assert!(f64::from(rounds) < 1.12 * least, "{tokens}: {rounds} rounds in {parts} parts, at least {least}");
        }
        assert_eq!(wide_parts(200, 1, 132), 1);
    }
}
