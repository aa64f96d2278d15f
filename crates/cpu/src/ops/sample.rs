//! Choosing a token from logits: greedy, or temperature with top-k, top-p and min-p; log-probabilities.
//!
//! A token is drawn as the largest of `logit / temperature + noise` over the kept candidates, with Gumbel noise that is a
//! hash of (seed, position, token). So a request gives the same tokens in any batch, and a draft that is drawn from
//! another distribution with the same noise is mostly the token that the model draws (two distributions at total
//! variation `d` agree with a probability of at least `(1 - d) / (1 + d)`). Assumes bias ids below the vocabulary size;
//! NaN and minus infinity are never chosen.

use longwave_engine::step::{Sampling, Token, TokenLogprobs};

use crate::ops::noise::{self, Noise};
use crate::ops::penalties::{self, Counts};

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

/// Chooses the token at `position` from logits `[vocab]`; `counts` are the tokens before it, for penalties; only tokens
/// of `mask` (bit `t % 32` of word `t / 32`) are chosen, unless none of them can be.
pub fn sample(logits: &[f32], how: &Sampling, position: u32, counts: Option<&Counts>, mask: Option<&[u32]>) -> Token {
    let changed;
    let forbids = position < how.forbidden_before && !how.forbidden.is_empty();
    let logits = if how.bias.is_empty() && !forbids && counts.is_none() && mask.is_none() {
        logits
    } else {
        let mut l = logits.to_vec();
        for &(t, b) in &how.bias {
            l[t as usize] += b;
        }
        for &t in how.forbidden.iter().filter(|_| forbids) {
            l[t as usize] = f32::NEG_INFINITY;
        }
        if let Some(mask) = mask {
            apply_mask(&mut l, mask);
        }
        if let Some(counts) = counts {
            penalties::apply(&mut l, how, counts);
        }
        changed = l;
        &changed
    };
    let top = argmax(logits);
    if how.temperature <= 0.0 {
        return top;
    }
    let noise = Noise::new(how.seed, position);
    let last = last_kept(logits, how, top);
    let scaled = |l: f32| f64::from(l) / f64::from(how.temperature);
    // The likeliest token first: it sets a bar that most others do not reach even with their largest noise.
    let mut best = (scaled(logits[top as usize]) + noise.gumbel(top), top);
    for (t, &l) in (0..).zip(logits) {
        let x = scaled(l);
        // Rounding is monotonic, so a bound below the bar means a score below the bar. NaN passes neither test.
        if x + noise.bound(t) >= best.0 && l > f32::NEG_INFINITY && last.is_none_or(|last| !before(last, (l, t))) {
            let score = x + noise.gumbel(t);
            if score > best.0 || score == best.0 && t < best.1 {
                best = (score, t);
            }
        }
    }
    best.1
}

/// Takes all probability from tokens that are not in the mask.
fn apply_mask(logits: &mut [f32], mask: &[u32]) {
    for (logits, &word) in logits.chunks_mut(32).zip(mask) {
        match word {
            u32::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            _ => {
                let forbidden = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            }
        }
    }
}

/// Whether `a` is kept before `b`: larger logits first, lower ids among equals.
fn before(a: (f32, Token), b: (f32, Token)) -> bool {
    a.0 > b.0 || a.0 == b.0 && a.1 < b.1
}

/// The worst candidate that top-k, top-p and min-p keep; `None` when they keep all. Top-p counts what top-k left.
fn last_kept(logits: &[f32], how: &Sampling, top: Token) -> Option<(f32, Token)> {
    let at = |t: Token| (logits[t as usize], t);
    let order = |a: &Token, b: &Token| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let weight = |l: f32| noise::exp((f64::from(l) - f64::from(logits[top as usize])) / f64::from(how.temperature));
    let mut last = None;
    let cuts_k = how.top_k > 0 && (how.top_k as usize) < logits.len();
    if !cuts_k && how.top_p >= 1.0 && how.min_p <= 0.0 {
        return last;
    }
    let mut kept: Vec<Token> = (0..logits.len() as Token).filter(|&t| logits[t as usize] > f32::NEG_INFINITY).collect();
    if kept.is_empty() {
        return last;
    }
    if cuts_k && (how.top_k as usize) < kept.len() {
        let (_, &mut worst, _) = kept.select_nth_unstable_by(how.top_k as usize - 1, order);
        kept.truncate(how.top_k as usize);
        // Sums below run over ascending ids.
        kept.sort_unstable();
        last = Some(at(worst));
    }
    if how.min_p > 0.0 {
        let passing = kept.iter().copied().filter(|&t| weight(logits[t as usize]) >= f64::from(how.min_p));
        last = passing.max_by(order).or(Some(top)).map(at);
    }
    if how.top_p < 1.0 {
        let needed = f64::from(how.top_p) * kept.iter().map(|&t| weight(logits[t as usize])).sum::<f64>();
        let worst = nucleus(&mut kept, needed, order, |t| weight(logits[t as usize]));
        if last.is_none_or(|last| before(at(worst), last)) {
            last = Some(at(worst));
        }
    }
    last
}

/// The candidate at which the weights of the best reach `needed`. Sorts only as many as it takes.
fn nucleus(
    kept: &mut [Token],
    needed: f64,
    order: impl Fn(&Token, &Token) -> std::cmp::Ordering,
    weight: impl Fn(Token) -> f64,
) -> Token {
    let (mut mass, mut done, mut piece) = (0.0, 0, 256);
    while done < kept.len() {
        let rest = &mut kept[done..];
        let n = piece.min(rest.len());
        if n < rest.len() {
            rest.select_nth_unstable_by(n, &order);
        }
        rest[..n].sort_unstable_by(&order);
        for &t in &rest[..n] {
            mass += weight(t);
            if mass >= needed {
                return t;
            }
        }
        done += n;
        piece *= 8;
    }
    kept[kept.len() - 1]
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
        assert_eq!(
            sample(&[0.0, 5.0, 1.0], &Sampling { bias: vec![(2, 10.0)], ..Sampling::default() }, 0, None, None),
            2
        );
    }

    /// Softmax of `logits`.
    fn softmax(logits: &[f32]) -> Vec<f64> {
        let z: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        logits.iter().map(|&l| f64::from(l).exp() / z).collect()
    }

    #[test]
    fn frequencies_follow_the_distribution_and_the_cuts() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let count = |how: &Sampling| {
            let mut n = [0u32; 4];
            (0..20_000).for_each(|p| n[sample(&logits, how, p, None, None) as usize] += 1);
            n
        };
        let base = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        for (n, p) in count(&base).iter().zip(softmax(&logits)) {
            assert!((f64::from(*n) / 20_000.0 - p).abs() < 0.012);
        }
        let half: Vec<f32> = logits.iter().map(|l| l * 2.0).collect();
        for (n, p) in count(&Sampling { temperature: 0.5, ..base.clone() }).iter().zip(softmax(&half)) {
            assert!((f64::from(*n) / 20_000.0 - p).abs() < 0.012);
        }
        // Probabilities are 0.0871, 0.2369, 0.6439, 0.0321; what is kept keeps its proportions.
        let kept = |how: Sampling, which: &[usize]| {
            let n = count(&how);
            let sum: f64 = which.iter().map(|&i| softmax(&logits)[i]).sum();
            for i in 0..4 {
                let p = if which.contains(&i) { softmax(&logits)[i] / sum } else { 0.0 };
                assert!((f64::from(n[i]) / 20_000.0 - p).abs() < 0.012 && (p > 0.0 || n[i] == 0), "{how:?}: {n:?}");
            }
        };
        kept(Sampling { top_k: 2, ..base.clone() }, &[1, 2]);
        kept(Sampling { top_k: 4, ..base.clone() }, &[0, 1, 2, 3]);
        kept(Sampling { top_p: 0.6, ..base.clone() }, &[2]);
        kept(Sampling { top_p: 0.65, ..base.clone() }, &[1, 2]);
        kept(Sampling { top_p: 0.95, ..base.clone() }, &[0, 1, 2]);
        kept(Sampling { min_p: 0.2, ..base.clone() }, &[1, 2]);
        kept(Sampling { min_p: 1.0, ..base.clone() }, &[2]);
        kept(Sampling { top_k: 3, top_p: 0.6, ..base.clone() }, &[2]);
        kept(Sampling { top_k: 3, min_p: 0.3, top_p: 0.99, ..base.clone() }, &[1, 2]);
    }

    #[test]
    fn a_mask_takes_all_probability_before_the_cuts_and_leaves_the_proportions() {
        let logits: Vec<f32> = (0..70).map(|t| if t == 0 { 9.0 } else { (t as f32 * 0.9).sin() }).collect();
        let allowed = [3u32, 31, 32, 64, 69];
        let mut mask = vec![0u32; 3];
        allowed.iter().for_each(|&t| mask[t as usize / 32] |= 1 << (t % 32));
        let best = *allowed.iter().max_by(|a, b| logits[**a as usize].total_cmp(&logits[**b as usize])).unwrap();
        let greedy = Sampling { bias: vec![(5, 100.0)], repetition_penalty: 1.5, ..Sampling::default() };
        assert_eq!(sample(&logits, &greedy, 0, Some(&Counts::default()), Some(&mask)), best);
        // Without the mask, the first token alone would be the nucleus and pass min-p.
        for (how, kept) in [
            (Sampling { top_k: 2, ..Sampling::default() }, 2),
            (Sampling { top_p: 0.99, ..Sampling::default() }, 5),
            (Sampling { min_p: 0.01, ..Sampling::default() }, 5),
        ] {
            let how = Sampling { temperature: 1.0, seed: 3, ..how };
            let mut seen: Vec<Token> = (0..2000).map(|at| sample(&logits, &how, at, None, Some(&mask))).collect();
            seen.sort_unstable();
            seen.dedup();
            assert!(seen.len() == kept && seen.iter().all(|t| allowed.contains(t)), "{seen:?}");
        }
        // A mask of everything is no mask.
        let how = Sampling { temperature: 1.0, seed: 3, top_p: 0.9, ..Sampling::default() };
        let all = [u32::MAX; 3];
        assert!(
            (0..500).all(|at| sample(&logits, &how, at, None, Some(&all)) == sample(&logits, &how, at, None, None))
        );
    }

    #[test]
    fn cuts_among_equals_keep_the_lower_ids() {
        let logits = [1.0f32; 6];
        let seen = |how: Sampling| (0..2000).map(|p| sample(&logits, &how, p, None, None)).max();
        let base = Sampling { temperature: 1.0, ..Sampling::default() };
        assert_eq!(seen(Sampling { top_k: 2, ..base.clone() }), Some(1));
        assert_eq!(seen(Sampling { top_p: 0.5, ..base.clone() }), Some(2));
        assert_eq!(seen(base), Some(5));
    }

    /// The quick test against the bar changes nothing, and neither does how many candidates are sorted at once.
    #[test]
    fn shortcuts_choose_what_the_definition_chooses() {
        for round in 0..200u32 {
            let noise = Noise::new(99, round);
            let logits: Vec<f32> = (0..3000).map(|t| 3.0 * noise.gumbel(t) as f32).collect();
            let how = Sampling {
                temperature: [1.0, 0.3, 2.5][round as usize % 3],
                top_p: [1.0, 0.9, 0.999, 0.2][round as usize % 4],
                top_k: [0, 50, 1000][round as usize / 4 % 3],
                min_p: [0.0, 0.01][round as usize / 2 % 2],
                seed: 5,
                ..Sampling::default()
            };
            let mut order: Vec<Token> = (0..3000).collect();
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            order.truncate(if how.top_k > 0 { how.top_k as usize } else { 3000 });
            let weight = |t: Token| {
                ((f64::from(logits[t as usize]) - f64::from(logits[order[0] as usize])) / f64::from(how.temperature))
                    .exp()
            };
            let total: f64 = order.iter().map(|&t| weight(t)).sum();
            let mut mass = 0.0;
            let best = order
                .iter()
                .take_while(|&&t| {
                    let take = how.top_p >= 1.0 || mass < f64::from(how.top_p) * total;
                    mass += weight(t);
                    take && weight(t) >= f64::from(how.min_p)
                })
                .map(|&t| {
                    let g = Noise::new(how.seed, round).gumbel(t);
                    (f64::from(logits[t as usize]) / f64::from(how.temperature) + g, t)
                })
                .max_by(|a, b| a.0.total_cmp(&b.0));
            assert_eq!(sample(&logits, &how, round, None, None), best.unwrap().1, "{how:?}");
        }
    }

    #[test]
    fn one_seed_and_position_give_one_token() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let how = |seed| Sampling { temperature: 1.0, seed, ..Sampling::default() };
        let run = |seed| (0..50).map(|p| sample(&logits, &how(seed), p, None, None)).collect::<Vec<_>>();
        assert_eq!(run(3), run(3));
        assert_ne!(run(3), run(4));
        assert!(run(3).windows(2).any(|w| w[0] != w[1]), "positions differ");
        assert_eq!(sample(&[f32::NAN, f32::NEG_INFINITY, f32::NAN, -3.0], &how(1), 0, None, None), 3);
        let nothing = [f32::NAN, f32::NEG_INFINITY];
        for cut in [how(1), Sampling { top_p: 0.5, top_k: 1, min_p: 0.1, ..how(1) }] {
            assert_eq!(sample(&nothing, &cut, 0, None, None), 0, "nothing to choose from");
        }
    }

    /// Two distributions at total variation `d`, drawn with one noise, agree with a probability between `(1-d)/(1+d)` and
    /// `1 - d`; independent draws would agree far less often.
    #[test]
    fn close_distributions_draw_the_same_token_with_the_same_noise() {
        let n = 20_000u32;
        for (scale, spread) in [(0.1f32, 40), (0.3, 40), (1.0, 8), (3.0, 8)] {
            let p: Vec<f32> = (0..spread).map(|i| (i as f32 * 1.3).sin()).collect();
            let q: Vec<f32> = p.iter().enumerate().map(|(i, l)| l + scale * (i as f32 * 2.1).cos()).collect();
            let d: f64 = softmax(&p).iter().zip(softmax(&q)).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0;
            let how = Sampling { temperature: 1.0, seed: 21, ..Sampling::default() };
            let same = (0..n).filter(|&at| sample(&p, &how, at, None, None) == sample(&q, &how, at, None, None)).count()
                as f64
                / f64::from(n);
            println!("total variation {d:.3}: {same:.3} agree, bounds {:.3} and {:.3}", (1.0 - d) / (1.0 + d), 1.0 - d);
            assert!(same >= (1.0 - d) / (1.0 + d) - 0.012 && same <= 1.0 - d + 0.012);
        }
    }

    #[test]
    fn logprobs_sum_to_one() {
        let l = [0.5f32, -1.0, 2.0, 0.0];
        let r = logprobs(&l, 2, 4);
        let sum: f32 = r.top.iter().map(|e| e.1.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6 && r.top[0].0 == 2 && r.chosen == r.top[0].1);
    }
}
