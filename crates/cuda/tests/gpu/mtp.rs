//! The MTP module: its inputs to the bits of the CPU's, and on the tiny model as many right drafts as the CPU makes.

use longwave_cpu::numerics::{Profile, fake_fp8_group};
use longwave_cpu::ops::norm::rms_norm;
use longwave_cuda::ops::UNMAPPED;
use longwave_cuda::ops::mtp::{KEPT, Mtp, MtpInput};
use longwave_engine::proof;
use longwave_engine::request::Request;
use longwave_engine::step::Backend;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::formats::{bf16_bits, bf16_value, e4m3};

use crate::model::{FORMATS, drafting_on_gpu, golden, on_cpu};
use crate::rig::{Fresh, first_difference, rig};

const EPS: f32 = 1e-6;

fn bits(v: &[f32]) -> Vec<u16> {
    v.iter().copied().map(bf16_bits).collect()
}

fn values(v: &[u16]) -> Vec<f32> {
    v.iter().copied().map(bf16_value).collect()
}

#[test]
fn mtp_inputs_and_streams_have_the_bits_of_the_cpu() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    let kernels = Mtp::new(&rig.context).unwrap();
    for width in [256usize, 4096, 7168] {
        let (batch, seats, vocab) = (9, 3, 50u32);
        let streams = bits(&fresh.floats(batch * 4 * width));
        let kept = bits(&fresh.floats(seats * 4 * width).iter().map(|v| 5.0 * v).collect::<Vec<_>>());
        let table = bits(&fresh.floats(vocab as usize * width));
        let norms = [0, 1].map(|_| fresh.floats(width).iter().map(|v| 1.0 + 0.3 * v).collect::<Vec<f32>>());
        let sources = [4, KEPT | 2, UNMAPPED, 8, 0, KEPT];
        let ids = [49, 0, 7, 50, UNMAPPED, 7];
        let rows = sources.len();
        let (ds, dk, dt) = (rig.put(&streams), rig.put(&kept), rig.put(&table));
        let (dn, de, dr, di) = (rig.put(&norms[0]), rig.put(&norms[1]), rig.put(&sources), rig.put(&ids));
        let (hc, hs) = (rig.poisoned::<u8>(rows * 4 * width), rig.poisoned::<f32>(rows * width / 32));
        let (ec, es) = (rig.poisoned::<u8>(rows * width), rig.poisoned::<f32>(rows * width / 128));
        let input = MtpInput {
            sources: dr.address(),
            ids: di.address(),
            streams: ds.address(),
            kept: dk.address(),
            table: dt.address(),
            stream_norm: dn.address(),
            embed_norm: de.address(),
            stream_codes: hc.address(),
            stream_scales: hs.address(),
            embed_codes: ec.address(),
            embed_scales: es.address(),
            rows: rows as u32,
            width: width as u32,
            vocab,
            eps: EPS,
        };
        kernels.input(&rig.stream, &input).unwrap();
        let expected = |x: &[u16], weight: &[f32]| {
            let (x, mut y) = (values(x), vec![0.0; width]);
            rms_norm(&x, weight, EPS, Profile::Serving, &mut y);
            y.chunks_mut(128).for_each(fake_fp8_group);
            y
        };
        let mut want = (Vec::new(), Vec::new());
        for (&source, &id) in sources.iter().zip(&ids) {
            for s in 0..4 {
                let row = |of: &[u16], i: u32| of[(i as usize * 4 + s) * width..][..width].to_vec();
                let x = match source {
                    UNMAPPED => vec![0; width],
                    seat if seat & KEPT != 0 => row(&kept, seat & !KEPT),
                    i => row(&streams, i),
                };
                want.0.extend(expected(&x, &norms[0]));
            }
            let x = if id < vocab { table[id as usize * width..][..width].to_vec() } else { vec![0; width] };
            want.1.extend(expected(&x, &norms[1]));
        }
        for (codes, scales, want) in [(hc, hs, want.0), (ec, es, want.1)] {
            let (codes, scales) = (codes.read(&rig.stream).unwrap(), scales.read(&rig.stream).unwrap());
            let ours: Vec<f32> = codes.iter().enumerate().map(|(i, &c)| e4m3::decode(c) * scales[i / 128]).collect();
            assert_eq!(first_difference(&ours, &want), None, "width {width}");
        }

        let (h, e) = (fresh.floats(rows * 4 * width), fresh.floats(rows * width));
        let (dh, de, out) = (rig.put(&h), rig.put(&e), rig.poisoned::<u16>(rows * 4 * width));
        kernels.streams(&rig.stream, dh.address(), de.address(), out.address(), width as u32, rows as u32).unwrap();
        let round = |v: f32| bf16_value(bf16_bits(v));
        let want: Vec<f32> =
            (0..rows * 4 * width).map(|i| round(round(h[i]) + round(e[i / (4 * width) * width + i % width]))).collect();
        assert_eq!(first_difference(&values(&out.read(&rig.stream).unwrap()), &want), None, "width {width}");

        let pairs = rig.put(&[3u32, 1, UNMAPPED, 0, 8, 2]);
        kernels.keep(&rig.stream, pairs.address(), ds.address(), dk.address(), width as u32, 3).unwrap();
        let after = dk.read(&rig.stream).unwrap();
        let seat = |of: &[u16], i: usize| of[i * 4 * width..][..4 * width].to_vec();
        assert_eq!(seat(&after, 0), seat(&kept, 0));
        assert_eq!(seat(&after, 1), seat(&streams, 3));
        assert_eq!(seat(&after, 2), seat(&streams, 8));
        println!("MTP input and streams, width {width}: the CPU's bits");
        rig.arena.reset();
    }
}

/// Tokens of the golden prompts one by one, and how many drafts were proposed and accepted.
fn drafted<B: Backend>(backend: B, drafts: u32) -> (Vec<Vec<u32>>, u64, u64) {
    let options = EngineOptions { drafts, prefix_cache: false, ..EngineOptions::default() };
    let mut engine = Engine::new(backend, options);
    let tokens = ["short", "text300", "tool", "needle2000"].map(|name| {
        let answer = proof::serve(&mut engine, &[Request::greedy(golden(name).0, 64)], 1).remove(0);
        assert_eq!(answer.failure, None);
        answer.tokens
    });
    let status = engine.status();
    (tokens.into(), status.drafts_proposed, status.drafts_accepted)
}

#[test]
fn as_many_drafts_are_right_as_on_the_cpu() {
    let Some(backend) = drafting_on_gpu(1, 512, FORMATS, 0) else { return };
    let (plain, ..) = drafted(backend, 0);
    for drafts in [1, 3, 7] {
        let (ours, proposed, accepted) = drafted(drafting_on_gpu(1, 512, FORMATS, drafts).unwrap(), drafts);
        let (_, on_cpu, accepted_on_cpu) = drafted(on_cpu(FORMATS, Profile::Serving, drafts), drafts);
        println!("drafts of {drafts}: {accepted} of {proposed} accepted, on the CPU {accepted_on_cpu} of {on_cpu}");
        assert_eq!(ours, plain, "drafts change no token");
        // A text takes another turn where two tokens are close, so the numbers are near each other and not equal.
        let rate = |accepted: u64, proposed: u64| accepted as f64 / proposed as f64;
        assert!((rate(accepted, proposed) - rate(accepted_on_cpu, on_cpu)).abs() < 0.12, "drafts of {drafts}");
    }
}
