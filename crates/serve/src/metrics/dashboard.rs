//! Every metric that the dashboard and the alarms in `deploy/` use is exported, and so is every one in the manual.
//! Only a test; assumes that metrics begin with `vllm:`, `longwave:`, `http_` or `process_`.

use std::collections::BTreeSet;
use std::path::Path;

use longwave_engine::Status;
use longwave_engine::step::Limits;
use serde_json::Value;

use super::families::Sheet;
use super::{Metrics, engine, process};

/// Names of all families, those of tiers and drafts included.
fn exported() -> BTreeSet<String> {
    let metrics = Metrics::new("tiny", 4096);
    // Families with labels appear with their first series.
    metrics.requests.touch();
    metrics.http.touch();
    let limits = Limits { seats: 1, step_tokens: 1, context: 1, units: [1; 3], drafts: 1, in_flight: 1, vocab: 1 };
    let mut status = Status::new(limits);
    status.tiers.host.limit_bytes = 1;
    let mut sheet = Sheet::new(&[]);
    engine::fill(&mut sheet, &status);
    let mut of_process = Sheet::new(&[]);
    process::fill(&mut of_process);
    let all = metrics.of_model.gather().into_iter().chain(sheet.families()).chain(metrics.of_server.gather());
    let all = all.chain(of_process.families());
    all.map(|family| family.name().to_owned()).collect()
}

/// Names of metrics in queries.
fn used(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "_:".contains(c)));
    let ours = ["vllm:", "longwave:", "http_", "process_"];
    words.filter(|word| ours.iter().any(|start| word.starts_with(start))).map(str::to_owned).collect()
}

fn queries(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                match value.as_str() {
                    Some(query) if name == "expr" || name == "query" => *text += &format!("{query}\n"),
                    _ => queries(value, text),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| queries(value, text)),
        _ => {}
    }
}

#[track_caller]
fn check(what: &str, names: BTreeSet<String>, least: usize) {
    let exported = exported();
    assert!(names.len() >= least, "{what}: {names:?}");
    for name in names {
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let known = exported.contains(&name) || family.is_some_and(|family| exported.contains(family));
        assert!(known, "{what} uses {name}, which is not exported");
    }
}

#[test]
fn the_dashboard_shows_only_what_is_exported() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/grafana/longwave.json");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut text = String::new();
    queries(&json, &mut text);
    check("the dashboard", used(&text), 40);
    let ids: Vec<u64> = json["panels"].as_array().unwrap().iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "a panel's id twice");
}

#[test]
fn alarms_watch_only_what_is_exported() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/alerts.yml");
    check("an alarm", used(&std::fs::read_to_string(path).unwrap()), 7);
}

#[test]
fn the_operations_manual_names_only_what_is_exported() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
    // A star stands for the rest of a name.
    let names = used(&std::fs::read_to_string(path).unwrap());
    check("docs/operations.md", names.into_iter().filter(|name| !name.ends_with([':', '_'])).collect(), 20);
}
