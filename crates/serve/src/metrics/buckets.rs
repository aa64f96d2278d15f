//! Bucket edges of histograms: vLLM's, so that its dashboards and alarms fit.
//! Seconds, unless they count something; refuses nothing.

/// From arrival to the end, and parts of that.
pub(super) const LATENCY_S: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];

/// To the first token.
pub(super) const FIRST_TOKEN_S: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];

/// Between tokens.
pub(super) const TOKEN_S: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];

/// Answers to one prompt.
pub(super) const ANSWERS: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];

/// HTTP requests by route, as the instrumentator for FastAPI has them.
pub(super) const HTTP_S: [f64; 3] = [0.1, 0.5, 1.0];

/// 1, 2, 5, 10, 20, 50 and so on up to `most`, at least 1.
pub(super) fn tokens(most: u32) -> Vec<f64> {
    let powers = (0..10).map(|power| 10u64.pow(power));
    let series = powers.flat_map(|power| [1, 2, 5].map(|digit| digit * power));
    series.take_while(|&edge| edge == 1 || edge <= u64::from(most)).map(|edge| edge as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_edges_end_with_the_context() {
        assert_eq!(tokens(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(tokens(1 << 20).last(), Some(&1_000_000.0));
        assert_eq!(tokens(0), [1.0]);
    }

    #[test]
    fn edges_rise() {
        for edges in [&LATENCY_S[..], &FIRST_TOKEN_S, &TOKEN_S, &ANSWERS, &HTTP_S, &tokens(1 << 20)] {
            assert!(edges.windows(2).all(|pair| pair[0] < pair[1]), "{edges:?}");
        }
    }
}
