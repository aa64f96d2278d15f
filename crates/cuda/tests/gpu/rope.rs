//! Angles of a step, against the CPU's.

use longwave_cpu::ops::rope::Frequencies;
use longwave_cuda::driver::DeviceSlice;
use longwave_cuda::ops::rope::{Angles, Rope};
use longwave_cuda::ops::{BatchRow, UNMAPPED};
use longwave_model::presets;
use longwave_model::rope;

use crate::paged::{assert_same, batch, put_rows};
use crate::rig::{Fresh, Rig, rig};

/// The CPU's table of `rows`.
pub fn table(frequencies: &Frequencies, rows: &[BatchRow], ratio: u32) -> Vec<f32> {
    let mut out = Vec::new();
    for row in rows {
        // Unit vectors show cosine and sine.
        let mut head = [0.0; 64];
        head.iter_mut().step_by(2).for_each(|v| *v = 1.0);
        let position = if row.seat == UNMAPPED { 0 } else { row.position - row.position % ratio };
        frequencies.angles(position).rotate(&mut head);
        out.extend(head.iter().step_by(2));
        out.extend(head.iter().skip(1).step_by(2));
    }
    out
}

/// The table for the YaRN base on the GPU.
pub fn put_table(rig: &mut Rig, rows: &[BatchRow], ratio: u32) -> DeviceSlice<f32> {
    rig.put(&table(&Frequencies::compressed(&presets::flash()), rows, ratio))
}

#[test]
fn angles_of_both_bases_are_the_cpus() {
    let Some(mut rig) = rig(16 << 20) else { return };
    let (mut fresh, rope) = (Fresh::new(), Rope::new(&rig.context).unwrap());
    let flash = presets::flash();
    let mut sequences = vec![(0, 0, 300), (1, 1_048_000, 577)];
    sequences.extend((0..2000).map(|_| (0, fresh.below(1 << 20) as u32, 1)));
    let rows = batch(&sequences);
    let d_rows = put_rows(&mut rig, &rows);
    let bases =
        [(rope::main(&flash), Frequencies::main(&flash)), (rope::compressed(&flash), Frequencies::compressed(&flash))];
    for (ours, reference) in bases {
        let frequencies = rig.put(&ours);
        for ratio in [1, 4, 128] {
            let out = rig.poisoned::<f32>(rows.len() * 64);
            let angles = Angles {
                rows: d_rows.address(),
                frequencies: frequencies.address(),
                out: out.address(),
                tokens: rows.len() as u32,
                ratio,
            };
            rope.fill(&rig.stream, &angles).unwrap();
            assert_same(&format!("ratio {ratio}"), &out.read(&rig.stream).unwrap(), &table(&reference, &rows, ratio));
        }
    }
    println!("rope: {} rows, two bases, three ratios: the same bits", rows.len());
}
