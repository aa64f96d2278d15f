//! The core of attention (model.md 6): queries against tiles of their window rows and of the compressed entries they see.
//!
//! Tiles are cut at absolute positions and entry numbers; picks in the order that they come in. Assumes that the window
//! rows and entries of the step are there; a page that no table maps is a panic.

use longwave_model::config::LayerKind;
use longwave_model::geometry::CacheKind;
use rayon::prelude::*;

use super::ROWS_PER_TASK;
use crate::cache::{Cache, Place};
use crate::forward::{Model, Rows};
use crate::ops::attend::{self, State, TILE};
use crate::ops::rows::load_main;
use crate::reads::Log;
use crate::scratch::Buffer;
use crate::weights::Attention;
use crate::window::WindowRows;

/// Attention outputs `[T, H, 512]`, not yet rounded.
pub(super) fn core(
    model: &Model,
    l: usize,
    a: &Attention,
    q: &[f32],
    windows: &[WindowRows],
    selected: &[Vec<u32>],
    seqs: &[Rows],
    cache: &Cache,
) -> Buffer {
    let h = model.config.num_attention_heads;
    let entries = match a.kind {
        LayerKind::Window => None,
        LayerKind::C4 => cache.place(CacheKind::C4Main, l),
        LayerKind::C128 => cache.place(CacheKind::C128Main, l),
    };
    let per = (ROWS_PER_TASK / h).max(1);
    let mut o = model.scratch.take(q.len());
    for (s, w) in seqs.iter().zip(windows) {
        let told = s.tell.filter(|told| told.wants(l));
        let scratch = || (State::new(per * h), vec![0.0; TILE * 512]);
        let out = &mut o[s.rows.start * h * 512..s.rows.end * h * 512];
        out.par_chunks_mut(per * h * 512).enumerate().for_each_init(scratch, |(state, tile), (i, out)| {
            let m = out.len() / (h * 512);
            let (p0, r0) = (s.start + (i * per) as u32, s.rows.start + i * per);
            let q = &q[r0 * h * 512..(r0 + m) * h * 512];
            state.start(m * h, &a.sink);
            let mut log = told.map(|_| Log::new(p0, m, &a.sink));
            window_tiles(model, state, q, w, p0, m, &mut log);
            match (a.kind, entries) {
                (LayerKind::C128, Some(place)) => {
                    dense_tiles(model, state, q, place, p0, m, s, cache, tile, &mut log);
                }
                (LayerKind::C4, Some(place)) => {
                    for j in 0..m {
                        picked_tiles(
                            model,
                            state,
                            j,
                            &q[j * h * 512..(j + 1) * h * 512],
                            place,
                            &selected[r0 + j],
                            s,
                            cache,
                            tile,
                            &mut log,
                        );
                    }
                }
                _ => {}
            }
            if let (Some(told), Some(log)) = (told, log) {
                told.add(log.finish(state));
            }
            for (r, out) in out.chunks_mut(512).enumerate() {
                state.output(r, out);
            }
        });
    }
    o
}

/// Window entries of `m` queries from position `p0`.
fn window_tiles(model: &Model, state: &mut State, q: &[f32], w: &WindowRows, p0: u32, m: usize, log: &mut Option<Log>) {
    let h = model.config.num_attention_heads;
    let reach = model.config.sliding_window - 1;
    let oldest = |p: u32| p.saturating_sub(reach).max(w.oldest);
    let (from, to) = (oldest(p0), p0 + m as u32);
    let mut t0 = from - from % TILE as u32;
    while t0 < to {
        let n = TILE.min((to - t0) as usize);
        let visible: Vec<(usize, usize)> = (0..m as u32)
            .map(|j| {
                let p = p0 + j;
                let (a, b) = (oldest(p).max(t0), (p + 1).min(t0 + n as u32));
                if a >= b { (0, 0) } else { ((a - t0) as usize, (b - t0) as usize) }
            })
            .collect();
        let kv = &w.rows[(t0 - w.first) as usize * 512..][..n * 512];
        attend::tile(state, 0, q, h, kv, n, &visible, model.profile);
        note(log, state, h, true, t0, &visible);
        t0 += TILE as u32;
    }
}

/// All c128 entries that `m` queries from position `p0` see.
fn dense_tiles(
    model: &Model,
    state: &mut State,
    q: &[f32],
    place: Place,
    p0: u32,
    m: usize,
    s: &Rows,
    cache: &Cache,
    tile: &mut [f32],
    log: &mut Option<Log>,
) {
    let h = model.config.num_attention_heads;
    let visible = |p: u32| ((p + 1) / 128) as usize;
    let most = visible(p0 + m as u32 - 1);
    for first in (0..most).step_by(TILE) {
        let n = TILE.min(most - first);
        load_entries(model, (first..first + n).map(|j| j as u32), 128, place, s, cache, tile);
        let seen: Vec<(usize, usize)> =
            (0..m as u32).map(|j| (0, visible(p0 + j).saturating_sub(first).min(n))).collect();
        attend::tile(state, 0, q, h, &tile[..n * 512], n, &seen, model.profile);
        note(log, state, h, false, first as u32, &seen);
    }
}

/// The picked c4 entries of query `j` of the piece.
fn picked_tiles(
    model: &Model,
    state: &mut State,
    j: usize,
    q: &[f32],
    place: Place,
    picks: &[u32],
    s: &Rows,
    cache: &Cache,
    tile: &mut [f32],
    log: &mut Option<Log>,
) {
    let h = model.config.num_attention_heads;
    for part in picks.chunks(TILE) {
        load_entries(model, part.iter().copied(), 4, place, s, cache, tile);
        attend::tile(state, j * h, q, h, &tile[..part.len() * 512], part.len(), &[(0, part.len())], model.profile);
        if let Some(log) = log {
            log.tile(state, j, (0, j * h), false, part.iter().copied(), 0..part.len());
        }
    }
}

/// Notes the tile that all queries of a piece took in last, from row or entry `first` on, of which query `j` sees `visible[j]`.
fn note(log: &mut Option<Log>, state: &State, h: usize, window: bool, first: u32, visible: &[(usize, usize)]) {
    let Some(log) = log else { return };
    for (j, &(from, to)) in visible.iter().enumerate().filter(|(_, seen)| seen.0 < seen.1) {
        log.tile(state, j, (j * h, j * h), window, first + from as u32..first + to as u32, from..to);
    }
}

/// Widens entries into `tile`.
fn load_entries(
    model: &Model,
    which: impl Iterator<Item = u32>,
    ratio: u32,
    place: Place,
    s: &Rows,
    cache: &Cache,
    tile: &mut [f32],
) {
    for (j, out) in which.zip(tile.chunks_mut(512)) {
        let page = cache.page(place, s.tables.must(place, j * ratio));
        load_main(model.formats.main, page, j as usize % place.rows, place.rows, out);
    }
}
