//! The engine on its thread: bounded intake, cancellation, status, shutdown and panics.

use std::sync::mpsc;
use std::time::Duration;

use longwave_engine::operators::OperatorTime;
use longwave_engine::request::{Event, FinishReason, Request, SubmitError};
use longwave_engine::sim::{Failure, SimBackend, SimOptions};
use longwave_engine::step::{Backend, BackendError, BlockCopy, BlockId, Limits, Step, StepResult, Ticket};
use longwave_engine::{EngineHandle, EngineOptions, Status, start};
use longwave_model::CacheLayout;

use crate::world::{Record, assert_home, paranoid, prompt, request, solo, tiny_layout, wide_limits};

fn start_with(limits: Limits, sim: SimOptions, options: EngineOptions) -> EngineHandle {
    start(SimBackend::new(tiny_layout(), limits, sim), options)
}

/// Submits a request whose last event also arrives in the channel.
fn submit(handle: &EngineHandle, request: Request, done: &mpsc::Sender<()>) -> Result<Record, SubmitError> {
    let record = Record::default();
    let (mut sink, done) = (record.sink(), done.clone());
    let tell = move |event| {
        let last = matches!(event, Event::Finished { .. });
        sink(event);
        if last {
            done.send(()).unwrap();
        }
    };
    handle.submit(request, Box::new(tell)).map(|_| record)
}

fn wait(done: &mpsc::Receiver<()>, times: usize) {
    for _ in 0..times {
        done.recv_timeout(Duration::from_secs(20)).expect("a request finishes");
    }
}

/// Polls until the status is as wanted; it is published a moment after the events of a step.
fn wait_for(handle: &EngineHandle, wanted: impl Fn(&Status) -> bool) -> Status {
    for _ in 0..10_000 {
        let status = handle.status();
        if wanted(&status) {
            return status;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("never seen: {:?}", handle.status());
}

#[test]
fn many_threads_get_the_tokens_of_solo_runs() {
    let handle = start_with(wide_limits(), SimOptions::default(), paranoid());
    let workers: Vec<_> = (0..8)
        .map(|t| {
            let handle = handle.clone();
            std::thread::spawn(move || {
                let (send, done) = mpsc::channel();
                for i in 0..10 {
                    let wanted = request(prompt(t, 1 + 37 * i), 12);
                    let record = submit(&handle, wanted.clone(), &send).unwrap();
                    wait(&done, 1);
                    assert_eq!(record.assert_complete(), FinishReason::Length);
                    assert_eq!(record.tokens(), solo(&tiny_layout(), 4096, &wanted).tokens());
                }
            })
        })
        .collect();
    workers.into_iter().for_each(|w| w.join().unwrap());
    let status = wait_for(&handle, |s| s.running == 0);
    assert_home(&status);
    assert_eq!(status.output_tokens, 960);
    assert!(status.alive && status.last_step > Duration::ZERO);
    handle.shutdown();
    assert!(!handle.status().alive);
}

#[test]
fn a_full_intake_turns_requests_away_until_there_is_room() {
    let sim = SimOptions { step_time: Duration::from_millis(5), ..SimOptions::default() };
    let options = EngineOptions { max_waiting: 3, retry_after_s: 2, ..paranoid() };
    let handle = start_with(Limits { seats: 1, ..wide_limits() }, sim, options);
    let (send, done) = mpsc::channel();
    let mut taken = 0;
    let full = loop {
        match submit(&handle, request(vec![1], 40), &send) {
            Ok(_) => taken += 1,
            Err(e) => break e,
        }
        assert!(taken < 20, "the intake is not bounded");
    };
    assert_eq!(full, SubmitError::QueueFull { waiting: 3, retry_after_s: 2 });
    wait(&done, taken);
    wait_for(&handle, |s| s.waiting == 0);
    submit(&handle, request(vec![1], 1), &send).unwrap();
    wait(&done, 1);
}

#[test]
fn cancel_ends_a_running_and_a_waiting_request() {
    let sim = SimOptions { step_time: Duration::from_millis(1), ..SimOptions::default() };
    let handle = start_with(Limits { seats: 1, ..wide_limits() }, sim, paranoid());
    let records = [Record::default(), Record::default()];
    let ids = [0, 1].map(|i| handle.submit(request(prompt(i, 9), 3000), records[i as usize].sink()).unwrap());
    wait_for(&handle, |s| s.output_tokens > 2);
    handle.cancel(ids[1]);
    handle.cancel(ids[0]);
    handle.cancel(ids[0]);
    let status = wait_for(&handle, |s| s.running == 0 && s.waiting == 0);
    assert_home(&status);
    records.iter().for_each(|r| assert_eq!(r.assert_complete(), FinishReason::Cancelled));
}

#[test]
fn a_panicking_backend_fails_every_request_and_later_ones() {
    let sim = SimOptions {
        fail_at_step: Some(3),
        failure: Failure::Panic,
        step_time: Duration::from_millis(1),
        ..SimOptions::default()
    };
    let handle = start_with(Limits { seats: 2, ..wide_limits() }, sim, paranoid());
    let (send, done) = mpsc::channel();
    let records: Vec<Record> = (0..5).filter_map(|_| submit(&handle, request(vec![1], 90), &send).ok()).collect();
    wait(&done, records.len());
    let why = "the engine thread panicked: injected failure".to_string();
    for record in &records {
        assert_eq!(record.assert_complete(), FinishReason::Failed(why.clone()));
    }
    wait_for(&handle, |s| !s.alive);
    assert_eq!(submit(&handle, request(vec![1], 1), &send).err(), Some(SubmitError::Stopped(why)));
    handle.shutdown();
}

#[test]
fn a_panicking_sink_takes_the_engine_down_but_no_event_is_lost() {
    let sim = SimOptions { step_time: Duration::from_millis(1), ..SimOptions::default() };
    let handle = start_with(Limits { seats: 2, ..wide_limits() }, sim, paranoid());
    let (send, done) = mpsc::channel();
    let records = [0, 1, 2].map(|_| submit(&handle, request(vec![1], 3000), &send).unwrap());
    handle.submit(Request { priority: -1, ..request(vec![1], 3) }, Box::new(|_| panic!("a bad sink"))).unwrap();
    handle.submit(request(vec![], 3), Box::new(|_| panic!("a bad sink"))).ok();
    wait(&done, 3);
    for record in &records {
        let FinishReason::Failed(why) = record.assert_complete() else { panic!("not failed") };
        assert_eq!(why, "the engine thread panicked: a bad sink");
    }
    let status = wait_for(&handle, |s| !s.alive);
    assert_eq!((status.running, status.waiting), (0, 0));
}

#[test]
fn shutdown_and_drop_settle_every_request() {
    for by_drop in [false, true] {
        let sim = SimOptions { step_time: Duration::from_millis(1), ..SimOptions::default() };
        let handle = start_with(Limits { seats: 1, ..wide_limits() }, sim, paranoid());
        let (send, done) = mpsc::channel();
        let records = [0, 1, 2].map(|_| submit(&handle, request(vec![1], 3000), &send).unwrap());
        if by_drop {
            drop(handle);
        } else {
            handle.shutdown();
            let stopped = SubmitError::Stopped("the engine was shut down".into());
            assert_eq!(submit(&handle, request(vec![1], 1), &send).err(), Some(stopped));
            handle.shutdown();
        }
        wait(&done, 3);
        let failed = FinishReason::Failed("the engine was shut down".into());
        records.iter().for_each(|r| assert_eq!(r.assert_complete(), failed));
    }
}

#[test]
fn a_handle_goes_to_any_thread() {
    fn any_thread<T: Clone + Send + Sync + 'static>() {}
    any_thread::<EngineHandle>();
}

/// A backend that hangs, as in a collective that one GPU never joins.
#[test]
fn when_no_step_completes_health_is_bad_and_what_waits_fails_until_it_does() {
    let sim = SimOptions { step_time: Duration::from_millis(700), ..SimOptions::default() };
    let options = EngineOptions { stall_after: Duration::from_millis(100), ..paranoid() };
    let handle = start_with(Limits { seats: 1, ..wide_limits() }, sim, options);
    let (send, done) = mpsc::channel();
    let running = submit(&handle, request(prompt(1, 20), 2), &send).unwrap();
    wait_for(&handle, |s| s.stalled || !running.events().is_empty());
    let waiting = submit(&handle, request(prompt(2, 20), 2), &send);
    let status = wait_for(&handle, |s| s.stalled);
    assert!(status.alive, "it may recover");
    if let Ok(waiting) = waiting {
        wait(&done, 1);
        assert_eq!(waiting.assert_complete(), FinishReason::Stalled { seconds: 1 });
    }
    assert_eq!(
        handle.submit(request(prompt(3, 20), 2), Box::new(|_| panic!("not taken in"))).unwrap_err(),
        SubmitError::Stalled { seconds: 1 }
    );
    wait(&done, 1);
    assert_eq!(running.assert_complete(), FinishReason::Length);
    assert_eq!(running.tokens(), solo(&tiny_layout(), 4096, &request(prompt(1, 20), 2)).tokens());
    let status = wait_for(&handle, |s| !s.stalled);
    assert_home(&status);
}

#[test]
fn a_slow_backend_with_the_watch_off_is_left_alone() {
    let sim = SimOptions { step_time: Duration::from_millis(60), ..SimOptions::default() };
    let options = EngineOptions { stall_after: Duration::ZERO, ..paranoid() };
    let handle = start_with(Limits { seats: 1, ..wide_limits() }, sim, options);
    let (send, done) = mpsc::channel();
    let records = [1, 2].map(|seed| submit(&handle, request(prompt(seed, 20), 3), &send).unwrap());
    wait(&done, 2);
    assert!(records.iter().all(|r| r.assert_complete() == FinishReason::Length));
    assert!(!handle.status().stalled);
}

/// A backend that panics when a unit is read, and whose timers fail.
struct Brittle(SimBackend);

impl Backend for Brittle {
    fn limits(&self) -> &Limits {
        self.0.limits()
    }
    fn layout(&self) -> &CacheLayout {
        self.0.layout()
    }
    fn fingerprint(&self) -> [u8; 32] {
        self.0.fingerprint()
    }
    fn time_operators(&mut self, _: bool) -> Result<Vec<OperatorTime>, BackendError> {
        Err(BackendError::Fatal("a bad clock".into()))
    }
    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        self.0.submit(step)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        self.0.collect(ticket)
    }
    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError> {
        self.0.copy(copies)
    }
    fn read_unit(&mut self, _: u8, _: BlockId, _: &mut [u8]) -> Result<(), BackendError> {
        panic!("a bad read")
    }
    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.0.write_unit(bucket, block, bytes)
    }
}

/// The request that was just being moved when the thread died is in no list of the engine any more.
#[test]
fn a_panic_while_a_request_gives_up_its_seat_loses_no_event() {
    let sim = SimOptions { step_time: Duration::from_millis(1), ..SimOptions::default() };
    let backend = Brittle(SimBackend::new(tiny_layout(), Limits { seats: 1, ..wide_limits() }, sim));
    let handle = start(backend, paranoid());
    let (send, done) = mpsc::channel();
    let patient = submit(&handle, request(prompt(1, 300), 3000), &send).unwrap();
    wait_for(&handle, |s| s.output_tokens > 40);
    let urgent = submit(&handle, Request { priority: -1, ..request(prompt(2, 30), 5) }, &send).unwrap();
    wait(&done, 2);
    for record in [&patient, &urgent] {
        let FinishReason::Failed(why) = record.events().pop().map_or(FinishReason::Cancelled, |last| match last {
            Event::Finished { reason, .. } => reason,
            other => panic!("not the last: {other:?}"),
        }) else {
            panic!("not failed")
        };
        assert_eq!(why, "the engine thread panicked: a bad read");
    }
    assert!(!wait_for(&handle, |s| !s.alive).alive);
}

#[test]
fn timers_that_fail_end_every_request_with_the_reason() {
    let sim = SimOptions { step_time: Duration::from_millis(1), ..SimOptions::default() };
    let backend = Brittle(SimBackend::new(tiny_layout(), Limits { seats: 1, ..wide_limits() }, sim));
    let handle = start(backend, EngineOptions { operator_times: true, ..paranoid() });
    let (send, done) = mpsc::channel();
    let records = [1, 2].map(|seed| submit(&handle, request(prompt(seed, 30), 3000), &send).unwrap());
    wait_for(&handle, |s| s.output_tokens > 4);
    handle.look(Box::new(|_| panic!("there is nothing to show")));
    wait(&done, 2);
    for record in &records {
        assert_eq!(record.assert_complete(), FinishReason::Failed("the backend stopped: a bad clock".into()));
    }
    assert!(!wait_for(&handle, |s| !s.alive).alive);
}
