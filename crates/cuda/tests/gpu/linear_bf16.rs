//! Products with bf16 weights, against plain sums on the CPU; their time against the floor.

use longwave_cuda::driver::Graph;
use longwave_cuda::ops::linear_bf16::{Bf16Product, Form, LinearBf16};
use longwave_model::formats::{bf16_bits, bf16_value};

use crate::rig::{Fresh, first_difference, relative_error, rig};

#[test]
fn bf16_products_agree_and_do_not_depend_on_the_batch() {
    const MOST: usize = 520;
    let Some(mut rig) = rig(2 << 30) else { return };
    let mut fresh = Fresh::new();
    let linear = LinearBf16::new(&rig.context).unwrap();
    for (rows, cols) in [
        (4usize, 256usize),
        (8, 256),
        (2432, 256),
        (64, 4096),
        (256, 4096),
        (1024, 4096),
        (384, 7168),
        (17, 128),
        (20_001, 1024),
        // More tiles than multiprocessors, the last one cut.
        (20_001, 2176),
    ] {
        let bits = |v: Vec<f32>| v.into_iter().map(bf16_bits).collect::<Vec<u16>>();
        let (w, x) = (bits(fresh.floats(rows * cols)), bits(fresh.floats(MOST * cols)));
        let (dw, dx, y) = (rig.put(&w), rig.put(&x), rig.poisoned::<f32>(MOST * rows));
        let product = |from: usize, tokens: usize| Bf16Product {
            w: dw.address(),
            x: dx.address() + (2 * from * cols) as u64,
            y: y.address(),
            rows: rows as u32,
            cols: cols as u32,
            tokens: tokens as u32,
        };
        linear.launch(&rig.stream, &product(0, MOST)).unwrap();
        let all = y.read(&rig.stream).unwrap();
        let at: Vec<(usize, usize)> = (0..200).map(|i| ((i * 37) % MOST, (i * 101) % rows)).collect();
        let exact = |&(t, r): &(usize, usize)| {
            let one = |k: usize| f64::from(bf16_value(w[r * cols + k])) * f64::from(bf16_value(x[t * cols + k]));
            (0..cols).map(one).sum::<f64>() as f32
        };
        let reference: Vec<f32> = at.iter().map(exact).collect();
        let ours: Vec<f32> = at.iter().map(|&(t, r)| all[t * rows + r]).collect();
        let error = relative_error(&ours, &reference);
        println!("linear_bf16 {rows} x {cols}: {error:.1e}");
        assert!(error < 1e-5 && all.iter().all(|v| v.is_finite()), "{error}");
        for (from, tokens) in [(0, 1), (519, 1), (3, 8), (100, 9), (7, 16), (488, 32), (1, 33), (64, 100), (8, 512)] {
            for form in linear.forms(cols as u32) {
                y.fill(&rig.stream, 0xff).unwrap();
                linear.launch_as(&rig.stream, &product(from, tokens), form).unwrap();
                let ours = y.read(&rig.stream).unwrap();
                let difference = first_difference(&ours[..tokens * rows], &all[from * rows..(from + tokens) * rows]);
                assert_eq!(difference, None, "{tokens} tokens from {from}, {rows} x {cols}, {form:?}");
                assert!(ours[tokens * rows..].iter().all(|v| v.is_nan()), "writes behind its results");
            }
        }
        rig.arena.reset();
    }
}

#[test]
fn three_products_at_once_have_the_bits_of_each() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let linear = LinearBf16::new(&rig.context).unwrap();
    for (rows, cols) in [([2048usize, 512, 64], 4096usize), ([17, 33, 1], 2048), ([272, 16, 8], 256)] {
        let mut bits = |n: usize| fresh.floats(n).into_iter().map(bf16_bits).collect::<Vec<u16>>();
        let w = rows.map(|rows| rig.put(&bits(rows * cols)));
        let x = rig.put(&bits(200 * cols));
        let y = rows.map(|rows| rig.poisoned::<f32>(200 * rows));
        for tokens in [1usize, 3, 8, 12, 70, 200] {
            let products = [0, 1, 2].map(|i| Bf16Product {
                w: w[i].address(),
                x: x.address(),
                y: y[i].address(),
                rows: rows[i] as u32,
                cols: cols as u32,
                tokens: tokens as u32,
            });
            let read = || [0, 1, 2].map(|i| y[i].read(&rig.stream).unwrap());
            products.iter().for_each(|p| linear.launch_as(&rig.stream, p, Form::Plain).unwrap());
            let each = read();
            for form in linear.forms(cols as u32) {
                y.iter().for_each(|y| y.fill(&rig.stream, 0xff).unwrap());
                linear.launch_three_as(&rig.stream, products, form).unwrap();
                for (i, (ours, each)) in read().iter().zip(&each).enumerate() {
                    let len = tokens * rows[i];
                    let difference = first_difference(&ours[..len], &each[..len]);
                    assert_eq!(difference, None, "{tokens} tokens, matrix {i} of {rows:?} x {cols}, {form:?}");
                    assert!(ours[len..].iter().all(|v| v.is_nan()), "writes behind its results");
                }
            }
            y.iter().for_each(|y| y.fill(&rig.stream, 0xff).unwrap());
        }
        rig.arena.reset();
    }
}

/// Median microseconds in a graph, weights read from memory: copies that together are larger than the L2 take turns.
#[test]
fn bf16_products_are_measured() {
    let Some(mut rig) = rig(16 << 30) else { return };
    let linear = LinearBf16::new(&rig.context).unwrap();
    for (name, rows, cols, all) in [
        ("lm_head", 129_280usize, 4096usize, &[1usize, 8, 16, 32, 64, 128, 512][..]),
        ("c4 compressor", 2048, 4096, &[1, 8, 32, 64, 128, 512, 2048, 4096]),
        ("index compressor", 512, 4096, &[32, 128, 512, 2048]),
        ("router", 256, 4096, &[1, 8, 32, 128, 512, 2048, 4096]),
        ("index weights", 64, 4096, &[1, 512, 2048]),
    ] {
        for &tokens in all {
            let copies = if tokens > 128 { 1 } else { (400 << 20) / (2 * rows * cols) + 1 };
            let mut slice = |len: usize| {
                let slice = rig.arena.slice::<u16>(len).unwrap();
                slice.fill(&rig.stream, 0x3c).unwrap();
                slice.address()
            };
            let (x, y) = (slice(tokens * cols), slice(2 * tokens * rows));
            let (rows_, cols_) = (rows as u32, cols as u32);
            let products: Vec<Bf16Product> = (0..copies)
                .map(|_| Bf16Product { w: slice(rows * cols), x, y, rows: rows_, cols: cols_, tokens: tokens as u32 })
                .collect();
            let rounds = (if tokens > 128 { 4 } else { 60 }) / copies + 1;
            let mut times = Vec::new();
            for form in linear.forms(cols as u32) {
                let graph = Graph::capture(&rig.stream, |s| {
                    (0..rounds).try_for_each(|_| products.iter().try_for_each(|p| linear.launch_as(s, p, form)))
                })
                .unwrap();
                times.push(rig.median_us(&graph) / (rounds * copies) as f64);
            }
            let bytes = (2 * rows * cols + tokens * (2 * cols + 4 * rows)) as f64;
            let floor = (bytes / 4.3e6).max((2 * tokens * rows * cols) as f64 / 790e6);
            println!("linear_bf16 {name} {rows} x {cols}, {tokens:4} tokens: {times:8.2?} us, floor {floor:.2}");
            assert!(times.iter().all(|us| *us > 0.0));
            rig.arena.reset();
        }
    }
}
