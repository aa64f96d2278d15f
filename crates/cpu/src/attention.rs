//! Attention of a layer over a batch (model.md 6): projections, window rows, compressors, indexer, core, output path.
//!
//! Tiles of the core are cut at absolute positions and entry numbers, so a query's result does not depend on how the
//! prompt was chunked. Scratch is bounded by the rows of the step: a window of earlier rows per sequence and one tile of
//! entries per thread; nothing grows with the context.

mod tiles;

use longwave_model::config::LayerKind;
use longwave_model::geometry::CacheKind;
use rayon::prelude::*;

use crate::cache::Cache;
use crate::compressors;
use crate::forward::{Model, PIECE, Rows, Seen, Tap};
use crate::numerics::Profile;
use crate::ops::index::{self, TopK};
use crate::ops::linear::{linear, linear_rows};
use crate::ops::norm::rms_norm;
use crate::ops::rope::Angles;
use crate::ops::rows::{load_index, round_index};
use crate::replay::Kept;
use crate::scratch::Buffer;
use crate::weights::{Attention, Indexer};
use crate::window::{self, WindowRows};

/// Query rows (tokens x heads) that share a tile of entries.
const ROWS_PER_TASK: usize = 64;

/// Output `[T, D]` for normalised inputs `x` `[T, D]`; only of the rows that are `kept`, when some are not. Window and
/// state rows are stored for all.
pub fn forward(
    model: &Model,
    l: usize,
    a: &Attention,
    x: &[f32],
    seqs: &[Rows],
    kept: Option<&Kept>,
    cache: &mut Cache,
    tap: &mut Option<Tap>,
) -> Buffer {
    let (d, t) = (model.config.hidden_size, x.len() / model.config.hidden_size);
    let all = angles(model, a.kind, seqs, t);
    let mut xq = model.scratch.copy(x);
    model.quantise(&mut xq);
    let mut kv = keys(model, a, &xq, &all);
    let window = cache.place(CacheKind::Window, l).expect("every layer has a window");
    let windows: Vec<WindowRows> =
        seqs.iter().map(|s| WindowRows::build(model, l, &mut kv, window, s, cache)).collect();
    model.mark("q/kv norm and insert");
    if let Some(tap) = tap {
        tap(l, Seen::Kv(&kv));
    }
    compressors::compress(model, l, a, x, seqs, cache);
    let Some(kept) = kept else { return attend(model, l, a, (x, &xq), &all, &windows, seqs, cache, tap) };
    if kept.rows.is_empty() {
        return model.scratch.take(0);
    }
    let (x, xq) = (kept.gather(&model.scratch, x, d), kept.gather(&model.scratch, &xq, d));
    let some = angles(model, a.kind, &kept.seqs, kept.rows.len());
    attend(model, l, a, (&x, &xq), &some, &windows, &kept.seqs, cache, tap)
}

/// Queries, indexer, core and output path of inputs `x` `[T, D]`, plain and quantised, whose window rows and entries are
/// there.
fn attend(
    model: &Model,
    l: usize,
    a: &Attention,
    (x, xq): (&[f32], &[f32]),
    angles: &[Angles],
    windows: &[WindowRows],
    seqs: &[Rows],
    cache: &Cache,
    tap: &mut Option<Tap>,
) -> Buffer {
    let c = &model.config;
    let (profile, h, eps, t) = (model.profile, c.num_attention_heads, c.rms_norm_eps, angles.len());
    let mut qr = projected_norm(model, xq, &a.wq_a, &a.q_norm);
    model.quantise(&mut qr);
    let mut q = model.scratch.take(t * h * 512);
    linear(&qr, &a.wq_b, &mut q);
    profile.round(&mut q);
    model.mark("wq_b");
    q.par_chunks_mut(h * 512).zip(angles).with_min_len(PIECE).for_each(|(q, angles)| {
        for head in q.chunks_mut(512) {
            let mut y = [0.0; 512];
            // The reference rounds the normalised head before rotating it, serving rounds once at the end.
            rms_norm(head, &[], eps, if profile == Profile::Reference { profile } else { Profile::Exact }, &mut y);
            angles.rotate(&mut y);
            profile.round(&mut y);
            head.copy_from_slice(&y);
        }
    });
    model.mark("q norm and rotation");

    if let Some(tap) = tap {
        tap(l, Seen::Q(&q));
    }

    let selected = match &a.indexer {
        Some(ix) => select(model, l, ix, x, &qr, angles, seqs, cache, tap),
        None => Vec::new(),
    };
    if a.indexer.is_some() {
        model.mark("index select");
    }
    let mut o = tiles::core(model, l, a, &q, windows, &selected, seqs, cache);
    if let Some(tap) = tap {
        tap(l, Seen::Attn(&o));
    }
    o.par_chunks_mut(h * 512).zip(angles).with_min_len(PIECE).for_each(|(o, angles)| {
        for head in o.chunks_mut(512) {
            profile.round(head);
            angles.rotate_back(head);
            profile.round(head);
        }
    });
    model.mark(match a.kind {
        LayerKind::Window => "attention window",
        LayerKind::C4 => "attention c4a",
        LayerKind::C128 => "attention c128a",
    });
    output(model, a, &o)
}

/// Stores the window rows of inputs `x` `[T, D]` where their blocks are mapped, and computes nothing else.
pub fn store_keys(model: &Model, l: usize, a: &Attention, x: &[f32], seqs: &[Rows], cache: &mut Cache) {
    let angles = angles(model, a.kind, seqs, x.len() / model.config.hidden_size);
    let mut xq = model.scratch.copy(x);
    model.quantise(&mut xq);
    let mut kv = keys(model, a, &xq, &angles);
    let place = cache.place(CacheKind::Window, l).expect("every layer has a window");
    for s in seqs {
        window::store(model, &mut kv, place, s, cache);
    }
    model.mark("q/kv norm and insert");
}

/// Window rows `[T, 512]` of quantised inputs: projected, normalised and rotated (model.md 6.2), not yet as stored.
fn keys(model: &Model, a: &Attention, xq: &[f32], angles: &[Angles]) -> Buffer {
    let mut kv = projected_norm(model, xq, &a.wkv, &a.kv_norm);
    kv.par_chunks_mut(512).zip(angles).with_min_len(64).for_each(|(kv, angles)| {
        angles.rotate(kv);
        model.profile.round(kv);
    });
    kv
}

/// Rotation of every row of the batch.
fn angles(model: &Model, kind: LayerKind, seqs: &[Rows], t: usize) -> Vec<Angles> {
    let f = if kind == LayerKind::Window { &model.freq_main } else { &model.freq_compressed };
    let mut out = Vec::with_capacity(t);
    for s in seqs {
        out.extend((s.start..s.end()).map(|p| f.angles(p)));
    }
    out
}

/// `rmsnorm(W x)` per row.
fn projected_norm(model: &Model, x: &[f32], w: &crate::ops::matrix::Matrix, norm: &[f32]) -> Buffer {
    let n = norm.len();
    let mut y = model.scratch.take(x.len() / w.shape().1 * n);
    linear(x, w, &mut y);
    model.profile.round(&mut y);
    model.mark("wq_a + wkv");
    let mut out = model.scratch.take(y.len());
    out.par_chunks_mut(n)
        .zip(y.par_chunks(n))
        .with_min_len(64)
        .for_each(|(o, y)| rms_norm(y, norm, model.config.rms_norm_eps, model.profile, o));
    model.mark("q/kv norm and insert");
    out
}

/// Entries that every row's query picks in a c4 layer, ascending (model.md 6.5).
fn select(
    model: &Model,
    l: usize,
    ix: &Indexer,
    x: &[f32],
    qr: &[f32],
    angles: &[Angles],
    seqs: &[Rows],
    cache: &Cache,
    tap: &mut Option<Tap>,
) -> Vec<Vec<u32>> {
    let (hi, k) = (model.config.index_n_heads, model.config.index_topk);
    let t = angles.len();
    let visible = |p: u32| ((p + 1) / 4) as usize;
    let mut picks: Vec<Vec<u32>> = vec![Vec::new(); t];
    let some_choose = seqs.iter().any(|s| visible(s.end() - 1) > k);
    if !some_choose && tap.is_none() {
        for s in seqs {
            for (p, r) in (s.start..).zip(s.rows.clone()) {
                picks[r].extend(0..visible(p) as u32);
            }
        }
        return picks;
    }

    let mut qi = model.scratch.take(t * hi * 128);
    linear(qr, &ix.wq_b, &mut qi);
    model.profile.round(&mut qi);
    model.mark("index wq_b");
    qi.par_chunks_mut(hi * 128).zip(angles).with_min_len(PIECE).for_each(|(q, angles)| {
        for head in q.chunks_mut(128) {
            angles.rotate(head);
            model.profile.round(head);
            compressors::rotate_index(model, head);
            round_index(model.formats.index, head);
        }
    });
    model.mark("index queries");
    let mut g = model.scratch.take(t * hi);
    linear(x, &ix.weights_proj, &mut g);
    model.profile.round(&mut g);
    let scale = index::weight_scale(hi, 128);
    g.iter_mut().for_each(|v| *v *= scale);
    if model.profile == Profile::Reference {
        model.profile.round(&mut g);
    }
    model.mark("index weights");
    if let Some(tap) = tap {
        tap(l, Seen::Index(&qi, &g));
    }

    let place = cache.place(CacheKind::C4Index, l).expect("a c4 layer has index keys");
    let per = (ROWS_PER_TASK / hi).max(1);
    for s in seqs {
        let scratch = || (vec![TopK::new(k); per], vec![0.0; 64 * 128], vec![0.0; per * hi * 64], vec![0.0; per * 64]);
        let pieces = picks[s.rows.clone()].par_chunks_mut(per).enumerate();
        pieces.for_each_init(scratch, |(top, keys, dots, scores), (i, picks)| {
            let p0 = s.start + (i * per) as u32;
            let r0 = s.rows.start + i * per;
            let m = picks.len();
            let most = visible(p0 + m as u32 - 1);
            if most > k {
                top.iter_mut().for_each(TopK::clear);
                for first in (0..most).step_by(64) {
                    let n = 64.min(most - first);
                    let page = cache.page(place, s.tables.must(place, 4 * first as u32));
                    load_index(model.formats.index, page, 0, place.rows, &mut keys[..n * 128]);
                    let q = &qi[r0 * hi * 128..(r0 + m) * hi * 128];
                    index::scores(q, &g[r0 * hi..(r0 + m) * hi], hi, &keys[..n * 128], model.profile, dots, scores);
                    for (j, top) in top[..m].iter_mut().enumerate() {
                        let seen = visible(p0 + j as u32).saturating_sub(first).min(n);
                        top.offer(&scores[j * n..j * n + seen], first as u32);
                    }
                }
            }
            for (j, out) in picks.iter_mut().enumerate() {
                let n = visible(p0 + j as u32);
                if n <= k { out.extend(0..n as u32) } else { top[j].finish(out) }
            }
        });
    }
    if let Some(tap) = tap {
        tap(l, Seen::Selected(&picks));
    }
    picks
}

/// Grouped output projection (model.md 6.7): `o` `[T, H, 512]` after the inverse rotation.
fn output(model: &Model, a: &Attention, o: &[f32]) -> Buffer {
    let c = &model.config;
    let (groups, rank) = (c.o_groups, c.o_lora_rank);
    let wide = c.num_attention_heads * 512 / groups;
    let t = o.len() / (groups * wide);
    let mut b = model.scratch.take(t * groups * rank);
    let (mut input, mut part) = (model.scratch.take(t * wide), model.scratch.take(t * rank));
    for g in 0..groups {
        for (r, input) in input.chunks_mut(wide).enumerate() {
            input.copy_from_slice(&o[(r * groups + g) * wide..][..wide]);
        }
        // Profile R multiplies in bf16, S quantises the input like every other FP8 product.
        if model.profile == Profile::Serving {
            model.quantise(&mut input);
        }
        linear_rows(&input, &a.wo_a, g * rank..(g + 1) * rank, &mut part);
        for (r, part) in part.chunks(rank).enumerate() {
            b[(r * groups + g) * rank..][..rank].copy_from_slice(part);
        }
    }
    model.profile.round(&mut b);
    model.mark("wo_a");
    model.quantise(&mut b);
    model.mark("quantise");
    let mut y = model.scratch.take(t * c.hidden_size);
    linear(&b, &a.wo_b, &mut y);
    model.profile.round(&mut y);
    model.mark("wo_b");
    y
}
