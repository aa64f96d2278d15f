//! Hyper-connections around a sublayer, against the CPU's, and their time for one token of Flash.

use longwave_cpu::numerics::{Profile, fake_fp8_group};
use longwave_cpu::ops::mhc::{self, Site};
use longwave_cpu::ops::norm::rms_norm;
use longwave_cuda::driver::{DeviceSlice, Graph, Stream};
use longwave_cuda::ops::mhc::{Mhc, MhcBatch, MhcShape, MhcSite, Output};
use longwave_model::formats::{bf16_bits, bf16_value, e4m3};

use crate::rig::{Fresh, Rig, relative_error, rig};

const ITERS: u32 = 20;
const EPS: f32 = 1e-6;

/// Bits of streams, mix, normed input, codes and scales.
type Left = (Vec<u16>, Vec<u32>, Vec<u16>, Vec<u8>, Vec<u32>);

struct Boundary {
    streams: DeviceSlice<u16>,
    function: DeviceSlice<f32>,
    partial: DeviceSlice<f32>,
    base: DeviceSlice<f32>,
    scale: DeviceSlice<f32>,
    weight: DeviceSlice<f32>,
    mix: DeviceSlice<f32>,
    normed: DeviceSlice<u16>,
    codes: DeviceSlice<u8>,
    scales: DeviceSlice<f32>,
    output: DeviceSlice<u16>,
}

impl Boundary {
    fn batch(&self, tokens: usize) -> MhcBatch {
        MhcBatch {
            streams: self.streams.address(),
            partial: self.partial.address(),
            mix: self.mix.address(),
            normed: self.normed.address(),
            codes: self.codes.address(),
            scales: self.scales.address(),
            tokens: tokens as u32,
        }
    }

    fn start(&self, stream: &Stream, mhc: &Mhc, width: usize, tokens: usize) {
        mhc.start(stream, &shape(width), self.function.address(), &self.batch(tokens)).unwrap();
    }

    fn site(&self) -> MhcSite {
        MhcSite {
            function: self.function.address(),
            base: self.base.address(),
            scale: self.scale.address(),
            weight: self.weight.address(),
        }
    }

    fn before(&self, stream: &Stream, mhc: &Mhc, width: usize, tokens: usize) {
        mhc.before(stream, &shape(width), &self.site(), &self.batch(tokens)).unwrap();
    }

    fn boundary(&self, stream: &Stream, mhc: &Mhc, width: usize, tokens: usize, y: Output) {
        mhc.boundary(stream, &shape(width), &self.site(), &self.batch(tokens), y).unwrap();
    }

    /// Bits of all that a boundary leaves.
    fn left(&self, stream: &Stream) -> Left {
        let bits = |slice: &DeviceSlice<f32>| slice.read(stream).unwrap().iter().map(|v| v.to_bits()).collect();
        let (streams, normed) = (self.streams.read(stream).unwrap(), self.normed.read(stream).unwrap());
        (streams, bits(&self.mix), normed, self.codes.read(stream).unwrap(), bits(&self.scales))
    }

    fn next(&self, stream: &Stream, mhc: &Mhc, width: usize, tokens: usize) {
        let (function, output) = (self.function.address(), self.output.address());
        mhc.next(stream, &shape(width), function, &self.batch(tokens), Output::Rounded(output)).unwrap();
    }

    fn after(&self, stream: &Stream, mhc: &Mhc, width: usize, tokens: usize) {
        mhc.after(stream, &shape(width), &self.batch(tokens), self.output.address()).unwrap();
    }
}

fn shape(width: usize) -> MhcShape {
    MhcShape { width: width as u32, norm_eps: EPS, hc_eps: EPS, iters: ITERS }
}

fn bits(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| bf16_bits(v)).collect()
}

fn floats(bits: &[u16]) -> Vec<f32> {
    bits.iter().map(|&b| bf16_value(b)).collect()
}

fn boundary(rig: &mut Rig, fresh: &mut Fresh, width: usize, tokens: usize) -> (Boundary, Vec<Vec<f32>>) {
    let host: Vec<Vec<f32>> = vec![
        floats(&bits(&fresh.floats(tokens * 4 * width))),
        fresh.floats(24 * 4 * width).iter().map(|v| 0.05 * v).collect(),
        fresh.floats(24),
        vec![0.7, 1.3, 0.9],
        fresh.floats(width).iter().map(|v| 1.0 + 0.3 * v).collect(),
        floats(&bits(&fresh.floats(tokens * width))),
    ];
    let boundary = Boundary {
        streams: rig.put(&bits(&host[0])),
        function: rig.put(&host[1]),
        partial: rig.poisoned(shape(width).scratch_bytes(tokens as u32) as usize / 4),
        base: rig.put(&host[2]),
        scale: rig.put(&host[3]),
        weight: rig.put(&host[4]),
        mix: rig.poisoned(tokens * 20),
        normed: rig.poisoned(tokens * width),
        codes: rig.poisoned(tokens * width),
        scales: rig.poisoned(tokens * width / 128),
        output: rig.put(&bits(&host[5])),
    };
    (boundary, host)
}

#[test]
fn a_boundary_agrees_and_does_not_depend_on_the_batch() {
    let Some(mut rig) = rig(256 << 20) else { return };
    agrees(&mut rig, false);
}

#[test]
fn a_boundary_on_the_tensor_cores_agrees_and_does_not_depend_on_the_batch() {
    let Some(mut rig) = rig(256 << 20) else { return };
    agrees(&mut rig, true);
}

fn agrees(rig: &mut Rig, tensor: bool) {
    let (mut fresh, k) = (Fresh::new(), Mhc::with(&rig.context, tensor).unwrap());
    for (width, tokens) in
        [(4096usize, 1usize), (4096, 9), (7168, 3), (1024, 40), (256, 70), (768, 5), (4096, 131), (256, 8)]
    {
        let (b, host) = boundary(rig, &mut fresh, width, tokens);
        b.start(&rig.stream, &k, width, tokens);
        let products = b.partial.read(&rig.stream).unwrap();
        b.before(&rig.stream, &k, width, tokens);
        let (mix, normed) = (b.mix.read(&rig.stream).unwrap(), b.normed.read(&rig.stream).unwrap());
        let (codes, scales) = (b.codes.read(&rig.stream).unwrap(), b.scales.read(&rig.stream).unwrap());
        b.after(&rig.stream, &k, width, tokens);
        let streams = b.streams.read(&rig.stream).unwrap();
        // The same streams with the products of the next site, which are those of a start with them.
        b.start(&rig.stream, &k, width, tokens);
        let of_next = b.partial.read(&rig.stream).unwrap();
        b.streams.write(&rig.stream, &bits(&host[0])).unwrap();
        b.next(&rig.stream, &k, width, tokens);
        assert!(products != of_next && of_next == b.partial.read(&rig.stream).unwrap());
        assert!(streams == b.streams.read(&rig.stream).unwrap());
        // An output that is not rounded yet: what rounds to the same is added.
        b.streams.write(&rig.stream, &bits(&host[0])).unwrap();
        let wide: Vec<f32> = host[5].iter().map(|v| v * (1.0 + 1e-4)).collect();
        let wide = Output::Wide(rig.put(&wide).address());
        k.next(&rig.stream, &shape(width), b.function.address(), &b.batch(tokens), wide).unwrap();
        assert!(of_next == b.partial.read(&rig.stream).unwrap() && streams == b.streams.read(&rig.stream).unwrap());
        let streams = floats(&streams);

        let site = Site { base: host[2].clone(), scale: host[3].clone(), hc_eps: EPS, norm_eps: EPS, iters: ITERS };
        let mut reference = [vec![], vec![], vec![], vec![]];
        for t in 0..tokens {
            let x = &host[0][t * 4 * width..(t + 1) * 4 * width];
            let row = |r: usize| host[1][r * 4 * width..(r + 1) * 4 * width].iter().zip(x);
            let dots: Vec<f32> =
                (0..24).map(|r| row(r).map(|(f, x)| f64::from(*f) * f64::from(*x)).sum::<f64>() as f32).collect();
            let (mut h, mut y) = (vec![0.0; width], vec![0.0; width]);
            let m = mhc::pre(x, &dots, &site, Profile::Serving, &mut h);
            rms_norm(&h, &host[4], EPS, Profile::Serving, &mut y);
            reference[0].extend(m.post.iter().chain(m.comb.as_flattened()));
            reference[1].extend_from_slice(&y);
            y.chunks_mut(128).for_each(fake_fp8_group);
            reference[2].extend_from_slice(&y);
            let mut x = x.to_vec();
            mhc::post(&mut x, &host[5][t * width..(t + 1) * width], &m, Profile::Serving);
            reference[3].extend_from_slice(&x);
        }
        let quantised: Vec<f32> = codes.iter().enumerate().map(|(i, &c)| e4m3::decode(c) * scales[i / 128]).collect();
        let errors = [
            relative_error(&mix, &reference[0]),
            relative_error(&floats(&normed), &reference[1]),
            relative_error(&quantised, &reference[2]),
            relative_error(&streams, &reference[3]),
        ];
        println!(
            "mhc {tokens} x {width}: mix {:.1e}, normed {:.1e}, e4m3 {:.1e}, streams {:.1e}",
            errors[0], errors[1], errors[2], errors[3]
        );
        // A value close to the middle between two bf16 or e4m3 values may round to the other side.
        assert!(errors[0] < 1e-5 && errors[1] < 1e-3 && errors[2] < 5e-3 && errors[3] < 1e-3, "{errors:?}");

        // The last token alone: the same bits.
        let last = (tokens - 1) * 4 * width;
        let one = Boundary {
            streams: rig.put(&bits(&host[0][last..])),
            partial: rig.poisoned(shape(width).scratch_bytes(1) as usize / 4),
            mix: rig.poisoned(20),
            normed: rig.poisoned(width),
            codes: rig.poisoned(width),
            scales: rig.poisoned(width / 128),
            output: rig.put(&bits(&host[5][(tokens - 1) * width..])),
            ..b
        };
        one.start(&rig.stream, &k, width, 1);
        one.before(&rig.stream, &k, width, 1);
        assert_eq!(one.mix.read(&rig.stream).unwrap(), mix[(tokens - 1) * 20..]);
        assert_eq!(one.codes.read(&rig.stream).unwrap(), codes[(tokens - 1) * width..]);
        one.after(&rig.stream, &k, width, 1);
        assert_eq!(floats(&one.streams.read(&rig.stream).unwrap()), streams[last..]);
        rig.arena.reset();
    }
}

#[test]
fn a_boundary_in_one_launch_has_the_bits_of_two() {
    let Some(mut rig) = rig(256 << 20) else { return };
    has_the_bits_of_two(&mut rig, false, 2);
}

#[test]
fn a_boundary_on_the_tensor_cores_in_one_launch_has_the_bits_of_two() {
    let Some(mut rig) = rig(256 << 20) else { return };
    has_the_bits_of_two(&mut rig, true, 8);
}

/// Of widths that use clusters of 2 to 16 blocks, of one unit and of two, with up to `most` tokens.
fn has_the_bits_of_two(rig: &mut Rig, tensor: bool, most: usize) {
    let (mut fresh, k) = (Fresh::new(), Mhc::with(&rig.context, tensor).unwrap());
    let widths = [4096usize, 2048, 1024, 512, 256];
    for (width, tokens) in widths.into_iter().flat_map(|width| (1..=most).map(move |tokens| (width, tokens))) {
        assert!(k.takes(&shape(width), tokens as u32));
        let (b, host) = boundary(rig, &mut fresh, width, tokens);
        let wide = rig.put(&fresh.floats(tokens * width));
        // Twice in a row: the second one has the mix of the first.
        let again = |work: &dyn Fn()| {
            b.streams.write(&rig.stream, &bits(&host[0])).unwrap();
            b.start(&rig.stream, &k, width, tokens);
            b.before(&rig.stream, &k, width, tokens);
            (0..2).for_each(|_| work());
            b.left(&rig.stream)
        };
        for y in [Output::Rounded(b.output.address()), Output::Wide(wide.address())] {
            let two = again(&|| {
                k.next(&rig.stream, &shape(width), b.function.address(), &b.batch(tokens), y).unwrap();
                b.before(&rig.stream, &k, width, tokens);
            });
            let one = again(&|| b.boundary(&rig.stream, &k, width, tokens, y));
            assert!(two == one, "{tokens} tokens of width {width}, {y:?}");
        }
        rig.arena.reset();
    }
}

#[test]
fn a_boundary_is_measured() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    for tokens in [1usize, 2, 4, 8, 16, 32, 128, 2048] {
        let (b, _) = boundary(&mut rig, &mut fresh, 4096, tokens);
        let y = Output::Rounded(b.output.address());
        for tensor in [false, true] {
            let k = Mhc::with(&rig.context, tensor).unwrap();
            let median_us = |work: &dyn Fn(&Stream)| {
                let graph = Graph::capture(&rig.stream, |s| {
                    (0..50).for_each(|_| work(s));
                    Ok(())
                });
                rig.median_us(&graph.unwrap()) / 50.0
            };
            let after = median_us(&|s| b.next(s, &k, 4096, tokens));
            let two = median_us(&|s| {
                b.next(s, &k, 4096, tokens);
                b.before(s, &k, 4096, tokens);
            });
            let takes = k.takes(&shape(4096), tokens as u32);
            let one = takes.then(|| median_us(&|s| b.boundary(s, &k, 4096, tokens, y)));
            let how = if tensor { "tensor cores" } else { "ordinary products" };
            println!(
                "mhc boundary, {tokens} tokens of 4096, {how}: after {after:.2} us, in two {two:.2}, in one {one:.2?}"
            );
            assert!(after > 0.0 && two > 0.0);
        }
        rig.arena.reset();
    }
}
