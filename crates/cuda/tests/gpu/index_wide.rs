//! Rows of the indexer that share keys against each row by itself: the same picks, whatever the segments; and both measured.

use longwave_cpu::numerics::round_slice;
use longwave_cuda::driver::{DeviceSlice, Graph};
use longwave_cuda::ops::BatchRow;
use longwave_cuda::ops::index::{Index, Selection};
use longwave_model::IndexFormat;

use crate::index::{Picks, keys, row, selection, store};
use crate::paged::{Paged, assert_same, batch};
use crate::rig::{Fresh, Rig, rig, small};

/// Runs one way of a selection on poisoned scratch and outputs.
fn run(rig: &mut Rig, ours: &(Selection, DeviceSlice<u32>, DeviceSlice<u32>), way: &dyn Fn(&Rig, &Selection)) -> Picks {
    let (selection, picks, counts) = ours;
    picks.fill(&rig.stream, 0xff).unwrap();
    counts.fill(&rig.stream, 0xff).unwrap();
    way(rig, selection);
    Picks { picks: picks.read(&rig.stream).unwrap(), counts: counts.read(&rig.stream).unwrap() }
}

/// Fails at the first row whose picks differ.
#[track_caller]
fn assert_picks(what: &str, rows: &[BatchRow], k: usize, ours: &Picks, want: &Picks) {
    assert_same(&format!("{what}: counts"), &ours.counts, &want.counts);
    for (t, row) in rows.iter().enumerate() {
        let name = format!("{what}: row {t}, {row:?}");
        assert_same(&name, &ours.picks[t * k..][..k], &want.picks[t * k..][..k]);
    }
}

#[test]
fn many_rows_that_share_keys_pick_what_each_picks_alone() {
    let Some(mut rig) = rig(2 << 30) else { return };
    let mut fresh = Fresh::new();
    // Keys of whole numbers up to `distinct`, many scores equal; or any.
    for (format, heads, k, count, distinct, segments) in [
        (IndexFormat::Fp8, 4usize, 64usize, 3000usize, None, [64u32, 512, 8192]),
        (IndexFormat::Fp4, 64, 512, 20_000, None, [1024, 8192, 20_032]),
        (IndexFormat::Fp8, 64, 1024, 20_000, Some(1.0f32), [1024, 8192, 20_032]),
        (IndexFormat::Bf16, 64, 512, 9000, None, [512, 4096, 8192]),
        (IndexFormat::Fp4, 20, 512, 20_000, Some(0.0), [2048, 8192, 20_032]),
    ] {
        let index = Index::new(&rig.context, format).unwrap();
        let mut value = |fresh: &mut Fresh| -> Vec<f32> {
            let mut x = fresh.floats(128);
            if let Some(most) = distinct {
                x.iter_mut().for_each(|v| *v = (*v * (most + 0.5)).round());
                x.iter_mut().step_by(32).for_each(|v| *v = 4.0);
            }
            x
        };
        let blocks = count.div_ceil(64) + 1;
        let mut paged = Paged::new(&mut fresh, 3, blocks, 6, 64 * format.row_bytes() as usize);
        for seat in 0..3 {
            store(&mut fresh, &mut paged, format, seat, count, &mut value);
        }
        paged.unmap(2, 3..blocks / 2);
        let d_keys = paged.put(&mut rig);
        // About k entries, few, and all of them.
        let (few, all) = (4 * k as u32 - 30, 4 * count as u32 - 101);
        let mut rows = batch(&[(1, few, 61), (0, 2 * count as u32, 45), (2, all, 100)]);
        // And neighbours of other sequences.
        let alone = (0..9).map(|i| (i % 3, 4 * count as u32 - 1 - 99 * i, rows.len() as u32 + i));
        let alone: Vec<BatchRow> =
            alone.map(|(seat, position, start_row)| BatchRow { seat, position, start: position, start_row }).collect();
        rows.extend(alone);
        let mut q = fresh.floats(rows.len() * heads * 128);
        round_slice(&mut q);
        let g = fresh.floats(rows.len() * heads);
        let ours = selection(&mut rig, &q, &g, &rows, &d_keys, heads, k, count as u32);
        let want = run(&mut rig, &ours, &|rig, s| index.select_by_row(&rig.stream, s).unwrap());
        let name = format!("{format:?}, {heads} heads, {k} of {count}");
        if rig.context.gpu().major != 9 {
            println!("skipped: {name}: rows share keys on Hopper alone");
            return;
        }
        for segment in segments {
            let wide = run(&mut rig, &ours, &|rig, s| index.select_wide(&rig.stream, s, segment).unwrap());
            assert_picks(&format!("{name}, segments of {segment}"), &rows, k, &wide, &want);
        }
        let chosen = run(&mut rig, &ours, &|rig, s| index.select(&rig.stream, s).unwrap());
        assert_picks(&name, &rows, k, &chosen, &want);
        println!("index {name}: the same picks of {} rows in segments of {segments:?}", rows.len());
        rig.arena.reset();
    }
}

#[test]
fn selections_of_many_rows_are_measured() {
    let Some(mut rig) = rig(3 << 30) else { return };
    if small() || rig.context.gpu().major != 9 {
        return;
    }
    let mut fresh = Fresh::new();
    let (heads, k) = (64usize, 512usize);
    for (format, tokens, count) in [
        (IndexFormat::Fp4, 2048usize, 32_768usize),
        (IndexFormat::Fp4, 512, 32_768),
        (IndexFormat::Fp4, 2048, 131_072),
        (IndexFormat::Fp8, 2048, 32_768),
        (IndexFormat::Fp8, 512, 32_768),
    ] {
        let index = Index::new(&rig.context, format).unwrap();
        let (paged, _) = keys(&mut fresh, format, count, &mut |fresh: &mut Fresh| fresh.floats(128));
        let d_keys = paged.put(&mut rig);
        let rows: Vec<BatchRow> = (0..tokens).map(|i| row((4 * count - tokens + i) as u32)).collect();
        let mut q = fresh.floats(tokens * heads * 128);
        round_slice(&mut q);
        let g = fresh.floats(tokens * heads);
        let ours = selection(&mut rig, &q, &g, &rows, &d_keys, heads, k, count as u32);
        let want = run(&mut rig, &ours, &|rig, s| index.select_by_row(&rig.stream, s).unwrap());
        let wide = run(&mut rig, &ours, &|rig, s| index.select(&rig.stream, s).unwrap());
        let name = format!("{format:?}, {k} of {count} entries, {tokens} tokens");
        assert_picks(&name, &rows, k, &wide, &want);
        let alone = Graph::capture(&rig.stream, |s| index.select_by_row(s, &ours.0)).unwrap();
        let shared = Graph::capture(&rig.stream, |s| index.select(s, &ours.0)).unwrap();
        let (alone, shared) = (rig.median_us(&alone), rig.median_us(&shared));
        let teraflops = 2.0 * (tokens * count * heads * 128) as f64 / shared / 1e6;
        println!("index {name}: {alone:.0} us each alone, {shared:.0} us together, {teraflops:.0} TF");
        rig.arena.reset();
    }
}
