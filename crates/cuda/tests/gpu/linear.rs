//! Products with fp8 weights for few tokens, against plain sums on the CPU; their time against the floor.

use longwave_cuda::driver::{Argument, DeviceSlice, Graph, Grid, Kernel, Module, Stream};
use longwave_model::formats::{e4m3, ue8m0};

use crate::rig::{Fresh, relative_error, rig};

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

/// Warps that share a row: by the shape alone.
fn split(cols: usize) -> usize {
    if cols >= 2048 { 8 } else { 2 }
}

/// The kernel for that many tokens and columns.
fn kernel(module: &Module, tokens: usize, cols: usize) -> Kernel {
    let names = match tokens {
        ..=8 => ["linear_fp8_1_8", "linear_fp8_1_2"],
        9..=16 => ["linear_fp8_2_8", "linear_fp8_2_2"],
        _ => ["linear_fp8_4_8", "linear_fp8_4_2"],
    };
    module.kernel(names[usize::from(split(cols) == 2)], 0).unwrap()
}

struct Operands {
    w: DeviceSlice<u8>,
    w_scales: DeviceSlice<f32>,
    x: DeviceSlice<u8>,
    x_scales: DeviceSlice<f32>,
    y: DeviceSlice<f32>,
}

impl Operands {
    fn launch(&self, stream: &Stream, module: &Kernel, rows: usize, cols: usize, tokens: usize) {
        let arguments = [
            Argument::from(&self.w),
            Argument::from(&self.w_scales),
            Argument::from(&self.x),
            Argument::from(&self.x_scales),
            Argument::from(&self.y),
            (rows as u32).into(),
            (cols as u32).into(),
            (tokens as u32).into(),
        ];
        stream.launch(module, Grid::new((rows / 16).div_ceil(8 / split(cols)) as u32, 256), &arguments).unwrap();
    }
}

#[test]
fn few_tokens_agree_and_do_not_depend_on_the_batch() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    let module = Module::load(&rig.context, "linear_fp8").unwrap();
    for (rows, cols) in [(16usize, 128usize), (1536, 4096), (4096, 8192), (272, 1024), (512, 256)] {
        let w = Codes::fresh(&mut fresh, rows, cols, 128);
        let x = Codes::fresh(&mut fresh, 32, cols, 1);
        let mut alone = Vec::new();
        for tokens in [1usize, 2, 7, 8, 9, 16, 17, 32] {
            let operands = Operands {
                w: rig.put(&w.codes),
                w_scales: rig.put(&w.scales),
                x: rig.put(&x.codes[..tokens * cols]),
                x_scales: rig.put(&x.scales[..tokens * cols / 128]),
                y: rig.poisoned(tokens * rows),
            };
            operands.launch(&rig.stream, &kernel(&module, tokens, cols), rows, cols, tokens);
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
            assert!(error < 1e-5, "{error}");
            assert!(ours.iter().all(|v| v.is_finite()));
        }
    }
}

/// Median microseconds in a graph, weights read from memory: copies that together are larger than the L2 take turns.
#[test]
fn few_tokens_are_measured() {
    let Some(mut rig) = rig(6 << 30) else { return };
    let module = Module::load(&rig.context, "linear_fp8").unwrap();
    for (name, rows, cols) in [
        ("wqa_wkv", 1536usize, 4096usize),
        ("wq_b", 32768, 1024),
        ("idx wq_b", 8192, 1024),
        ("wo_b", 4096, 8192),
        ("shared gate_up", 4096, 4096),
        ("shared down", 4096, 2048),
    ] {
        for tokens in [1usize, 8, 32] {
            let copies = (400 << 20) / (rows * cols) + 1;
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
            let kernel = kernel(&module, tokens, cols);
            let rounds = 200 / copies + 1;
            let launches = (rounds * copies) as f64;
            let graph = Graph::capture(&rig.stream, |s| {
                (0..rounds).for_each(|_| all.iter().for_each(|o| o.launch(s, &kernel, rows, cols, tokens)));
                Ok(())
            })
            .unwrap();
            let us = rig.median_us(&graph) / launches;
            let floor = (rows * cols + tokens * (cols + 4 * rows)) as f64 / 4.3e6;
            println!("linear_fp8 {name} {rows} x {cols}, {tokens:2} tokens: {:6.2} us, floor {floor:.2}", us);
            assert!(us > 0.0);
        }
        rig.arena.reset();
    }
}
