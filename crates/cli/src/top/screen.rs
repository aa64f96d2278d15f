//! The screen of `longwave top`: facts, pools, steps with their operators where these are timed, requests, reuse. Draws what
//! a view holds at any size of terminal; what does not fit is left out from below, operators where it is narrow. Assumes views of
//! this version's server and shows zeros for what is missing.

use std::collections::VecDeque;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Paragraph, Row, Sparkline, Table};
use serde_json::Value;

use crate::top::operators::Operators;
use crate::units::grouped;

/// Steps that are remembered.
const STEPS: usize = 400;
/// Seconds over which rates are smoothed.
const SMOOTH_S: f64 = 2.0;
/// Room for operators and their times beside the steps, where a screen has enough for both.
const OPERATOR_COLUMNS: u16 = 50;
const COLUMNS_FOR_OPERATORS: u16 = 96;
/// What units are used for, as the server numbers it.
const USES: [(&str, Color); 6] = [
    ("free", Color::DarkGray),
    ("one request", Color::Blue),
    ("window", Color::Yellow),
    ("checkpoint", Color::Cyan),
    ("kept", Color::Magenta),
    ("shared", Color::White),
];

/// What is known of a server.
pub struct Board {
    url: String,
    view: Option<Value>,
    said: Option<String>,
    /// When the last view came, s.
    at_s: f64,
    /// Tokens per second: prompts, answers.
    rates: [f64; 2],
    /// Wall times of the last steps, us.
    steps: VecDeque<u64>,
    operators: Operators,
}

impl Board {
    /// Nothing known yet.
    pub fn new(url: String) -> Board {
        Board {
            url,
            view: None,
            said: None,
            at_s: 0.0,
            rates: [0.0; 2],
            steps: VecDeque::new(),
            operators: Operators::default(),
        }
    }

    /// A view came at `at_s`.
    pub fn take(&mut self, view: Value, at_s: f64) {
        if let Some(before) = &self.view {
            let passed_s = (at_s - self.at_s).max(1e-3);
            for (rate, name) in self.rates.iter_mut().zip(["prompt_tokens", "output_tokens"]) {
                let new = number(&view[name]).saturating_sub(number(&before[name])) as f64 / passed_s;
                let share = (passed_s / SMOOTH_S).min(1.0);
                *rate += (new - *rate) * share;
            }
        }
        for step in view["step_list"].as_array().into_iter().flatten() {
            self.steps.push_back(number(&step[1]));
        }
        self.operators.take(&view["operators"], at_s);
        self.steps.drain(..self.steps.len().saturating_sub(STEPS));
        (self.view, self.said, self.at_s) = (Some(view), None, at_s);
    }

    /// Something to tell.
    pub fn say(&mut self, what: String) {
        self.said = Some(what);
    }

    /// Draws everything.
    pub fn draw(&self, frame: &mut Frame) {
        let pools = self.view.as_ref().and_then(|view| view["pools"].as_array()).map_or(0, Vec::len) as u16;
        let [title, facts, pools, steps, requests, reports] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(5),
            Constraint::Length(2 + pools),
            Constraint::Length(7),
            Constraint::Fill(2),
            Constraint::Fill(1),
        ])
        .areas(frame.area());
        let end = if self.said.is_some() { "" } else { "   q ends" };
        let said = self.said.as_deref().unwrap_or_default();
        let heading = Line::from(vec![
            "Longwave ".bold(),
            Span::raw(self.url.as_str()),
            Span::styled(end, Style::new().add_modifier(Modifier::DIM)),
            Span::styled(format!("  {said}"), Style::new().fg(Color::Red)),
        ]);
        frame.render_widget(Paragraph::new(heading), title);
        let Some(view) = &self.view else {
            frame.render_widget(Paragraph::new("waiting for the first view …"), facts);
            return;
        };
        frame.render_widget(Paragraph::new(self.facts(view)), facts);
        draw_pools(frame, pools, view);
        let shown = steps.width >= COLUMNS_FOR_OPERATORS && !self.operators.means().is_empty();
        let columns = if shown { OPERATOR_COLUMNS } else { 0 };
        let [steps, operators] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(columns)])
            .spacing(u16::from(columns > 0) * 2)
            .areas(steps);
        self.draw_steps(frame, steps);
        self.draw_operators(frame, operators);
        draw_requests(frame, requests, view);
        draw_reports(frame, reports, view);
    }

    fn facts(&self, view: &Value) -> Vec<Line<'static>> {
        let count = |value: &Value| grouped(number(value));
        let prefix = &view["prefix"];
        let share = |part: u64, whole: u64| format!("{:.0} %", 100.0 * part as f64 / whole.max(1) as f64);
        let drafts: Vec<String> = list(&view["drafts_proposed"])
            .iter()
            .zip(list(&view["drafts_accepted"]))
            .filter(|(proposed, _)| number(proposed) > 0)
            .map(|(proposed, accepted)| share(number(accepted), number(proposed)))
            .collect();
        let drafts = if drafts.is_empty() { "none".to_owned() } else { drafts.join(", ") };
        let stalled = if view["stalled"] == true { "   NO STEP COMPLETES" } else { "" };
        vec![
            Line::from(format!(
                "running {} of {}   waiting {}   gave up seats {}{stalled}",
                count(&view["running"]),
                count(&view["seats"]),
                count(&view["waiting"]),
                count(&view["preempted"])
            )),
            Line::from(format!(
                "answers {:.0} tokens/s ({})   prompts {:.0} tokens/s ({})",
                self.rates[1],
                count(&view["output_tokens"]),
                self.rates[0],
                count(&view["prompt_tokens"])
            )),
            Line::from(format!(
                "from the cache {} of {} prompt tokens   {} blocks, {} checkpoints",
                share(number(&prefix["hit_tokens"]), number(&prefix["query_tokens"])),
                count(&prefix["query_tokens"]),
                count(&prefix["blocks"]),
                count(&prefix["checkpoints"])
            )),
            Line::from(format!("drafts that were right, by place: {drafts}")),
        ]
    }

    fn draw_steps(&self, frame: &mut Frame, area: Rect) {
        let [title, bars] = Layout::vertical([Constraint::Length(1), Constraint::Length(5)]).areas(area);
        let shown: Vec<u64> = self.steps.iter().rev().take(bars.width.into()).rev().copied().collect();
        let ms = |us: u64| us as f64 / 1e3;
        let last = shown.last().map_or("Steps: none since this began to look".to_owned(), |us| {
            format!(
                "Steps: last {:.1} ms, longest shown {:.1} ms",
                ms(*us),
                ms(shown.iter().copied().max().unwrap_or(0))
            )
        });
        frame.render_widget(Paragraph::new(last.bold()), title);
        frame.render_widget(Sparkline::default().data(&shown).style(Style::new().fg(Color::Blue)), bars);
    }

    /// The longest operators, as many as there is room for.
    fn draw_operators(&self, frame: &mut Frame, area: Rect) {
        let rows = self.operators.means().into_iter().map(|mean| {
            let cell = |text: String| Text::from(text).right_aligned();
            Row::new([
                Text::from(mean.name),
                cell(format!("{:.1}", mean.us)),
                cell(format!("{:.1} %", 100.0 * mean.share)),
            ])
        });
        let names =
            [Text::from("operator"), Text::from("us a step").right_aligned(), Text::from("share").right_aligned()];
        let widths = [Constraint::Fill(1), Constraint::Length(10), Constraint::Length(7)];
        frame.render_widget(Table::new(rows, widths).header(Row::new(names).bold()), area);
    }
}

/// A bar of uses for each pool.
fn draw_pools(frame: &mut Frame, area: Rect, view: &Value) {
    let names = USES
        .iter()
        .flat_map(|(name, colour)| [Span::styled("■ ", Style::new().fg(*colour)), Span::raw(format!("{name}  "))]);
    let mut lines = vec![Line::from(names.collect::<Vec<_>>())];
    for pool in list(&view["pools"]) {
        let mut counts = [0; USES.len()];
        for run in list(&pool["runs"]).chunks_exact(2) {
            if let Some(count) = counts.get_mut(number(&run[0]) as usize) {
                *count += number(&run[1]);
            }
        }
        let total = number(&pool["total"]);
        let text = format!(" {} of {} units", grouped(total - counts[0].min(total)), grouped(total));
        let width = usize::from(area.width).saturating_sub(8 + text.len()) as u64;
        let mut spans = vec![Span::raw(format!("{:<8}", pool["name"].as_str().unwrap_or_default()))];
        // Used ones first; what is rounded away of them is free.
        let mut left = width;
        for use_of in (1..USES.len()).chain([0]) {
            let cells = if use_of == 0 { left } else { (counts[use_of] * width).div_ceil(total.max(1)).min(left) };
            left -= cells;
            let glyph = if use_of == 0 { "░" } else { "█" };
            spans.push(Span::styled(glyph.repeat(cells as usize), Style::new().fg(USES[use_of].1)));
        }
        spans.push(Span::raw(text));
        lines.push(Line::from(spans));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_requests(frame: &mut Frame, area: Rect, view: &Value) {
    let count = |value: &Value| grouped(number(value));
    let rows = list(&view["requests"]).iter().map(|one| {
        let answer = format!("{} of {}", count(&one["output"]), count(&one["most"]));
        let units = list(&one["units"]).iter().map(count).collect::<Vec<_>>().join(", ");
        let phase = one["phase"].as_str().unwrap_or_default().to_owned();
        Row::new([
            count(&one["id"]),
            phase,
            count(&one["prompt"]),
            count(&one["cached"]),
            count(&one["committed"]),
            answer,
            units,
        ])
    });
    let widths = [8, 9, 11, 15, 11, 18, 20].map(Constraint::Length);
    let names = ["request", "phase", "prompt", "from the cache", "computed", "answer", "units l, m, s"];
    frame.render_widget(Table::new(rows, widths).header(Row::new(names).bold()), area);
}

fn draw_reports(frame: &mut Frame, area: Rect, view: &Value) {
    let count = |value: &Value| grouped(number(value));
    let rows = list(&view["reports"]).iter().map(|one| {
        let why = one["ended_by"].as_str().unwrap_or_default().replace('_', " ");
        Row::new([count(&one["prompt_tokens"]), count(&one["cached_tokens"]), why])
    });
    let names = ["prompt", "reused", "and no more, because"];
    let widths = [11, 11, 40].map(Constraint::Length);
    frame.render_widget(Table::new(rows, widths).header(Row::new(names).bold()), area);
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
