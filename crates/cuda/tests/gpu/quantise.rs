//! Roundings between steps, to the bits of the CPU's.

use longwave_cpu::numerics::{fake_fp8_group, round_slice};
use longwave_cuda::ops::quantise::Quantise;
use longwave_model::formats::e4m3;

use crate::rig::{Fresh, first_difference, rig};

#[test]
fn roundings_have_the_bits_of_the_cpu() {
    let Some(mut rig) = rig(64 << 20) else { return };
    let mut fresh = Fresh::new();
    let quantise = Quantise::new(&rig.context).unwrap();
    for len in [128usize, 256, 1920, 1 << 20] {
        // Groups of all sizes, among them zeros and values below the floor of a scale.
        let sizes: Vec<f32> = fresh.floats(len / 128).iter().map(|v| (20.0 * v).exp2()).collect();
        let mut x: Vec<f32> = fresh.floats(len).iter().enumerate().map(|(i, v)| v * v * v * sizes[i / 128]).collect();
        x[..64].fill(0.0);
        let dx = rig.put(&x);
        let (codes, scales) = (rig.poisoned::<u8>(len), rig.poisoned::<f32>(len / 128));
        let [from, to, to_scales] = [dx.address(), codes.address(), scales.address()];
        quantise.quantise(&rig.stream, from, to, to_scales, len as u64).unwrap();
        round_slice(&mut x);
        x.chunks_mut(128).for_each(fake_fp8_group);
        let (codes, scales) = (codes.read(&rig.stream).unwrap(), scales.read(&rig.stream).unwrap());
        let ours: Vec<f32> = codes.iter().enumerate().map(|(i, &c)| e4m3::decode(c) * scales[i / 128]).collect();
        assert_eq!(first_difference(&ours, &x), None, "{len} values");
        println!("quantise {len}: the CPU's bits");
        rig.arena.reset();
    }
}
