//! Products with packed fp4 experts, against plain sums on the CPU; their time against the floor.

use longwave_cuda::driver::{Argument, DeviceSlice, Graph, Grid, Kernel, Module, Stream};
use longwave_model::formats::{e2m1, e4m3, ue8m0};

use crate::rig::{Fresh, Rig, relative_error, rig};

struct Operands {
    w: DeviceSlice<u8>,
    w_scales: DeviceSlice<u8>,
    x: DeviceSlice<u8>,
    x_scales: DeviceSlice<f32>,
    groups: DeviceSlice<i32>,
    inputs: DeviceSlice<u32>,
    y: DeviceSlice<f32>,
}

fn split(cols: usize) -> usize {
    if cols >= 4096 { 4 } else { 2 }
}

fn kernel(module: &Module, cols: usize) -> Kernel {
    module.kernel(if split(cols) == 4 { "experts_fp4_4" } else { "experts_fp4_2" }, 8 * 2 * cols as u32).unwrap()
}

impl Operands {
    fn launch(&self, stream: &Stream, kernel: &Kernel, rows: usize, cols: usize, groups: usize) {
        let arguments = [
            Argument::from(&self.w),
            Argument::from(&self.w_scales),
            Argument::from(&self.x),
            Argument::from(&self.x_scales),
            Argument::from(&self.groups),
            Argument::from(&self.inputs),
            Argument::from(&self.y),
            (rows as u32).into(),
            (cols as u32).into(),
        ];
        let blocks = (rows / 16).div_ceil(8 / split(cols)) as u32;
        let shared_bytes = (8 * 2 * cols) as u32;
        let grid = Grid { blocks: [blocks, groups as u32, 1], shared_bytes, ..Grid::new(1, 256) };
        stream.launch(kernel, grid, &arguments).unwrap();
    }
}

fn repack(rig: &Rig, module: &Module, w: &DeviceSlice<u8>) {
    let pieces = w.len() / 64;
    let kernel = module.kernel("repack", 0).unwrap();
    let grid = Grid::new(pieces.div_ceil(256) as u32, 256);
    rig.stream.launch(&kernel, grid, &[Argument::from(w), Argument::U64(pieces as u64)]).unwrap();
}

#[test]
fn pairs_agree_and_do_not_depend_on_their_group() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    let module = Module::load(&rig.context, "experts_fp4").unwrap();
    for (experts, rows, cols) in [(3usize, 16usize, 128usize), (2, 2048, 4096), (2, 4096, 2048), (4, 272, 256)] {
        let byte = |v: f32| (128.0 + 127.0 * v) as u8;
        let codes: Vec<u8> = fresh.floats(experts * rows * cols / 2).into_iter().map(byte).collect();
        let scales: Vec<u8> =
            fresh.floats(experts * rows * cols / 32).into_iter().map(|v| (122.0 + 4.0 * v) as u8).collect();
        let (inputs, pairs) = (5usize, 11usize);
        let x: Vec<u8> = fresh.floats(inputs * cols).into_iter().map(|v| e4m3::encode(448.0 * v * v * v)).collect();
        let x_scales: Vec<f32> =
            fresh.floats(inputs * cols / 128).into_iter().map(|v| ue8m0::value((120.0 + 4.0 * v) as u8)).collect();
        let of_pair: Vec<u32> = (0..pairs as u32).map(|p| (p * 3) % inputs as u32).collect();
        // Eight pairs of the last expert, three of the first; then each pair alone.
        let last = experts as i32 - 1;
        let together = [last, 0, 8, 0, 8, 3];
        let alone: Vec<i32> = (0..pairs as i32).flat_map(|p| [if p < 8 { last } else { 0 }, p, 1]).collect();
        let mut results = Vec::new();
        for groups in [&together[..], &alone] {
            let operands = Operands {
                w: rig.put(&codes),
                w_scales: rig.put(&scales),
                x: rig.put(&x),
                x_scales: rig.put(&x_scales),
                groups: rig.put(groups),
                inputs: rig.put(&of_pair),
                y: rig.poisoned(pairs * rows),
            };
            repack(&rig, &module, &operands.w);
            operands.launch(&rig.stream, &kernel(&module, cols), rows, cols, groups.len() / 3);
            results.push(operands.y.read(&rig.stream).unwrap());
        }
        assert!(results[0] == results[1], "a pair depends on its group");
        let exact = |pair: usize, row: usize| -> f64 {
            let (expert, input) = (if pair < 8 { experts - 1 } else { 0 }, of_pair[pair] as usize);
            let row = expert * rows + row;
            let one = |k: usize| {
                let (even, odd) = e2m1::decode_pair(codes[row * cols / 2 + k / 2]);
                let w = if k.is_multiple_of(2) { even } else { odd } * ue8m0::value(scales[row * cols / 32 + k / 32]);
                f64::from(w) * f64::from(e4m3::decode(x[input * cols + k]) * x_scales[input * cols / 128 + k / 128])
            };
            (0..cols).map(one).sum()
        };
        let at: Vec<(usize, usize)> = (0..40).map(|i| (i % pairs, (i * 37) % rows)).collect();
        let reference: Vec<f32> = at.iter().map(|&(p, r)| exact(p, r) as f32).collect();
        let ours: Vec<f32> = at.iter().map(|&(p, r)| results[0][p * rows + r]).collect();
        let error = relative_error(&ours, &reference);
        println!("experts_fp4 {experts} x {rows} x {cols}: {error:.1e}");
        assert!(error < 1e-5 && results[0].iter().all(|v| v.is_finite()), "{error}");
    }
}

/// Flash's experts in a graph: gate and up, then down; different experts each time, so that they come from memory.
#[test]
fn flash_experts_are_measured() {
    let Some(mut rig) = rig(8 << 30) else { return };
    let module = Module::load(&rig.context, "experts_fp4").unwrap();
    for (tokens, used) in [(1usize, 6usize), (2, 12), (4, 23), (8, 44)] {
        let mut sum = (0.0, 0.0);
        for (name, rows, cols) in [("gate and up", 4096usize, 4096usize), ("down", 4096, 2048)] {
            let experts = 256;
            let pairs = 6 * tokens;
            let groups: Vec<i32> = (0..used)
                .flat_map(|g| {
                    let (from, to) = (g * pairs / used, (g + 1) * pairs / used);
                    [g as i32, from as i32, (to - from) as i32]
                })
                .collect();
            let inputs: Vec<u32> = (0..pairs as u32).map(|p| p % tokens as u32).collect();
            let w = rig.arena.slice::<u8>(experts * rows * cols / 2).unwrap();
            let w_scales = rig.arena.slice::<u8>(experts * rows * cols / 32).unwrap();
            let x = rig.arena.slice::<u8>(tokens * cols).unwrap();
            let x_scales = rig.arena.slice::<f32>(tokens * cols / 128).unwrap();
            for slice in [&w, &w_scales, &x] {
                slice.fill(&rig.stream, 0x31).unwrap();
            }
            x_scales.fill(&rig.stream, 0).unwrap();
            // Each launch takes the next experts.
            let turns = experts / used;
            let y = rig.arena.slice(pairs * rows).unwrap();
            let inputs = rig.put(&inputs);
            let all: Vec<DeviceSlice<i32>> = (0..turns)
                .map(|t| {
                    let shifted: Vec<i32> =
                        groups.chunks(3).flat_map(|g| [g[0] + (t * used) as i32, g[1], g[2]]).collect();
                    rig.put(&shifted)
                })
                .collect();
            let kernel = kernel(&module, cols);
            let mut operands = Operands { w, w_scales, x, x_scales, groups: rig.put(&groups), inputs, y };
            let rounds = 60 / turns + 1;
            let graph = Graph::capture(&rig.stream, |s| {
                for _ in 0..rounds {
                    for groups in &all {
                        operands.groups = groups.share();
                        operands.launch(s, &kernel, rows, cols, used);
                    }
                }
                Ok(())
            })
            .unwrap();
            let us = rig.median_us(&graph) / (rounds * turns) as f64;
            let floor = (used * rows * cols * 17 / 32) as f64 / 4.3e6;
            println!("experts_fp4 {name}, {tokens} tokens, {used} experts: {:6.2} us, floor {floor:.2}", us);
            sum = (sum.0 + us, sum.1 + floor);
            rig.arena.reset();
        }
        println!("experts_fp4 both, {tokens} tokens: {:6.2} us, floor {:.2}", sum.0, sum.1);
        assert!(sum.0 > 0.0);
    }
}
