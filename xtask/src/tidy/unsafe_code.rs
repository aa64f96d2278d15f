//! `unsafe` stands only where it has to, and each one says why it is sound.
//!
//! The comment `SAFETY:` (or `# Safety` in the docs of an unsafe function) is on the line itself or in the comments and
//! attributes right above it.

use super::source::{code_only, has_word};
use super::{Report, TrackedFile};

/// Files and folders that may use it.
const ALLOWED: [(&str, &str); 4] = [
    ("crates/cpu/src/simd/", "vector intrinsics, and the calls into functions compiled for an instruction set"),
    ("crates/model/src/checkpoint.rs", "mapping a file into memory"),
    ("crates/cuda/src/driver/", "calls of the CUDA driver"),
    ("crates/engine/tests/engine/allocations.rs", "a test that counts allocations is an allocator"),
];

pub(super) fn check(files: &[TrackedFile], report: &mut Report) {
    for file in files.iter().filter(|file| file.path.ends_with(".rs")) {
        let Some(text) = &file.text else { continue };
        let lines: Vec<&str> = text.lines().collect();
        for (at, _) in code_only(text).lines().enumerate().filter(|(_, line)| has_word(line, "unsafe")) {
            if !ALLOWED.iter().any(|(place, _)| file.path.starts_with(place)) {
                report.fault(&file.path, at + 1, "unsafe outside the files that may use it; move it or do without");
            } else if !is_explained(&lines, at) {
                report.fault(&file.path, at + 1, "unsafe without a reason; write // SAFETY: above it");
            }
        }
    }
}

fn is_explained(lines: &[&str], at: usize) -> bool {
    let says = |line: &str| line.contains("SAFETY:") || line.contains("# Safety");
    let above = lines[..at].iter().rev().take_while(|line| {
        let line = line.trim_start();
        line.starts_with("//") || line.starts_with("#[")
    });
    says(lines[at]) || above.into_iter().any(|line| says(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_may_stand_above_attributes() {
        let lines = ["// SAFETY: it is", "// fine", "#[inline]", "unsafe fn f() {}", "unsafe fn g() {}"];
        assert!(is_explained(&lines, 3));
        assert!(!is_explained(&lines, 4));
    }
}
