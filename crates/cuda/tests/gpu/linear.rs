//! Products with fp8 weights, against plain sums on the CPU; their time against the floor.

use longwave_cuda::driver::{DeviceSlice, Graph};
use longwave_cuda::ops::linear_fp8::{Form, Fp8Product, LinearFp8};
use longwave_model::formats::{e4m3, ue8m0};

use crate::flash::number;
use crate::rig::{Fresh, first_difference, relative_error, rig, small};

/// Codes and one scale per 128 columns (and per `rows` rows), as a checkpoint or the quantiser makes them.
struct Codes {
    codes: Vec<u8>,
    scales: Vec<f32>,
    cols: usize,
    rows_per_scale: usize,
}

impl Codes {
    fn fresh(fresh: &mut Fresh, rows: usize, cols: usize, rows_per_scale: usize) -> Codes {
        let codes = fresh.floats(rows * cols).into_iter().map(|v| e4m3::encode(448.0 * v * v * v)).collect();
        let scales = fresh.floats(rows.div_ceil(rows_per_scale) * cols / 128);
        let scales = scales.into_iter().map(|v| ue8m0::value((120.0 + 4.0 * v) as u8)).collect();
        Codes { codes, scales, cols, rows_per_scale }
    }

    fn value(&self, row: usize, col: usize) -> f64 {
        let scale = self.scales[row / self.rows_per_scale * (self.cols / 128) + col / 128];
        f64::from(e4m3::decode(self.codes[row * self.cols + col])) * f64::from(scale)
    }
}

/// Hopper's fp8 sums of 128 columns keep about 14 bits; results are rounded to nine afterwards.
const TOLERANCE: f64 = 1e-3;

struct Operands {
    w: DeviceSlice<u8>,
    w_scales: DeviceSlice<f32>,
    x: DeviceSlice<u8>,
    x_scales: DeviceSlice<f32>,
    y: DeviceSlice<f32>,
}

impl Operands {
    fn product(&self, rows: usize, cols: usize, tokens: usize) -> Fp8Product {
        Fp8Product {
            w: self.w.address(),
            w_scales: self.w_scales.address(),
            x: self.x.address(),
            x_scales: self.x_scales.address(),
            y: self.y.address(),
            rows: rows as u32,
            cols: cols as u32,
            groups: 1,
            tokens: tokens as u32,
        }
    }
}

fn takes(form: Form, tokens: usize, cols: usize) -> bool {
    match form {
        Form::Eight => tokens <= 8,
        Form::Few => tokens <= 32,
        Form::Stream | Form::Teams => tokens <= 64,
        Form::Turns => tokens <= 64 && cols.is_multiple_of(256),
        _ => true,
    }
}

#[test]
fn few_tokens_agree_and_do_not_depend_on_the_batch() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    let linear = LinearFp8::new(&rig.context).unwrap();
    for (rows, cols) in [(16usize, 128usize), (1536, 4096), (4096, 8192), (272, 1024), (512, 256)] {
        let w = Codes::fresh(&mut fresh, rows, cols, 128);
        let x = Codes::fresh(&mut fresh, 64, cols, 1);
        let mut alone = Vec::new();
        for tokens in [1usize, 2, 7, 8, 9, 16, 17, 32, 33, 64] {
            let operands = Operands {
                w: rig.put(&w.codes),
                w_scales: rig.put(&w.scales),
                x: rig.put(&x.codes[..tokens * cols]),
                x_scales: rig.put(&x.scales[..tokens * cols / 128]),
                y: rig.poisoned(tokens * rows),
            };
            linear.launch(&rig.stream, &operands.product(rows, cols, tokens)).unwrap();
            let ours = operands.y.read(&rig.stream).unwrap();
            if tokens == 1 {
                alone = ours.clone();
            }
            assert!(ours[..rows] == alone[..], "the first token of {tokens} differs from itself alone");
            let at: Vec<usize> = (0..24).map(|i| (i * 37) % rows + rows * ((i * 5) % tokens)).collect();
            let exact = at.iter().map(|&i| (0..cols).map(|k| w.value(i % rows, k) * x.value(i / rows, k)).sum::<f64>());
            let exact: Vec<f32> = exact.map(|v| v as f32).collect();
            let error = relative_error(&at.iter().map(|&i| ours[i]).collect::<Vec<_>>(), &exact);
            println!("linear_fp8 {rows} x {cols}, {tokens} tokens: {error:.1e}");
            assert!(error < TOLERANCE, "{error}");
            assert!(ours.iter().all(|v| v.is_finite()));
        }
    }
}

/// Groups as in the output projection: each against a plain product of its own operands, and all numbers of tokens
/// against each other.
#[test]
fn many_tokens_and_groups_have_the_bits_of_few_and_of_one() {
    const MOST: usize = 300;
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let linear = LinearFp8::new(&rig.context).unwrap();
    for (groups, rows, cols) in [
        (1usize, 16usize, 128usize),
        (1, 1536, 4096),
        (1, 272, 1024),
        (1, 512, 256),
        (1, 400, 384),
        (1, 256, 7168),
        (1, 8208, 1024),
        (2, 128, 256),
        (8, 1024, 4096),
        (3, 256, 2048),
        (1, 12_288, 2048),
        (1, 8192, 4224),
        (1, 32, 16_384),
        // Several tiles for each multiprocessor, the last one cut; one pair of column blocks, and three.
        (1, 16_400, 256),
        (1, 33_840, 768),
    ] {
        if small() && groups * rows * cols > 1 << 19 {
            continue;
        }
        let w: Vec<Codes> = (0..groups).map(|_| Codes::fresh(&mut fresh, rows, cols, 128)).collect();
        let x = Codes::fresh(&mut fresh, MOST, groups * cols, 1);
        let operands = Operands {
            w: rig.put(&w.iter().flat_map(|w| w.codes.clone()).collect::<Vec<_>>()),
            w_scales: rig.put(&w.iter().flat_map(|w| w.scales.clone()).collect::<Vec<_>>()),
            x: rig.put(&x.codes),
            x_scales: rig.put(&x.scales),
            y: rig.poisoned(MOST * groups * rows),
        };
        let product = |from: usize, tokens: usize| Fp8Product {
            x: operands.x.address() + (from * groups * cols) as u64,
            x_scales: operands.x_scales.address() + (4 * from * groups * cols / 128) as u64,
            groups: groups as u32,
            ..operands.product(rows, cols, tokens)
        };
        let width = groups * rows;
        let at: Vec<(usize, usize, usize)> =
            (0..60).map(|i| ((i * 37) % MOST, (i * 5) % groups, (i * 101) % rows)).collect();
        let exact = |&(t, g, r): &(usize, usize, usize)| {
            (0..cols).map(|k| w[g].value(r, k) * x.value(t, g * cols + k)).sum::<f64>() as f32
        };
        let reference: Vec<f32> = at.iter().map(exact).collect();
        let sizes = [(0, 1), (299, 1), (5, 2), (11, 5), (3, 8), (100, 16), (7, 32), (1, 33), (200, 64), (64, 130)];
        for forms in linear.forms() {
            let form = forms[forms.len() - 1];
            operands.y.fill(&rig.stream, 0xff).unwrap();
            linear.launch_as(&rig.stream, &product(0, MOST), form).unwrap();
            let all = operands.y.read(&rig.stream).unwrap();
            let ours: Vec<f32> = at.iter().map(|&(t, g, r)| all[t * width + g * rows + r]).collect();
            let error = relative_error(&ours, &reference);
            println!("linear_fp8 {groups} x {rows} x {cols}, {MOST} tokens, {form:?}: {error:.1e}");
            assert!(error < TOLERANCE && all.iter().all(|v| v.is_finite()), "{error}");
            let all_forms = forms.iter().flat_map(|form| sizes.map(|(from, tokens)| (*form, from, tokens)));
            for (form, from, tokens) in all_forms.filter(|(form, _, tokens)| takes(*form, *tokens, cols)) {
                operands.y.fill(&rig.stream, 0xff).unwrap();
                linear.launch_as(&rig.stream, &product(from, tokens), form).unwrap();
                let ours = operands.y.read(&rig.stream).unwrap();
                let difference = first_difference(&ours[..tokens * width], &all[from * width..(from + tokens) * width]);
                assert_eq!(difference, None, "{form:?}, {tokens} tokens from {from}, {groups} x {rows} x {cols}");
                assert!(ours[tokens * width..].iter().all(|v| v.is_nan()), "writes behind its results");
            }
        }
        rig.arena.reset();
    }
}

/// Median microseconds in a graph, weights read from memory: copies that together are larger than the L2 take turns.
/// LINEAR_TOKENS takes up to so many tokens, LINEAR_ROWS matrices of so many rows.
#[test]
fn fp8_products_are_measured() {
    let Some(mut rig) = rig(8 << 30) else { return };
    let linear = LinearFp8::new(&rig.context).unwrap();
    for (name, rows, cols) in [
        ("wqa_wkv", 1536usize, 4096usize),
        ("wq_b", 32768, 1024),
        ("idx wq_b", 8192, 1024),
        ("wo_b", 4096, 8192),
        ("shared gate_up", 4096, 4096),
        ("shared down", 4096, 2048),
    ] {
        for tokens in [1usize, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 4096] {
            if tokens > number("LINEAR_TOKENS", 4096) || rows != number("LINEAR_ROWS", rows) {
                continue;
            }
            let copies = if tokens > 128 { 1 } else { (400 << 20) / (rows * cols) + 1 };
            let shape = |n: usize| n.max(1);
            let all: Vec<Operands> = (0..copies)
                .map(|_| Operands {
                    w: rig.arena.slice(rows * cols).unwrap(),
                    w_scales: rig.arena.slice(shape(rows / 128 * cols / 128)).unwrap(),
                    x: rig.arena.slice(tokens * cols).unwrap(),
                    x_scales: rig.arena.slice(tokens * cols / 128).unwrap(),
                    y: rig.arena.slice(tokens * rows).unwrap(),
                })
                .collect();
            for o in &all {
                o.w.fill(&rig.stream, 0x31).unwrap();
                o.w_scales.fill(&rig.stream, 0).unwrap();
                o.x.fill(&rig.stream, 0x2a).unwrap();
                o.x_scales.fill(&rig.stream, 0).unwrap();
            }
            let rounds = (if tokens > 128 { 8 } else { 200 }) / copies + 1;
            let launches = (rounds * copies) as f64;
            let mut line = String::new();
            for form in linear.forms().concat() {
                let tiles = matches!(form, Form::Small | Form::Large | Form::Tiles(_));
                if !takes(form, tokens, cols) || tokens < 32 && tiles {
                    continue;
                }
                let graph = Graph::capture(&rig.stream, |s| {
                    let one = |o: &Operands| linear.launch_as(s, &o.product(rows, cols, tokens), form);
                    (0..rounds).try_for_each(|_| all.iter().try_for_each(one))
                })
                .unwrap();
                line += &format!(" {form:?} {:.2}", rig.median_us(&graph) / launches);
            }
            let floor = (rows * cols + tokens * (cols + 4 * rows)) as f64 / 4.3e6;
            let floor = floor.max((2 * tokens * rows * cols) as f64 / 1580e6);
            println!("linear_fp8 {name} {rows} x {cols}, {tokens:2} tokens:{line} us, floor {floor:.2}");
            assert!(!line.is_empty());
        }
        rig.arena.reset();
    }
}
