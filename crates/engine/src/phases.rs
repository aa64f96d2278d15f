//! How long steps took and how much they held, summed up for metrics.
//!
//! Plain data that the thread around the engine fills, since the engine reads no clock. A step counts once, for what it
//! did; times are wall times from planning to commit.

use std::time::Duration;

/// Upper ends of the buckets of [`StepTotals::by_tokens`]; one more holds what is above.
pub const TOKEN_BUCKETS: [u64; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Pieces of prompts alone.
    Prefill,
    /// Tokens of answers alone.
    Decode,
    /// Both.
    Mixed,
    /// Neither: windows that were rebuilt, pieces that ended in a failure.
    Other,
}

impl Phase {
    /// All, in the order of the sums.
    pub const ALL: [Phase; 4] = [Phase::Prefill, Phase::Decode, Phase::Mixed, Phase::Other];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
            Phase::Mixed => "mixed",
            Phase::Other => "other",
        }
    }
}

/// Sums since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTotals {
    /// Steps of each phase, in the order of [`Phase::ALL`].
    pub steps: [u64; 4],
    /// Their wall times.
    pub time: [Duration; 4],
    /// Steps by the prompt and output tokens they held; not cumulative.
    pub by_tokens: [u64; TOKEN_BUCKETS.len() + 1],
    /// Those tokens.
    pub tokens: u64,
}

impl StepTotals {
    /// Counts a step that computed `prompt` tokens of prompts and gave `output` tokens.
    pub(crate) fn add(&mut self, prompt: u64, output: u64, time: Duration) {
        let phase = match (prompt > 0, output > 0) {
            // The last piece of a prompt gives the first token of its answer.
            (true, false) => Phase::Prefill,
            (false, true) => Phase::Decode,
            (true, true) => Phase::Mixed,
            (false, false) => Phase::Other,
        };
        self.steps[phase as usize] += 1;
        self.time[phase as usize] += time;
        let tokens = prompt + output;
        self.tokens += tokens;
        self.by_tokens[TOKEN_BUCKETS.partition_point(|&end| end < tokens)] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_counts_for_what_it_did() {
        let mut totals = StepTotals::default();
        let second = Duration::from_secs(1);
        for (prompt, output) in [(512, 0), (0, 1), (0, 3), (500, 12), (0, 0), (0, 20_000)] {
            totals.add(prompt, output, second);
        }
        assert_eq!(totals.steps, [1, 3, 1, 1]);
        assert_eq!(totals.time, [second, 3 * second, second, second]);
        // 0 and 1 fall under 1, 3 under 8, both of 512 under 512, the last above all.
        let mut wanted = [0; 14];
        (wanted[0], wanted[1], wanted[7], wanted[13]) = (2, 1, 2, 1);
        assert_eq!(totals.by_tokens, wanted);
        assert_eq!(totals.tokens, 512 + 1 + 3 + 512 + 20_000);
    }
}
