//! A load as an SVG picture: the four latencies as cumulative shares of requests, and the output of every second.
//!
//! One file without scripts, fonts or links; light or dark as the viewer is. Assumes numbers that the summary holds.

use std::fmt::Write;

use crate::bench::percentiles::Distribution;
use crate::bench::record::Record;
use crate::bench::report::Setting;
use crate::bench::summary::{LATENCIES, Summary};

const WIDTH: f64 = 960.0;
const PANEL: (f64, f64) = (404.0, 168.0);
const LEFT: [f64; 2] = [56.0, 532.0];
const TOP: [f64; 3] = [108.0, 352.0, 596.0];
/// Points of a curve: more cannot be seen.
const POINTS: usize = 200;

const STYLE: &str = "
  svg { background: #fff; font: 13px system-ui, sans-serif; color: #1d2430 }
  text { fill: currentColor } .soft { fill: #5d6878 } .grid { stroke: #dde2e9 } .axis { stroke: #98a2b0 }
  .curve { fill: none; stroke: #1f5fbf; stroke-width: 2 } .bar { fill: #1f5fbf } .mark { stroke: #b4530a; stroke-dasharray: 3 3 }
  .title { font-size: 18px; font-weight: 600 } .name { font-weight: 600 } .value { fill: #b4530a }
  @media (prefers-color-scheme: dark) {
    svg { background: #12161c; color: #e6eaf0 } .soft { fill: #9aa6b6 } .grid { stroke: #2a323d } .axis { stroke: #5d6878 }
    .curve { stroke: #7fb0ff } .bar { fill: #7fb0ff } .mark { stroke: #ffb26b } .value { fill: #ffb26b }
  }";

/// The picture.
pub fn svg(setting: &Setting, summary: &Summary, records: &[Record]) -> String {
    let height = TOP[2] + PANEL.1 + 56.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n<title>Load on {}</title>\n<style>{STYLE}\n</style>\n",
        escaped(&setting.model)
    );
    text(&mut out, LEFT[0], 40.0, "title", "start", &format!("{} under load", setting.model));
    let failed = if summary.failed > 0 { format!(", {} failed", summary.failed) } else { String::new() };
    let line = format!(
        "{}: {} requests in {:.1} s{failed}, {:.1} output tokens/s",
        setting.load(),
        summary.completed,
        summary.duration_s,
        summary.per_second(summary.output_tokens)
    );
    text(&mut out, LEFT[0], 62.0, "soft", "start", &line);
    for (index, ((_, name), distribution)) in LATENCIES.iter().zip(&summary.latencies_ms).enumerate() {
        let (x, y) = (LEFT[index % 2], TOP[index / 2]);
        text(&mut out, x, y - 12.0, "name", "start", &format!("{}{}, ms", name[..1].to_uppercase(), &name[1..]));
        if let Some(distribution) = distribution {
            shares(&mut out, x, y, distribution);
        }
    }
    seconds(&mut out, summary, records);
    out + "</svg>\n"
}

/// A cumulative curve with its median and 99th percentile.
fn shares(out: &mut String, x: f64, y: f64, distribution: &Distribution) {
    let (width, height) = PANEL;
    // The last percent is often far away; the axis ends a little behind it.
    let most = nice(distribution.at(99.0) * 1.15);
    let at = |value: f64| x + width * (value / most).min(1.0);
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let level = y + height * (1.0 - share);
        rule(out, if share == 0.0 { "axis" } else { "grid" }, (x, level), (x + width, level));
        text(out, x - 8.0, level + 4.0, "soft", "end", &format!("{:.0} %", share * 100.0));
    }
    for part in 0..=4 {
        let value = most * f64::from(part) / 4.0;
        text(out, at(value), y + height + 18.0, "soft", "middle", &short(value));
    }
    let mut path = String::new();
    for point in 0..=POINTS {
        let percent = 100.0 * point as f64 / POINTS as f64;
        let command = if point == 0 { 'M' } else { 'L' };
        let level = y + height * (1.0 - percent / 100.0);
        write!(path, "{command}{:.1} {level:.1}", at(distribution.at(percent)))
            .expect("writing to a String cannot fail");
    }
    writeln!(out, "<path class=\"curve\" d=\"{path}\"/>").expect("writing to a String cannot fail");
    for (percent, level) in [(50.0, 0.66), (99.0, 0.88)] {
        let value = distribution.at(percent);
        rule(out, "mark", (at(value), y), (at(value), y + height));
        let (side, anchor) = if value < most * 0.7 { (6.0, "start") } else { (-6.0, "end") };
        text(out, at(value) + side, y + height * level, "value", anchor, &format!("p{percent} {}", short(value)));
    }
}

/// Output tokens of every second, and how many requests were under way.
fn seconds(out: &mut String, summary: &Summary, records: &[Record]) {
    let (x, y, width, height) = (LEFT[0], TOP[2], LEFT[1] + PANEL.0 - LEFT[0], PANEL.1);
    text(out, x, y - 12.0, "name", "start", "Output tokens in each second; the line: requests under way");
    let count = summary.tokens_by_second.len();
    let most = nice(summary.tokens_by_second.iter().copied().fold(1.0, f64::max));
    for share in [0.0, 0.5, 1.0] {
        let level = y + height * (1.0 - share);
        rule(out, if share == 0.0 { "axis" } else { "grid" }, (x, level), (x + width, level));
        text(out, x - 8.0, level + 4.0, "soft", "end", &short(most * share));
    }
    // Long loads: neighbouring seconds share a bar, which shows their mean.
    let (per_bar, slot) = (count.div_ceil(240), width / count as f64);
    for (index, chunk) in summary.tokens_by_second.chunks(per_bar).enumerate() {
        let tall = height * chunk.iter().sum::<f64>() / chunk.len() as f64 / most;
        let (left, wide) = (x + slot * (index * per_bar) as f64, slot * chunk.len() as f64);
        let gap = (wide * 0.12).min(2.0);
        let (left, top, wide) = (left + gap, y + height - tall, wide - 2.0 * gap);
        writeln!(out, "<rect class=\"bar\" opacity=\".55\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{wide:.1}\" height=\"{tall:.1}\"/>")
            .expect("writing to a String cannot fail");
    }
    let peak = summary.peak_running.max(1) as f64;
    let mut path = String::new();
    for point in 0..=POINTS {
        let at_s = summary.duration_s * point as f64 / POINTS as f64;
        let running = records.iter().filter(|r| r.sent_s <= at_s && at_s < r.sent_s + r.latency_s).count() as f64;
        let command = if point == 0 { 'M' } else { 'L' };
        let (right, level) = (x + width * point as f64 / POINTS as f64, y + height * (1.0 - running / peak));
        write!(path, "{command}{right:.1} {level:.1}").expect("writing to a String cannot fail");
    }
    writeln!(out, "<path class=\"curve\" d=\"{path}\"/>").expect("writing to a String cannot fail");
    text(out, x + width, y - 12.0, "soft", "end", &format!("at most {} under way", summary.peak_running));
    for part in 0..=4 {
        let share = f64::from(part) / 4.0;
        let anchor = if part == 4 { "end" } else { "middle" };
        text(
            out,
            x + width * share,
            y + height + 18.0,
            "soft",
            anchor,
            &format!("{} s", short(summary.duration_s * share)),
        );
    }
}

fn rule(out: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    writeln!(
        out,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    )
    .expect("writing to a String cannot fail");
}

fn text(out: &mut String, x: f64, y: f64, class: &str, anchor: &str, text: &str) {
    writeln!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escaped(text)
    )
    .expect("writing to a String cannot fail");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A round number that is not smaller.
fn nice(value: f64) -> f64 {
    let value = value.max(1e-3);
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 5.0, 6.0, 8.0, 10.0];
    steps.iter().map(|step| step * power).find(|round| *round >= value * (1.0 - 1e-9)).unwrap_or(10.0 * power)
}

/// Three figures, no zeros at the end.
fn short(value: f64) -> String {
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        for (value, end) in [(0.97, 1.0), (1.0, 1.0), (11.0, 12.0), (99.0, 100.0), (410.0, 500.0)] {
            assert!((nice(value) - end).abs() < 1e-9, "{value}");
        }
        assert_eq!([short(1234.0), short(12.50), short(0.5), short(0.0)], ["1234", "12.5", "0.5", "0"]);
    }
}
