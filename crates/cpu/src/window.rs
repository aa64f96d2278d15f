//! Window rows of a layer: stored where their block is mapped, read back for the queries of a step (model.md 6.2, 6.3).
//!
//! A row is rounded once: what a query of this step sees is what a later step reads from the page. Assumes that the
//! backend checked that the rows before a step are mapped; refuses nothing.

use crate::cache::{Cache, Place};
use crate::forward::{Model, Rows};
use crate::ops::attend::TILE;
use crate::ops::rows::{load_main, store_main};
use crate::scratch::Buffer;

/// Window rows of one sequence: the step's own and up to 127 before them, as stored, from a multiple of [`TILE`] on.
pub struct WindowRows {
    /// Position of the first row.
    pub first: u32,
    /// First position that has a row at all.
    pub oldest: u32,
    /// `[n, 512]`.
    pub rows: Buffer,
}

impl WindowRows {
    /// Stores the step's rows (in `kv`, which becomes what was stored) and reads the earlier ones from their pages.
    pub fn build(model: &Model, l: usize, kv: &mut [f32], place: Place, s: &Rows, cache: &mut Cache) -> WindowRows {
        let oldest = s.oldest_in(l, &model.config);
        let from = s.start.saturating_sub(model.config.sliding_window - 1).max(oldest).min(s.start);
        let first = from - from % TILE as u32;
        let mut rows = model.scratch.take((s.end() - first) as usize * 512);
        // Rows before the window are in the first tile but never visible.
        rows[..(from - first) as usize * 512].fill(0.0);
        let ahead = s.ahead.unwrap_or_default();
        let in_pages = s.start - (ahead.len() / 512) as u32;
        for p in from..in_pages {
            let page = cache.page(place, s.tables.must(place, p));
            let out = &mut rows[(p - first) as usize * 512..][..512];
            load_main(model.formats.main, page, (p % place.block_tokens) as usize, place.rows, out);
        }
        rows[(in_pages - first) as usize * 512..][..ahead.len()].copy_from_slice(ahead);
        store(model, kv, place, s, cache);
        let own = &kv[s.rows.start * 512..s.rows.end * 512];
        rows[(s.start - first) as usize * 512..].copy_from_slice(own);
        WindowRows { first, oldest, rows }
    }
}

/// Rounds the rows of one sequence in `kv` to what is stored, and stores those whose block is mapped.
pub fn store(model: &Model, kv: &mut [f32], place: Place, s: &Rows, cache: &mut Cache) {
    let format = model.formats.main;
    let mut loose = vec![0; format.row_bytes() as usize];
    for (p, row) in (s.start..).zip(kv[s.rows.start * 512..s.rows.end * 512].chunks_mut(512)) {
        // A row that no page keeps is rounded by way of a page of its own.
        let (page, slot, rows) = match s.tables.block(place, p).filter(|_| s.ahead.is_none()) {
            Some(block) => (cache.page_mut(place, block), (p % place.block_tokens) as usize, place.rows),
            None => (&mut loose[..], 0, 1),
        };
        store_main(format, row, page, slot, rows);
        load_main(format, page, slot, rows, row);
    }
}
