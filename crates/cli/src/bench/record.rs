//! One request as its client saw it. Times are seconds, from the moment when the request was sent.
//! Assumes that somebody else decides whether it counts: a failed one holds why, and no latency.

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Record {
    /// When it was sent, since the load began.
    pub sent_s: f64,
    /// Tokens of the prompt, as the server counts them; 0 when it does not say.
    pub prompt_tokens: u64,
    /// Of them, taken from the server's cache; `None` when it does not say.
    pub cached_tokens: Option<u64>,
    /// Tokens of the answer, as the server counts them, else the pieces that came.
    pub output_tokens: u64,
    /// To the first piece with text, a thought or a call.
    pub ttft_s: f64,
    /// To the last such piece.
    pub latency_s: f64,
    /// Between such pieces; a piece may hold several tokens.
    pub gaps_s: Vec<f64>,
    /// The text, where the next turn needs it.
    pub text: String,
    /// Why it is not counted.
    pub error: Option<String>,
}

impl Record {
    /// A request that failed after so long.
    pub fn failed(sent_s: f64, latency_s: f64, error: impl ToString) -> Record {
        Record { sent_s, latency_s, error: Some(error.to_string()), ..Record::default() }
    }

    /// Time per output token behind the first; `None` for answers of one token.
    pub fn tpot_s(&self) -> Option<f64> {
        (self.output_tokens > 1).then(|| (self.latency_s - self.ttft_s) / (self.output_tokens - 1) as f64)
    }
}
