//! Rules that look at one file at a time: its length, its first lines, words that do not belong in it; and the size of
//! the whole repository. Files under `testdata/` are data and only counted.

use super::{Report, TrackedFile};

/// Most lines of a source file.
const LINES_MAX: usize = 800;
/// Longer files are listed.
const LINES_AIM: usize = 400;
/// Longer files that may stay, with the reason.
const LONG_FILES: [(&str, &str); 0] = [];
/// What all tracked files together may weigh.
const REPOSITORY_BYTES_MAX: u64 = 30 << 20;

/// Words that must not be committed, cut so that this table does not contain them, and what to do about each.
const BANNED: [(&str, &str); 15] = [
    (concat!("to", "do!("), "finish it or return an error that says what is missing"),
    (concat!("unimple", "mented!("), "finish it or return an error that says what is missing"),
    (concat!("db", "g!("), "take the debugging line out"),
    (concat!("FIX", "ME"), "mend it, or file an issue and name it here"),
    (concat!("XX", "X"), "mend it, or file an issue and name it here"),
    (concat!("/wo", "rk/"), "a path of one machine: use a path relative to the repository"),
    (concat!("/ro", "ot/"), "a path of one machine: use a path relative to the repository or $HOME"),
    (concat!("/ho", "me/"), "a path of one machine: use a path relative to the repository or $HOME"),
    (concat!("/tmp/bash", "_jobs"), "a path of one machine: take it out"),
    (concat!("index.crates", ".io"), "a registry host: leave it to cargo's configuration"),
    (concat!("static.crates", ".io"), "a registry host: leave it to cargo's configuration"),
    (concat!("files.python", "hosted.org"), "a registry host: leave it to pip's configuration"),
    (concat!("pypi.org", "/simple"), "a registry host: leave it to pip's configuration"),
    (concat!("--index", "-url"), "a registry host: leave it to pip's configuration"),
    (concat!("//192.", "168."), "a private address: use localhost or a documentation address"),
];

/// Commands that a newcomer and the CI must both run.
const COMMANDS: [&str; 1] = ["tools/test.sh"];

pub(super) fn check(files: &[TrackedFile], report: &mut Report) {
    for file in files.iter().filter(|file| !file.path.starts_with("testdata/")) {
        let Some(text) = &file.text else { continue };
        if is_source(&file.path) {
            length(&file.path, text.lines().count(), report);
        }
        if file.path.ends_with(".rs") {
            first_lines(&file.path, text, report);
        }
        if file.path != "Cargo.lock" {
            words(&file.path, text, report);
        }
    }
    whole(files, report);
}

fn is_source(path: &str) -> bool {
    [".rs", ".py", ".cu", ".cuh", ".js", ".css", ".html", ".sh"].iter().any(|end| path.ends_with(end))
}

fn length(path: &str, lines: usize, report: &mut Report) {
    if lines > LINES_MAX && !LONG_FILES.iter().any(|(name, _)| *name == path) {
        report.fault(path, LINES_MAX + 1, format!("{lines} lines, at most {LINES_MAX}; split it by concept"));
    } else if lines > LINES_AIM {
        report.notes.push(format!("{path} has {lines} lines; aim at {LINES_AIM}"));
    }
}

/// A file says first what it is, what it assumes and what it refuses.
fn first_lines(path: &str, text: &str, report: &mut Report) {
    let said = text
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .filter(|line| !line.trim_start_matches("//!").trim().is_empty())
        .count();
    let least = if is_short_kind(path) { 1 } else { 2 };
    if said < least {
        let what = format!("{said} lines of //! at the top, at least {least}; say what it is, assumes and refuses");
        report.fault(path, 1, what);
    }
}

/// Test files and module lists may say it in one line.
fn is_short_kind(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    path.contains("/tests/") || path.contains("/benches/") || ["mod.rs", "tests.rs", "testing.rs"].contains(&name)
}

fn words(path: &str, text: &str, report: &mut Report) {
    for (number, line) in text.lines().enumerate() {
        for (word, advice) in BANNED {
            if contains(line, word) {
                report.fault(path, number + 1, format!("contains {word:?}; {advice}"));
            }
        }
    }
}

/// A path must start there and not inside a relative path; a word of letters must not be part of a longer one.
fn contains(line: &str, word: &str) -> bool {
    let inner = |c: char| c.is_alphanumeric() || "_.-".contains(c);
    line.match_indices(word).any(|(at, _)| {
        let starts_path = word.starts_with('/') && !word.starts_with("//");
        let letters = word.chars().all(|c| c.is_alphanumeric());
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        !(((starts_path || letters) && before.ends_with(inner)) || (letters && after.starts_with(inner)))
    })
}

fn whole(files: &[TrackedFile], report: &mut Report) {
    let bytes: u64 = files.iter().map(|file| file.bytes).sum();
    if bytes > REPOSITORY_BYTES_MAX {
        let what = format!("all tracked files have {bytes} bytes, at most {REPOSITORY_BYTES_MAX}; take data out");
        report.fault(".", 1, what);
    }
    for needed in ["Cargo.lock", "LICENSE-MIT", "LICENSE-APACHE", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"] {
        if !files.iter().any(|file| file.path == needed) {
            report.fault(needed, 1, "is not tracked by git; commit it");
        }
    }
    for path in ["README.md", ".ci/run"] {
        let text = files.iter().find(|file| file.path == path).and_then(|file| file.text.as_deref()).unwrap_or("");
        for command in COMMANDS.iter().filter(|command| !text.contains(**command)) {
            let what = format!("does not have `{command}`; README.md and .ci/run must name the same commands");
            report.fault(path, 1, what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_where_they_stand_alone() {
        let [path, mark] = [concat!("/wo", "rk/"), concat!("XX", "X")];
        assert!(contains(concat!("see /wo", "rk/main"), path));
        assert!(!contains(concat!("crates/cpu/src/wo", "rk/x.rs"), path));
        assert!(contains(concat!("// XX", "X: later"), mark));
        assert!(!contains(concat!("MXX", "XIV"), mark));
    }

    #[test]
    fn faults_say_where_and_what_to_do() {
        let mut report = Report::default();
        first_lines("crates/a/src/b.rs", "//! One line.\nfn main() {}\n", &mut report);
        words("a.md", concat!("fine\nwith db", "g!(x)\n"), &mut report);
        length("a.rs", 801, &mut report);
        let lines: Vec<String> = report.faults.iter().map(|fault| fault.to_string()).collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].starts_with("crates/a/src/b.rs:1: 1 lines of //! at the top, at least 2; "));
        assert!(lines[1].starts_with("a.md:2: contains "));
        assert!(lines[2].starts_with("a.rs:801: 801 lines, at most 800; "));
    }
}
