//! `longwave top`: a running server in the terminal, as the explorer's live view shows it in the browser.
//!
//! Reads the same stream of views (`/explore/api/live`) of a server on any machine. Refuses a server that does not have it,
//! with what may be wrong, before the screen is taken over; one that goes away later is asked again.

mod feed;
mod operators;
mod screen;

use std::io::IsTerminal;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::bench::connection::Server;
use crate::output;
use crate::top::feed::News;
use crate::top::screen::Board;

/// Arguments of `longwave top`.
#[derive(clap::Args)]
pub struct Args {
    /// Address of the server.
    #[arg(default_value = "http://127.0.0.1:8000")]
    url: String,
    /// Milliseconds between two views.
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u32).range(50..=60_000))]
    every: u32,
    /// Print one view and end; the same happens where the output is no terminal.
    #[arg(long)]
    once: bool,
    /// Key of the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

/// Columns and rows of a view that is printed.
const PRINTED: (u16, u16) = (110, 40);
/// Longest wait for the first view.
const FIRST_VIEW: Duration = Duration::from_secs(20);
/// Longest time to the reaction to a key.
const KEY_MS: u64 = 50;

/// Watches until q, Esc or Ctrl-C.
pub fn run(args: Args) -> Result<()> {
    let server = Server::new(&args.url, args.api_key)?;
    let url = server.url();
    let (send, news) = mpsc::channel();
    feed::start(server, args.every, send)?;
    let mut board = Board::new(url);
    if args.once || !std::io::stdout().is_terminal() {
        return print(&mut board, &news);
    }
    let mut terminal = ratatui::init();
    let result = watch(&mut terminal, &mut board, &news);
    ratatui::restore();
    result
}

fn print(board: &mut Board, news: &Receiver<News>) -> Result<()> {
    match news.recv_timeout(FIRST_VIEW) {
        Ok(News::View(view)) => board.take(view, 0.0),
        Ok(News::Said(what)) => bail!("{what}"),
        Err(_) => bail!("no view came in {} s", FIRST_VIEW.as_secs()),
    }
    output::text(&drawn(board, PRINTED)?)
}

/// The board as text.
fn drawn(board: &Board, (columns, rows): (u16, u16)) -> Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows))?;
    terminal.draw(|frame| board.draw(frame))?;
    let cells = terminal.backend().buffer().content();
    let lines = cells.chunks(columns.into()).map(|line| {
        let line: String = line.iter().map(|cell| cell.symbol()).collect();
        line.trim_end().to_owned()
    });
    Ok(lines.collect::<Vec<_>>().join("\n").trim_end().to_owned() + "\n")
}

fn watch(terminal: &mut ratatui::DefaultTerminal, board: &mut Board, news: &Receiver<News>) -> Result<()> {
    let began = Instant::now();
    loop {
        while let Ok(new) = news.try_recv() {
            match new {
                News::View(view) => board.take(view, began.elapsed().as_secs_f64()),
                News::Said(what) => board.say(what),
            }
        }
        terminal.draw(|frame| board.draw(frame))?;
        if event::poll(Duration::from_millis(KEY_MS))?
            && let Event::Key(key) = event::read()?
            && key.kind == KeyEventKind::Press
        {
            let interrupted = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            if interrupted || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_view_is_drawn_with_its_numbers() {
        let mut board = Board::new("http://here:1".into());
        let view = |tokens: u64| {
            json!({
                "running": 2, "waiting": 5, "seats": 32, "steps": 70, "prompt_tokens": 4000, "output_tokens": tokens,
                "preempted": 1, "stalled": false, "drafts_proposed": [10, 8, 0], "drafts_accepted": [9, 4, 0],
                "prefix": {"queries": 4, "query_tokens": 1000, "hits": 2, "hit_tokens": 250, "blocks": 9, "checkpoints": 3,
                           "evicted_blocks": 0},
                "pools": [{"name": "large", "total": 100, "runs": [1, 30, 5, 10, 2, 10, 0, 50]}],
                "requests": [{"id": 7, "phase": "decode", "prompt": 12_345, "cached": 2048, "committed": 12_400,
                              "output": 55, "most": 900, "units": [20, 16, 16], "priority": 0}],
                "tree": [], "tree_hidden": 0, "step_list": [[69, 4100, 0, 2, 2], [70, 3900, 0, 2, 2]],
                "reports": [{"prompt_tokens": 12_345, "cached_tokens": 2048, "ended_by": "diverged"}],
            })
        };
        board.take(view(1000), 1.0);
        board.take(view(1100), 2.0);
        assert!(!drawn(&board, PRINTED).unwrap().contains("operator"), "not where nothing is timed");
        let mut timed = view(1100);
        timed["operators"] = json!({"steps": 4, "times": [{"name": "index select", "calls": 84, "us": 4938.0},
                                                          {"name": "lm_head", "calls": 4, "us": 962.0}]});
        board.take(timed, 2.0);
        let text = drawn(&board, PRINTED).unwrap();
        for part in [
            "http://here:1",
            "running 2 of 32",
            "waiting 5",
            "large",
            "50 of 100 units",
            "3.9 ms",
            "decode",
            "12,345",
            "25 %",
            "diverged",
            "90 %",
            "operator",
            "1234.5  83.7 %",
            "lm_head",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        // A small terminal loses lines, and nothing fails.
        for size in [(20, 5), (1, 1), (80, 12)] {
            drawn(&board, size).unwrap();
        }
    }

    #[test]
    fn before_the_first_view_the_screen_says_what_it_waits_for() {
        let mut board = Board::new("http://here:1".into());
        assert!(drawn(&board, PRINTED).unwrap().contains("waiting for the first view"));
        board.say("the server has closed the stream".into());
        assert!(drawn(&board, PRINTED).unwrap().contains("has closed the stream"));
    }
}
