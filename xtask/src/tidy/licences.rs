//! Every package of the dependency tree has a licence that lets anybody use the program.
//!
//! A licence expression holds when the allowed licences satisfy it: of alternatives one is enough, of parts all are
//! needed. Single exceptions stand in a table with the reason.

use serde_json::Value;

use super::Report;

/// Licences that ask for no more than a notice.
const ALLOWED: [&str; 12] = [
    "MIT",
    "MIT-0",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "Zlib",
    "ISC",
    "Unicode-3.0",
    "BSL-1.0",
    "CC0-1.0",
    "Unlicense",
];

/// Package, its licence, why it may stay.
const EXCEPTIONS: [(&str, &str, &str); 2] = [
    ("option-ext", "MPL-2.0", "unchanged; comes with the vendor's crate (deepseek-recipe, tokenizers, hf-hub, dirs)"),
    (
        "webpki-roots",
        "CDLA-Permissive-2.0",
        "a list of certificates, data; same way in, and no connection is ever made",
    ),
];

pub(super) fn check(metadata: &Value, report: &mut Report) {
    let packages: Vec<&Value> = metadata["packages"].as_array().into_iter().flatten().collect();
    let name_of = |package: &Value| package["name"].as_str().unwrap_or_default().to_owned();
    for package in &packages {
        let (name, licence) = (name_of(package), package["license"].as_str().unwrap_or("none"));
        let excepted = EXCEPTIONS.iter().any(|(crate_name, its, _)| *crate_name == name && *its == licence);
        if !excepted && !is_allowed(licence) {
            let version = package["version"].as_str().unwrap_or_default();
            let what = format!(
                "{name} {version} has licence {licence:?}, which is not allowed; do without it (`cargo tree -i {name}`)"
            );
            report.fault("Cargo.lock", 1, what);
        }
    }
    for (name, _, _) in EXCEPTIONS {
        if !packages.iter().any(|package| name_of(package) == name) {
            report.fault("xtask/src/tidy/licences.rs", 1, format!("{name} is gone; take its exception out"));
        }
    }
}

/// Whether the allowed licences satisfy an SPDX expression (`/` is the old spelling of OR).
fn is_allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let holds = any_of(&words, &mut at);
    holds && at == words.len()
}

fn any_of(words: &[&str], at: &mut usize) -> bool {
    let mut holds = all_of(words, at);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        holds |= all_of(words, at);
    }
    holds
}

fn all_of(words: &[&str], at: &mut usize) -> bool {
    let mut holds = one(words, at);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        holds &= one(words, at);
    }
    holds
}

fn one(words: &[&str], at: &mut usize) -> bool {
    let Some(&word) = words.get(*at) else { return false };
    *at += 1;
    if word == "(" {
        let holds = any_of(words, at);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return holds && closed;
    }
    if words.get(*at) == Some(&"WITH") {
        let exception = words.get(*at + 1).copied().unwrap_or_default();
        *at += 2;
        return ALLOWED.contains(&format!("{word} WITH {exception}").as_str());
    }
    ALLOWED.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_hold_as_spdx_says() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "MIT OR GPL-3.0-only",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0-only",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "MIT AND BSD-3-Clause",
        ] {
            assert!(is_allowed(good), "{good}");
        }
        for bad in ["none", "MPL-2.0", "MIT AND GPL-3.0-only", "(MIT OR Apache-2.0", "GPL-2.0-only WITH x OR LGPL-2.1"]
        {
            assert!(!is_allowed(bad), "{bad}");
        }
    }
}
