//! Bytes of tokens to text, piece by piece, never splitting a character.
//!
//! A byte-level token may end in the middle of a UTF-8 character; its first bytes wait here for the rest. Bytes that can
//! no longer become a character turn into U+FFFD, as `String::from_utf8_lossy` would do on the whole: the pieces joined
//! equal that, wherever the input was cut.

/// Holds back at most three bytes.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    held: Vec<u8>,
}

impl Detokenizer {
    /// Nothing held.
    pub fn new() -> Detokenizer {
        Detokenizer::default()
    }

    /// Takes the bytes of a token and appends the text that is complete.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.held.extend_from_slice(bytes);
        let mut start = 0;
        loop {
            match std::str::from_utf8(&self.held[start..]) {
                Ok(rest) => {
                    text.push_str(rest);
                    start = self.held.len();
                    break;
                }
                Err(error) => {
                    let good = start + error.valid_up_to();
                    text.push_str(std::str::from_utf8(&self.held[start..good]).expect("valid up to here"));
                    start = good;
                    let Some(bad) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    start += bad;
                }
            }
        }
        self.held.drain(..start);
    }

    /// The end of the text: what is held can no longer be completed.
    pub fn finish(&mut self, text: &mut String) {
        if !self.held.is_empty() {
            text.push_str(&String::from_utf8_lossy(&self.held));
            self.held.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The joined pieces of `bytes` cut at `cuts`, and each piece checked to be whole.
    fn joined(bytes: &[u8], cuts: &[usize]) -> String {
        let mut detokenizer = Detokenizer::new();
        let mut text = String::new();
        let mut from = 0;
        for &cut in cuts.iter().chain([&bytes.len()]) {
            detokenizer.push(&bytes[from..cut], &mut text);
            from = cut;
        }
        detokenizer.finish(&mut text);
        text
    }

    #[test]
    fn every_split_gives_the_lossy_text_of_the_whole() {
        let samples: [&[u8]; 7] = [
            "plain".as_bytes(),
            "åé杭州🤭 \u{fffd} end".as_bytes(),
            b"\xff\xfe broken \xe6\x9d",
            b"\xf0\x9f\xa4 cut \xf0\x9f",
            b"\xc3\x28 \xe2\x82\x28 \xed\xa0\x80",
            b"\xf4\x90\x80\x80",
            b"",
        ];
        for bytes in samples {
            let want = String::from_utf8_lossy(bytes);
            let single: Vec<usize> = (0..bytes.len()).collect();
            assert_eq!(joined(bytes, &single), want, "byte by byte {bytes:?}");
            for first in 0..=bytes.len() {
                for second in first..=bytes.len() {
                    assert_eq!(joined(bytes, &[first, second]), want, "{bytes:?} at {first} and {second}");
                }
            }
        }
    }

    #[test]
    fn random_bytes_at_random_cuts_give_the_lossy_text() {
        // A fixed multiplicative generator: the same bytes in every run.
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let seeds = "aé杭🤭".as_bytes();
        for _ in 0..3000 {
            let bytes: Vec<u8> = (0..next() % 24)
                .map(|_| if next() % 4 == 0 { next() as u8 } else { seeds[next() % seeds.len()] })
                .collect();
            let mut cuts: Vec<usize> = (0..next() % 5).map(|_| next() % (bytes.len() + 1)).collect();
            cuts.sort_unstable();
            assert_eq!(joined(&bytes, &cuts), String::from_utf8_lossy(&bytes), "{bytes:?} at {cuts:?}");
        }
    }
}
