//! Compressors of a layer over one sequence's rows: entries are written when a group closes, state rows when mapped.
//!
//! Rows of the step live in a buffer that belongs to the step; earlier rows come from the state pages. A row is stored
//! only if its block is in the table (ARCHITECTURE.md, "Cache design").

use longwave_model::config::LayerKind;
use longwave_model::geometry::{C128_HEADER_BYTES, CacheKind, IndexFormat, MAX_DRAFTS};

use crate::cache::{Cache, Place};
use crate::forward::{Model, Rows};
use crate::ops::compress::{self, Row, Running};
use crate::ops::hadamard::hadamard;
use crate::ops::linear::linear;
use crate::ops::rows::{load_f32, store_f32, store_index, store_main};
use crate::replay::Kept;
use crate::scratch::Buffer;
use crate::weights::{Attention, Compressor};

/// Stores what inputs `x` `[T, D]` of a layer leave in its compressors: entries of groups that close, state rows.
pub fn compress(model: &Model, l: usize, a: &Attention, x: &[f32], seqs: &[Rows], cache: &mut Cache) {
    let Some(comp) = &a.compressor else { return };
    // A replay has all entries and leaves state where it ends: the previous and the open group of four. It ends at a
    // multiple of 128, or another part of it follows: no c128 state of it is ever read.
    let first = |s: &Rows| if a.kind == LayerKind::C4 { (s.end() - s.end() % 4).saturating_sub(4) } else { s.end() };
    if let Some(kept) = Kept::new(seqs, first) {
        if !kept.rows.is_empty() {
            let x = kept.gather(&model.scratch, x, model.config.hidden_size);
            compress(model, l, a, &x, &kept.seqs, cache);
        }
        return;
    }
    let rows = project(model, x, comp, seqs, a.kind.ratio() as usize);
    model.mark("compressor projection");
    match &a.indexer {
        Some(ix) => {
            for s in seqs {
                step4(model, l, comp, Target::Main, &rows, s, cache);
            }
            model.mark("c4 compress");
            let keys = project(model, x, &ix.compressor, seqs, 4);
            model.mark("index compressor projection");
            for s in seqs {
                step4(model, l, &ix.compressor, Target::Index, &keys, s, cache);
            }
            model.mark("index compress");
        }
        None => {
            seqs.iter().filter(|s| s.replay.is_none()).for_each(|s| step128(model, l, comp, &rows, s, cache));
            model.mark("c128 compress");
        }
    }
}

/// Compressor rows of a batch: `[T, 2n]`, values then scores with ape, `n = c * w`.
struct CompressorRows {
    data: Buffer,
    width: usize,
}

/// Projects `x` `[T, D]` and adds the positional bias of each row's absolute position.
fn project(model: &Model, x: &[f32], c: &Compressor, seqs: &[Rows], ratio: usize) -> CompressorRows {
    let (n, d) = c.wkv.shape();
    let t = x.len() / d;
    let (mut values, mut scores) = (model.scratch.take(t * n), model.scratch.take(t * n));
    linear(x, &c.wkv, &mut values);
    linear(x, &c.wgate, &mut scores);
    let mut data = model.scratch.take(t * 2 * n);
    for s in seqs {
        for (i, r) in s.rows.clone().enumerate() {
            let ape = &c.ape[(s.start as usize + i) % ratio * n..][..n];
            let (v, g) = data[r * 2 * n..(r + 1) * 2 * n].split_at_mut(n);
            v.copy_from_slice(&values[r * n..(r + 1) * n]);
            for ((g, s), a) in g.iter_mut().zip(&scores[r * n..(r + 1) * n]).zip(ape) {
                *g = s + a;
            }
        }
    }
    CompressorRows { data, width: 2 * n }
}

impl CompressorRows {
    fn row(&self, r: usize) -> &[f32] {
        &self.data[r * self.width..(r + 1) * self.width]
    }
}

/// Where a ratio-4 compressor's entries go.
enum Target {
    /// c4 main entries.
    Main,
    /// Index keys.
    Index,
}

/// Ratio 4: closes every group that ends in this step, then stores the state rows.
fn step4(model: &Model, l: usize, c: &Compressor, target: Target, rows: &CompressorRows, s: &Rows, cache: &mut Cache) {
    let (state, entries) = match target {
        Target::Main => (CacheKind::C4State, CacheKind::C4Main),
        Target::Index => (CacheKind::IndexState, CacheKind::C4Index),
    };
    let state = cache.place(state, l).expect("a c4 layer has compressor state");
    let entries = cache.place(entries, l).expect("a c4 layer has entries");
    if s.replay.is_none() {
        close4(model, c, target, rows, s, state, entries, cache);
    }
    for p in s.start..s.end() {
        if let Some(block) = s.tables.block(state, p) {
            let at = (p % state.block_tokens) as usize * rows.width * 4;
            store_f32(
                rows.row(s.rows.start + (p - s.start) as usize),
                &mut cache.page_mut(state, block)[at..at + rows.width * 4],
            );
        }
    }
}

/// Writes the entries of groups of four that end in this step.
fn close4(
    model: &Model,
    c: &Compressor,
    target: Target,
    rows: &CompressorRows,
    s: &Rows,
    state: Place,
    entries: Place,
    cache: &mut Cache,
) {
    let w = rows.width / 4;

    // Earlier rows that groups of this step still need: the previous complete group and the open one.
    let first = (s.start - s.start % 4).saturating_sub(4);
    let mut earlier = model.scratch.take((s.start - first) as usize * rows.width);
    for (p, out) in (first..s.start).zip(earlier.chunks_mut(rows.width)) {
        let page = cache.page(state, s.tables.must(state, p));
        load_f32(&page[(p % state.block_tokens) as usize * rows.width * 4..][..rows.width * 4], out);
    }
    let at = |p: u32| -> Row {
        if p < s.start {
            &earlier[(p - first) as usize * rows.width..][..rows.width]
        } else {
            rows.row(s.rows.start + (p - s.start) as usize)
        }
    };

    let mut u = vec![0.0; w];
    for j in s.start / 4..s.end() / 4 {
        let four = |from: u32| std::array::from_fn(|i| at(from + i as u32));
        compress::pool4((j > 0).then(|| four(4 * j - 4)), four(4 * j), &mut u);
        let angles = model.freq_compressed.angles(4 * j);
        compress::entry(&mut u, &c.norm, model.config.rms_norm_eps, &angles, model.profile);
        let page = cache.page_mut(entries, s.tables.must(entries, 4 * j));
        let slot = j as usize % entries.rows;
        match target {
            Target::Main => store_main(model.formats.main, &u, page, slot, entries.rows),
            Target::Index => {
                rotate_index(model, &mut u);
                store_index(model.formats.index, &u, page, slot, entries.rows);
            }
        }
    }
}

/// The Hadamard rotation that belongs to FP4 keys and queries (model.md 6.5).
pub fn rotate_index(model: &Model, x: &mut [f32]) {
    if model.formats.index == IndexFormat::Fp4 {
        hadamard(x);
        model.profile.round(x);
    }
}

/// Running sums of one group, unpacked from a state page.
struct Open {
    max: Vec<f32>,
    sum: Vec<f32>,
    acc: Vec<f32>,
}

impl Open {
    fn fold(&mut self, row: Row, first: bool) {
        compress::fold(&mut self.running(), row, first);
    }

    fn running(&mut self) -> Running<'_> {
        Running { max: &mut self.max, sum: &mut self.sum, acc: &mut self.acc }
    }
}

const SUMS: usize = C128_HEADER_BYTES as usize;
const PENDING: usize = SUMS + 3 * 512 * 4;
const ROW_BYTES: usize = 1024 * 4;

/// Ratio 128: folds the committed rows into the open group's sums, keeps draft rows apart, writes entries of groups that
/// close (those that close inside the drafts are overwritten should the drafts be rejected).
fn step128(model: &Model, l: usize, c: &Compressor, rows: &CompressorRows, s: &Rows, cache: &mut Cache) {
    let state = cache.place(CacheKind::C128State, l).expect("a c128 layer has compressor state");
    let entries = cache.place(CacheKind::C128Main, l).expect("a c128 layer has entries");
    let committed = s.end() - s.drafts;
    let mut open = load_open(cache, state, s);
    let row = |open: &mut Open, p: u32, cache: &mut Cache| {
        open.fold(rows.row(s.rows.start + (p - s.start) as usize), p.is_multiple_of(128));
        if p % 128 != 127 {
            return;
        }
        let mut u = vec![0.0; 512];
        compress::finish(&open.running(), &mut u);
        let j = p / 128;
        let angles = model.freq_compressed.angles(128 * j);
        compress::entry(&mut u, &c.norm, model.config.rms_norm_eps, &angles, model.profile);
        let page = cache.page_mut(entries, s.tables.must(entries, 128 * j));
        store_main(model.formats.main, &u, page, j as usize % entries.rows, entries.rows);
    };
    for p in s.start..committed {
        row(&mut open, p, cache);
    }
    store_open(cache, state, s, committed, &open);
    for p in committed..s.end() {
        row(&mut open, p, cache);
        if let Some(block) = s.tables.block(state, p) {
            let page = cache.page_mut(state, block);
            if p % 128 == 0 {
                page[..4].fill(0);
            }
            let at = PENDING + (p % MAX_DRAFTS) as usize * ROW_BYTES;
            store_f32(rows.row(s.rows.start + (p - s.start) as usize), &mut page[at..at + ROW_BYTES]);
        }
    }
}

/// Sums of the group that is open at the start of the step, with drafts of the last step that were accepted folded in.
fn load_open(cache: &Cache, state: Place, s: &Rows) -> Open {
    let mut open = Open { max: vec![0.0; 512], sum: vec![0.0; 512], acc: vec![0.0; 512] };
    if s.start.is_multiple_of(128) {
        return open;
    }
    let page = cache.page(state, s.tables.must(state, s.start));
    let folded = u32::from_le_bytes(page[..4].try_into().expect("four bytes"));
    for (i, v) in [&mut open.max, &mut open.sum, &mut open.acc].into_iter().enumerate() {
        load_f32(&page[SUMS + i * 2048..][..2048], v);
    }
    let mut row = vec![0.0; 1024];
    for p in s.start - s.start % 128 + folded..s.start {
        load_f32(&page[PENDING + (p % MAX_DRAFTS) as usize * ROW_BYTES..][..ROW_BYTES], &mut row);
        open.fold(&row, p.is_multiple_of(128));
    }
    open
}

fn store_open(cache: &mut Cache, state: Place, s: &Rows, committed: u32, open: &Open) {
    let folded = committed % 128;
    if folded == 0 {
        return;
    }
    let Some(block) = s.tables.block(state, committed) else { return };
    let page = cache.page_mut(state, block);
    page[..4].copy_from_slice(&folded.to_le_bytes());
    for (i, v) in [&open.max, &open.sum, &open.acc].into_iter().enumerate() {
        store_f32(v, &mut page[SUMS + i * 2048..][..2048]);
    }
}
