//! Embedding and the head's mix, against the CPU's.

use longwave_cpu::numerics::Profile;
use longwave_cpu::ops::mhc::{self, Site};
use longwave_cpu::ops::norm::rms_norm;
use longwave_cuda::ops::UNMAPPED;
use longwave_cuda::ops::ends::{Ends, HeadMix};
use longwave_model::formats::{bf16_bits, bf16_value};

use crate::rig::{Fresh, first_difference, relative_error, rig};

const EPS: f32 = 1e-6;

#[test]
fn ends_agree_and_do_not_depend_on_the_batch() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    let ends = Ends::new(&rig.context).unwrap();
    for (width, tokens) in [(256usize, 70usize), (4096, 20), (7168, 5)] {
        let bits = |v: Vec<f32>| v.into_iter().map(bf16_bits).collect::<Vec<u16>>();
        let vocab = 100;
        let table = bits(fresh.floats(vocab * width));
        let ids: Vec<u32> = (0..tokens).map(|t| if t == 3 { UNMAPPED } else { (t * 37 % vocab) as u32 }).collect();
        let (dt, di, streams) = (rig.put(&table), rig.put(&ids), rig.poisoned::<u16>(tokens * 4 * width));
        let [at, from, to] = [di.address(), dt.address(), streams.address()];
        ends.embed(&rig.stream, at, from, to, width as u32, tokens as u32).unwrap();
        let ours = streams.read(&rig.stream).unwrap();
        for (t, row) in ours.chunks(width).enumerate() {
            let want = match ids[t / 4] {
                UNMAPPED => vec![0; width],
                id => table[id as usize * width..][..width].to_vec(),
            };
            assert!(row == want, "row {t} of width {width}");
        }

        let host = bits(fresh.floats(tokens * 4 * width).iter().map(|v| 3.0 * v).collect());
        let function: Vec<f32> = fresh.floats(16 * width).iter().map(|v| 0.05 * v).collect();
        let (base, scale) = (fresh.floats(4), vec![0.8f32]);
        let weight: Vec<f32> = fresh.floats(width).iter().map(|v| 1.0 + 0.3 * v).collect();
        let rows: Vec<u32> = vec![tokens as u32 - 1, 0, UNMAPPED, 2, 2];
        let (ds, df, db) = (rig.put(&host), rig.put(&function), rig.put(&base));
        let (dc, dw, dr) = (rig.put(&scale), rig.put(&weight), rig.put(&rows));
        let out = rig.poisoned::<u16>(rows.len() * width);
        let head = HeadMix {
            streams: ds.address(),
            rows: dr.address(),
            function: df.address(),
            base: db.address(),
            scale: dc.address(),
            weight: dw.address(),
            out: out.address(),
            count: rows.len() as u32,
            width: width as u32,
            norm_eps: EPS,
            hc_eps: EPS,
        };
        ends.head(&rig.stream, &head).unwrap();
        let ours: Vec<f32> = out.read(&rig.stream).unwrap().into_iter().map(bf16_value).collect();
        let site = Site { base, scale, hc_eps: EPS, norm_eps: EPS, iters: 0 };
        let mut want = Vec::new();
        for &row in &rows {
            let mut y = vec![0.0; width];
            if row != UNMAPPED {
                let x: Vec<f32> =
                    host[row as usize * 4 * width..][..4 * width].iter().map(|&b| bf16_value(b)).collect();
                let dot = |r: usize| {
                    let row = &function[r * 4 * width..(r + 1) * 4 * width];
                    row.iter().zip(&x).map(|(f, x)| f64::from(*f) * f64::from(*x)).sum::<f64>() as f32
                };
                let dots: Vec<f32> = (0..4).map(dot).collect();
                let mut h = vec![0.0; width];
                mhc::head(&x, &dots, &site, Profile::Serving, &mut h);
                rms_norm(&h, &weight, EPS, Profile::Serving, &mut y);
            }
            want.extend(y);
        }
        let error = relative_error(&ours, &want);
        println!("head {width}: {error:.1e}");
        assert!(error < 1e-3, "{error}");
        assert_eq!(first_difference(&ours[3 * width..4 * width], &ours[4 * width..]), None);
        out.fill(&rig.stream, 0xff).unwrap();
        ends.head(&rig.stream, &HeadMix { count: 1, ..head }).unwrap();
        let alone: Vec<f32> = out.read(&rig.stream).unwrap().into_iter().map(bf16_value).collect();
        assert_eq!(first_difference(&alone[..width], &ours[..width]), None);
        rig.arena.reset();
    }
}
