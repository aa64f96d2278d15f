//! Routing against the CPU's, and the groups it makes.

use longwave_cpu::ops::router;
use longwave_cuda::driver::DeviceSlice;
use longwave_cuda::ops::UNMAPPED;
use longwave_cuda::ops::router::{Choosing, Router, Routing};

use crate::rig::{Fresh, Rig, rig};

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
