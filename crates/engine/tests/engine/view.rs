//! Views: every unit has one use, requests are where they are, the tree is that of the cache, nobody's looking costs nothing,
//! and times of operators are there when they are allowed.

use std::sync::mpsc;
use std::time::Duration;

use longwave_engine::request::Event;
use longwave_engine::sim::{SimBackend, SimOptions};
use longwave_engine::start;
use longwave_engine::view::{RequestPhase, UnitUse, View};
use longwave_engine::{Engine, EngineHandle, EngineOptions};

use crate::world::{Record, Rng, paranoid, prompt, request, solo, tiny_layout, wide_limits};

fn look(handle: &EngineHandle) -> View {
    let (send, seen) = mpsc::channel();
    handle.look(Box::new(move |view| send.send(view).unwrap()));
    seen.recv_timeout(Duration::from_secs(20)).expect("somebody who looks is shown something")
}

fn count(view: &View, pool: usize, uses: &[UnitUse]) -> u32 {
    view.units[pool].iter().filter(|unit| uses.contains(unit)).count() as u32
}

/// What must hold at any moment.
fn assert_sound(view: &View) {
    use UnitUse::*;
    let status = &view.status;
    for pool in 0..3 {
        assert_eq!(view.units[pool].len() as u32, status.units_total[pool]);
        assert_eq!(count(view, pool, &[Free]), status.units_total[pool] - status.units_used[pool], "pool {pool}");
        // What only the cache holds is a part of what it holds.
        assert!(count(view, pool, &[Cached, Checkpoint]) <= status.units_cached[pool]);
        let mapped: u32 = view.requests.iter().map(|request| request.units[pool]).sum();
        assert!(count(view, pool, &[LongLived, Window, Shared]) <= mapped);
    }
    let seated = view.requests.iter().filter(|request| request.phase != RequestPhase::Waiting).count();
    assert_eq!((seated as u32, view.requests.len() as u32 - seated as u32), (status.running, status.waiting.min(64)));
    let blocks: u32 = view.tree.iter().map(|run| run.blocks).sum();
    let checkpoints: u32 = view.tree.iter().map(|run| run.checkpoints).sum();
    assert_eq!((u64::from(blocks), u64::from(checkpoints)), (status.prefix.nodes, status.prefix.checkpoints));
    for (place, run) in view.tree.iter().enumerate() {
        let parent = run.parent.map(|id| view.tree[..place].iter().find(|run| run.id == id).unwrap());
        assert_eq!(parent.map_or(0, |parent| parent.depth + parent.blocks), run.depth);
    }
}

#[test]
fn every_step_of_a_mixed_load_shows_each_unit_once() {
    let backend = SimBackend::new(tiny_layout(), wide_limits(), SimOptions::default());
    let mut engine = Engine::new(backend, paranoid());
    let mut rng = Rng(7);
    let (mut records, mut seen, mut shared) = (Vec::new(), Vec::new(), false);
    for turn in 0..400 {
        if turn < 200 && rng.one_in(4) {
            // Texts with beginnings in common.
            let mut text = prompt(u64::from(rng.below(3)), 300);
            text.extend(prompt(turn, rng.below(700)));
            let record = Record::default();
            engine.submit(request(text, 1 + rng.below(20)), record.sink()).unwrap();
            records.push(record);
        }
        engine.step();
        let view = engine.view(engine.status(), Vec::new());
        assert_sound(&view);
        seen.extend(view.requests.iter().map(|request| request.phase));
        shared |= view.units[0].contains(&UnitUse::Shared);
    }
    assert!(records.len() > 20 && shared);
    for phase in [RequestPhase::Prefill, RequestPhase::Decode] {
        assert!(seen.contains(&phase), "never {phase:?}");
    }
    // Idle: what is left is the cache's.
    let view = engine.view(engine.status(), Vec::new());
    assert!(view.requests.is_empty() && view.tree.iter().any(|run| run.parent.is_some()));
    assert_eq!(count(&view, 0, &[UnitUse::LongLived, UnitUse::Window, UnitUse::Shared]), 0);
}

#[test]
fn an_idle_engine_is_seen_and_steps_are_remembered_from_the_first_look_on() {
    let handle = start(SimBackend::new(tiny_layout(), wide_limits(), SimOptions::default()), paranoid());
    let (send, done) = mpsc::channel();
    let ask = |seed| {
        let send = send.clone();
        let tell = move |event| {
            if matches!(event, Event::Finished { .. }) {
                send.send(()).unwrap();
            }
        };
        handle.submit(request(prompt(seed, 600), 12), Box::new(tell)).unwrap();
        done.recv_timeout(Duration::from_secs(20)).unwrap();
    };
    ask(1);
    let first = look(&handle);
    assert!(first.status.steps > 0 && first.steps.is_empty());
    assert_sound(&first);
    ask(2);
    let second = look(&handle);
    assert_sound(&second);
    assert_eq!(second.steps.len() as u64, second.status.steps - first.status.steps);
    assert_eq!(second.steps.iter().map(|step| step.output_tokens).sum::<u32>(), 12);
    assert!(second.steps.iter().all(|step| step.run_us <= step.wall_us));
    assert_eq!(second.steps.last().unwrap().number, second.status.steps);
    handle.shutdown();
    // Dropped, not kept.
    let (send, seen) = mpsc::channel::<View>();
    handle.look(Box::new(move |view| send.send(view).unwrap()));
    assert!(seen.recv_timeout(Duration::from_secs(5)).is_err());
}

#[test]
fn steps_carry_their_operators_where_that_is_allowed_and_answers_stay_the_same() {
    for operator_times in [false, true] {
        let options = EngineOptions { operator_times, ..paranoid() };
        let handle = start(SimBackend::new(tiny_layout(), wide_limits(), SimOptions::default()), options);
        let (send, done) = mpsc::channel();
        // The first one with nobody to look, the second one watched.
        for seed in [1, 2] {
            let (record, wanted, send) = (Record::default(), request(prompt(seed, 600), 12), send.clone());
            let mut sink = record.sink();
            let tell = move |event| {
                let last = matches!(event, Event::Finished { .. });
                sink(event);
                if last {
                    send.send(()).unwrap();
                }
            };
            handle.submit(wanted.clone(), Box::new(tell)).unwrap();
            done.recv_timeout(Duration::from_secs(20)).unwrap();
            record.assert_complete();
            assert_eq!(record.tokens(), solo(&tiny_layout(), 4096, &wanted).tokens());
            let view = look(&handle);
            assert_eq!(view.steps.is_empty(), seed == 1);
            for step in &view.steps {
                let found: Vec<_> = step.operators.iter().map(|o| (o.name, o.calls, o.us)).collect();
                // The prompt in one step, then a token in each.
                let tokens = f64::from(step.prompt_tokens.max(1));
                assert_eq!(found, if operator_times { vec![("hashes", 1, tokens)] } else { vec![] });
            }
        }
        handle.shutdown();
    }
}
