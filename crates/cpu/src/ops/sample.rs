//! Choosing a token from logits: greedy, or temperature with top-k, top-p and min-p; log-probabilities.
//!
//! The random number of a position is a hash of (seed, position), so a request gives the same tokens in any batch.

use longwave_engine::step::{Sampling, Token, TokenLogprobs};

/// Index of the largest logit, the lowest among equals; NaN never wins.
pub fn argmax(logits: &[f32]) -> Token {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, &v) in logits.iter().enumerate() {
        if v > best.0 {
            best = (v, i as Token);
        }
    }
    best.1
}

/// Chooses the token at `position` from `logits` `[vocab]`.
pub fn sample(logits: &[f32], how: &Sampling, position: u32) -> Token {
    let biased;
    let logits = if how.bias.is_empty() {
        logits
    } else {
        let mut l = logits.to_vec();
        for &(t, b) in &how.bias {
            l[t as usize] += b;
        }
        biased = l;
        &biased
    };
    if how.temperature <= 0.0 {
        return argmax(logits);
    }
    // Best first, ties to the lower id, so that every cut below is a prefix.
    let mut order: Vec<(f32, Token)> =
        logits.iter().enumerate().map(|(i, &v)| (v, i as Token)).filter(|e| e.0 > f32::NEG_INFINITY).collect();
    order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    if how.top_k > 0 {
        order.truncate(how.top_k as usize);
    }
    let top = f64::from(order[0].0);
    let weights: Vec<f64> = order.iter().map(|e| ((f64::from(e.0) - top) / f64::from(how.temperature)).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut n = 0;
    let mut mass = 0.0;
    while n < weights.len() {
        let cut_p = how.top_p < 1.0 && mass >= f64::from(how.top_p) * total;
        let cut_min = weights[n] < f64::from(how.min_p);
        if n > 0 && (cut_p || cut_min) {
            break;
        }
        mass += weights[n];
        n += 1;
    }
    let mut u = uniform(how.seed, position) * mass;
    for (w, e) in weights[..n].iter().zip(&order) {
        u -= w;
        if u < 0.0 {
            return e.1;
        }
    }
    order[n - 1].1
}

/// A number in [0, 1) from (seed, position).
pub fn uniform(seed: u64, position: u32) -> f64 {
    // SplitMix64 finaliser over the two, once more for good mixing of low seeds.
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(u64::from(position) + 1));
    for _ in 0..2 {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
    }
    (z >> 11) as f64 / (1u64 << 53) as f64
}

/// Log-probabilities of `chosen` and of the `top` most likely tokens, before temperature and cuts.
pub fn logprobs(logits: &[f32], chosen: Token, top: u32) -> TokenLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&v| f64::from(v - max).exp()).sum();
    let of = |t: Token| (f64::from(logits[t as usize] - max) - sum.ln()) as f32;
    let mut order: Vec<Token> = (0..logits.len() as Token).collect();
    let n = (top as usize).min(order.len());
    let better = |a: &Token, b: &Token| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if n > 0 && n < order.len() {
        order.select_nth_unstable_by(n, better);
    }
    order.truncate(n);
    order.sort_unstable_by(better);
    TokenLogprobs { chosen: of(chosen), top: order.into_iter().map(|t| (t, of(t))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_prefers_the_lower_id_and_ignores_nan() {
        assert_eq!(argmax(&[1.0, 3.0, f32::NAN, 3.0]), 1);
        assert_eq!(sample(&[0.0, 5.0, 1.0], &Sampling { bias: vec![(2, 10.0)], ..Sampling::default() }, 0), 2);
    }

    #[test]
    fn frequencies_follow_the_distribution_and_the_cuts() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let count = |how: &Sampling| {
            let mut n = [0u32; 4];
            (0..20_000).for_each(|p| n[sample(&logits, how, p) as usize] += 1);
            n
        };
        let base = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        let z: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        for (n, l) in count(&base).iter().zip(logits) {
            assert!((f64::from(*n) / 20_000.0 - f64::from(l).exp() / z).abs() < 0.012);
        }
        assert_eq!(count(&Sampling { top_k: 2, ..base.clone() })[0], 0);
        assert_eq!(count(&Sampling { top_p: 0.6, ..base.clone() })[1], 0);
        assert_eq!(count(&Sampling { min_p: 0.2, ..base.clone() })[0], 0);
    }

    #[test]
    fn logprobs_sum_to_one() {
        let l = [0.5f32, -1.0, 2.0, 0.0];
        let r = logprobs(&l, 2, 4);
        let sum: f32 = r.top.iter().map(|e| e.1.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6 && r.top[0].0 == 2 && r.chosen == r.top[0].1);
    }
}
