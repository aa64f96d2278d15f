//! Norms, rotation and storing behind the projections, against the CPU's: all bits.

use longwave_cpu::numerics::{Profile, round_slice};
use longwave_cpu::ops::norm::rms_norm;
use longwave_cpu::ops::rope::Frequencies;
use longwave_cpu::ops::rows::store_main;
use longwave_cuda::driver::{DeviceSlice, Graph};
use longwave_cuda::ops::keys::{Gather, Heads, Keys, Projected};
use longwave_cuda::ops::{BatchRow, Pages, UNMAPPED};
use longwave_model::formats::{bf16_bits, e4m3, ue8m0};
use longwave_model::{MainFormat, presets};

use crate::paged::{Paged, assert_same, batch, bits, put_rows};
use crate::rig::{Fresh, Rig, rig, small};
use crate::rope::put_table;

const EPS: f32 = 1e-6;
const NOWHERE: Pages = Pages { pool: 0, table: 0, unit_bytes: 0, table_len: 0, shift: 0 };

struct Inputs {
    products: Vec<f32>,
    q_norm: Vec<f32>,
    kv_norm: Vec<f32>,
    q_width: usize,
}

struct Latents {
    launch: Projected,
    codes: DeviceSlice<u8>,
    scales: DeviceSlice<f32>,
}

impl Latents {
    fn read(&self, rig: &Rig) -> (Vec<u8>, Vec<u32>) {
        (self.codes.read(&rig.stream).unwrap(), bits(&self.scales.read(&rig.stream).unwrap()))
    }
}

fn project(rig: &mut Rig, keys: &Keys, x: &Inputs, rows: &[BatchRow], window: Pages, local: Pages) -> Latents {
    let (tokens, q_width) = (rows.len(), x.q_width);
    let (codes, scales) = (rig.poisoned(tokens * q_width), rig.poisoned(tokens * q_width / 128));
    let launch = Projected {
        products: rig.put(&x.products).address(),
        rows: put_rows(rig, rows).address(),
        angles: put_table(rig, rows, 1).address(),
        q_norm: rig.put(&x.q_norm).address(),
        kv_norm: rig.put(&x.kv_norm).address(),
        codes: codes.address(),
        scales: scales.address(),
        window,
        local,
        tokens: tokens as u32,
        q_width: q_width as u32,
        eps: EPS,
    };
    keys.project(&rig.stream, &launch).unwrap();
    Latents { launch, codes, scales }
}

/// The CPU's codes and scales, its window rows stored in both caches.
fn reference(
    format: MainFormat,
    x: &Inputs,
    rows: &[BatchRow],
    window: &mut Paged,
    local: &mut Paged,
) -> (Vec<u8>, Vec<u32>) {
    let frequencies = Frequencies::compressed(&presets::flash());
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for (products, row) in x.products.chunks(x.q_width + 512).zip(rows) {
        if row.seat == UNMAPPED {
            codes.extend(vec![0xff; x.q_width]);
            scales.extend(vec![u32::MAX; x.q_width / 128]);
            continue;
        }
        let mut products = products.to_vec();
        round_slice(&mut products);
        let (q, kv) = products.split_at(x.q_width);
        let mut y = vec![0.0; x.q_width];
        rms_norm(q, &x.q_norm, EPS, Profile::Serving, &mut y);
        for group in y.chunks(128) {
            let byte = ue8m0::scale_fp8(group.iter().fold(0.0f32, |m, v| m.max(v.abs())));
            scales.push(ue8m0::value(byte).to_bits());
            codes.extend(group.iter().map(|v| e4m3::encode(v * ue8m0::inverse(byte))));
        }
        let mut y = vec![0.0; 512];
        rms_norm(kv, &x.kv_norm, EPS, Profile::Serving, &mut y);
        frequencies.angles(row.position).rotate(&mut y);
        round_slice(&mut y);
        for cache in [&mut *window, &mut *local] {
            let (slot, n) = (cache.slot(row.position), cache.rows());
            if let Some(page) = cache.page(row.seat, row.position) {
                store_main(format, &y, page, slot, n);
            }
        }
    }
    (codes, scales)
}

fn inputs(fresh: &mut Fresh, q_width: usize, tokens: usize) -> Inputs {
    let weight = |v: Vec<f32>| v.iter().map(|v| 1.0 + 0.4 * v).collect();
    Inputs {
        products: fresh.floats(tokens * (q_width + 512)).iter().map(|v| 3.0 * v * v * v).collect(),
        q_norm: weight(fresh.floats(q_width)),
        kv_norm: weight(fresh.floats(512)),
        q_width,
    }
}

#[test]
fn latents_and_window_rows_have_the_bits_of_the_cpu() {
    let Some(mut rig) = rig(256 << 20) else { return };
    let mut fresh = Fresh::new();
    for format in [MainFormat::Fp8, MainFormat::Bf16] {
        let keys = Keys::new(&rig.context, format).unwrap();
        for q_width in [128, 1024, 1536] {
            let rows = batch(&[(2, 0, 5), (0, 300, 70), (1, 4999, 1)]);
            let x = inputs(&mut fresh, q_width, rows.len());
            let page = 64 * format.row_bytes() as usize;
            let mut window = Paged::new(&mut fresh, 3, 80, 6, page);
            let mut local = Paged::new(&mut fresh, 3, 80, 6, page);
            window.unmap(0, 4..5);
            local.unmap(1, 0..80);
            let (d_window, d_local) = (window.put(&mut rig), local.put(&mut rig));
            let all = project(&mut rig, &keys, &x, &rows, d_window.pages, d_local.pages);
            let ours = all.read(&rig);
            // One row alone, without pages of the step.
            let (t, mut last) = (rows.len() - 2, window.clone());
            let alone = Inputs { products: x.products[t * (q_width + 512)..][..q_width + 512].to_vec(), ..x };
            let d_last = last.put(&mut rig);
            let one = project(&mut rig, &keys, &alone, &rows[t..=t], d_last.pages, NOWHERE).read(&rig);

            let x = Inputs { products: x.products, ..alone };
            let theirs = reference(format, &x, &rows, &mut window, &mut local);
            let what = |part| format!("{format:?} {q_width}: {part}");
            assert_same(&what("codes"), &ours.0, &theirs.0);
            assert_same(&what("scales"), &ours.1, &theirs.1);
            assert_same(&what("window"), &d_window.bytes.read(&rig.stream).unwrap(), &window.bytes);
            assert_same(&what("local"), &d_local.bytes.read(&rig.stream).unwrap(), &local.bytes);
            assert_same(&what("codes alone"), &one.0, &ours.0[t * q_width..][..q_width]);
            let page = window.page(1, 4999).unwrap().to_vec();
            last.page(1, 4999).unwrap().copy_from_slice(&page);
            assert_same(&what("window alone"), &d_last.bytes.read(&rig.stream).unwrap(), &last.bytes);
            if small() {
                rig.arena.reset();
                continue;
            }
            let time = |tokens: u32| {
                let launch = Projected { tokens, ..all.launch };
                let graph = Graph::capture(&rig.stream, |s| (0..100).try_for_each(|_| keys.project(s, &launch)));
                rig.median_us(&graph.unwrap()) / 100.0
            };
            let (one, many) = (time(1), time(rows.len() as u32));
            println!(
                "keys {format:?} {q_width}: the same bits, row {t} alone too; 1 row {one:.2} us, {} rows {many:.2} us",
                rows.len()
            );
            rig.arena.reset();
        }
    }
}

#[test]
fn rows_before_a_step_are_gathered_byte_for_byte() {
    let Some(mut rig) = rig(128 << 20) else { return };
    let mut fresh = Fresh::new();
    for format in [MainFormat::Fp8, MainFormat::Bf16] {
        let keys = Keys::new(&rig.context, format).unwrap();
        let page = 64 * format.row_bytes() as usize;
        let mut window = Paged::new(&mut fresh, 4, 80, 6, page);
        window.bytes = fresh.floats(window.bytes.len()).iter().map(|v| (v * 127.0 + 128.0) as u8).collect();
        let mut local = Paged::new(&mut fresh, 4, 80, 6, page);
        window.unmap(1, 76..77);
        local.unmap(3, 0..1);
        let sequences = [[0, 300], [UNMAPPED, 9], [1, 4999], [2, 5], [3, 127]];
        let (d_window, d_local) = (window.put(&mut rig), local.put(&mut rig));
        let list = rig.put(&sequences.concat());
        let gather = Gather {
            sequences: list.address(),
            count: sequences.len() as u32,
            window: d_window.pages,
            local: d_local.pages,
        };
        keys.gather(&rig.stream, &gather).unwrap();
        for [seat, start] in sequences.into_iter().filter(|s| s[0] != UNMAPPED) {
            for p in start.saturating_sub(127)..start {
                let slot = window.slot(p);
                let (Some(from), Some(to)) = (window.page(seat, p), local.page(seat, p)) else { continue };
                let data = if format == MainFormat::Fp8 { 576 } else { 1024 };
                to[slot * data..][..data].copy_from_slice(&from[slot * data..][..data]);
                if format == MainFormat::Fp8 {
                    let at = 64 * 576 + slot * 8;
                    to[at..at + 8].copy_from_slice(&from[at..at + 8]);
                }
            }
        }
        assert_same(&format!("{format:?}"), &d_local.bytes.read(&rig.stream).unwrap(), &local.bytes);
        rig.arena.reset();
    }
}

#[test]
fn query_heads_have_the_bits_of_the_cpu_and_are_measured() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    let keys = Keys::new(&rig.context, MainFormat::Fp8).unwrap();
    let frequencies = Frequencies::compressed(&presets::flash());
    for heads in [4, 64, 128] {
        let rows = batch(&[(0, 70_000, 3), (1, 0, 20)]);
        let x: Vec<f32> = fresh.floats(rows.len() * heads * 512).iter().map(|v| 2.0 * v).collect();
        let out = rig.poisoned::<u16>(x.len());
        let launch = Heads {
            products: rig.put(&x).address(),
            rows: put_rows(&mut rig, &rows).address(),
            angles: put_table(&mut rig, &rows, 1).address(),
            out: out.address(),
            tokens: rows.len() as u32,
            heads: heads as u32,
            eps: EPS,
        };
        keys.queries(&rig.stream, &launch).unwrap();
        let ours = out.read(&rig.stream).unwrap();
        let mut theirs = vec![0xffffu16; x.len()];
        for (t, row) in rows.iter().enumerate().filter(|(_, r)| r.seat != UNMAPPED) {
            for h in t * heads..(t + 1) * heads {
                let (mut head, mut y) = (x[h * 512..][..512].to_vec(), vec![0.0; 512]);
                round_slice(&mut head);
                rms_norm(&head, &[], EPS, Profile::Exact, &mut y);
                frequencies.angles(row.position).rotate(&mut y);
                theirs[h * 512..][..512].iter_mut().zip(&y).for_each(|(o, v)| *o = bf16_bits(*v));
            }
        }
        assert_same(&format!("{heads} heads"), &ours, &theirs);
        if small() {
            rig.arena.reset();
            continue;
        }
        let one = Heads { tokens: 1, ..launch };
        let many = |launch: Heads| {
            Graph::capture(&rig.stream, |s| (0..100).try_for_each(|_| keys.queries(s, &launch))).unwrap()
        };
        let (one, all) = (rig.median_us(&many(one)) / 100.0, rig.median_us(&many(launch)) / 100.0);
        println!("queries, {heads} heads: the same bits; 1 token {one:.2} us, {} tokens {all:.2} us", rows.len());
        rig.arena.reset();
    }
}
