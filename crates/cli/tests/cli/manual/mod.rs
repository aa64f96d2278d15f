//! README.md and `docs/`: links lead somewhere, commands run, quoted messages and numbers are the program's.
//!
//! Markdown as it is written here: fences of three backticks at the start of a line, headings with `#`. Blocks of commands
//! are `sh`; what a block needs beyond this machine stands behind it (`sh gpu`). See CONTRIBUTING.md, "Documentation".

mod commands;
mod flags;
mod links;
mod messages;
mod shell;
mod sizes;

use std::path::{Path, PathBuf};

/// A page: where it is in the repository, and its parts.
pub struct Page {
    /// Path from the root of the repository.
    pub path: String,
    /// Everything outside fences, line by line; lines of fences are empty.
    pub prose: String,
    /// Fenced blocks.
    pub blocks: Vec<Block>,
}

/// A fenced block.
pub struct Block {
    /// Line of the fence, from 1.
    pub line: usize,
    /// What stands behind the opening backticks.
    pub info: String,
    /// The lines between the fences.
    pub text: String,
}

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Reads a page of the repository.
pub fn page(path: &str) -> Page {
    let text = std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let (mut prose, mut blocks) = (String::new(), Vec::<Block>::new());
    let mut open = false;
    for (index, line) in text.lines().enumerate() {
        match line.strip_prefix("```") {
            Some(_) if open => open = false,
            Some(info) => {
                open = true;
                blocks.push(Block { line: index + 1, info: info.trim().to_owned(), text: String::new() });
            }
            None if open => {
                let block = blocks.last_mut().unwrap();
                block.text += line;
                block.text.push('\n');
            }
            None => prose += line,
        }
        prose.push('\n');
    }
    assert!(!open, "{path}: a fence is not closed");
    Page { path: path.to_owned(), prose, blocks }
}

/// The manual: README.md and all pages of `docs/`.
pub fn manual() -> Vec<Page> {
    let mut paths: Vec<String> = std::fs::read_dir(root().join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".md"))
        .map(|name| format!("docs/{name}"))
        .collect();
    paths.sort();
    paths.insert(0, "README.md".to_owned());
    assert!(paths.len() > 8, "{paths:?}");
    paths.iter().map(|path| page(path)).collect()
}

/// Code spans of a text. Those that are wrapped over a line have a space there.
pub fn spans(prose: &str) -> Vec<String> {
    prose.split('`').skip(1).step_by(2).map(|span| span.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}
