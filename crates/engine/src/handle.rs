//! The engine on its own thread, and the handle that everybody else holds.
//!
//! Requests go in through a bounded queue; events come back through each request's sink, on the engine thread. Assumes
//! sinks that return quickly. When the thread hangs, the watchdog (`watchdog.rs`) fails what waits. When the thread ends, by shutdown, a fatal failure or a panic (of the backend or of a sink,
//! which takes all requests down), every request gets its `Finished`, the status says not alive, and later requests are turned away with the reason.

use std::collections::{BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::admission::Admission;
use crate::attention::LayerKind;
use crate::engine::{Engine, Stage};
use crate::options::EngineOptions;
use crate::phases::StepTotals;
use crate::request::{Event, EventSink, FinishReason, Request, RequestId, SubmitError};
use crate::status::Status;
use crate::step::{Backend, BackendError, Limits};
use crate::tier::DirectoryError;
use crate::view::{Look, StepView};
use crate::watchdog::Watchdog;
use crate::watched::Watched;

/// Looks that may wait; one more is dropped.
const LOOKERS: usize = 64;

/// A handle to a running engine. Clones are equal; when the last one is dropped the engine shuts down.
#[derive(Clone)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

/// A request on its way to the engine thread.
struct Submission {
    id: RequestId,
    request: Request,
    sink: EventSink,
}

/// What crosses from handles to the engine thread.
#[derive(Default)]
struct Intake {
    submissions: VecDeque<Submission>,
    /// Each at most once, and emptied before every step.
    cancels: BTreeSet<RequestId>,
    /// Who looks, at most [`LOOKERS`]; answered before the next step.
    looks: Vec<Look>,
    /// Requests that wait inside the engine, those just taken over included.
    waiting: usize,
    next_id: u64,
    shutdown: bool,
    /// Why nothing is taken in any more.
    stopped: Option<String>,
}

impl Intake {
    fn has_nothing(&self) -> bool {
        self.submissions.is_empty() && self.cancels.is_empty() && self.looks.is_empty() && !self.shutdown
    }
}

struct Shared {
    intake: Mutex<Intake>,
    wake: Condvar,
    status: Mutex<Status>,
    watchdog: Arc<Watchdog>,
    admission: Admission,
    limits: Limits,
    attention_layers: Vec<LayerKind>,
    max_waiting: usize,
    retry_after_s: u32,
}

/// Held by handles only, so that its drop means that nobody can ask anything any more.
struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Starts an engine over `backend` on a thread named "longwave-engine". Panics where [`open`] has an error.
pub fn start<B: Backend + 'static>(backend: B, options: EngineOptions) -> EngineHandle {
    open(backend, options).unwrap_or_else(|e| panic!("{e}"))
}

/// [`start`], with an error when the cache directory cannot be used.
pub fn open<B: Backend + 'static>(backend: B, options: EngineOptions) -> Result<EngineHandle, DirectoryError> {
    let (max_waiting, retry_after_s) = (options.max_waiting, options.retry_after_s);
    let watchdog = Watchdog::new(options.stall_after);
    let engine = Engine::open(backend, options)?;
    let shared = Arc::new(Shared {
        intake: Mutex::default(),
        wake: Condvar::new(),
        status: Mutex::new(engine.status()),
        watchdog,
        admission: engine.admission.clone(),
        limits: engine.limits().clone(),
        attention_layers: engine.attention_layers().to_vec(),
        max_waiting,
        retry_after_s,
    });
    let of_thread = Arc::clone(&shared);
    let thread = std::thread::Builder::new().name("longwave-engine".into()).spawn(move || run(engine, &of_thread));
    let thread = thread.expect("the system can start one more thread");
    let watched = Arc::clone(&shared);
    let watch = move || watched.watchdog.watch(|id| watched.cancel(id));
    let watch = std::thread::Builder::new().name("longwave-watchdog".into()).spawn(watch);
    drop(watch.expect("the system can start one more thread"));
    Ok(EngineHandle { owner: Arc::new(Owner { shared, thread: Mutex::new(Some(thread)) }) })
}

impl EngineHandle {
    /// Hands a request to the engine. Events follow on the engine thread unless this is an error.
    pub fn submit(&self, request: Request, sink: EventSink) -> Result<RequestId, SubmitError> {
        let shared = &self.owner.shared;
        let mut intake = lock(&shared.intake);
        if let Some(why) = &intake.stopped {
            return Err(SubmitError::Stopped(why.clone()));
        }
        if shared.watchdog.is_stalled() {
            return Err(SubmitError::Stalled { seconds: shared.watchdog.seconds() });
        }
        let waiting = intake.waiting + intake.submissions.len();
        if waiting >= shared.max_waiting {
            return Err(SubmitError::QueueFull { waiting, retry_after_s: shared.retry_after_s });
        }
        let id = RequestId(intake.next_id);
        intake.next_id += 1;
        let sink = shared.watchdog.gate(id, request.prompt.len() as u32, sink);
        intake.submissions.push_back(Submission { id, request, sink });
        shared.wake.notify_one();
        Ok(id)
    }

    /// Ends a request before the next step; nothing happens when it is finished.
    pub fn cancel(&self, id: RequestId) {
        self.owner.shared.cancel(id);
    }

    /// A snapshot, taken after the last step; requests on their way to the engine count as waiting.
    pub fn status(&self) -> Status {
        let shared = &self.owner.shared;
        let queued = {
            let intake = lock(&shared.intake);
            intake.waiting + intake.submissions.len()
        };
        let status = lock(&shared.status).clone();
        let waiting = queued as u32 + status.displaced;
        Status { waiting, stalled: shared.watchdog.is_stalled(), ..status }
    }

    /// Hands a view of everything to `look` before the next step, also when nothing runs. It is dropped uncalled when the
    /// engine has stopped or too many look. Costs nothing when nobody does.
    pub fn look(&self, look: Look) {
        let shared = &self.owner.shared;
        let mut intake = lock(&shared.intake);
        if intake.stopped.is_none() && intake.looks.len() < LOOKERS {
            intake.looks.push(look);
            shared.wake.notify_one();
        }
    }

    /// Most tokens that a prompt of `prompt` tokens can be answered with: the context and the pools bound it.
    pub fn most_tokens(&self, prompt: u32) -> u32 {
        let shared = &self.owner.shared;
        shared.admission.most_outputs(prompt, shared.limits.context.saturating_sub(prompt))
    }

    /// Kinds of the layers whose attention requests may ask for, by number; none where the backend cannot tell.
    pub fn attention_layers(&self) -> &[LayerKind] {
        &self.owner.shared.attention_layers
    }

    /// Bounds of the backend.
    pub fn limits(&self) -> &Limits {
        &self.owner.shared.limits
    }

    /// Fails what runs and waits, and returns when the thread has ended. Must not be called from a sink.
    pub fn shutdown(&self) {
        self.owner.shared.request_shutdown();
        let thread = lock(&self.owner.thread).take();
        if let Some(thread) = thread {
            thread.join().expect("the engine thread catches its panics");
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.request_shutdown();
    }
}

impl Shared {
    fn cancel(&self, id: RequestId) {
        let mut intake = lock(&self.intake);
        if id.0 < intake.next_id && intake.stopped.is_none() {
            intake.cancels.insert(id);
            self.wake.notify_one();
        }
    }

    fn request_shutdown(&self) {
        lock(&self.intake).shutdown = true;
        self.wake.notify_one();
    }

    fn publish(&self, status: Status) {
        lock(&self.intake).waiting = (status.waiting - status.displaced) as usize;
        *lock(&self.status) = status;
    }
}

/// Data under these locks is whole between statements, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread: runs the loop, then settles every request that is left.
fn run<B: Backend>(mut engine: Engine<B>, shared: &Shared) {
    let mut taken = VecDeque::new();
    let why = match catch_unwind(AssertUnwindSafe(|| drive(&mut engine, shared, &mut taken))) {
        Ok(why) => why,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            let why = format!("the engine thread panicked: {}", text.unwrap_or("no message"));
            engine.abandon(&why);
            why
        }
    };
    {
        let mut intake = lock(&shared.intake);
        intake.stopped = Some(why.clone());
        intake.cancels.clear();
        intake.looks.clear();
        taken.append(&mut intake.submissions);
    }
    for Submission { request, mut sink, .. } in taken {
        let prompt_tokens = request.prompt.len() as u32;
        let reason = FinishReason::Failed(why.clone());
        let event = Event::Finished { reason, prompt_tokens, cached_tokens: 0, output_tokens: 0 };
        let _ = catch_unwind(AssertUnwindSafe(|| sink(event)));
    }
    shared.watchdog.settle(&why);
    shared.publish(engine.status());
    shared.watchdog.end();
}

/// Steps until shutdown or a fatal failure; returns why it ended. `taken` holds requests that have left the intake and
/// are not in the engine yet, out here so that a panic does not lose them.
fn drive<B: Backend>(engine: &mut Engine<B>, shared: &Shared, taken: &mut VecDeque<Submission>) -> String {
    match step_on(engine, shared, taken) {
        Ok(why) => why,
        Err(error) => {
            engine.stop(&error.to_string());
            // What stopped it first.
            engine.stopped().map_or_else(|| error.to_string(), str::to_owned)
        }
    }
}

/// [`drive`]; an error is that of timers.
fn step_on<B: Backend>(
    engine: &mut Engine<B>,
    shared: &Shared,
    taken: &mut VecDeque<Submission>,
) -> Result<String, BackendError> {
    let mut cancels = BTreeSet::new();
    let (mut looks, mut watched) = (Vec::new(), Watched::new(engine.options.operator_times));
    let mut idle = false;
    let (mut last_step, mut step_totals, mut computed) = (Duration::ZERO, StepTotals::default(), (0, 0));
    loop {
        {
            let mut intake = lock(&shared.intake);
            shared.watchdog.set_busy(!idle || intake.waiting + intake.submissions.len() > 0);
            while idle && intake.has_nothing() {
                intake = shared.wake.wait(intake).unwrap_or_else(PoisonError::into_inner);
            }
            if intake.shutdown {
                drop(intake);
                engine.stop("the engine was shut down");
            } else {
                std::mem::swap(taken, &mut intake.submissions);
                std::mem::swap(&mut cancels, &mut intake.cancels);
                std::mem::swap(&mut looks, &mut intake.looks);
                intake.waiting += taken.len();
            }
        }
        if let Some(why) = engine.stopped() {
            return Ok(why.to_string());
        }
        while let Some(Submission { id, request, sink }) = taken.pop_front() {
            engine.submit_as(id, request, sink).expect("handles count what waits, and the engine is not stopped");
        }
        while let Some(id) = cancels.pop_first() {
            engine.cancel(id);
        }
        let (started, before) = (Instant::now(), computed);
        shared.watchdog.set_busy(true);
        watched.before_step(&mut engine.backend, started)?;
        let mut passed = [started; 2];
        idle = !engine.step_in_stages(&mut |stage| passed[stage as usize] = Instant::now());
        if !idle {
            shared.watchdog.beat();
        }
        let status = engine.status();
        if !idle {
            (last_step, computed) = (started.elapsed(), (status.prompt_tokens, status.output_tokens));
            step_totals.add(computed.0 - before.0, computed.1 - before.1, last_step);
            let run = passed[Stage::Computed as usize] - passed[Stage::Planned as usize];
            let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
            let step = StepView {
                number: status.steps,
                wall_us: us(last_step),
                run_us: us(run),
                prompt_tokens: (computed.0 - before.0) as u32,
                output_tokens: (computed.1 - before.1) as u32,
                running: status.running,
                operators: Arc::default(),
            };
            watched.after_step(&mut engine.backend, step)?;
        }
        let status = Status { last_step, step_totals, ..status };
        if !looks.is_empty() {
            watched.look(&mut engine.backend, Instant::now())?;
            for look in looks.drain(..) {
                look(engine.view(status.clone(), watched.steps()));
            }
        }
        shared.publish(status);
    }
}
