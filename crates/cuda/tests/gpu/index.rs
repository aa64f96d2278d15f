//! The indexer against the CPU's: bits of queries, the same picks where scores are exact, and close ones elsewhere.

use longwave_cpu::numerics::{Profile, round_slice};
use longwave_cpu::ops::hadamard::hadamard;
use longwave_cpu::ops::index::{TopK, scores, weight_scale};
use longwave_cpu::ops::rope::Frequencies;
use longwave_cpu::ops::rows::{load_index, round_index, store_index};
use longwave_cuda::driver::{DeviceSlice, Graph};
use longwave_cuda::ops::index::{Index, Queries, Selection, scratch_bytes};
use longwave_cuda::ops::{BatchRow, UNMAPPED};
use longwave_model::formats::bf16_bits;
use longwave_model::{IndexFormat, presets};

use crate::paged::{OnGpu, Paged, assert_same, batch, bits, put_rows};
use crate::rig::{Fresh, Rig, rig};
use crate::rope::put_table;

const FORMATS: [IndexFormat; 3] = [IndexFormat::Fp8, IndexFormat::Fp4, IndexFormat::Bf16];

#[test]
fn index_queries_have_the_bits_of_the_cpu() {
    let Some(mut rig) = rig(64 << 20) else { return };
    let mut fresh = Fresh::new();
    let frequencies = Frequencies::compressed(&presets::flash());
    for format in FORMATS {
        let index = Index::new(&rig.context, format).unwrap();
        for heads in [4usize, 64] {
            let rows = batch(&[(0, 70_000, 3), (1, 0, 20)]);
            let x: Vec<f32> = fresh.floats(rows.len() * heads * 128).iter().map(|v| 5.0 * v * v * v).collect();
            let gates = fresh.floats(rows.len() * heads);
            let (out, weights) = (rig.poisoned::<u16>(x.len()), rig.poisoned::<f32>(gates.len()));
            let launch = Queries {
                products: rig.put(&x).address(),
                gates: rig.put(&gates).address(),
                rows: put_rows(&mut rig, &rows).address(),
                angles: put_table(&mut rig, &rows, 1).address(),
                out: out.address(),
                weights: weights.address(),
                tokens: rows.len() as u32,
                heads: heads as u32,
            };
            index.queries(&rig.stream, &launch).unwrap();
            let (mut want, mut want_weights) = (vec![0xffffu16; x.len()], vec![u32::MAX; gates.len()]);
            for (t, row) in rows.iter().enumerate().filter(|(_, r)| r.seat != UNMAPPED) {
                for h in t * heads..(t + 1) * heads {
                    let mut head = x[h * 128..][..128].to_vec();
                    round_slice(&mut head);
                    frequencies.angles(row.position).rotate(&mut head);
                    round_slice(&mut head);
                    if format == IndexFormat::Fp4 {
                        hadamard(&mut head);
                        round_slice(&mut head);
                    }
                    round_index(format, &mut head);
                    want[h * 128..][..128].iter_mut().zip(&head).for_each(|(o, v)| *o = bf16_bits(*v));
                    let mut g = [gates[h]];
                    round_slice(&mut g);
                    want_weights[h] = (g[0] * weight_scale(heads, 128)).to_bits();
                }
            }
            assert_same(&format!("{format:?} {heads}"), &out.read(&rig.stream).unwrap(), &want);
            assert_same(&format!("{format:?} {heads}"), &bits(&weights.read(&rig.stream).unwrap()), &want_weights);
        }
        println!("index queries {format:?}: the same bits");
        rig.arena.reset();
    }
}

/// Keys of seat 1, as stored and widened.
pub fn keys(
    fresh: &mut Fresh,
    format: IndexFormat,
    count: usize,
    value: &mut dyn FnMut(&mut Fresh) -> Vec<f32>,
) -> (Paged, Vec<f32>) {
    let mut paged = Paged::new(fresh, 2, count.div_ceil(64) + 1, 6, 64 * format.row_bytes() as usize);
    let wide = store(fresh, &mut paged, format, 1, count, value);
    (paged, wide)
}

/// Stores the first `count` keys of a seat; the same widened.
pub fn store(
    fresh: &mut Fresh,
    paged: &mut Paged,
    format: IndexFormat,
    seat: u32,
    count: usize,
    value: &mut dyn FnMut(&mut Fresh) -> Vec<f32>,
) -> Vec<f32> {
    let mut wide = vec![0.0; count * 128];
    for (e, wide) in wide.chunks_mut(128).enumerate() {
        let (x, slot) = (value(fresh), paged.slot(e as u32));
        let page = paged.page(seat, e as u32).unwrap();
        store_index(format, &x, page, slot, 64);
        load_index(format, page, slot, 64, wide);
    }
    wide
}

pub struct Picks {
    pub picks: Vec<u32>,
    pub counts: Vec<u32>,
}

/// A selection whose outputs are poisoned, and these.
pub fn selection(
    rig: &mut Rig,
    q: &[f32],
    g: &[f32],
    rows: &[BatchRow],
    keys: &OnGpu,
    heads: usize,
    k: usize,
    most: u32,
) -> (Selection, DeviceSlice<u32>, DeviceSlice<u32>) {
    let tokens = rows.len();
    let (picks, counts) = (rig.poisoned::<u32>(tokens * k), rig.poisoned::<u32>(tokens));
    let q: Vec<u16> = q.iter().map(|v| bf16_bits(*v)).collect();
    let selection = Selection {
        queries: rig.put(&q).address(),
        weights: rig.put(g).address(),
        rows: put_rows(rig, rows).address(),
        keys: keys.pages,
        seats: keys.seats,
        scratch: rig.poisoned::<u8>(scratch_bytes(tokens as u32, k as u32, most) as usize).address(),
        picks: picks.address(),
        counts: counts.address(),
        tokens: tokens as u32,
        heads: heads as u32,
        k: k as u32,
        most,
        seen: Some(most),
    };
    (selection, picks, counts)
}

fn select(
    rig: &mut Rig,
    index: &Index,
    q: &[f32],
    g: &[f32],
    rows: &[BatchRow],
    keys: &OnGpu,
    heads: usize,
    k: usize,
    most: u32,
) -> Picks {
    let (selection, picks, counts) = selection(rig, q, g, rows, keys, heads, k, most);
    index.select(&rig.stream, &selection).unwrap();
    Picks { picks: picks.read(&rig.stream).unwrap(), counts: counts.read(&rig.stream).unwrap() }
}

pub fn row(position: u32) -> BatchRow {
    BatchRow { seat: 1, position, start: position, start_row: 0 }
}

/// The CPU's scores of `visible` keys.
fn reference(q: &[f32], g: &[f32], heads: usize, keys: &[f32], visible: usize) -> Vec<f32> {
    let mut all = vec![0.0; visible];
    for (first, out) in (0..visible).step_by(64).zip(all.chunks_mut(64)) {
        let mut dots = vec![0.0; heads * out.len()];
        scores(q, g, heads, &keys[first * 128..][..out.len() * 128], Profile::Serving, &mut dots, out);
    }
    all
}

fn best(all: &[f32], k: usize) -> Vec<u32> {
    let mut top = TopK::new(k);
    top.offer(all, 0);
    let mut out = Vec::new();
    top.finish(&mut out);
    out
}

#[test]
fn picks_are_those_of_the_cpu_ties_included() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    for (format, heads, k, count, distinct) in [
        (IndexFormat::Fp8, 4usize, 64usize, 5000usize, 1.0f32),
        (IndexFormat::Fp8, 64, 512, 40_000, 2.0),
        (IndexFormat::Fp4, 64, 512, 6000, 1.0),
        (IndexFormat::Bf16, 64, 1024, 20_000, 4.0),
        (IndexFormat::Fp8, 64, 1024, 9000, 0.0),
    ] {
        let index = Index::new(&rig.context, format).unwrap();
        // Small whole numbers: every product and sum is exact in any order, and many scores are equal.
        let whole = |fresh: &mut Fresh, n: usize, most: f32| -> Vec<f32> {
            fresh.floats(n).iter().map(|v| (v * (most + 0.5)).round()).collect()
        };
        // The largest value of each group of 32 is 4 (or 6), so that the scale of a group is a power of two.
        let (paged, wide) = keys(&mut fresh, format, count, &mut |fresh: &mut Fresh| {
            let mut x = whole(fresh, 128, distinct);
            x.iter_mut().step_by(32).for_each(|v| *v = 4.0);
            x
        });
        let mut positions: Vec<u32> = vec![0, 2, 3, 4 * k as u32 - 2, 4 * k as u32 - 1, 4 * k as u32 + 3];
        positions.extend([4 * count as u32 - 1, 4 * count as u32 - 2, 2 * count as u32 + 1]);
        let mut rows: Vec<BatchRow> = positions.iter().map(|&p| row(p)).collect();
        rows.insert(2, BatchRow { seat: UNMAPPED, position: 9, start: 9, start_row: 0 });
        let tokens = rows.len();
        let q = whole(&mut fresh, tokens * heads * 128, 1.0);
        let g: Vec<f32> = whole(&mut fresh, tokens * heads, 2.0).iter().map(|v| v * 0.25).collect();
        let d_keys = paged.put(&mut rig);
        let most = count as u32;
        let ours = select(&mut rig, &index, &q, &g, &rows, &d_keys, heads, k, most);
        for (t, at) in rows.iter().enumerate() {
            let mut want = vec![u32::MAX; k];
            let mut want_count = u32::MAX;
            if at.seat != UNMAPPED {
                let visible = ((at.position + 1) / 4) as usize;
                let (q, g) = (&q[t * heads * 128..][..heads * 128], &g[t * heads..][..heads]);
                let picked = best(&reference(q, g, heads, &wide, visible), k);
                want[..picked.len()].copy_from_slice(&picked);
                want_count = picked.len() as u32;
            }
            let name = format!("{format:?} {heads} heads, {k} of {}: row {t}", (at.position + 1) / 4);
            assert_eq!(ours.counts[t], want_count, "{name}");
            assert_same(&name, &ours.picks[t * k..][..k], &want);
        }
        // Few rows are scored as a whole; of more, some have several segments each, and beside many a row has one. A row that may
        // see more keys than few rows have room for is many segments.
        let last = tokens - 3;
        let (q1, g1) = (&q[last * heads * 128..][..heads * 128], &g[last * heads..][..heads]);
        let name = format!("{format:?} {heads} heads, {k} of {count}");
        for (copies, most) in
            [(1usize, most), (1, (1 << 18) + 1), (3, (1 << 18) + 1), (20, most), (130, most), (300, most)]
        {
            let many = vec![rows[last]; copies];
            let all = select(&mut rig, &index, &q1.repeat(copies), &g1.repeat(copies), &many, &d_keys, heads, k, most);
            for t in [0, copies / 2, copies - 1] {
                let name = format!("{name}, row {t} of {copies} that see at most {most}");
                assert_same(&name, &all.picks[t * k..][..k], &ours.picks[last * k..][..k]);
            }
        }
        println!(
            "index {name}: the same picks alone, in {tokens}, in 20, in 130 and in 300 rows, however many segments"
        );
        rig.arena.reset();
    }
}

#[test]
fn picks_of_real_scores_differ_only_among_nearly_equal_ones_and_are_measured() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let (heads, k, count) = (64usize, 512usize, 32_768usize);
    for format in FORMATS {
        let index = Index::new(&rig.context, format).unwrap();
        let (paged, wide) = keys(&mut fresh, format, count, &mut |fresh: &mut Fresh| fresh.floats(128));
        let d_keys = paged.put(&mut rig);
        let tokens = 3;
        let rows: Vec<BatchRow> = [4 * count - 1, 4 * count - 5, 40_001].iter().map(|&p| row(p as u32)).collect();
        let mut q = fresh.floats(tokens * heads * 128);
        q.chunks_mut(128).for_each(|q| round_index(format, q));
        round_slice(&mut q);
        let g: Vec<f32> = fresh.floats(tokens * heads).iter().map(|v| v * weight_scale(heads, 128)).collect();
        let ours = select(&mut rig, &index, &q, &g, &rows, &d_keys, heads, k, count as u32);
        let (mut others, mut gap) = (0, 0.0f32);
        for (t, at) in rows.iter().enumerate() {
            let visible = ((at.position + 1) / 4) as usize;
            let all = reference(&q[t * heads * 128..][..heads * 128], &g[t * heads..][..heads], heads, &wide, visible);
            let want = best(&all, k);
            let bar = want.iter().map(|&e| all[e as usize]).fold(f32::INFINITY, f32::min);
            let picked = &ours.picks[t * k..][..k];
            assert!(picked.windows(2).all(|w| w[0] < w[1]), "{format:?}: ascending");
            for e in picked.iter().filter(|e| want.binary_search(e).is_err()) {
                others += 1;
                gap = gap.max((bar - all[*e as usize]).abs());
            }
            // Alone it is the same selection.
            let alone = select(
                &mut rig,
                &index,
                &q[t * heads * 128..][..heads * 128],
                &g[t * heads..][..heads],
                &rows[t..=t],
                &d_keys,
                heads,
                k,
                count as u32,
            );
            assert_same(&format!("{format:?}: row {t} alone"), &alone.picks, picked);
        }
        println!("index {format:?}: {others} of {} picks are others, worst gap to the bar {gap:.1e}", tokens * k);
        assert!(gap < 1e-5 && others < 10, "{format:?}");

        for tokens in [1usize, 8, 16, 32, 128, 512] {
            let (rows, most) = (vec![rows[0]; tokens], count as u32);
            let q: Vec<u16> = (0..tokens).flat_map(|_| q[..heads * 128].iter().map(|v| bf16_bits(*v))).collect();
            let selection = Selection {
                queries: rig.put(&q).address(),
                weights: rig.put(&g[..heads].repeat(tokens)).address(),
                rows: put_rows(&mut rig, &rows).address(),
                keys: d_keys.pages,
                seats: d_keys.seats,
                scratch: rig.poisoned::<u8>(scratch_bytes(tokens as u32, k as u32, most) as usize).address(),
                picks: rig.poisoned::<u32>(tokens * k).address(),
                counts: rig.poisoned::<u32>(tokens).address(),
                tokens: tokens as u32,
                heads: heads as u32,
                k: k as u32,
                most,
                seen: Some(most),
            };
            let graph = Graph::capture(&rig.stream, |s| (0..10).try_for_each(|_| index.select(s, &selection))).unwrap();
            let us = rig.median_us(&graph) / 10.0;
            println!("index {format:?}, {k} of {count} entries, {tokens} tokens: {us:.1} us");
        }
        rig.arena.reset();
    }
}
