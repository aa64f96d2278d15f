//! JSON-Schema-Test-Suite (draft 2020-12, optional parts included) through our grammar: which schemas it takes, and for
//! those whether it allows exactly the valid instances, as JSON text.
//!
//! `testdata/json-schema-suite/draft2020-12.json` is the suite, one case per line: file, description, schema, tests
//! (description, instance, valid). `exceptions.txt` beside it lists every instance that is judged otherwise, with the
//! reason; a test holds the list to what is so. An instance whose keys come in another order than the grammar wants is
//! valid JSON that a model would have been led to write in that order: it counts as allowed when some order is.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use longwave_text::AnswerRules;
use longwave_text::grammar::{Format, FormatRule};
use serde_json::{Map, Value};

use crate::grammars::{GRAMMARS, follow};

type Case = (String, String, Value, Vec<(String, Value, bool)>);

fn suite() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/json-schema-suite/draft2020-12.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn rules(schema: &Value) -> AnswerRules {
    let format = FormatRule { format: Format::Schema(schema.clone()), param: "response_format".into() };
    AnswerRules { format: Some(format), ..AnswerRules::default() }
}

/// A value with its keys in every order that is worth trying: all of one level, while there are few keys.
fn orders(value: &Value) -> Vec<Value> {
    match value {
        Value::Object(fields) if (1..=5).contains(&fields.len()) => {
            let mut out = Vec::new();
            let keys: Vec<&String> = fields.keys().collect();
            for order in permutations(keys.len()) {
                let inner = order.iter().map(|&i| (keys[i].clone(), orders(&fields[keys[i]])));
                let inner: Vec<(String, Vec<Value>)> = inner.collect();
                let most = inner.iter().map(|(_, values)| values.len()).max().unwrap_or(1);
                for n in 0..most {
                    let pick = |(key, values): &(String, Vec<Value>)| (key.clone(), values[n % values.len()].clone());
                    out.push(Value::Object(inner.iter().map(pick).collect::<Map<_, _>>()));
                }
            }
            out
        }
        Value::Array(items) => {
            let items: Vec<Vec<Value>> = items.iter().map(orders).collect();
            let most = items.iter().map(Vec::len).max().unwrap_or(1);
            (0..most).map(|n| items.iter().map(|values| values[n % values.len()].clone()).collect()).collect()
        }
        other => vec![other.clone()],
    }
}

fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(n - 1);
    shorter.iter().flat_map(|p| (0..n).map(move |at| [&p[..at], &[n - 1], &p[at..]].concat())).collect()
}

#[test]
fn json_schema_suite_2020_12_has_no_exceptions_but_the_listed_ones() {
    let (mut taken, mut valid, mut invalid, mut reordered) = (0, 0, 0, 0);
    let (mut refused, mut found) = (BTreeMap::<String, u32>::new(), Vec::new());
    let suite = suite();
    for (file, what, schema, tests) in &suite {
        let rules = rules(schema);
        if let Err(error) = GRAMMARS.compile(&rules) {
            assert_eq!(error.param.as_deref(), Some("response_format"));
            let reason = error.message.trim_start_matches("response_format: ").chars().take(90).collect();
            *refused.entry(reason).or_default() += 1;
            continue;
        }
        taken += 1;
        for (test, instance, is_valid) in tests {
            let allowed = |value: &Value| follow(&rules, &value.to_string()) == Ok(true);
            let first = allowed(instance);
            let other = !first && orders(instance).iter().any(allowed);
            reordered += u32::from(other && *is_valid);
            *(if *is_valid { &mut valid } else { &mut invalid }) += 1;
            if (first || other) != *is_valid {
                let verdict = if *is_valid { "refused" } else { "allowed" };
                found.push(format!("{verdict}: {file} / {what} / {test}"));
            }
        }
    }
    let mut report = format!(
        "{taken} of {} schemas taken ({:.1} %); of their instances {valid} are valid and {invalid} are not; {} judged \
         otherwise; {reordered} valid ones in another order of keys\n",
        suite.len(),
        100.0 * f64::from(taken) / suite.len() as f64,
        found.len(),
    );
    for (reason, count) in &refused {
        let _ = writeln!(report, "  {count:3} not taken: {reason}");
    }
    println!("{report}{}", found.join("\n"));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/json-schema-suite/exceptions.txt");
    let listed = std::fs::read_to_string(path).unwrap();
    let listed = listed.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let listed: Vec<&str> = listed.map(|line| line.split_once(" -- ").map_or(line, |(test, _)| test)).collect();
    let new: Vec<_> = found.iter().filter(|line| !listed.contains(&line.as_str())).collect();
    let gone: Vec<_> = listed.iter().filter(|line| !found.iter().any(|f| f == *line)).collect();
    assert!(new.is_empty() && gone.is_empty(), "not listed: {new:#?}\nlisted and not so any more: {gone:#?}");
}
