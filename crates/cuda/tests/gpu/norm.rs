//! RMS norm against the CPU's.

use longwave_cpu::numerics::Profile;
use longwave_cpu::ops::norm::rms_norm;
use longwave_cuda::driver::{Argument, Grid, Module};

use crate::rig::{Fresh, relative_error, rig};

#[test]
fn rms_norm_agrees_and_does_not_depend_on_the_batch() {
    let Some(mut rig) = rig(64 << 20) else { return };
    let mut fresh = Fresh::new();
    let kernel = Module::load(&rig.context, "norm").unwrap().kernel("rms_norm_f32", 0).unwrap();
    for (rows, width) in [(1usize, 4096usize), (3, 512), (17, 1024), (128, 7168), (5, 32)] {
        let (x, w) = (fresh.floats(rows * width), fresh.floats(width));
        let (dx, dw, out) = (rig.put(&x), rig.put(&w), rig.poisoned::<f32>(rows * width));
        let arguments =
            [Argument::from(&dx), Argument::from(&dw), Argument::from(&out), (width as u32).into(), 1e-6f32.into()];
        rig.stream.launch(&kernel, Grid::new(rows as u32, 256), &arguments).unwrap();
        let ours = out.read(&rig.stream).unwrap();
        let mut reference = vec![0.0; rows * width];
        for (x, out) in x.chunks(width).zip(reference.chunks_mut(width)) {
            rms_norm(x, &w, 1e-6, Profile::Exact, out);
        }
        let error = relative_error(&ours, &reference);
        println!("rms_norm {rows} x {width}: {error:.1e}");
        assert!(error < 1e-6, "{error}");
        // The last row alone: the same bits.
        let last = rig.put(&x[(rows - 1) * width..]);
        let one = rig.poisoned::<f32>(width);
        let arguments =
            [Argument::from(&last), Argument::from(&dw), Argument::from(&one), (width as u32).into(), 1e-6f32.into()];
        rig.stream.launch(&kernel, Grid::new(1, 256), &arguments).unwrap();
        assert_eq!(one.read(&rig.stream).unwrap(), ours[(rows - 1) * width..]);
    }
}
