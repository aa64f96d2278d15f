//! Which of our crates may use which, and what must never come into the lower ones.
//!
//! The arrows are those of ARCHITECTURE.md, "Code map". A crate that is not in the table is a fault: its place has to be
//! decided first.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Report, TrackedFile};

/// Crate, what it may use, what its tests may use besides.
const ARROWS: [(&str, &[&str], &[&str]); 9] = [
    ("longwave-model", &[], &[]),
    ("longwave-text", &[], &[]),
    ("longwave-engine", &["longwave-model"], &[]),
    ("longwave-cpu", &["longwave-engine", "longwave-model"], &[]),
    ("longwave-cuda", &["longwave-engine", "longwave-model"], &["longwave-cpu"]),
    ("longwave-link", &["longwave-engine", "longwave-model"], &[]),
    ("longwave-serve", &["longwave-engine", "longwave-text", "longwave-link"], &[]),
    (
        "longwave",
        &[
            "longwave-model",
            "longwave-text",
            "longwave-engine",
            "longwave-cpu",
            "longwave-cuda",
            "longwave-link",
            "longwave-serve",
        ],
        &[],
    ),
    ("xtask", &[], &[]),
];

/// Crates without an async runtime, a server or a driver; text alone may carry one inside a dependency.
const LOWER: [&str; 4] = ["longwave-model", "longwave-text", "longwave-engine", "longwave-cpu"];
const RUNTIMES: [&str; 8] = ["tokio", "axum", "hyper", "async-std", "smol", "reqwest", "cudarc", "zeromq"];

pub(super) fn check(files: &[TrackedFile], metadata: &Value, report: &mut Report) {
    for package in ours(metadata) {
        let name = text(package, "name");
        let Some((manifest, content)) = manifest_of(files, name) else {
            report.fault("Cargo.toml", 1, format!("{name} has no tracked Cargo.toml; commit it"));
            continue;
        };
        let Some((_, uses, tests)) = ARROWS.iter().find(|(crate_name, _, _)| *crate_name == name) else {
            report.fault(
                manifest,
                1,
                format!("{name} has no place yet; add it to ARCHITECTURE.md and to xtask's table"),
            );
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = text(dependency, "name");
            let line = content.lines().position(|line| line.starts_with(target)).map_or(1, |at| at + 1);
            let in_tests = dependency["kind"] == "dev";
            let is_ours = target.starts_with("longwave");
            if is_ours && !uses.contains(&target) && !(in_tests && tests.contains(&target)) {
                report.fault(
                    manifest,
                    line,
                    format!("{name} must not use {target}; see ARCHITECTURE.md, \"Code map\""),
                );
            }
            if LOWER.contains(&name) && RUNTIMES.contains(&target) {
                report.fault(manifest, line, format!("{name} must not use {target}; keep it above longwave-serve"));
            }
        }
        if LOWER.contains(&name) && name != "longwave-text" {
            for runtime in reachable(metadata, text(package, "id")).intersection(&RUNTIMES.into()) {
                report.fault(manifest, 1, format!("{name} pulls in {runtime}; find it with `cargo tree -i {runtime}`"));
            }
        }
    }
}

/// Packages of this workspace.
fn ours(metadata: &Value) -> impl Iterator<Item = &Value> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages.filter(|package| package["source"].is_null())
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn manifest_of<'a>(files: &'a [TrackedFile], name: &str) -> Option<(&'a str, &'a str)> {
    let line = format!("name = \"{name}\"");
    let manifests = files.iter().filter(|file| file.path.ends_with("/Cargo.toml"));
    manifests
        .filter_map(|file| Some((file.path.as_str(), file.text.as_deref()?)))
        .find(|(_, content)| content.lines().any(|l| l == line))
}

/// Names of all packages that `start` needs to build and to test.
fn reachable<'a>(metadata: &'a Value, start: &'a str) -> BTreeSet<&'a str> {
    let nodes = || metadata["resolve"]["nodes"].as_array().into_iter().flatten();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut seen = BTreeSet::from([start]);
    let mut open = vec![start];
    while let Some(id) = open.pop() {
        let Some(node) = nodes().find(|node| text(node, "id") == id) else { continue };
        for dependency in node["deps"].as_array().into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            // The tests of other crates are not built for this one.
            let for_tests_only = kinds.clone().count() > 0 && kinds.clone().all(|kind| kind["kind"] == "dev");
            let target = text(dependency, "pkg");
            if (id == start || !for_tests_only) && seen.insert(target) {
                open.push(target);
            }
        }
    }
    packages.filter(|package| seen.contains(text(package, "id"))).map(|package| text(package, "name")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn wrong_arrows_and_hidden_runtimes_are_found() {
        let manifest =
            "[package]\nname = \"longwave-engine\"\n[dependencies]\nlongwave-cpu.workspace = true\nhelper = \"1\"\n";
        let path = "crates/engine/Cargo.toml".to_owned();
        let files = [TrackedFile { path, bytes: 0, text: Some(manifest.to_owned()) }];
        let dependency = |pkg: &str, kind: Value| json!({"pkg": pkg, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [
                {"id": "engine", "name": "longwave-engine", "source": null, "dependencies": [
                    {"name": "longwave-cpu", "kind": null}, {"name": "helper", "kind": "dev"},
                ]},
                {"id": "helper", "name": "helper", "source": "registry", "dependencies": []},
                {"id": "tokio", "name": "tokio", "source": "registry", "dependencies": []},
                {"id": "axum", "name": "axum", "source": "registry", "dependencies": []},
            ],
            "resolve": {"nodes": [
                {"id": "engine", "deps": [dependency("helper", json!("dev"))]},
                {"id": "helper", "deps": [dependency("tokio", json!(null)), dependency("axum", json!("dev"))]},
            ]},
        });
        let mut report = Report::default();
        check(&files, &metadata, &mut report);
        let lines: Vec<String> = report.faults.iter().map(|fault| fault.to_string()).collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("crates/engine/Cargo.toml:4: longwave-engine must not use longwave-cpu"));
        assert!(lines[1].starts_with("crates/engine/Cargo.toml:1: longwave-engine pulls in tokio"));
    }
}
