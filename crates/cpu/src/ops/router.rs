//! Router (model.md 7.1): scores `sqrt(softplus(logit))`, the bias for choosing only, weights normalised and scaled.
//! Ties go to the lower expert. Hash layers take the experts of their table and weigh them by the same scores.

/// A chosen expert and its weight.
pub type Choice = (u32, f32);

/// `sqrt(log(1 + e^v))`, with the identity above 20.
fn score(v: f32) -> f32 {
    let v64 = f64::from(v);
    let softplus = if v > 20.0 { v } else { v64.exp().ln_1p() as f32 };
    softplus.sqrt()
}

/// The `k` experts with the largest `score + bias`, in that order; among equals the lower id first, NaN last.
pub fn scored(logits: &[f32], bias: &[f32], k: usize, scale: f32, out: &mut Vec<Choice>) {
    let scores: Vec<f32> = logits.iter().map(|&v| score(v)).collect();
    let key = |e: usize| {
        let b = scores[e] + bias[e];
        if b.is_nan() { -1e30 } else { b }
    };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
    weigh(order[..k].iter().map(|&e| (e as u32, scores[e])), scale, out);
}

/// The experts of a hash layer's table, weighted by their scores.
pub fn hashed(logits: &[f32], table: &[u32], scale: f32, out: &mut Vec<Choice>) {
    weigh(table.iter().map(|&e| (e, score(logits[e as usize]))), scale, out);
}

fn weigh(chosen: impl Iterator<Item = Choice> + Clone, scale: f32, out: &mut Vec<Choice>) {
    let sum: f32 = chosen.clone().map(|c| c.1).sum();
    out.extend(chosen.map(|(e, s)| (e, s / sum * scale)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_case_of_the_specification() {
        let logits = [2.0, -1.0, 0.5, 0.0, 3.0, -3.0, 1.0, 1.5];
        let bias = [0.0, 0.9, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0];
        let want = [1.458399, 0.559698, 0.986953, 0.832555, 1.74602, 0.220425, 1.145976, 1.304382];
        assert!(logits.iter().zip(want).all(|(&l, w)| (score(l) - w).abs() < 2e-6));
        let mut out = Vec::new();
        scored(&logits, &bias, 3, 1.5, &mut out);
        let close = |c: Choice, e: u32, w: f32| assert!(c.0 == e && (c.1 - w).abs() < 2e-6, "{c:?}");
        close(out[0], 1, 0.252687);
        close(out[1], 0, 0.658424);
        close(out[2], 7, 0.588890);
    }

    #[test]
    fn ties_go_to_the_lower_expert_and_hash_layers_use_unbiased_scores() {
        let mut out = Vec::new();
        scored(&[1.0; 6], &[0.0; 6], 2, 1.0, &mut out);
        assert_eq!(out, vec![(0, 0.5), (1, 0.5)]);
        out.clear();
        hashed(&[0.0, 2.0, 0.0], &[1, 2], 1.5, &mut out);
        assert!(
            (out[0].1 / out[1].1 - score(2.0) / score(0.0)).abs() < 1e-6 && (out[0].1 + out[1].1 - 1.5).abs() < 1e-6
        );
    }
}
