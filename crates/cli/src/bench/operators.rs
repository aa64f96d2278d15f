//! Operators of a step beside their floors, as a table for people and as JSON for programs.
//!
//! Shares are of the operators' sum. An operator without a floor, and one whose floor is shorter than a launch, has no
//! ratio: memory and arithmetic are not what it waits for.

use std::fmt::Write as _;

use longwave_model::floors::{self, Roofs, StepShape, Work};
use serde_json::{Value, json};

use crate::bench::depth::Measured;
use crate::units::grouped;

/// What the floors are made of.
pub struct Probe {
    /// What the machine can do.
    pub roofs: Roofs,
    /// Microseconds of a launch that does nothing; `None` where nothing is launched.
    pub launch_us: Option<f64>,
    /// Bytes that were read to find out.
    pub read_bytes: u64,
    /// What was looked at: a GPU's name, or an instruction set.
    pub device: String,
}

/// A point of the sweep.
pub struct Point {
    /// What was computed.
    pub shape: StepShape,
    /// Steps with timers.
    pub steps: u32,
    /// How long they took.
    pub measured: Measured,
    /// What they had to do.
    pub work: Vec<Work>,
}

/// One operator in a step.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    name: &'static str,
    calls: f64,
    us: f64,
    share: f64,
    floor_us: Option<f64>,
    ratio: Option<f64>,
}

impl Point {
    fn rows(&self, probe: &Probe) -> Vec<Row> {
        let steps = f64::from(self.steps.max(1));
        let sum: f64 = self.measured.operators.iter().map(|time| time.us).sum();
        let row = |time: &longwave_engine::operators::OperatorTime| {
            let (calls, us) = (f64::from(time.calls) / steps, time.us / steps);
            let floor_us = floors::step_us(&self.work, &probe.roofs, time.name);
            let compared = floor_us.filter(|floor| *floor > probe.launch_us.unwrap_or(0.0) * calls);
            Row { name: time.name, calls, us, share: time.us / sum, floor_us, ratio: compared.map(|f| us / f) }
        };
        self.measured.operators.iter().map(row).collect()
    }

    fn title(&self) -> String {
        let (shape, behind) = (&self.shape, grouped(self.shape.context.into()));
        match (shape.sequences, shape.rows) {
            (1, 1) => format!("1 sequence behind {behind} tokens"),
            (n, 1) => format!("{n} sequences behind {behind} tokens each"),
            (_, rows) => format!("a chunk of {} tokens behind {behind}", grouped(rows.into())),
        }
    }
}

/// Sum of the operators and of their floors, us a step.
fn sums(rows: &[Row]) -> [f64; 2] {
    [rows.iter().map(|row| row.us).sum(), rows.iter().filter_map(|row| row.floor_us).sum()]
}

/// One line about the machine.
pub fn machine(probe: &Probe) -> String {
    let (roofs, tera) = (&probe.roofs, |flop: f64| flop / 1e12);
    let reads = roofs.read_bytes_per_s / 1e9;
    match probe.launch_us {
        Some(launch_us) => format!(
            "{}: reads {reads:.0} GB/s, a launch takes {launch_us:.1} us; floors with {:.0} TFLOP/s of bf16 and {:.0} of fp8\n",
            probe.device,
            tera(roofs.bf16_flop_per_s),
            tera(roofs.fp8_flop_per_s)
        ),
        None => format!(
            "{}: reads {reads:.1} GB/s where a step's {} lie, {:.3} TFLOP/s\n",
            probe.device,
            crate::units::show_short(probe.read_bytes),
            tera(roofs.bf16_flop_per_s)
        ),
    }
}

/// The table of a point.
pub fn table(point: &Point, probe: &Probe) -> String {
    let rows = point.rows(probe);
    let [us, floor_us] = sums(&rows);
    let mut out = format!(
        "\n{}: a step takes {:.3} ms, {:.3} with timers\n{:<28}{:>7}{:>12}{:>12}{:>8}{:>12}{:>9}\n",
        point.title(),
        point.measured.step_ms,
        point.measured.timed_ms,
        "operator",
        "calls",
        "us a call",
        "us a step",
        "share",
        "floor, us",
        "ratio"
    );
    let mut line = |name: &str, calls: String, each: String, us: f64, share: f64, floor: String, ratio: String| {
        writeln!(out, "{name:<28}{calls:>7}{each:>12}{us:>12.1}{:>7.1}%{floor:>12}{ratio:>9}", share * 100.0)
            .expect("writing to a String cannot fail");
    };
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    for row in &rows {
        line(
            row.name,
            format!("{:.0}", row.calls),
            format!("{:.2}", row.us / row.calls),
            row.us,
            row.share,
            or_none(row.floor_us.map(|us| format!("{us:.1}"))),
            or_none(row.ratio.map(|ratio| format!("{ratio:.2}"))),
        );
    }
    let ratio = or_none((floor_us > 0.0).then(|| format!("{:.2}", us / floor_us)));
    line("sum", String::new(), String::new(), us, 1.0, format!("{floor_us:.1}"), ratio);
    out
}

/// The probe as JSON.
pub fn json_probe(probe: &Probe) -> Value {
    let roofs = &probe.roofs;
    json!({
        "device": probe.device, "read_bytes": probe.read_bytes, "read_bytes_per_s": roofs.read_bytes_per_s,
        "bf16_flop_per_s": roofs.bf16_flop_per_s, "fp8_flop_per_s": roofs.fp8_flop_per_s,
        "tf32_flop_per_s": roofs.tf32_flop_per_s, "launch_us": probe.launch_us,
    })
}

/// A point as JSON; times of operators are of a step.
pub fn json_point(point: &Point, probe: &Probe) -> Value {
    let rows = point.rows(probe);
    let [us, floor_us] = sums(&rows);
    let operators: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "operator": row.name, "calls": row.calls, "us_per_call": row.us / row.calls, "us": row.us,
                "share": row.share, "floor_us": row.floor_us, "ratio": row.ratio,
            })
        })
        .collect();
    json!({
        "kind": if point.shape.rows == 1 { "decode" } else { "prefill" },
        "batch_size": point.shape.sequences, "context_len": point.shape.context, "tokens": point.shape.rows,
        "step_ms": point.measured.step_ms, "step_with_timers_ms": point.measured.timed_ms, "steps": point.steps,
        "operators": operators, "operators_us": us, "floor_us": floor_us,
    })
}

#[cfg(test)]
mod tests {
    use longwave_engine::operators::OperatorTime;
    use longwave_model::floors::Rate;

    use super::*;

    /// Two steps; floors of 10 us a call for "wq_b", and of 0.5 for "router".
    fn point() -> Point {
        let work = |name, bytes| Work { name, calls: 2, bytes, flop: 0.0, rate: Rate::Fp8 };
        let time = |name, us| OperatorTime { name, calls: 4, us };
        Point {
            shape: StepShape { sequences: 8, rows: 1, context: 8192, logits: 8, ranks: 1 },
            steps: 2,
            measured: Measured {
                step_ms: 0.05,
                timed_ms: 0.07,
                operators: vec![time("wq_b", 60.0), time("router", 30.0), time("sampling", 10.0)],
            },
            work: vec![work("wq_b", 10e3), work("router", 500.0)],
        }
    }

    fn probe(launch_us: Option<f64>) -> Probe {
        let (read_bytes_per_s, flop) = (1e9, 1e12);
        let roofs = Roofs { read_bytes_per_s, bf16_flop_per_s: flop, fp8_flop_per_s: flop, tf32_flop_per_s: flop };
        Probe { roofs, launch_us, read_bytes: 1 << 20, device: "it".into() }
    }

    #[test]
    fn operators_are_compared_with_floors_that_are_longer_than_a_launch() {
        let json = json_point(&point(), &probe(Some(1.4)));
        let operator = |i: usize, name: &str| json["operators"][i][name].as_f64();
        assert_eq!(
            (operator(0, "calls"), operator(0, "us"), operator(0, "us_per_call")),
            (Some(2.0), Some(30.0), Some(15.0))
        );
        assert_eq!(
            (operator(0, "share"), operator(0, "floor_us"), operator(0, "ratio")),
            (Some(0.6), Some(20.0), Some(1.5))
        );
        assert_eq!((operator(1, "floor_us"), operator(1, "ratio")), (Some(1.0), None));
        assert_eq!((operator(2, "floor_us"), operator(2, "ratio")), (None, None));
        assert_eq!((json["operators_us"].as_f64(), json["floor_us"].as_f64()), (Some(50.0), Some(21.0)));
        assert_eq!((&json["kind"], &json["context_len"]), (&"decode".into(), &8192.into()));
        // Nothing is launched on a CPU.
        assert_eq!(json_point(&point(), &probe(None))["operators"][1]["ratio"].as_f64(), Some(15.0));
    }

    #[test]
    fn the_table_has_a_line_for_each_operator_and_their_sum() {
        let text = table(&point(), &probe(Some(1.4)));
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(
            text.contains("8 sequences behind 8,192 tokens each: a step takes 0.050 ms, 0.070 with timers"),
            "{text}"
        );
        assert_eq!(words[3], ["wq_b", "2", "15.00", "30.0", "60.0%", "20.0", "1.50"]);
        assert_eq!(words[5], ["sampling", "2", "2.50", "5.0", "10.0%", "-", "-"]);
        assert_eq!(words[6], ["sum", "50.0", "100.0%", "21.0", "2.38"]);
        let mut chunk = point();
        chunk.shape = StepShape { sequences: 1, rows: 2048, ..chunk.shape };
        assert!(table(&chunk, &probe(None)).contains("a chunk of 2,048 tokens behind 8,192: "));
    }
}
