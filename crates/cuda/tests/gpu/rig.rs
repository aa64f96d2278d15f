//! A GPU with a stream and an arena, fresh numbers, and errors as in the acceptance rule of model.md 10.

use longwave_cuda::driver::{Arena, Context, DeviceSlice, Element, Event, Gpu, Graph, Stream, probe};

pub struct Rig {
    pub context: Context,
    pub stream: Stream,
    pub arena: Arena,
}

/// The GPUs; `None`, with the reason printed, where there is none, or no kernel for one.
pub fn gpus() -> Option<Vec<Gpu>> {
    if longwave_cuda::cubins::CUBINS.is_empty() {
        println!("skipped: built without nvcc");
        return None;
    }
    probe().inspect_err(|missing| println!("skipped: {missing}")).ok()
}

/// The first GPU with `bytes` of memory; `None`, with the reason printed, where there is none.
pub fn rig(bytes: u64) -> Option<Rig> {
    let gpu = gpus()?.into_iter().next();
    let context = Context::open(&gpu?).unwrap();
    let stream = Stream::new(&context).unwrap();
    let arena = Arena::new(&context, bytes).unwrap();
    Some(Rig { context, stream, arena })
}

impl Rig {
    /// `values` on the GPU.
    pub fn put<T: Element>(&mut self, values: &[T]) -> DeviceSlice<T> {
        let slice = self.arena.slice(values.len()).unwrap();
        slice.write(&self.stream, values).unwrap();
        slice
    }

    /// Room for `len` values, every byte 255: NaN for floats.
    pub fn poisoned<T: Element>(&mut self, len: usize) -> DeviceSlice<T> {
        let slice: DeviceSlice<T> = self.arena.slice(len).unwrap();
        slice.fill(&self.stream, 0xff).unwrap();
        slice
    }

    /// Median time of twelve replays, microseconds.
    pub fn median_us(&self, graph: &Graph) -> f64 {
        let (start, end) = (Event::new(&self.context).unwrap(), Event::new(&self.context).unwrap());
        let replay = |_| {
            start.record(&self.stream).unwrap();
            graph.launch(&self.stream).unwrap();
            end.record(&self.stream).unwrap();
            end.elapsed_us(&start).unwrap()
        };
        let mut times: Vec<f64> = (0..12).map(replay).collect();
        times.sort_by(f64::total_cmp);
        times[6]
    }
}

/// Whether a sanitizer watches, under which everything takes a thousand times as long: GPU_SMALL=1 leaves large cases out.
pub fn small() -> bool {
    std::env::var_os("GPU_SMALL").is_some()
}

/// Numbers between -1 and 1 (splitmix64), other ones in every run unless GPU_SEED says which.
pub struct Fresh(u64);

impl Fresh {
    pub fn new() -> Fresh {
        use std::hash::BuildHasher;
        let random = std::collections::hash_map::RandomState::new().hash_one(0);
        let seed = std::env::var("GPU_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(random);
        println!("GPU_SEED={seed}");
        Fresh(seed)
    }

    pub fn floats(&mut self, len: usize) -> Vec<f32> {
        let next = |_| {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((x ^ (x >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..len).map(next).collect()
    }

    /// A whole number below `n`, at most 2^23.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.floats(1)[0] + 1.0) * 0.5 * n as f32) as usize % n
    }
}

/// Where two results differ first, with both; `None` when all bits are equal.
pub fn first_difference(a: &[f32], b: &[f32]) -> Option<(usize, f32, f32)> {
    assert_eq!(a.len(), b.len());
    (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()).map(|i| (i, a[i], b[i]))
}

/// `||ours - reference|| / ||reference||`; NaN anywhere is NaN.
pub fn relative_error(ours: &[f32], reference: &[f32]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    let squares = |f: &dyn Fn(usize) -> f64| (0..ours.len()).map(|i| f(i) * f(i)).sum::<f64>().sqrt();
    squares(&|i| f64::from(ours[i]) - f64::from(reference[i])) / squares(&|i| f64::from(reference[i]))
}
