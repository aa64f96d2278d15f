//! What this CPU can do at most: reads of a large buffer and fused multiply-adds from registers, by all threads.
//!
//! Measured in the pool of the calling thread; the best of a few runs counts. Other work on the machine makes both lower.

use std::time::Instant;

use rayon::prelude::*;

use crate::simd::Lanes;

/// Runs of which the best counts.
const RUNS: usize = 5;

crate::dispatch! {
    fn spin(n: usize) -> f32 = spin_body;
}

/// `n` rounds of twelve independent fused multiply-adds over 16 lanes.
#[inline(always)]
fn spin_body<V: Lanes>(n: usize) -> f32 {
    let mut acc: [V; 12] = std::array::from_fn(|i| V::splat(i as f32));
    let (a, b) = (V::splat(std::hint::black_box(0.999)), V::splat(std::hint::black_box(1e-3)));
    for _ in 0..n {
        for v in &mut acc {
            *v = v.fma(a, b);
        }
    }
    acc.iter().map(|v| v.sum()).sum()
}

crate::dispatch! {
    fn read(x: &[f32]) -> f32 = read_body;
}

#[inline(always)]
fn read_body<V: Lanes>(x: &[f32]) -> f32 {
    let mut acc: [V; 8] = std::array::from_fn(|_| V::splat(0.0));
    for c in x.as_chunks::<128>().0 {
        for (v, c) in acc.iter_mut().zip(c.as_chunks::<16>().0) {
            *v = v.add(V::load(c));
        }
    }
    acc.iter().map(|v| v.sum()).sum()
}

/// The shortest run of `work`, s.
fn best_s(mut work: impl FnMut() -> f32) -> f64 {
    let timed = |_| {
        let began = Instant::now();
        std::hint::black_box(work());
        began.elapsed().as_secs_f64()
    };
    (0..RUNS).map(timed).fold(f64::INFINITY, f64::min)
}

/// Floating-point operations per second; `rounds` says how long it spins, 384 operations of a thread each.
pub fn flop_per_s(rounds: usize) -> f64 {
    let threads = rayon::current_num_threads();
    let seconds = best_s(|| (0..threads).into_par_iter().map(|_| spin(rounds)).sum());
    (threads * rounds * 12 * 32) as f64 / seconds
}

/// Bytes per second that are read from a buffer of this size, at least one float for each thread. One that fits the caches
/// shows what these can do.
pub fn read_bytes_per_s(bytes: usize) -> f64 {
    let threads = rayon::current_num_threads();
    let data = vec![1.0f32; (bytes / 4).max(128 * threads)];
    let part = data.len().div_ceil(threads);
    let seconds = best_s(|| data.par_chunks(part).map(read).sum());
    data.len() as f64 * 4.0 / seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_roofs_are_positive_numbers() {
        for roof in [flop_per_s(1000), read_bytes_per_s(1 << 20), read_bytes_per_s(0)] {
            assert!(roof.is_finite() && roof > 0.0, "{roof}");
        }
    }
}
