//! The driver layer: copies, order, graphs, clear errors.

use longwave_cuda::driver::{Argument, DeviceSlice, Event, Graph, Grid, Module, Pinned};

use crate::rig::rig;

#[test]
fn bytes_come_back_and_a_full_arena_says_so() {
    let Some(mut rig) = rig(1 << 20) else { return };
    let values: Vec<u32> = (0..10_000).collect();
    let slice: DeviceSlice<u32> = rig.arena.slice(values.len()).unwrap();
    slice.write(&rig.stream, &values).unwrap();
    assert_eq!(slice.read(&rig.stream).unwrap(), values);
    let error = rig.arena.slice::<u8>(1 << 20).err().unwrap().to_string();
    assert!(error.contains("1048576 bytes") && error.contains("left of 1048576"), "{error}");
    let mut pinned = Pinned::new(&rig.context, 64).unwrap();
    pinned.bytes_mut()[63] = 7;
    assert_eq!(pinned.bytes().iter().map(|&b| u32::from(b)).sum::<u32>(), 7);
}

#[test]
fn an_unknown_kernel_is_named() {
    let Some(rig) = rig(1 << 20) else { return };
    let error = Module::load(&rig.context, "no_such_file").err().unwrap().to_string();
    assert!(error.contains("no_such_file"), "{error}");
    let module = Module::load(&rig.context, "roofs").unwrap();
    let error = module.kernel("no_such_kernel", 0).err().unwrap().to_string();
    assert!(error.contains("no_such_kernel in roofs"), "{error}");
    let empty = module.kernel("empty", 0).unwrap();
    let error = rig.stream.launch(&empty, Grid::new(1, 4096), &[]).unwrap_err().to_string();
    assert!(error.contains("empty with") && error.contains("4096"), "{error}");
}

#[test]
fn a_graph_replays_what_was_captured() {
    let Some(mut rig) = rig(1 << 20) else { return };
    let module = Module::load(&rig.context, "roofs").unwrap();
    let copy = module.kernel("copy_bytes", 0).unwrap();
    let from: DeviceSlice<u32> = rig.arena.slice(4096).unwrap();
    let to: DeviceSlice<u32> = rig.arena.slice(4096).unwrap();
    let arguments = [Argument::from(&from), Argument::from(&to), Argument::U64(1024)];
    from.write(&rig.stream, &vec![1; 4096]).unwrap();
    to.fill(&rig.stream, 0xff).unwrap();
    let graph = Graph::capture(&rig.stream, |s| s.launch(&copy, Grid::new(4, 64), &arguments)).unwrap();
    assert_eq!(to.read(&rig.stream).unwrap()[0], u32::MAX, "nothing ran yet");
    for value in [5, 9] {
        from.write(&rig.stream, &vec![value; 4096]).unwrap();
        graph.launch(&rig.stream).unwrap();
        assert_eq!(to.read(&rig.stream).unwrap(), vec![value; 4096]);
    }
    // Launches of a graph, back to back, and of the same work one by one.
    let empty = module.kernel("empty", 0).unwrap();
    let many = |s: &longwave_cuda::driver::Stream, overlaps| {
        (0..1000).try_for_each(|_| s.launch(&empty, Grid { overlaps, ..Grid::new(132, 128) }, &[]))
    };
    let (start, end) = (Event::new(&rig.context).unwrap(), Event::new(&rig.context).unwrap());
    for overlaps in [false, true] {
        let graph = Graph::capture(&rig.stream, |s| many(s, overlaps)).unwrap();
        graph.launch(&rig.stream).unwrap();
        start.record(&rig.stream).unwrap();
        graph.launch(&rig.stream).unwrap();
        end.record(&rig.stream).unwrap();
        let replayed = end.elapsed_us(&start).unwrap() / 1000.0;
        start.record(&rig.stream).unwrap();
        many(&rig.stream, overlaps).unwrap();
        end.record(&rig.stream).unwrap();
        let one_by_one = end.elapsed_us(&start).unwrap() / 1000.0;
        println!("empty kernel, programmatic launch {overlaps}: {replayed:.2} us in a graph, {one_by_one:.2} us alone");
    }
}
