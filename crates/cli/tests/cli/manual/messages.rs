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

/// Where messages are that people meet when a server starts and when a request is refused.
const FILES: [&str; 17] = [
    "cli/src/backend.rs",
    "cli/src/load.rs",
    "cli/src/serve.rs",
    "cli/src/serve/batching.rs",
    "cli/src/serve/security.rs",
    "cli/src/source.rs",
    "cli/src/tiers.rs",
    "cuda/src/backend.rs",
    "cuda/src/driver/context.rs",
    "engine/src/request.rs",
    "engine/src/tier/directory.rs",
    "model/src/checkpoint.rs",
    "model/src/config.rs",
    "serve/src/batch/store.rs",
    "serve/src/security/keys.rs",
    "serve/src/security/tls.rs",
    "serve/src/server.rs",
];

/// The texts of errors in a source, and how much of each is fixed.
fn errors(source: &str) -> Vec<(String, usize)> {
    let source = source.replace("\\\"", "\u{1}");
    let source = joined(source.split("#[cfg(test)]").next().unwrap_or_default());
    let starts = ["#[error(", "bail!("];
    let texts = starts.iter().flat_map(|start| source.split(start).skip(1)).filter_map(|rest| {
        let text = rest.trim_start().strip_prefix('"')?.split('"').next()?;
        Some(text.replace('\u{1}', "\""))
    });
    let fixed = |text: &str| text.split('{').map(|part| part.split('}').next_back().unwrap_or("").len()).sum();
    texts.map(|text| (text.clone(), fixed(&text))).collect()
}

#[test]
fn every_error_of_a_start_and_every_code_of_a_request_is_on_the_page() {
    let prose = page("docs/errors.md").prose;
    let (messages, named) = (quoted(&prose), super::spans(&prose));
    let parts =
        |message: &str| message.split('…').map(|p| p.trim().to_owned()).filter(|p| p.len() > 1).collect::<Vec<_>>();
    let read = |path: &str| std::fs::read_to_string(root().join("crates").join(path)).unwrap();
    let (mut missing, mut count) = (Vec::new(), 0);
    for path in FILES {
        for (text, fixed) in errors(&read(path)) {
            count += 1;
            let is = |message: &String| has(&text, &parts(message).iter().map(String::as_str).collect::<Vec<_>>());
            if fixed > 11 && !messages.iter().any(is) {
                missing.push(format!("{path}: {text}"));
            }
        }
    }
    let of_errors = read("serve/src/errors.rs");
    let literals = of_errors.split('"').skip(1).step_by(2).filter(|text| text.contains('_'));
    let codes = literals.filter(|text| text.chars().all(|c| c.is_ascii_lowercase() || c == '_'));
    // The kinds of errors end so, and one code.
    for code in codes.filter(|text| !text.ends_with("_error") || *text == "internal_error") {
        if !named.iter().any(|name| name == code) {
            missing.push(format!("the code {code}"));
        }
    }
    assert!(missing.is_empty(), "docs/errors.md does not have\n{}", missing.join("\n"));
    assert!(count > 60, "only {count} errors were found");
}

#[test]
fn parts_must_be_there_in_order_and_near_each_other() {
    let source = joined("#[error(\"port {port} on {host} is \\\n        in use (\\\"really\\\")\")]");
    assert!(has(&source, &["port", "on", "is in use (\"really\")"]));
    assert!(!has(&source, &["on", "port"]) && !has(&source, &["port", "is free"]));
    assert!(!has(&format!("one {} two", " ".repeat(100)), &["one", "two"]));
}
