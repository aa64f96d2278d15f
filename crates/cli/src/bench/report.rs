//! A load as a table for people and as JSON for programs. The JSON has the field names of vLLM's `bench serve`.
//! Nothing is computed here that the summary does not hold.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::bench::load::Plan;
use crate::bench::percentiles::label;
use crate::bench::record::Record;
use crate::bench::summary::{LATENCIES, Summary};
use crate::bench::workload::Endpoint;
use crate::units::grouped;

/// What was run.
pub struct Setting {
    /// Address of the server.
    pub url: String,
    /// Model that was asked for.
    pub model: String,
    /// Route that was asked.
    pub endpoint: Endpoint,
    /// When it was asked.
    pub plan: Plan,
    /// Requests of a session.
    pub turns: u32,
    /// Percentiles to report.
    pub percentiles: Vec<f64>,
}

impl Setting {
    /// The load in words.
    pub fn load(&self) -> String {
        let agents = if self.turns > 1 { format!(" of {} turns", self.turns) } else { String::new() };
        let most = self.plan.sessions.map(|n| format!("{n} at once{agents}"));
        match (self.plan.rate, most) {
            (None, most) => most.unwrap_or_default(),
            (Some(rate), None) => format!("{rate} arrivals/s{agents}"),
            (Some(rate), Some(most)) => format!("{rate} arrivals/s, at most {most}"),
        }
    }
}

/// The table.
pub fn table(setting: &Setting, summary: &Summary) -> String {
    let mut out = format!("{} on {}, {}\n\n", setting.model, setting.url, setting.load());
    let rate = |count: u64| format!("{:.1}/s", summary.per_second(count));
    let failed = if summary.failed > 0 { format!(", {} FAILED", grouped(summary.failed)) } else { String::new() };
    let requests = format!(
        "{} in {:.1} s{failed}, {}, at most {} at once",
        grouped(summary.completed),
        summary.duration_s,
        rate(summary.completed),
        summary.peak_running
    );
    line(&mut out, "requests", &requests);
    if summary.targets.any() {
        let share = 100.0 * summary.good as f64 / summary.completed.max(1) as f64;
        let targets = summary.targets.describe();
        line(
            &mut out,
            "within targets",
            &format!("{} ({share:.0} %), {}: {targets}", summary.good, rate(summary.good)),
        );
    }
    let cached = summary.cached_tokens.map(|cached| {
        let share = 100.0 * cached as f64 / summary.prompt_tokens.max(1) as f64;
        format!(", {} ({share:.0} %) from the cache", grouped(cached))
    });
    let prompt =
        format!("{}, {}{}", grouped(summary.prompt_tokens), rate(summary.prompt_tokens), cached.unwrap_or_default());
    line(&mut out, "prompt tokens", &prompt);
    let peak = summary.tokens_by_second.iter().copied().fold(0.0, f64::max);
    let output =
        format!("{}, {}, at most {peak:.0} in a second", grouped(summary.output_tokens), rate(summary.output_tokens));
    line(&mut out, "output tokens", &output);

    let mut titles = format!("\n{:<24}{:>10}{:>10}", "milliseconds", "mean", "std");
    for percent in &setting.percentiles {
        write!(titles, "{:>10}", label(*percent)).expect("writing to a String cannot fail");
    }
    out += &titles;
    out += &format!("{:>10}\n", "max");
    for ((_, title), distribution) in LATENCIES.iter().zip(&summary.latencies_ms) {
        let Some(d) = distribution else { continue };
        out += &format!("{title:<24}{}{}", cell(d.mean), cell(d.std));
        setting.percentiles.iter().for_each(|percent| out += &cell(d.at(*percent)));
        out += &format!("{}\n", cell(d.at(100.0)));
    }
    out
}

fn line(out: &mut String, title: &str, text: &str) {
    writeln!(out, "{title:<24}{text}").expect("writing to a String cannot fail");
}

/// Four figures, in ten columns.
fn cell(value: f64) -> String {
    let digits = if value < 10.0 {
        3
    } else if value < 100.0 {
        2
    } else {
        1
    };
    format!("{value:>10.digits$}")
}

/// The same with vLLM's names; `records` adds the times of every request.
pub fn json(setting: &Setting, summary: &Summary, records: Option<&[Record]>) -> Value {
    let plan = &setting.plan;
    let mut out = json!({
        "endpoint_type": setting.endpoint.route(),
        "base_url": setting.url,
        "model_id": setting.model,
        "num_prompts": summary.completed + summary.failed,
        // As vLLM writes a load without a rate.
        "request_rate": plan.rate.map_or(Value::from("inf"), Value::from),
        "max_concurrency": plan.sessions,
        "turns": setting.turns,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.prompt_tokens,
        "total_cached_tokens": summary.cached_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.per_second(summary.completed),
        "request_goodput": summary.targets.any().then(|| summary.per_second(summary.good)),
        "output_throughput": summary.per_second(summary.output_tokens),
        "total_token_throughput": summary.per_second(summary.prompt_tokens + summary.output_tokens),
        "max_output_tokens_per_s": summary.tokens_by_second.iter().copied().fold(0.0, f64::max),
        "max_concurrent_requests": summary.peak_running,
    });
    let fields = out.as_object_mut().expect("an object was written");
    for ((name, _), distribution) in LATENCIES.iter().zip(&summary.latencies_ms) {
        let Some(d) = distribution else { continue };
        fields.insert(format!("mean_{name}_ms"), d.mean.into());
        fields.insert(format!("median_{name}_ms"), d.median().into());
        fields.insert(format!("std_{name}_ms"), d.std.into());
        for percent in &setting.percentiles {
            fields.insert(format!("{}_{name}_ms", label(*percent)), d.at(*percent).into());
        }
    }
    if let Some(records) = records {
        detailed(fields, records);
    }
    out
}

fn detailed(fields: &mut Map<String, Value>, records: &[Record]) {
    let list = |of: &dyn Fn(&Record) -> Value| records.iter().map(of).collect::<Value>();
    fields.insert("start_times".into(), list(&|r| r.sent_s.into()));
    fields.insert("input_lens".into(), list(&|r| r.prompt_tokens.into()));
    fields.insert("output_lens".into(), list(&|r| r.output_tokens.into()));
    fields.insert("ttfts".into(), list(&|r| r.ttft_s.into()));
    fields.insert("itls".into(), list(&|r| r.gaps_s.clone().into()));
    fields.insert("latencies".into(), list(&|r| r.latency_s.into()));
    fields.insert("errors".into(), list(&|r| r.error.clone().unwrap_or_default().into()));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::summary::Targets;

    fn setting(rate: Option<f64>, sessions: Option<usize>, turns: u32) -> Setting {
        let (count, duration, think, timeout) = (2, None, Duration::ZERO, Duration::from_secs(1));
        Setting {
            url: "http://here:1".into(),
            model: "m".into(),
            endpoint: Endpoint::Chat,
            plan: Plan { sessions, rate, count, duration, think, timeout },
            turns,
            percentiles: vec![50.0, 99.0],
        }
    }

    fn records() -> Vec<Record> {
        let one = Record {
            prompt_tokens: 100,
            cached_tokens: Some(25),
            output_tokens: 3,
            ttft_s: 0.25,
            latency_s: 0.35,
            gaps_s: vec![0.05, 0.05],
            ..Record::default()
        };
        vec![one.clone(), one, Record::failed(0.1, 0.2, "503")]
    }

    #[test]
    fn the_json_has_the_names_of_vllm() {
        let summary = Summary::of(&records(), 0.5, &Targets::read(&["ttft:300".into()]).unwrap());
        let json = json(&setting(None, Some(8), 1), &summary, Some(&records()));
        for (name, value) in [
            ("completed", json!(2)),
            ("failed", json!(1)),
            ("num_prompts", json!(3)),
            ("max_concurrency", json!(8)),
            ("request_rate", json!("inf")),
            ("total_input_tokens", json!(200)),
            ("total_output_tokens", json!(6)),
            ("request_throughput", json!(4.0)),
            ("request_goodput", json!(4.0)),
            ("output_throughput", json!(12.0)),
            ("total_token_throughput", json!(412.0)),
            ("mean_ttft_ms", json!(250.0)),
            ("median_ttft_ms", json!(250.0)),
            ("p99_ttft_ms", json!(250.0)),
            ("input_lens", json!([100, 100, 0])),
            ("errors", json!(["", "", "503"])),
        ] {
            assert_eq!(json[name], value, "{name}");
        }
        for name in ["tpot", "itl", "e2el"] {
            assert!(json[format!("median_{name}_ms")].as_f64().unwrap() > 0.0);
        }
    }

    #[test]
    fn the_table_says_what_ran_and_what_failed() {
        let summary = Summary::of(&records(), 0.5, &Targets::default());
        let text = table(&setting(Some(2.5), Some(8), 3), &summary);
        for part in [
            "m on http://here:1",
            "2.5 arrivals/s, at most 8 at once of 3 turns",
            "1 FAILED",
            "50 (25 %) from the cache",
            "time to first token",
            "p99",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(!text.contains("within targets"));
    }
}
