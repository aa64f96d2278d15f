//! Penalties: logits of tokens that prompt or answer contain already are lowered.
//!
//! The order and the meaning are those of vLLM: first the repetition penalty over prompt and answer (positive logits are
//! divided by it, others multiplied), then frequency times occurrences and presence over the answer alone. Assumes
//! penalties that were checked; tokens that cannot be chosen (minus infinity) stay so.

pub use longwave_engine::counts::Counts;
use longwave_engine::step::Sampling;

/// Lowers logits `[vocab]` in place.
pub fn apply(logits: &mut [f32], how: &Sampling, counts: &Counts) {
    for (token, times) in counts.iter() {
        let logit = &mut logits[token as usize];
        if how.repetition_penalty != 1.0 {
            *logit = if *logit > 0.0 { *logit / how.repetition_penalty } else { *logit * how.repetition_penalty };
        }
        if times > 0 {
            *logit -= how.frequency_penalty * times as f32 + how.presence_penalty;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetition_counts_prompt_and_answer_the_others_the_answer_alone() {
        let mut counts = Counts::default();
        counts.add(&[0, 1, 1], 0, 3);
        counts.add(&[1, 2, 2], 3, 3);
        let base = Sampling { answer_from: 3, ..Sampling::default() };
        let after = |how: Sampling| {
            let mut logits = [4.0, -4.0, 4.0, 4.0, f32::NEG_INFINITY];
            apply(&mut logits, &how, &counts);
            logits
        };
        let never = f32::NEG_INFINITY;
        assert_eq!(after(base.clone()), [4.0, -4.0, 4.0, 4.0, never]);
        assert_eq!(after(Sampling { repetition_penalty: 2.0, ..base.clone() }), [2.0, -8.0, 2.0, 4.0, never]);
        assert_eq!(after(Sampling { presence_penalty: 1.5, ..base.clone() }), [4.0, -5.5, 2.5, 4.0, never]);
        assert_eq!(after(Sampling { frequency_penalty: 0.5, ..base.clone() }), [4.0, -4.5, 3.0, 4.0, never]);
        let all = Sampling { repetition_penalty: 2.0, presence_penalty: 1.0, frequency_penalty: -1.0, ..base };
        assert_eq!(after(all), [2.0, -8.0, 3.0, 4.0, never]);
        counts.clear();
        assert_eq!(counts, Counts::default());
    }
}
