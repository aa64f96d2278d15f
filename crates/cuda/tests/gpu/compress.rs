//! Compressors against the CPU's: all bits of entries and state, however a sequence is cut into steps.

use longwave_cpu::numerics::{Profile, round_slice};
use longwave_cpu::ops::compress::{Row, Running, entry, finish, fold, pool4};
use longwave_cpu::ops::hadamard::hadamard;
use longwave_cpu::ops::rope::Frequencies;
use longwave_cpu::ops::rows::{store_f32, store_index, store_main};
use longwave_cuda::driver::{DeviceSlice, Graph};
use longwave_cuda::ops::compress::{Compress, Compressor, Sequence};
use longwave_cuda::ops::{BatchRow, UNMAPPED};
use longwave_model::{IndexFormat, MainFormat, presets};

use crate::paged::{Paged, assert_same, put_rows};
use crate::rig::{Fresh, Rig, rig};
use crate::rope::put_table;

const EPS: f32 = 1e-6;
const LEN: usize = 300;

/// Products of a sequence `[len, 2n]` and its weights.
struct Inputs {
    products: Vec<f32>,
    ape: Vec<f32>,
    norm: Vec<f32>,
    n: usize,
}

fn inputs(fresh: &mut Fresh, n: usize, ratio: usize, width: usize) -> Inputs {
    Inputs {
        products: fresh.floats(LEN * 2 * n).iter().map(|v| 4.0 * v).collect(),
        ape: fresh.floats(ratio * n),
        norm: fresh.floats(width).iter().map(|v| 1.0 + 0.4 * v).collect(),
        n,
    }
}

impl Inputs {
    /// A row with the positional bias on its scores.
    fn row(&self, p: usize) -> Vec<f32> {
        let mut row = self.products[p * 2 * self.n..(p + 1) * 2 * self.n].to_vec();
        let at = p % (self.ape.len() / self.n) * self.n;
        row[self.n..].iter_mut().zip(&self.ape[at..]).for_each(|(s, a)| *s += a);
        row
    }
}

enum Target {
    Main(MainFormat),
    Index(IndexFormat),
}

fn store(target: &Target, u: &mut [f32], page: &mut [u8], slot: usize, rows: usize) {
    match target {
        Target::Main(format) => store_main(*format, u, page, slot, rows),
        Target::Index(format) => {
            if *format == IndexFormat::Fp4 {
                hadamard(u);
                round_slice(u);
            }
            store_index(*format, u, page, slot, rows);
        }
    }
}

/// Where the sequences of a test are: a step has rows of seat 1 and, before them, a padded row and rows of seat 0.
struct Step<'a> {
    x: &'a Inputs,
    ratio: u32,
    weights: [DeviceSlice<f32>; 2],
}

impl Step<'_> {
    /// One step of seat 1 at `start`, `count` rows, beside rows of seat 0 from its start; gives the launch and its lists.
    fn put(&self, rig: &mut Rig, products: &[f32], start: u32, count: u32, other: u32) -> (Vec<BatchRow>, Compressor) {
        let width = 2 * self.x.n;
        let mut rows = vec![BatchRow { seat: UNMAPPED, position: 0, start: 0, start_row: 0 }];
        let mut all = vec![f32::NAN; width];
        rows.extend((0..other).map(|position| BatchRow { seat: 0, position, start: 0, start_row: 1 }));
        all.extend_from_slice(&self.x.products[..other as usize * width]);
        let start_row = rows.len() as u32;
        rows.extend((start..start + count).map(|position| BatchRow { seat: 1, position, start, start_row }));
        all.extend_from_slice(products);
        let nowhere = longwave_cuda::ops::Pages { pool: 0, table: 0, unit_bytes: 0, table_len: 0, shift: 0 };
        let compressor = Compressor {
            products: rig.put(&all).address(),
            ape: self.weights[0].address(),
            angles: put_table(rig, &rows, self.ratio).address(),
            norm: self.weights[1].address(),
            state: nowhere,
            entries: nowhere,
            eps: EPS,
        };
        (rows, compressor)
    }
}

/// The CPU's entries of positions before `len`, and the state rows of those that are mapped.
fn reference4(x: &Inputs, target: &Target, seat: u32, len: usize, state: &mut Paged, entries: &mut Paged) {
    let width = 2 * x.n;
    let rows: Vec<Vec<f32>> = (0..len).map(|p| x.row(p)).collect();
    for (p, row) in rows.iter().enumerate() {
        let slot = state.slot(p as u32);
        if let Some(page) = state.page(seat, p as u32) {
            store_f32(row, &mut page[slot * width * 4..][..width * 4]);
        }
    }
    let mut u = vec![0.0; x.norm.len()];
    for j in 0..len / 4 {
        let four = |from: usize| -> [Row; 4] { std::array::from_fn(|i| rows[from + i].as_slice()) };
        pool4((j > 0).then(|| four(4 * j - 4)), four(4 * j), &mut u);
        let angles = Frequencies::compressed(&presets::flash()).angles(4 * j as u32);
        entry(&mut u, &x.norm, EPS, &angles, Profile::Serving);
        let (slot, n) = (entries.slot(j as u32), entries.rows());
        if let Some(page) = entries.page(seat, j as u32) {
            store(target, &mut u, page, slot, n);
        }
    }
}

#[test]
fn ratio_four_has_the_bits_of_the_cpu_in_any_steps() {
    let Some(mut rig) = rig(256 << 20) else { return };
    let mut fresh = Fresh::new();
    let formats = [
        (MainFormat::Fp8, IndexFormat::Fp8),
        (MainFormat::Bf16, IndexFormat::Fp4),
        (MainFormat::Fp8, IndexFormat::Bf16),
    ];
    for (main, index) in formats {
        let compress = Compress::new(&rig.context, main, index).unwrap();
        for target in [Target::Main(main), Target::Index(index)] {
            let (n, width, row_bytes, shift) = match &target {
                Target::Main(format) => (1024, 512, format.row_bytes(), 2),
                Target::Index(format) => (256, 128, format.row_bytes(), 1),
            };
            let x = inputs(&mut fresh, n, 4, width);
            let blocks = LEN.div_ceil(1 << shift);
            let state = Paged::new(&mut fresh, 2, blocks, shift, (8 * n) << shift);
            let mut entries = Paged::new(&mut fresh, 2, 2, 6, 64 * row_bytes as usize);
            entries.unmap(0, 0..2);
            for steps in [vec![LEN], vec![1; LEN], vec![1, 2, 3, 5, 1, 130, 7, 64, 4, 3, 1, 1, 78]] {
                let (mut state, mut entries) = (state.clone(), entries.clone());
                if steps.len() == 1 {
                    // A prefill keeps the last rows only.
                    state.unmap(1, 0..blocks - 4);
                }
                let (d_state, d_entries) = (state.put(&mut rig), entries.put(&mut rig));
                let step = Step { x: &x, ratio: 4, weights: [rig.put(&x.ape), rig.put(&x.norm)] };
                let mut start = 0u32;
                let before = rig.arena.used_bytes();
                for &count in &steps {
                    let products = &x.products[start as usize * 2 * n..][..count * 2 * n];
                    let (rows, c) = step.put(&mut rig, products, start, count as u32, 6);
                    let c = Compressor { state: d_state.pages, entries: d_entries.pages, ..c };
                    let list = put_rows(&mut rig, &rows).address();
                    match target {
                        Target::Main(_) => compress.main4(&rig.stream, &c, list, rows.len() as u32),
                        Target::Index(_) => compress.index4(&rig.stream, &c, list, rows.len() as u32),
                    }
                    .unwrap();
                    start += count as u32;
                }
                assert!(rig.arena.used_bytes() > before);
                reference4(&x, &target, 0, 6, &mut state, &mut entries);
                reference4(&x, &target, 1, LEN, &mut state, &mut entries);
                let name = match target {
                    Target::Main(format) => format!("main {format:?}, {} steps", steps.len()),
                    Target::Index(format) => format!("index {format:?}, {} steps", steps.len()),
                };
                assert_same(&format!("{name}: entries"), &d_entries.bytes.read(&rig.stream).unwrap(), &entries.bytes);
                assert_same(&format!("{name}: state"), &d_state.bytes.read(&rig.stream).unwrap(), &state.bytes);
                println!("compress4 {name}: the same bytes");
                rig.arena.reset();
            }
        }
    }
}

/// The CPU's entries of ratio 128.
fn reference128(x: &Inputs, format: MainFormat, seat: u32, entries: &mut Paged) {
    let (mut max, mut sum, mut acc) = (vec![0.0; 512], vec![0.0; 512], vec![0.0; 512]);
    for p in 0..LEN {
        let mut sums = Running { max: &mut max, sum: &mut sum, acc: &mut acc };
        fold(&mut sums, &x.row(p), p % 128 == 0);
        if p % 128 != 127 {
            continue;
        }
        let mut u = vec![0.0; 512];
        finish(&sums, &mut u);
        let j = (p / 128) as u32;
        entry(&mut u, &x.norm, EPS, &Frequencies::compressed(&presets::flash()).angles(128 * j), Profile::Serving);
        let (slot, n) = (entries.slot(j), entries.rows());
        if let Some(page) = entries.page(seat, j) {
            store_main(format, &u, page, slot, n);
        }
    }
}

#[test]
fn ratio_128_has_the_bits_of_the_cpu_in_any_steps_and_with_rejected_drafts() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    for format in [MainFormat::Fp8, MainFormat::Bf16] {
        let compress = Compress::new(&rig.context, format, IndexFormat::Fp8).unwrap();
        let x = inputs(&mut fresh, 512, 128, 512);
        let state = Paged::new(&mut fresh, 2, 3, 7, 64 * format.row_bytes() as usize);
        let mut entries = Paged::new(&mut fresh, 2, 2, 1, 2 * format.row_bytes() as usize);
        reference128(&x, format, 1, &mut entries);
        let wanted = entries.bytes.clone();
        entries.bytes.fill(0xff);
        // Rows, drafts among them, drafts that are accepted; ends at LEN or later with all real rows seen.
        let whole = vec![(LEN, 0, 0)];
        let ones = vec![(1, 0, 0); LEN];
        let chunks = vec![(100, 0, 0), (28, 0, 0), (1, 0, 0), (171, 0, 0)];
        let mut drafts = vec![(120, 0, 0)];
        let mut at = 120;
        while at < LEN {
            let drafted = fresh.below(8).min(LEN - at - 1);
            let accepted = fresh.below(drafted + 1);
            drafts.push((1 + drafted, drafted, accepted));
            at += 1 + accepted;
        }
        for (name, steps) in [("one step", whole), ("single rows", ones), ("chunks", chunks), ("drafts", drafts)] {
            let (d_state, d_entries) = (state.put(&mut rig), entries.put(&mut rig));
            let step = Step { x: &x, ratio: 128, weights: [rig.put(&x.ape), rig.put(&x.norm)] };
            let mut start = 0;
            for &(count, drafted, accepted) in &steps {
                let mut products = x.products[start * 1024..(start + count) * 1024].to_vec();
                // Rejected drafts are other rows.
                let kept = (count - drafted + accepted) * 1024;
                let others = fresh.floats(products.len() - kept);
                products[kept..].copy_from_slice(&others);
                let (rows, c) = step.put(&mut rig, &products, start as u32, count as u32, 0);
                let c = Compressor { state: d_state.pages, entries: d_entries.pages, ..c };
                let sequences = [
                    Sequence { seat: UNMAPPED, start: 0, start_row: 0, rows: 1, drafts: 0, unused: [7; 3] },
                    Sequence {
                        seat: 1,
                        start: start as u32,
                        start_row: rows.len() as u32 - count as u32,
                        rows: count as u32,
                        drafts: drafted as u32,
                        unused: [7; 3],
                    },
                ];
                let words: Vec<u32> =
                    sequences.iter().flat_map(|s| [s.seat, s.start, s.start_row, s.rows, s.drafts, 7, 7, 7]).collect();
                let list = rig.put(&words);
                compress.main128(&rig.stream, &c, list.address(), 2, count as u32).unwrap();
                start += count - drafted + accepted;
            }
            assert_eq!(start, LEN);
            let ours = d_entries.bytes.read(&rig.stream).unwrap();
            assert_same(&format!("{format:?}, {name}"), &ours, &wanted);
            println!("compress128 {format:?}, {name}: {} steps, the same bytes", steps.len());
            rig.arena.reset();
        }
    }
}

#[test]
fn compressors_are_measured() {
    let Some(mut rig) = rig(256 << 20) else { return };
    let mut fresh = Fresh::new();
    let compress = Compress::new(&rig.context, MainFormat::Fp8, IndexFormat::Fp8).unwrap();
    for (name, n, ratio, width) in [("main4", 1024, 4, 512), ("index4", 256, 4, 128), ("main128", 512, 128, 512)] {
        let x = inputs(&mut fresh, n, ratio, width);
        let state = Paged::new(&mut fresh, 2, LEN, if ratio == 4 { 0 } else { 7 }, 64 * 584);
        let entries = Paged::new(&mut fresh, 2, 4, 6, 64 * 584);
        let (d_state, d_entries) = (state.put(&mut rig), entries.put(&mut rig));
        let step = Step { x: &x, ratio: ratio as u32, weights: [rig.put(&x.ape), rig.put(&x.norm)] };
        // The row that ends a group, and a chunk.
        for (start, count) in [(127u32, 1u32), (0, 256)] {
            let products = x.products[start as usize * 2 * n..][..count as usize * 2 * n].to_vec();
            let (rows, c) = step.put(&mut rig, &products, start, count, 0);
            let c = Compressor { state: d_state.pages, entries: d_entries.pages, ..c };
            let list = put_rows(&mut rig, &rows).address();
            let sequence = rig.put(&[1, start, 1, count, 0, 0, 0, 0]).address();
            let graph = Graph::capture(&rig.stream, |s| {
                (0..20).try_for_each(|_| match name {
                    "main4" => compress.main4(s, &c, list, rows.len() as u32),
                    "index4" => compress.index4(s, &c, list, rows.len() as u32),
                    _ => compress.main128(s, &c, sequence, 1, count),
                })
            })
            .unwrap();
            println!("compress {name}, {count} rows: {:.2} us", rig.median_us(&graph) / 20.0);
        }
        rig.arena.reset();
    }
}
