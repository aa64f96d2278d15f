//! Conversations: what every turn reuses when one grows long, and when more of them run than fit.

use longwave_engine::report::{PrefixEnd, PrefixReport};
use longwave_engine::sim::SimBackend;
use longwave_engine::step::{Limits, Token};
use longwave_engine::{Engine, EngineOptions};

use crate::prefix::{CONTEXT, ample, edge, engine_with, submit};
use crate::world::{assert_home, paranoid, prompt, request, solo, tiny_layout};

/// A conversation: every prompt is the one before, its answer and something new.
struct Session {
    text: Vec<Token>,
    seed: u64,
    turns: u64,
}

impl Session {
    fn new(seed: u64, system: u32) -> Session {
        Session { text: prompt(seed, system), seed, turns: 0 }
    }

    /// Asks the next turn. Returns the report and how much of the prompt was seen before.
    fn turn(
        &mut self,
        engine: &mut Engine<SimBackend>,
        new: u32,
        answer: u32,
        verified: bool,
    ) -> (PrefixReport, usize) {
        let seen = self.text.len();
        self.turns += 1;
        self.text.extend(prompt(self.seed * 1000 + self.turns, new));
        let wanted = request(self.text.clone(), answer);
        let record = submit(engine, &wanted);
        while engine.step() {}
        record.assert_complete();
        if verified {
            assert_eq!(record.tokens(), solo(&tiny_layout(), CONTEXT, &wanted).tokens());
        }
        self.text.extend(record.tokens());
        (record.report().unwrap(), seen)
    }
}

#[test]
fn m3_twenty_turns_to_64k_tokens_reuse_nearly_everything() {
    let mut prefilled = Vec::new();
    for (checkpoint_answers, replay) in [(true, false), (false, false), (false, true)] {
        let options = EngineOptions { checkpoint_answers, replay, ..EngineOptions::default() };
        let mut engine = engine_with(ample(), options);
        let mut session = Session::new(1, 3000);
        let (mut reusable, mut reused) = (0, 0);
        for turn in 0..20 {
            let (report, seen) = session.turn(&mut engine, 2660, 400, turn % 8 == 0);
            if turn > 0 {
                (reusable, reused) = (reusable + seen as u32, reused + report.cached_tokens);
                let share = f64::from(report.cached_tokens) / seen as f64;
                assert!(!checkpoint_answers || share >= 0.9 && report.cached_tokens == edge(seen), "{turn}: {report}");
                assert!(!checkpoint_answers || turn < 4 || share >= 0.98, "turn {turn}: {report} of {seen}");
            }
        }
        assert!(session.text.len() > 64_000);
        assert!(!checkpoint_answers || f64::from(reused) >= 0.98 * f64::from(reusable));
        let status = engine.status();
        let replayed = status.prefix.replayed_tokens;
        prefilled.push((status.prompt_tokens, replayed, f64::from(reused) / f64::from(reusable)));
        engine.check_integrity().unwrap();
    }
    println!("prefilled, replayed, reused share; checkpoints in answers, nothing, replays: {prefilled:?}");
    // 19 answers that nobody computes again.
    assert!(prefilled[1].0 - prefilled[0].0 >= 19 * 400 * 9 / 10, "{prefilled:?}");
    // Replays save the same prefill and pay for it with a few layers of each turn's last positions.
    assert_eq!(prefilled[2].0, prefilled[0].0, "{prefilled:?}");
    assert!(prefilled[2].1 > 0 && prefilled[0].1 + prefilled[1].1 == 0, "{prefilled:?}");
}

#[test]
fn m3_more_sessions_than_fit_report_a_hit_or_a_reason() {
    let layout = tiny_layout();
    // A session of 4,096 tokens: 16 blocks and some checkpoints.
    let fits = |sessions: u32| {
        [0, 1, 2].map(|i| sessions * (layout.long_lived_units()[i] * 17 + 5 * layout.sliding_units(0)[i]))
    };
    for (fit, sessions) in [(2, 3), (2, 4), (3, 6)] {
        let mut engine = engine_with(Limits { units: fits(fit), ..ample() }, paranoid());
        let mut all: Vec<Session> = (0..sessions).map(|s| Session::new(50 + s, 200)).collect();
        let (mut hits, mut reasons, mut tokens, mut seen_tokens) = (0, 0, 0, 0);
        for turn in 0..20 {
            for session in &mut all {
                let (report, seen) = session.turn(&mut engine, 140, 50, true);
                if turn == 0 {
                    continue;
                }
                (tokens, seen_tokens) = (tokens + report.cached_tokens, seen_tokens + edge(seen));
                if report.cached_tokens * 10 >= edge(seen) * 9 {
                    hits += 1;
                } else {
                    let (evicted, missing) = match report.ended_by {
                        PrefixEnd::Evicted { .. } => (true, false),
                        PrefixEnd::CheckpointEvicted { .. } => (false, true),
                        // An answer's checkpoint gave way to a later one whose blocks were evicted since.
                        PrefixEnd::CheckpointMissing => (false, true),
                        _ => panic!("no reason for a miss after {seen} tokens: {report}"),
                    };
                    assert!(!missing || report.matched_tokens > report.cached_tokens);
                    reasons += u32::from(evicted || missing);
                }
            }
        }
        let status = engine.status().prefix;
        println!(
            "{sessions} sessions where {fit} fit: {hits} hits, {reasons} misses with a reason, {tokens} of {seen_tokens} \
             tokens reused, {} nodes and {} checkpoints evicted",
            status.evicted_nodes, status.evicted_checkpoints
        );
        assert_eq!(hits + reasons, sessions as u32 * 19);
        assert!(hits * 4 > sessions as u32 * 19, "windows of others push everything out");
        assert_home(&engine.status());
    }
}
