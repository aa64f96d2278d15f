//! Few rows of the indexer in both forms: the same scores, bit for bit, and the same picks, whatever rows see; and both measured.

use longwave_cpu::numerics::round_slice;
use longwave_cuda::driver::{DeviceSlice, Graph};
use longwave_cuda::ops::index::{Index, Selection, scratch_bytes};
use longwave_cuda::ops::{BatchRow, UNMAPPED};
use longwave_model::IndexFormat;

use crate::index::{keys, row, selection};
use crate::paged::{OnGpu, Paged, assert_same};
use crate::rig::{Fresh, Rig, rig, small};

/// A selection with its scratch and outputs.
struct Case {
    selection: Selection,
    picks: DeviceSlice<u32>,
    counts: DeviceSlice<u32>,
    scratch: DeviceSlice<u32>,
}

impl Case {
    fn new(
        rig: &mut Rig,
        fresh: &mut Fresh,
        rows: &[BatchRow],
        keys: &OnGpu,
        heads: usize,
        k: usize,
        most: u32,
    ) -> Case {
        let mut q = fresh.floats(rows.len() * heads * 128);
        round_slice(&mut q);
        let g = fresh.floats(rows.len() * heads);
        let (mut selection, picks, counts) = selection(rig, &q, &g, rows, keys, heads, k, most);
        let scratch = rig.poisoned::<u32>(scratch_bytes(rows.len() as u32, k as u32, most) as usize / 4);
        selection.scratch = scratch.address();
        Case { selection, picks, counts, scratch }
    }

    /// Picks, counts and scratch of one form, all poisoned before.
    fn run(&self, rig: &Rig, index: &Index, beside: bool) -> [Vec<u32>; 3] {
        let all = [&self.picks, &self.counts, &self.scratch];
        all.iter().for_each(|slice| slice.fill(&rig.stream, 0xff).unwrap());
        index.select_by_row_as(&rig.stream, &self.selection, beside).unwrap();
        all.map(|slice| slice.read(&rig.stream).unwrap())
    }

    /// Fails where the forms differ in what a row picks or in a score that it needs.
    fn check(&self, rig: &Rig, index: &Index, rows: &[BatchRow], what: &str) {
        let [first, second] = [false, true].map(|beside| self.run(rig, index, beside));
        assert_same(&format!("{what}: counts"), &second[1], &first[1]);
        let (k, stride) = (self.selection.k as usize, self.selection.most.next_multiple_of(64) as usize);
        for (t, row) in rows.iter().enumerate() {
            let visible = if row.seat == UNMAPPED { 0 } else { (row.position as usize + 1) / 4 };
            let name = format!("{what}: row {t} that sees {visible}");
            assert_same(&format!("{name}: picks"), &second[0][t * k..][..k], &first[0][t * k..][..k]);
            if visible > k {
                let scores = |of: &[Vec<u32>; 3]| of[2][t * stride..][..visible].to_vec();
                assert_same(&format!("{name}: scores"), &scores(&second), &scores(&first));
                let groups = rows.len() * stride + t * stride / 16;
                let largest = |of: &[Vec<u32>; 3]| of[2][groups..][..visible.div_ceil(16)].to_vec();
                assert_same(&format!("{name}: largest of groups"), &largest(&second), &largest(&first));
            }
        }
    }
}

/// `count` keys of which `distinct` in whole numbers, or any.
fn some_keys(fresh: &mut Fresh, format: IndexFormat, count: usize, distinct: Option<f32>) -> Paged {
    let mut value = |fresh: &mut Fresh| -> Vec<f32> {
        let mut x = fresh.floats(128);
        if let Some(most) = distinct {
            x.iter_mut().for_each(|v| *v = (*v * (most + 0.5)).round());
            x.iter_mut().step_by(32).for_each(|v| *v = 4.0);
        }
        x
    };
    keys(fresh, format, count, &mut value).0
}

/// Rows of seat 1 that see so many entries.
fn rows_that_see(visible: &[usize]) -> Vec<BatchRow> {
    visible.iter().map(|&n| row((4 * n + 2) as u32)).collect()
}

#[test]
fn both_forms_of_few_rows_score_and_pick_the_same() {
    let Some(mut rig) = rig(2 << 30) else { return };
    if rig.context.gpu().major != 9 {
        println!("skipped: few rows have a second form on Hopper alone");
        return;
    }
    let mut fresh = Fresh::new();
    for (format, heads, k, count, distinct) in [
        (IndexFormat::Fp4, 64usize, 512usize, 40_000usize, None),
        (IndexFormat::Fp8, 64, 512, 20_000, None),
        (IndexFormat::Bf16, 64, 1024, 20_000, None),
        (IndexFormat::Fp4, 64, 1024, 20_000, Some(1.0f32)),
        (IndexFormat::Fp8, 20, 64, 9000, Some(2.0)),
        (IndexFormat::Bf16, 4, 512, 20_000, Some(0.0)),
        (IndexFormat::Fp4, 9, 1, 20_000, None),
    ] {
        let index = Index::new(&rig.context, format).unwrap();
        let mut paged = some_keys(&mut fresh, format, count, distinct);
        // A page that is not there.
        let hole = fresh.below(count / 64);
        paged.unmap(1, hole..hole + 1);
        let d_keys = paged.put(&mut rig);
        let name = format!("{format:?}, {heads} heads, {k} of {count}");
        let mut sees = vec![0, 1, k - 1, k, k + 1, k + 2, k + 17, 2048, 2049, 4096, 4097, 6000, count - 1, count];
        sees.extend([16_384, 16_385].iter().filter(|&&n| n <= count));
        sees.retain(|&n| n <= count);
        for tokens in [1usize, 3, 8, 15] {
            for first in (0..sees.len()).step_by(tokens) {
                let mut rows = rows_that_see(&sees[first..(first + tokens).min(sees.len())]);
                rows.insert(
                    fresh.below(rows.len() + 1),
                    BatchRow { seat: UNMAPPED, position: 9, start: 9, start_row: 0 },
                );
                // Alone as well: a padded row beside changes how many blocks a row has.
                for rows in [&rows[..], &rows[..1]] {
                    // Scratch and launches are for more than rows see.
                    let most = [count as u32, 3 * count as u32][fresh.below(2)];
                    let case = Case::new(&mut rig, &mut fresh, rows, &d_keys, heads, k, most);
                    case.check(&rig, &index, rows, &format!("{name}, at most {most}"));
                }
            }
        }
        println!("index {name}: the same scores and picks in both forms");
        rig.arena.reset();
    }
}

#[test]
fn both_forms_pick_the_same_of_a_million_positions() {
    let Some(mut rig) = rig(2 << 30) else { return };
    if small() || rig.context.gpu().major != 9 {
        return;
    }
    let mut fresh = Fresh::new();
    let (format, heads, k, count, most) = (IndexFormat::Fp4, 64, 512, 65_536, 1 << 18);
    let index = Index::new(&rig.context, format).unwrap();
    let mut paged = some_keys(&mut fresh, format, count, None);
    for tokens in [1usize, 16] {
        // Every page four times over, so that each score comes four times; or once, with pages that are not there behind it.
        for holes in [false, true] {
            let mut long = Paged::new(&mut fresh, 2, most / 64, 6, 64 * format.row_bytes() as usize);
            for block in 0..most as u32 / 64 {
                let from = paged.page(1, block * 64 % count as u32).map(|page| page.to_vec());
                if let (Some(from), Some(to)) = (from, long.page(1, block * 64)) {
                    to.copy_from_slice(&from);
                }
            }
            if holes {
                long.unmap(1, count / 64 + 3..most / 64 - 5);
            }
            let d_keys = long.put(&mut rig);
            let sees: Vec<usize> = (0..tokens).map(|t| [most, most - 1, 65_537, 131_072, 20_001][t % 5]).collect();
            let rows = rows_that_see(&sees);
            let case = Case::new(&mut rig, &mut fresh, &rows, &d_keys, heads, k, most as u32);
            case.check(&rig, &index, &rows, &format!("{tokens} rows, {k} of {most}, holes: {holes}"));
            rig.arena.reset();
        }
    }
    println!("index {format:?}: the same picks of {most} entries in both forms");
}

#[test]
fn both_forms_of_few_rows_are_measured() {
    let Some(mut rig) = rig(2 << 30) else { return };
    if small() || rig.context.gpu().major != 9 {
        return;
    }
    let mut fresh = Fresh::new();
    let (heads, k) = (64usize, 512usize);
    for (format, count) in [
        (IndexFormat::Fp4, 2048usize),
        (IndexFormat::Fp4, 2053),
        (IndexFormat::Fp4, 8192),
        (IndexFormat::Fp4, 32_768),
        (IndexFormat::Fp4, 262_144),
        (IndexFormat::Fp8, 32_768),
        (IndexFormat::Bf16, 32_768),
    ] {
        let index = Index::new(&rig.context, format).unwrap();
        let d_keys = some_keys(&mut fresh, format, count, None).put(&mut rig);
        for tokens in [1usize, 2, 4, 8, 16] {
            // Launches are those of a model of a million positions, whatever rows see.
            let (rows, most) = (rows_that_see(&vec![count; tokens]), 1 << 18);
            let case = Case::new(&mut rig, &mut fresh, &rows, &d_keys, heads, k, most);
            let us = [false, true].map(|beside| {
                let ten = |s: &_| (0..10).try_for_each(|_| index.select_by_row_as(s, &case.selection, beside));
                rig.median_us(&Graph::capture(&rig.stream, ten).unwrap()) / 10.0
            });
            let [first, second] = us;
            println!(
                "index {format:?}, {k} of {count} entries, {tokens} tokens: {first:.1} us, second form {second:.1}"
            );
        }
        rig.arena.reset();
    }
}
