//! What a GPU can do at most, for floors: reads of a large buffer and launches, measured; the rate of its tensor cores.
//!
//! The rate is four fifths of the peak, which is what large products reach. Assumes a GPU that kernels exist for and that
//! nothing else keeps busy.

use longwave_model::floors::Roofs;

use crate::driver::{Arena, Argument, Context, DeviceSlice, DriverError, Event, Gpu, Graph, Grid, Module, Stream};

/// Runs of which the middle one counts, behind one that does not.
const RUNS: usize = 11;
/// Empty kernels of a graph.
const LAUNCHES: usize = 64;

/// What was measured on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuRoofs {
    /// Its product name.
    pub name: String,
    /// Bytes per second read, and operations per second.
    pub roofs: Roofs,
    /// Microseconds of a kernel that does nothing, in a graph.
    pub launch_us: f64,
}

/// Measures `gpu` with reads of so many bytes, which need not be free for longer than this takes.
pub fn measure(gpu: &Gpu, bytes: u64) -> Result<GpuRoofs, DriverError> {
    let context = Context::open(gpu)?;
    let stream = Stream::new(&context)?;
    let module = Module::load(&context, "roofs")?;
    let (read, empty) = (module.kernel("read_bytes", 0)?, module.kernel("empty", 0)?);
    let bytes = bytes.next_multiple_of(16);
    let mut arena = Arena::new(&context, bytes + (1 << 20))?;
    let from: DeviceSlice<u8> = arena.slice(bytes as usize)?;
    let out: DeviceSlice<u8> = arena.slice(256)?;
    from.fill(&stream, 3)?;
    let grid = Grid::new(2 * gpu.multiprocessors, 512);
    let arguments = [Argument::from(&from), Argument::from(&out), Argument::U64(bytes / 16)];
    let read_us = middle_us(&context, &stream, || stream.launch(&read, grid, &arguments))?;
    // Once outside of a capture, so that its code is on the GPU.
    stream.launch(&empty, Grid::new(1, 32), &[])?;
    let launches =
        Graph::capture(&stream, |stream| (0..LAUNCHES).try_for_each(|_| stream.launch(&empty, Grid::new(1, 32), &[])))?;
    let launches_us = middle_us(&context, &stream, || launches.launch(&stream))?;
    let bf16 = f64::from(gpu.multiprocessors) * rate_of_one(gpu);
    let roofs = Roofs {
        read_bytes_per_s: bytes as f64 / read_us * 1e6,
        bf16_flop_per_s: bf16,
        fp8_flop_per_s: 2.0 * bf16,
        tf32_flop_per_s: bf16 / 2.0,
    };
    Ok(GpuRoofs { name: gpu.name.clone(), roofs, launch_us: launches_us / LAUNCHES as f64 })
}

/// bf16 operations per second of a multiprocessor: of the 989 tera of an H200's 132, and the 2,250 of a B200's 148.
fn rate_of_one(gpu: &Gpu) -> f64 {
    let peak = if gpu.major >= 10 { 2250e12 / 148.0 } else { 989e12 / 132.0 };
    0.8 * peak
}

fn middle_us(
    context: &Context,
    stream: &Stream,
    work: impl Fn() -> Result<(), DriverError>,
) -> Result<f64, DriverError> {
    let (start, end) = (Event::new(context)?, Event::new(context)?);
    work()?;
    let timed = |_| {
        start.record(stream)?;
        work()?;
        end.record(stream)?;
        end.elapsed_us(&start)
    };
    let mut times = (0..RUNS).map(timed).collect::<Result<Vec<f64>, DriverError>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[RUNS / 2])
}
