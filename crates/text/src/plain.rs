//! The model's tokens as plain text, for prompts that are plain text themselves.
//!
//! Nothing is parsed: the markers of thoughts and calls appear as they are spelled, because whoever writes prompts by hand
//! reads them by hand. Stop texts end it; what could be the start of one is held back. Characters are never split.

use crate::detokenizer::Detokenizer;
use crate::tokenizer::Tokenizer;

/// Reads one answer.
#[derive(Debug, Clone)]
pub struct PlainReply {
    stop: Vec<String>,
    /// Keep the stop text that ended it.
    include_stop: bool,
    detokenizer: Detokenizer,
    held: String,
    stopped: Option<String>,
}

impl PlainReply {
    /// Empty stop texts are ignored.
    pub fn new(stop: Vec<String>, include_stop: bool) -> PlainReply {
        let stop = stop.into_iter().filter(|text| !text.is_empty()).collect();
        PlainReply { stop, include_stop, detokenizer: Detokenizer::new(), held: String::new(), stopped: None }
    }

    /// Takes a token and appends the text that is certain. Leave out the token that ended the generation.
    pub fn push_token(&mut self, tokenizer: &Tokenizer, token: u32, out: &mut String) {
        if self.stopped.is_some() {
            return;
        }
        let mut text = String::new();
        self.detokenizer.push(tokenizer.token_bytes(token), &mut text);
        self.push(&text, out);
    }

    /// The stop text that ended it.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// The end of the tokens: appends what was held back.
    pub fn finish(&mut self, out: &mut String) {
        if self.stopped.is_none() {
            let mut text = String::new();
            self.detokenizer.finish(&mut text);
            self.push(&text, out);
            out.push_str(&std::mem::take(&mut self.held));
        }
    }

    fn push(&mut self, text: &str, out: &mut String) {
        self.held.push_str(text);
        let found = self.stop.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        // The first that is complete, as if the text came one character at a time.
        if let Some((at, stop)) = found.min_by_key(|(at, stop)| (at + stop.len(), *at)) {
            let end = if self.include_stop { at + stop.len() } else { at };
            out.push_str(&self.held[..end]);
            self.stopped = Some(stop.clone());
            self.held.clear();
            return;
        }
        let certain = self.held.len() - self.waiting();
        out.push_str(&self.held[..certain]);
        self.held.drain(..certain);
    }

    /// Bytes at the end that could be the start of a stop text.
    fn waiting(&self) -> usize {
        let starts = |stop: &String| {
            let most = stop.len().min(self.held.len() + 1) - 1;
            (1..=most).rev().find(|&length| stop.is_char_boundary(length) && self.held.ends_with(&stop[..length]))
        };
        self.stop.iter().filter_map(starts).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&str], stop: &[&str], include: bool) -> (String, Option<String>) {
        let mut reply = PlainReply::new(stop.iter().map(|&text| text.to_owned()).collect(), include);
        let mut out = String::new();
        for piece in pieces {
            if reply.stopped.is_none() {
                reply.push(piece, &mut out);
            }
        }
        reply.finish(&mut out);
        (out, reply.stopped)
    }

    #[test]
    fn stop_texts_end_the_text_wherever_it_is_cut() {
        let text = "one\n\ntwo\u{e9}END three";
        for at in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
            let pieces = [&text[..at], &text[at..]];
            assert_eq!(read(&pieces, &["END", "EN"], false), ("one\n\ntwo\u{e9}".into(), Some("EN".into())), "{at}");
            assert_eq!(read(&pieces, &["\n\n"], true), ("one\n\n".into(), Some("\n\n".into())), "{at}");
            assert_eq!(read(&pieces, &["absent", "three!", ""], false), (text.into(), None), "{at}");
        }
    }

    #[test]
    fn a_held_start_of_a_stop_text_is_given_out_at_the_end() {
        assert_eq!(read(&["abc", "d"], &["cdx"], false), ("abcd".into(), None));
    }
}
