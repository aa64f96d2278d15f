//! Routing against the CPU's, and the groups it makes.

use longwave_cpu::ops::router;
use longwave_cuda::cubins;
use longwave_cuda::driver::{DeviceSlice, Graph};
use longwave_cuda::ops::UNMAPPED;
use longwave_cuda::ops::linear_bf16::{Bf16Product, LinearBf16};
use longwave_cuda::ops::router::{Choosing, Router, Routing};
use longwave_model::formats::bf16_bits;

use crate::rig::{Fresh, Rig, rig, small};

/// Routing in memory of its own, poisoned.
pub fn poisoned(rig: &mut Rig, tokens: usize, experts: usize, chosen: usize) -> (Routing, DeviceSlice<u32>) {
    let [tokens, experts, chosen] = [tokens, experts, chosen].map(|n| n as u32);
    let memory = rig.poisoned::<u32>(Routing::scratch_bytes(tokens, experts, chosen) as usize / 4);
    let (routing, end) = Routing::at(memory.address(), tokens, experts, chosen);
    assert!(end <= memory.address() + 4 * memory.len() as u64);
    (routing, memory)
}

/// `len` words of routing's memory at `address`.
pub fn words(rig: &Rig, memory: &DeviceSlice<u32>, address: u64, len: usize) -> Vec<u32> {
    let first = (address - memory.address()) as usize / 4;
    memory.read(&rig.stream).unwrap()[first..first + len].to_vec()
}

#[test]
fn choices_are_those_of_the_cpu_and_groups_hold_every_pair_once() {
    let Some(mut rig) = rig(256 << 20) else { return };
    let mut fresh = Fresh::new();
    let router = Router::new(&rig.context).unwrap();
    let (mut weights_seen, mut weights_other) = (0, 0);
    for (tokens, experts, k) in [
        (1usize, 8usize, 2usize),
        (37, 8, 2),
        (1, 256, 6),
        (5, 256, 6),
        (8, 256, 6),
        (8, 512, 32),
        (9, 256, 6),
        (3, 384, 6),
        (700, 256, 6),
        (513, 384, 6),
        (4100, 256, 6),
    ] {
        for hashed in [false, true] {
            // Every fourth token has few different logits, so that choices are between equals; some are very large.
            let mut logits: Vec<f32> = fresh.floats(tokens * experts).iter().map(|v| 4.0 * v).collect();
            for (t, row) in logits.chunks_mut(experts).enumerate() {
                match t % 4 {
                    1 => row.iter_mut().for_each(|v| *v = v.round()),
                    2 => row.iter_mut().for_each(|v| *v *= 12.0),
                    _ => {}
                }
            }
            let bias: Vec<f32> = fresh.floats(experts).iter().map(|v| (8.0 * v).round() / 16.0).collect();
            let vocab = 50;
            let table: Vec<u32> = (0..vocab * k).map(|i| (i * 7 % experts) as u32).collect();
            // Padded rows are at the end in a step, but nothing depends on it.
            let padded = |t: usize| tokens > 4 && (t == 2 || t + 2 >= tokens);
            let ids: Vec<u32> =
                (0..tokens).map(|t| if padded(t) { UNMAPPED } else { (t * 13 % vocab) as u32 }).collect();
            let (routing, memory) = poisoned(&mut rig, tokens, experts, k);
            let (dl, db, dt, di) = (rig.put(&logits), rig.put(&bias), rig.put(&table), rig.put(&ids));
            let how = if hashed { Choosing::Hashed(dt.address()) } else { Choosing::Scored(db.address()) };
            router.route(&rig.stream, dl.address(), di.address(), how, 1.5, &routing).unwrap();
            let read = |address, len| words(&rig, &memory, address, len);
            let (choices, weights) = (read(routing.choices, tokens * k), read(routing.weights, tokens * k));
            for t in 0..tokens {
                let mut want = Vec::new();
                let row = &logits[t * experts..(t + 1) * experts];
                match hashed {
                    _ if padded(t) => want.resize(k, (UNMAPPED, 0.0)),
                    true => router::hashed(row, &table[ids[t] as usize * k..][..k], 1.5, &mut want),
                    false => router::scored(row, &bias, k, 1.5, &mut want),
                }
                for (s, (expert, weight)) in want.into_iter().enumerate() {
                    assert_eq!(choices[t * k + s], expert, "token {t}, slot {s} of {tokens} x {experts}");
                    let ours = f32::from_bits(weights[t * k + s]);
                    assert!((ours - weight).abs() <= 4e-7 * weight, "{ours} {weight}");
                    weights_seen += 1;
                    weights_other += u32::from(ours.to_bits() != weight.to_bits());
                }
            }
            let most = routing.most_groups() as usize;
            let (groups, places) = (read(routing.groups, 3 * most), read(routing.places, tokens * k));
            let (inputs, sources) = (read(routing.inputs, tokens * k), read(routing.sources, tokens * k));
            let pairs = choices.iter().filter(|&&e| e != UNMAPPED).count();
            let mut next = 0;
            for group in groups.chunks(3) {
                let (expert, first, n) = (group[0], group[1], group[2]);
                assert!(n <= routing.group() && (n == 0 || first == next), "{group:?} after {next}");
                for p in first..first + n {
                    let source = sources[p as usize] as usize;
                    assert_eq!((choices[source], places[source]), (expert, p));
                    assert_eq!(inputs[p as usize] as usize, source / k);
                }
                next += n;
            }
            assert_eq!(next as usize, pairs);
            assert!(sources[pairs..].iter().all(|&s| s == UNMAPPED) && inputs.iter().all(|&t| (t as usize) < tokens));
            assert!((0..tokens * k).all(|i| (places[i] == UNMAPPED) == (choices[i] == UNMAPPED)));
            let used = groups.chunks(3).filter(|g| g[2] > 0).count();
            println!("router {tokens} x {experts}, hashed {hashed}: {pairs} pairs in {used} of {most} groups");
            rig.arena.reset();
        }
    }
    println!("router: {weights_other} of {weights_seen} weights differ from the CPU's in the last bits");
}

/// Whether the GPU has product and choice in one launch; says so where not.
fn has_one_launch(rig: &Rig) -> bool {
    let has = cubins::find("router_cluster", rig.context.gpu().major, rig.context.gpu().minor).is_some();
    if !has {
        println!("skipped: no router in one launch for this GPU");
    }
    has
}

#[test]
fn one_launch_has_the_bits_of_product_and_choice() {
    let Some(mut rig) = rig(256 << 20) else { return };
    if !has_one_launch(&rig) {
        return;
    }
    let mut fresh = Fresh::new();
    let (router, linear) = (Router::new(&rig.context).unwrap(), LinearBf16::new(&rig.context).unwrap());
    let bits = |v: Vec<f32>| v.into_iter().map(bf16_bits).collect::<Vec<u16>>();
    for (experts, cols, k) in [
        (256usize, 4096usize, 6usize),
        (256, 4096, 8),
        (384, 7168, 6),
        (512, 2048, 8),
        (240, 3072, 5),
        (272, 5120, 1),
        (16, 2048, 8),
    ] {
        if small() && experts * cols > 1 << 20 {
            continue;
        }
        let w = rig.put(&bits(fresh.floats(experts * cols)));
        // Logits of ordinary size, large ones, none but equal ones, and no numbers.
        let factors = [0.02f32, 0.3, 0.0, 0.05, 0.02, f32::NAN, 0.002, 0.1];
        let x = fresh.floats(8 * cols).iter().enumerate().map(|(i, v)| v * factors[i / cols]).collect();
        let x = rig.put(&bits(x));
        let mut bias: Vec<f32> = fresh.floats(experts).iter().map(|v| (8.0 * v).round() / 16.0).collect();
        bias[experts / 2] = f32::NAN;
        bias[experts / 3] = f32::NEG_INFINITY;
        let bias = rig.put(&bias);
        let y = rig.poisoned::<f32>(8 * experts);
        for hashed in [false, true] {
            for tokens in (1..=8usize).filter(|tokens| !small() || tokens % 7 == 1) {
                // Every expert, or few of them so that one has several groups; ranks with a part of the experts.
                let named = if fresh.below(2) == 0 { experts } else { 3 };
                let vocab = 20;
                let table: Vec<u32> = (0..vocab * k).map(|_| fresh.below(named) as u32).collect();
                let ids: Vec<u32> = (0..tokens)
                    .map(|_| if fresh.below(4) == 0 { UNMAPPED } else { fresh.below(vocab) as u32 })
                    .collect();
                let (dt, di) = (rig.put(&table), rig.put(&ids));
                let how = if hashed { Choosing::Hashed(dt.address()) } else { Choosing::Scored(bias.address()) };
                let first = fresh.below(experts);
                for here in [0..experts, 0..experts / 2, first..experts, experts - 1..experts] {
                    let (routing, memory) = poisoned(&mut rig, tokens, experts, k);
                    let routing = routing.with(here.clone());
                    let product = Bf16Product {
                        w: w.address(),
                        x: x.address(),
                        y: y.address(),
                        rows: experts as u32,
                        cols: cols as u32,
                        tokens: tokens as u32,
                    };
                    linear.launch(&rig.stream, &product).unwrap();
                    router.route(&rig.stream, y.address(), di.address(), how, 1.5, &routing).unwrap();
                    let two = memory.read(&rig.stream).unwrap();
                    memory.fill(&rig.stream, 0xff).unwrap();
                    y.fill(&rig.stream, 0xff).unwrap();
                    assert!(router.takes_product(&product, &routing), "{experts} x {cols}, {tokens} tokens");
                    router.product_and_route(&rig.stream, &product, di.address(), how, 1.5, &routing).unwrap();
                    // Choices, weights, groups, inputs, sources, places and what lies between them.
                    let one = memory.read(&rig.stream).unwrap();
                    let difference = (0..two.len()).find(|&i| one[i] != two[i]).map(|i| (i, one[i], two[i]));
                    let case = format!("{tokens} tokens, {k} of {experts} x {cols}, hashed {hashed}, here {here:?}");
                    assert_eq!(difference, None, "{case}, ids {ids:?}, {routing:?} at {:x}", memory.address());
                    assert!(
                        two[..tokens * k].iter().zip(0..).all(|(&e, i)| (e == UNMAPPED) == (ids[i / k] == UNMAPPED))
                    );
                }
            }
        }
        println!("router in one launch, {k} of {experts} x {cols}: the bits of two");
        rig.arena.reset();
    }
}

/// Median microseconds in a graph of product and choice, in two launches and in one; gates are read from memory.
#[test]
fn routers_are_measured() {
    let Some(mut rig) = rig(2 << 30) else { return };
    let mut fresh = Fresh::new();
    let (router, linear) = (Router::new(&rig.context).unwrap(), LinearBf16::new(&rig.context).unwrap());
    for (experts, cols) in [(256usize, 4096usize), (384, 7168)] {
        let k = 6;
        // Together larger than the L2.
        let copies = (400 << 20) / (2 * experts * cols) + 1;
        let gate: Vec<u16> = fresh.floats(experts * cols).into_iter().map(bf16_bits).collect();
        let gates: Vec<DeviceSlice<u16>> = (0..copies).map(|_| rig.put(&gate)).collect();
        let x: Vec<u16> = fresh.floats(8 * cols).iter().map(|v| bf16_bits(0.02 * v)).collect();
        let (x, bias) = (rig.put(&x), rig.put(&vec![0.0f32; experts]));
        let table: Vec<u32> = (0..k).map(|i| (i * 37) as u32).collect();
        let (table, ids, y) = (rig.put(&table), rig.put(&[0u32; 8]), rig.poisoned::<f32>(8 * experts));
        for tokens in [1usize, 2, 4, 8] {
            let (routing, _memory) = poisoned(&mut rig, tokens, experts, k);
            for how in [Choosing::Scored(bias.address()), Choosing::Hashed(table.address())] {
                let time = |at_once: bool| {
                    let graph = Graph::capture(&rig.stream, |s| {
                        gates.iter().try_for_each(|gate| {
                            let product = Bf16Product {
                                w: gate.address(),
                                x: x.address(),
                                y: y.address(),
                                rows: experts as u32,
                                cols: cols as u32,
                                tokens: tokens as u32,
                            };
                            if at_once {
                                return router.product_and_route(s, &product, ids.address(), how, 1.5, &routing);
                            }
                            linear.launch(s, &product)?;
                            router.route(s, y.address(), ids.address(), how, 1.5, &routing)
                        })
                    })
                    .unwrap();
                    rig.median_us(&graph) / copies as f64
                };
                let two = time(false);
                let one = if has_one_launch(&rig) { format!("{:.2}", time(true)) } else { "none".into() };
                let how = if matches!(how, Choosing::Scored(_)) { "scored" } else { "hashed" };
                println!(
                    "router {experts} x {cols}, {how}, {tokens} tokens: {two:.2} us in two launches, {one} in one"
                );
                assert!(two > 0.0);
            }
        }
        rig.arena.reset();
    }
}
