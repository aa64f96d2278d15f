//! Products with fp8 and bf16 weights against plain sums on the CPU, few tokens and many, in groups; their time against the
//! floor.

use std::rc::Rc;

use longwave_cuda::driver::Graph;
use longwave_cuda::loader::{Plain, Scaled};
use longwave_cuda::ops::linear::Linear;
use longwave_cuda::scratch::Codes;
use longwave_model::formats::{bf16_bits, bf16_value, e4m3, ue8m0};

use crate::rig::{Fresh, Rig, relative_error, rig};

/// Codes and one scale per 128 columns (and per `rows` rows), as a checkpoint or the quantiser makes them.
struct Host {
    codes: Vec<u8>,
    scales: Vec<f32>,
    cols: usize,
    rows_per_scale: usize,
}

impl Host {
    fn fresh(fresh: &mut Fresh, rows: usize, cols: usize, rows_per_scale: usize) -> Host {
        let codes = fresh.floats(rows * cols).into_iter().map(|v| e4m3::encode(448.0 * v * v * v)).collect();
        let scales = fresh.floats(rows.div_ceil(rows_per_scale) * cols / 128);
        let scales = scales.into_iter().map(|v| ue8m0::value((120.0 + 4.0 * v) as u8)).collect();
        Host { codes, scales, cols, rows_per_scale }
    }

    fn value(&self, row: usize, col: usize) -> f64 {
        let scale = self.scales[row / self.rows_per_scale * (self.cols / 128) + col / 128];
        f64::from(e4m3::decode(self.codes[row * self.cols + col])) * f64::from(scale)
    }
}

/// A few places of a result, as (token, row).
fn places(rows: usize, tokens: usize) -> Vec<(usize, usize)> {
    (0..24).map(|i| ((i * 5) % tokens, (i * 37) % rows)).collect()
}

const TOKENS: [usize; 11] = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 200];

#[test]
fn fp8_products_agree_and_do_not_depend_on_the_batch() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let (mut fresh, linear) = (Fresh::new(), Linear::new(&rig.context).unwrap());
    // Rows of a group, columns, groups.
    for (rows, cols, groups) in
        [(16, 128, 1), (1536, 4096, 1), (4096, 8192, 1), (272, 1024, 1), (512, 256, 1), (1024, 4096, 8), (128, 1024, 2)]
    {
        let w = Host::fresh(&mut fresh, groups * rows, cols, 128);
        let x = Host::fresh(&mut fresh, 200, groups * cols, 1);
        let weights = Scaled {
            codes: rig.put(&w.codes),
            scales: rig.put(&w.scales),
            rows: (groups * rows) as u32,
            cols: cols as u32,
        };
        let mut longest = Vec::new();
        for tokens in TOKENS.into_iter().rev() {
            let width = groups * cols;
            let input = Codes {
                codes: rig.put(&x.codes[..tokens * width]),
                scales: rig.put(&x.scales[..tokens * width / 128]),
            };
            let y = rig.poisoned::<f32>(tokens * groups * rows);
            linear.grouped(&rig.stream, &weights, groups as u32, &input, &y, tokens as u32).unwrap();
            let ours = y.read(&rig.stream).unwrap();
            if longest.is_empty() {
                longest = ours.clone();
            }
            let differs = ours.iter().zip(&longest).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(differs, None, "{rows} x {cols} x {groups}: {tokens} tokens differ from 200");
            let at = places(groups * rows, tokens);
            let exact = at.iter().map(|&(token, row)| {
                let from = row / rows * cols;
                (0..cols).map(|k| w.value(row, k) * x.value(token, from + k)).sum::<f64>() as f32
            });
            let exact: Vec<f32> = exact.collect();
            let found: Vec<f32> = at.iter().map(|&(token, row)| ours[token * groups * rows + row]).collect();
            let error = relative_error(&found, &exact);
            if [1, 200].contains(&tokens) {
                println!("linear_fp8 {groups} x {rows} x {cols}, {tokens} tokens: {error:.1e}");
            }
            assert!(error < 1e-5, "{error}");
            assert!(ours.iter().all(|v| v.is_finite()));
        }
        rig.arena.reset();
    }
}

#[test]
fn bf16_products_agree_and_do_not_depend_on_the_batch() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let (mut fresh, linear) = (Fresh::new(), Linear::new(&rig.context).unwrap());
    for (rows, cols) in
        [(4, 256), (8, 256), (64, 4096), (256, 4096), (2048, 4096), (384, 7168), (2432, 256), (1000, 1024)]
    {
        let host = |fresh: &mut Fresh, n: usize| -> Vec<u16> { fresh.floats(n).into_iter().map(bf16_bits).collect() };
        let (w, x) = (host(&mut fresh, rows * cols), host(&mut fresh, 200 * cols));
        let weights = Plain { values: rig.put(&w), rows: rows as u32, cols: cols as u32 };
        let mut longest = Vec::new();
        for tokens in TOKENS.into_iter().rev() {
            let (input, y) = (rig.put(&x[..tokens * cols]), rig.poisoned::<f32>(tokens * rows));
            linear.bf16(&rig.stream, &weights, &input, &y, tokens as u32).unwrap();
            let ours = y.read(&rig.stream).unwrap();
            if longest.is_empty() {
                longest = ours.clone();
            }
            let differs = ours.iter().zip(&longest).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(differs, None, "{rows} x {cols}: {tokens} tokens differ from 200");
            let at = places(rows, tokens);
            let value = |bits: u16| f64::from(bf16_value(bits));
            let exact = at.iter().map(|&(token, row)| {
                (0..cols).map(|k| value(w[row * cols + k]) * value(x[token * cols + k])).sum::<f64>() as f32
            });
            let exact: Vec<f32> = exact.collect();
            let found: Vec<f32> = at.iter().map(|&(token, row)| ours[token * rows + row]).collect();
            let error = relative_error(&found, &exact);
            if [1, 200].contains(&tokens) {
                println!("linear_bf16 {rows} x {cols}, {tokens} tokens: {error:.1e}");
            }
            assert!(error < 1e-5, "{error}");
            assert!(ours.iter().all(|v| v.is_finite()));
        }
        rig.arena.reset();
    }
}

/// A product over memory of its own.
type Product = Box<dyn Fn(&Rig)>;

/// Median microseconds of a product in a graph, weights read from memory: copies that together are larger than the L2
/// take turns.
fn measure(rig: &mut Rig, make: &mut dyn FnMut(&mut Rig) -> Product, bytes: usize) -> f64 {
    let copies = (128 << 20) / bytes + 2;
    let all: Vec<Product> = (0..copies).map(|_| make(rig)).collect();
    let rounds = 60 / copies + 1;
    let graph = Graph::capture(&rig.stream, |_| {
        (0..rounds).for_each(|_| all.iter().for_each(|launch| launch(rig)));
        Ok(())
    });
    let us = rig.median_us(&graph.unwrap()) / (rounds * copies) as f64;
    rig.arena.reset();
    us
}

#[test]
fn products_are_measured() {
    let Some(mut rig) = rig(12 << 30) else { return };
    let linear = Rc::new(Linear::new(&rig.context).unwrap());
    for tokens in [1usize, 8, 32, 512] {
        for (name, rows, cols) in [
            ("wqa_wkv", 1536usize, 4096usize),
            ("wq_b", 32768, 1024),
            ("wo_b", 4096, 8192),
            ("shared gate_up", 4096, 4096),
            ("shared down", 4096, 2048),
        ] {
            let mut make = |rig: &mut Rig| -> Product {
                let (linear, shape) = (linear.clone(), (rows as u32, cols as u32));
                let scales = rig.filled(rows / 128 * cols / 128, 0);
                let w = Scaled { codes: rig.filled(rows * cols, 0x31), scales, rows: shape.0, cols: shape.1 };
                let x = Codes { codes: rig.filled(tokens * cols, 0x2a), scales: rig.filled(tokens * cols / 128, 0) };
                let y = rig.filled(tokens * rows, 0);
                Box::new(move |rig| linear.fp8(&rig.stream, &w, &x, &y, tokens as u32).unwrap())
            };
            let us = measure(&mut rig, &mut make, rows * cols);
            let floor = (rows * cols + tokens * (cols + 4 * rows)) as f64 / 4.3e6;
            let tera = 2.0 * (rows * cols * tokens) as f64 / us / 1e6;
            println!("linear_fp8 {name}, {tokens:3} tokens: {us:6.2} us, floor {floor:.2}, {tera:.0} TFLOP/s");
            assert!(us > 0.0);
        }
        for (name, rows, cols) in [
            ("c4 compressor", 2048usize, 4096usize),
            ("router", 256, 4096),
            ("index weights", 64, 4096),
            ("head", 129280, 4096),
        ] {
            let mut make = |rig: &mut Rig| -> Product {
                let linear = linear.clone();
                let w = Plain { values: rig.filled(rows * cols, 0x31), rows: rows as u32, cols: cols as u32 };
                let (x, y) = (rig.filled(tokens * cols, 0x2a), rig.filled(tokens * rows, 0));
                Box::new(move |rig| linear.bf16(&rig.stream, &w, &x, &y, tokens as u32).unwrap())
            };
            let us = measure(&mut rig, &mut make, 2 * rows * cols);
            let floor = (2 * rows * cols + tokens * (2 * cols + 4 * rows)) as f64 / 4.3e6;
            println!("linear_bf16 {name}, {tokens:3} tokens: {us:6.2} us, floor {floor:.2}");
            assert!(us > 0.0);
        }
    }
}
