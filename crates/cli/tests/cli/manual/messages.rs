//! Messages that `docs/errors.md` quotes are those of the program: their fixed parts stand in its sources, in this order.

use std::path::Path;

use super::{page, root};

/// All sources of the crates, without tests below `tests/`. Continued lines are joined, quotes have no backslash.
fn sources(folder: &Path, out: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.extension().and_then(|end| end.to_str()) {
            _ if path.is_dir() => sources(&path, out),
            Some("rs") => out.push(joined(&std::fs::read_to_string(path).unwrap())),
            _ => {}
        }
    }
}

fn joined(source: &str) -> String {
    let mut parts = source.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, next| all + next.trim_start()).replace("\\\"", "\"")
}

/// Longest text that a format stands for in the source, bytes.
const PLACE: usize = 60;

/// Whether the parts follow each other in `source`, with placeholders between them.
fn has(source: &str, parts: &[&str]) -> bool {
    let follows = |start: usize| {
        parts[1..].iter().try_fold(start + parts[0].len(), |at, part| {
            let found = at + source[at..].find(part)?;
            (found - at <= PLACE).then_some(found + part.len())
        })
    };
    source.match_indices(parts[0]).any(|(start, _)| follows(start).is_some())
}

/// Code spans of the rows of tables that have a column of messages, in that column.
fn quoted(prose: &str) -> Vec<String> {
    let (mut out, mut column) = (Vec::new(), None);
    for line in prose.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        if !line.starts_with('|') {
            column = None;
        } else if let Some(at) = cells.iter().position(|cell| *cell == "message") {
            column = Some(at);
        } else if let Some(cell) = column.and_then(|at| cells.get(at)) {
            out.extend(super::spans(cell));
        }
    }
    out
}

#[test]
fn the_messages_on_the_page_of_errors_are_the_programs() {
    let mut all = Vec::new();
    for name in std::fs::read_dir(root().join("crates")).unwrap() {
        sources(&name.unwrap().path().join("src"), &mut all);
    }
    let messages = quoted(&page("docs/errors.md").prose);
    assert!(messages.len() > 70, "only {} messages were found", messages.len());
    let mut faults = Vec::new();
    for message in &messages {
        let parts: Vec<&str> = message.split('…').map(str::trim).filter(|part| part.len() > 1).collect();
        let fixed: usize = parts.iter().map(|part| part.len()).sum();
        if fixed < 10 {
            faults.push(format!("`{message}` says too little to be found"));
        } else if !all.iter().any(|source| has(source, &parts)) {
            faults.push(format!("`{message}` is in no source"));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn parts_must_be_there_in_order_and_near_each_other() {
    let source = joined("#[error(\"port {port} on {host} is \\\n        in use (\\\"really\\\")\")]");
    assert!(has(&source, &["port", "on", "is in use (\"really\")"]));
    assert!(!has(&source, &["on", "port"]) && !has(&source, &["port", "is free"]));
    assert!(!has(&format!("one {} two", " ".repeat(100)), &["one", "two"]));
}
