//! What the memory of this GPU can do, for the floors of benches.

use longwave_cuda::driver::{Argument, DeviceSlice, Event, Grid, Module};

use crate::rig::rig;

#[test]
fn large_reads_and_copies_are_measured() {
    const BYTES: u64 = 4 << 30;
    let Some(mut rig) = rig(2 * BYTES + 4096) else { return };
    let module = Module::load(&rig.context, "roofs").unwrap();
    let (read, copy) = (module.kernel("read_bytes", 0).unwrap(), module.kernel("copy_bytes", 0).unwrap());
    let from: DeviceSlice<u8> = rig.arena.slice(BYTES as usize).unwrap();
    let to: DeviceSlice<u8> = rig.arena.slice(BYTES as usize).unwrap();
    from.fill(&rig.stream, 3).unwrap();
    to.fill(&rig.stream, 0xff).unwrap();
    let blocks = 2 * rig.context.gpu().multiprocessors;
    let (start, end) = (Event::new(&rig.context).unwrap(), Event::new(&rig.context).unwrap());
    let best = |kernel, moved: u64| {
        let arguments = [Argument::from(&from), Argument::from(&to), Argument::U64(BYTES / 16)];
        let times = (0..12).map(|_| {
            start.record(&rig.stream).unwrap();
            rig.stream.launch(kernel, Grid::new(blocks, 512), &arguments).unwrap();
            end.record(&rig.stream).unwrap();
            end.elapsed_us(&start).unwrap()
        });
        let mut times: Vec<f64> = times.skip(2).collect();
        times.sort_by(f64::total_cmp);
        moved as f64 / times[times.len() / 2] / 1e6
    };
    let (reads, copies) = (best(&read, BYTES), best(&copy, 2 * BYTES));
    let measured = longwave_cuda::roofs::measure(rig.context.gpu(), 1 << 30).unwrap();
    println!("{measured:?}");
    println!("roofs on {}: read {reads:.2} TB/s, copy {copies:.2} TB/s", rig.context.gpu().name);
    let copied = to.read(&rig.stream).unwrap();
    assert!(copied.iter().all(|&b| b == 3), "the copy is wrong");
    assert!(reads > 0.1 && copies > 0.1, "{reads} {copies}");
    let ratio = measured.roofs.read_bytes_per_s / 1e12 / reads;
    assert!((0.5..2.0).contains(&ratio) && measured.launch_us > 0.1, "{measured:?} beside {reads} TB/s");
}
