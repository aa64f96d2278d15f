//! Products with packed fp4 experts, against plain sums on the CPU; their time against the floor.

use longwave_cuda::cubins;
use longwave_cuda::driver::{Argument, DeviceSlice, Graph, Grid, Kernel, Module, Stream};
use longwave_cuda::ops::experts::{Experts, RoutedProduct};
use longwave_cuda::ops::router::GROUPS;
use longwave_model::formats::{e2m1, e4m3, ue8m0};

use crate::flash::number;
use crate::rig::{Fresh, Rig, first_difference, relative_error, rig, small};

/// Pairs of a group: every number of columns that the tensor cores are given, at its end and just behind.
const SIZES: [usize; 19] = [1, 3, 8, 11, 16, 27, 32, 40, 57, 64, 65, 80, 81, 96, 97, 112, 113, 127, 128];

struct Operands {
    w: DeviceSlice<u8>,
    w_scales: DeviceSlice<u8>,
    w_factors: DeviceSlice<f32>,
    x: DeviceSlice<u8>,
    x_scales: DeviceSlice<f32>,
    groups: DeviceSlice<i32>,
    inputs: DeviceSlice<u32>,
    y: DeviceSlice<f32>,
}

fn split(cols: usize) -> usize {
    if cols >= 4096 { 4 } else { 2 }
}

/// A form of the product, and the pairs of a group that it takes at most.
struct Form {
    name: &'static str,
    kernel: Kernel,
    most: usize,
    shared_bytes: u32,
}

/// Forms that give the same bits, and what arranges their weights.
struct Forms {
    forms: Vec<Form>,
    repack: Kernel,
    /// It is Hopper's, which has factors.
    hopper: bool,
}

/// All forms for this number of columns that the GPU has.
fn forms(rig: &Rig, cols: usize) -> Vec<Forms> {
    let form = |file: &str, names: [&'static str; 2], first: bool, most: usize, shared_bytes: usize| {
        let (module, name, shared_bytes) =
            (Module::load(&rig.context, file).unwrap(), names[usize::from(!first)], shared_bytes as u32);
        Form { name, kernel: module.kernel(name, shared_bytes.max(64 << 10)).unwrap(), most, shared_bytes }
    };
    let repack = |file: &str, name| {
        Module::load(&rig.context, file).unwrap().kernel(name, (8 * cols + cols / 2) as u32).unwrap()
    };
    let four = split(cols) == 4;
    let few = form("experts_fp4", ["experts_fp4_4", "experts_fp4_2"], four, 8, 16 * cols + cols / 4);
    let many = form("experts_fp4", ["experts_fp4_many_4", "experts_fp4_many_2"], four, 64, 0);
    let mut all = vec![Forms { forms: vec![few, many], repack: repack("experts_fp4", "repack"), hopper: false }];
    if cubins::find("experts_fp4_wide", rig.context.gpu().major, rig.context.gpu().minor).is_some() {
        let names = ["experts_fp4_stream_whole", "experts_fp4_stream_any"];
        let whole = cols.is_multiple_of(1024);
        let stream = form("experts_fp4_stream", names, whole, 8, 8 * cols + cols / 4);
        let bytes = 6 * 64 * 132 + 192 * 64 * 4 + 256 + 96;
        let wide = form("experts_fp4_wide", ["experts_fp4_wide"; 2], true, 64, bytes);
        let ring = |name, most: usize, bytes| form("experts_fp4_ring", [name; 2], true, most, bytes);
        let rings = [ring("experts_fp4_ring_64", 64, 223_616), ring("experts_fp4_ring_128", 128, 222_528)];
        let repack = repack("experts_fp4_stream", "repack_fp8");
        all.push(Forms { forms: [stream, wide].into_iter().chain(rings).collect(), repack, hopper: true });
    }
    all
}

impl Operands {
    fn launch(&self, stream: &Stream, form: &Form, rows: usize, cols: usize, groups: usize) {
        let mut arguments = vec![
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
        let shared_bytes = form.shared_bytes;
        if ["stream", "wide", "ring"].iter().any(|hopper| form.name.contains(hopper)) {
            arguments.insert(2, Argument::from(&self.w_factors));
        }
        let grid = match form.name {
            "experts_fp4_4" | "experts_fp4_2" => {
                arguments.push((groups as u32).into());
                Grid::new(264, 256)
            }
            "experts_fp4_many_4" | "experts_fp4_many_2" => {
                Grid { blocks: [(rows / 16).div_ceil(8) as u32, groups as u32, 2], ..Grid::new(1, 256) }
            }
            "experts_fp4_stream_whole" | "experts_fp4_stream_any" => {
                arguments.push((groups as u32).into());
                Grid::new(396, 128)
            }
            _ => {
                arguments.push((groups as u32).into());
                Grid::new(132, 512)
            }
        };
        stream.launch(&form.kernel, Grid { shared_bytes, ..grid }, &arguments).unwrap();
    }
}

fn repack(rig: &Rig, forms: &Forms, operands: &Operands, cols: usize) {
    let shared_bytes = (8 * cols + cols / 2) as u32;
    let grid = Grid { shared_bytes, ..Grid::new((operands.w.len() / (8 * cols)) as u32, 256) };
    let mut arguments = vec![Argument::from(&operands.w), Argument::from(&operands.w_scales), (cols as u32).into()];
    if forms.hopper {
        arguments.insert(2, Argument::from(&operands.w_factors));
    }
    rig.stream.launch(&forms.repack, grid, &arguments).unwrap();
}

#[test]
fn pairs_agree_and_do_not_depend_on_their_group() {
    let Some(mut rig) = rig(2 << 30) else { return };
    let mut fresh = Fresh::new();
    for (experts, rows, cols) in
        [(3usize, 16usize, 128usize), (2, 2048, 4096), (2, 4096, 2048), (4, 272, 256), (2, 400, 384), (2, 80, 1408)]
    {
        if small() && rows > 512 {
            continue;
        }
        let byte = |v: f32| (128.0 + 127.0 * v) as u8;
        let codes: Vec<u8> = fresh.floats(experts * rows * cols / 2).into_iter().map(byte).collect();
        // Rows of different sizes; some groups are far below the others of their row.
        let scale = |(i, v): (usize, f32)| {
            let (row, far) = (i / (cols / 32), if i % 17 == 3 { 30.0 } else { 0.0 });
            (122.0 + 5.0 * v - 20.0 * (row % 3) as f32 - far) as u8
        };
        let scales: Vec<u8> = fresh.floats(experts * rows * cols / 32).into_iter().enumerate().map(scale).collect();
        let (inputs, many, pairs) = (5usize, 200usize, 203usize);
        let x: Vec<u8> = fresh.floats(inputs * cols).into_iter().map(|v| e4m3::encode(448.0 * v * v * v)).collect();
        let x_scales: Vec<f32> =
            fresh.floats(inputs * cols / 128).into_iter().map(|v| ue8m0::value((120.0 + 4.0 * v) as u8)).collect();
        let of_pair: Vec<u32> = (0..pairs as u32).map(|p| (p * 3) % inputs as u32).collect();
        // Pairs of the last expert, then three of the first, in groups of many sizes; unused groups behind them.
        let last = experts as i32 - 1;
        let grouped = |most: usize| -> Vec<i32> {
            let mut groups: Vec<i32> =
                (0..many).step_by(most).flat_map(|p| [last, p as i32, most.min(many - p) as i32]).collect();
            groups.extend([0, many as i32, 3, 0, 0, 0, 0, 0, 0]);
            groups
        };
        for forms in forms(&rig, cols) {
            let mut results = Vec::new();
            for (form, most) in forms
                .forms
                .iter()
                .flat_map(|form| SIZES.map(|most| (form, most)))
                .filter(|(form, most)| *most <= form.most)
            {
                let groups = grouped(most);
                let operands = Operands {
                    w: rig.put(&codes),
                    w_scales: rig.put(&scales),
                    w_factors: rig.poisoned(experts * rows),
                    x: rig.put(&x),
                    x_scales: rig.put(&x_scales),
                    groups: rig.put(&groups),
                    inputs: rig.put(&of_pair),
                    y: rig.poisoned(pairs * rows),
                };
                repack(&rig, &forms, &operands, cols);
                operands.launch(&rig.stream, form, rows, cols, groups.len() / 3);
                results.push(operands.y.read(&rig.stream).unwrap());
                let different = first_difference(&results[results.len() - 1], &results[0]);
                assert_eq!(different, None, "{} with groups of {most}, {rows} x {cols}", form.name);
            }
            let exact = |pair: usize, row: usize| -> f64 {
                let (expert, input) = (if pair < many { experts - 1 } else { 0 }, of_pair[pair] as usize);
                let row = expert * rows + row;
                let one = |k: usize| {
                    let (even, odd) = e2m1::decode_pair(codes[row * cols / 2 + k / 2]);
                    let w =
                        if k.is_multiple_of(2) { even } else { odd } * ue8m0::value(scales[row * cols / 32 + k / 32]);
                    f64::from(w) * f64::from(e4m3::decode(x[input * cols + k]) * x_scales[input * cols / 128 + k / 128])
                };
                (0..cols).map(one).sum()
            };
            let at: Vec<(usize, usize)> = (0..40).map(|i| (i % pairs, (i * 37) % rows)).collect();
            // Of small rows as much counts as of large ones.
            let size = |pair: usize, row: usize| {
                let expert = if pair < many { experts - 1 } else { 0 };
                2f32.powi(20 * ((expert * rows + row) % 3) as i32)
            };
            let reference: Vec<f32> = at.iter().map(|&(p, r)| exact(p, r) as f32 * size(p, r)).collect();
            let ours: Vec<f32> = at.iter().map(|&(p, r)| results[0][p * rows + r] * size(p, r)).collect();
            let error = relative_error(&ours, &reference);
            println!("{} {experts} x {rows} x {cols}: {error:.1e}", forms.forms[0].name);
            // Hopper's fp8 sums of 128 columns keep about 14 bits; results are rounded to nine afterwards.
            let tolerance = if forms.hopper { 1e-3 } else { 1e-5 };
            assert!(error < tolerance && results[0].iter().all(|v| v.is_finite()), "{error}");
            rig.arena.reset();
        }
    }
}

/// The operator, told of each size of group: the largest is not chosen by any step so far.
#[test]
fn products_do_not_depend_on_the_size_of_groups() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let experts = Experts::new(&rig.context).unwrap();
    let count = 3usize;
    for (rows, cols, padded) in [(16usize, 128usize, false), (208, 384, true), (592, 1152, false), (4096, 2048, true)] {
        if small() && rows > 512 {
            continue;
        }
        let codes: Vec<u8> = fresh.floats(count * rows * cols / 2).iter().map(|v| (128.0 + 127.0 * v) as u8).collect();
        let scales: Vec<u8> = fresh.floats(count * rows * cols / 32).iter().map(|v| (122.0 + 5.0 * v) as u8).collect();
        // A small expert, a large one and one without pairs; places behind the last pair stay as they are.
        let of_expert = [1 + fresh.below(70), 65 + fresh.below(200), 0];
        let (pairs, inputs) = (of_expert.iter().sum::<usize>(), 37usize);
        let x: Vec<u8> = fresh.floats(inputs * cols).iter().map(|v| e4m3::encode(448.0 * v * v * v)).collect();
        let x_scales: Vec<f32> = fresh.floats(inputs * cols / 128).iter().map(|v| 0.01 + v.abs()).collect();
        let of_pair: Vec<u32> = (0..pairs).map(|_| fresh.below(inputs) as u32).collect();
        let (w, w_scales, w_factors) = (rig.put(&codes), rig.put(&scales), rig.poisoned::<f32>(count * rows));
        let weights = [w.address(), w_scales.address(), w_factors.address()];
        experts.repack(&rig.stream, weights, (count * rows) as u32, cols as u32).unwrap();
        let (x, x_scales, of_pair) = (rig.put(&x), rig.put(&x_scales), rig.put(&of_pair));
        let results = GROUPS.map(|group| {
            let (mut groups, mut first) = (Vec::new(), 0);
            for (expert, &own) in of_expert.iter().enumerate() {
                for from in (0..own).step_by(group as usize) {
                    groups.extend([expert as i32, (first + from) as i32, (own - from).min(group as usize) as i32]);
                }
                first += own;
            }
            groups.resize(groups.len() + if padded { 15 } else { 0 }, 0);
            let (places, y) = (rig.put(&groups), rig.poisoned::<f32>((pairs + 2) * rows));
            let product = RoutedProduct {
                w: w.address(),
                w_scales: w_scales.address(),
                w_factors: w_factors.address(),
                x: x.address(),
                x_scales: x_scales.address(),
                inputs: of_pair.address(),
                groups: places.address(),
                group,
                group_count: (groups.len() / 3) as u32,
                y: y.address(),
                rows: rows as u32,
                cols: cols as u32,
            };
            experts.product(&rig.stream, &product).unwrap();
            y.read(&rig.stream).unwrap()
        });
        let (own, behind) = results[0].split_at(pairs * rows);
        assert!(own.iter().all(|v| v.is_finite()) && behind.iter().all(|v| v.to_bits() == u32::MAX));
        for (result, group) in results.iter().zip(GROUPS) {
            let difference = first_difference(result, &results[0]);
            assert_eq!(difference, None, "groups of {group}, {of_expert:?} pairs, {rows} x {cols}");
        }
        rig.arena.reset();
    }
}

/// Flash's experts in a graph: gate and up, then down, all forms; other experts each time, so that they come from memory.
/// EXPERTS_TOKENS takes one number of tokens alone.
#[test]
fn flash_experts_are_measured() {
    let Some(mut rig) = rig(8 << 30) else { return };
    let mut fresh = Fresh::new();
    let only = number("EXPERTS_TOKENS", 0);
    for tokens in [1usize, 4, 8, 16, 32, 64, 128, 512, 2048, 4096].into_iter().filter(|&t| only == 0 || t == only) {
        // Six experts of each token, by expert.
        let mut of_expert = vec![Vec::new(); 256];
        for token in 0..tokens as u32 {
            let mut chosen: Vec<usize> = Vec::new();
            while chosen.len() < 6 {
                let expert = fresh.below(256);
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                    of_expert[expert].push(token);
                }
            }
        }
        let used = of_expert.iter().filter(|tokens| !tokens.is_empty()).count();
        let turns = (256 / used).max(1);
        for (name, rows, cols) in [("gate and up", 4096usize, 4096usize), ("down", 4096, 2048)] {
            let (experts, pairs) = (256, 6 * tokens);
            let w = rig.arena.slice::<u8>(experts * rows * cols / 2).unwrap();
            let w_scales = rig.arena.slice::<u8>(experts * rows * cols / 32).unwrap();
            let x = rig.arena.slice::<u8>(tokens * cols).unwrap();
            let x_scales = rig.arena.slice::<f32>(tokens * cols / 128).unwrap();
            // Bytes of scales are multiples of eight.
            for (slice, byte) in [(&w, 0x31), (&w_scales, 0xc8), (&x, 0x31)] {
                slice.fill(&rig.stream, byte).unwrap();
            }
            x_scales.fill(&rig.stream, 0).unwrap();
            let w_factors = rig.arena.slice::<f32>(experts * rows).unwrap();
            w_factors.fill(&rig.stream, 0).unwrap();
            let y = rig.arena.slice(pairs * rows).unwrap();
            let inputs: Vec<u32> = of_expert.iter().flatten().copied().collect();
            let inputs = rig.put(&inputs);
            let groups = rig.put(&[0i32; 3]);
            let mut operands = Operands { w, w_scales, w_factors, x, x_scales, groups, inputs, y };
            let mut line = format!("experts_fp4 {name}, {tokens} tokens, {used} experts:");
            for form in forms(&rig, cols).into_iter().flat_map(|forms| forms.forms) {
                // Each launch takes the next experts.
                let mut all: Vec<(DeviceSlice<i32>, usize)> = Vec::new();
                for turn in 0..turns {
                    let (mut groups, mut first) = (Vec::new(), 0);
                    for (expert, tokens) in of_expert.iter().enumerate() {
                        for from in (0..tokens.len()).step_by(form.most) {
                            let n = form.most.min(tokens.len() - from);
                            groups.extend([((expert + turn * used) % 256) as i32, (first + from) as i32, n as i32]);
                        }
                        first += tokens.len();
                    }
                    all.push((rig.put(&groups), groups.len() / 3));
                }
                let rounds = if tokens > 128 { 2 } else { 60 / turns + 1 };
                let graph = Graph::capture(&rig.stream, |s| {
                    for _ in 0..rounds {
                        for (groups, count) in &all {
                            operands.groups = groups.share();
                            operands.launch(s, &form, rows, cols, *count);
                        }
                    }
                    Ok(())
                })
                .unwrap();
                let us = rig.median_us(&graph) / (rounds * turns) as f64;
                line += &format!(" {} {us:.1},", form.name.trim_start_matches("experts_"));
            }
            let floor = (used * rows * cols * 17 / 32) as f64 / 4.3e6;
            println!("{line} floor {floor:.1} us");
            rig.arena.reset();
        }
    }
}
