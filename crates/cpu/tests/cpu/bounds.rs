//! Memory that does not grow, rows that are not there: M7 and M13 of CONTRIBUTING.md.

use longwave_cpu::backend::CpuBackend;
use longwave_engine::proof::{self, Answer};
use longwave_engine::request::Request;
use longwave_engine::step::{
    Backend, BackendError, BlockCopy, BlockId, Limits, ReturnLogits, Step, StepResult, Ticket,
};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::CacheLayout;
use longwave_model::geometry::Bucket;

use crate::invariance::prompt;
use crate::served::{drafting, request};

/// A CPU backend that tells its scratch after every step and spoils everything that no step may read.
struct Watched {
    inner: CpuBackend,
    /// Largest peak so far, by thousands of positions.
    peaks: std::sync::Arc<std::sync::Mutex<Vec<(u32, u64)>>>,
    mapped: [std::collections::BTreeSet<BlockId>; 3],
    spoil: bool,
}

impl Watched {
    fn new(inner: CpuBackend, spoil: bool) -> Watched {
        Watched { inner, peaks: Default::default(), mapped: Default::default(), spoil }
    }
}

impl Backend for Watched {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }
    fn layout(&self) -> &CacheLayout {
        self.inner.layout()
    }
    fn fingerprint(&self) -> [u8; 32] {
        self.inner.fingerprint()
    }
    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        if self.spoil {
            // A block that comes into a table for the first time holds whatever its last owner left: here, NaN.
            for seq in &step.seqs {
                for write in step.writes_of(seq).iter().filter(|w| w.block != BlockId::NONE) {
                    let bucket = self.layout().groups[write.group as usize].bucket;
                    if self.mapped[bucket as usize].insert(write.block) {
                        let bytes = vec![0xff; self.layout().buckets[bucket as usize].unit_bytes() as usize];
                        self.inner.write_unit(bucket as u8, write.block, &bytes)?;
                    }
                }
            }
        }
        let position = step.seqs.iter().map(|s| s.start + s.tokens.len() as u32).max().unwrap_or(0);
        let ticket = self.inner.submit(step)?;
        self.peaks.lock().unwrap().push((position, self.inner.scratch_bytes().1));
        Ok(ticket)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        self.inner.collect(ticket)
    }
    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError> {
        self.inner.copy(copies)
    }
    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError> {
        self.inner.read_unit(bucket, block, out)
    }
    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.inner.write_unit(bucket, block, bytes)
    }
}

#[test]
fn m7_scratch_stays_under_the_plan_and_does_not_grow_with_the_context() {
    let most: u32 = 32 << 10;
    let inner = crate::served::with_context(256, 1, 64 << 20, 0, most);
    let (planned, _) = inner.scratch_bytes();
    let watched = Watched::new(inner, false);
    let peaks = watched.peaks.clone();
    let mut engine = Engine::new(watched, EngineOptions::default());
    // Refused before anything is computed.
    let long = Request { logits: ReturnLogits::No, ..request(prompt(most as usize + 1, 1), 1, 0) };
    let refused = proof::serve(&mut engine, std::slice::from_ref(&long), 1).remove(0);
    assert!(refused.failure.is_some_and(|f| f.contains("TooLong")));
    assert_eq!((engine.status().steps, peaks.lock().unwrap().len()), (0, 0));

    let fits = Request { prompt: long.prompt[..most as usize - 1].to_vec(), ..long };
    let answer = proof::serve(&mut engine, std::slice::from_ref(&fits), 1).remove(0);
    assert!(answer.failure.is_none() && answer.tokens.len() == 1);
    let peaks = peaks.lock().unwrap();
    let at = |position: u32| peaks.iter().filter(|p| p.0 <= position).map(|p| p.1).max().unwrap();
    println!("planned {planned} B; peak at 2K {}, 16K {}, 32K {}", at(2 << 10), at(16 << 10), at(most));
    // Chunks send uneven numbers of rows to the experts, so the peak still moves a little; the context grew by 16.
    assert!(at(most) < at(2 << 10) + planned / 10, "scratch grew with the context: {}, {}", at(2 << 10), at(most));
    assert!(at(most) <= planned, "{} of {planned}", at(most));
}

/// A graph is captured for 1, 2, 4, 8, 16 rows and run with fewer; here, seats that are empty, and blocks full of NaN.
#[test]
fn m13_real_rows_do_not_depend_on_empty_seats_and_poisoned_blocks() {
    let requests: Vec<Request> =
        (0..16).map(|i| request(prompt(3 + 37 * (i % 5), i as u64), 1 + (i as u32 % 7), i as u64)).collect();
    let serve = |seats: u32, spoil: bool, requests: &[Request], arrivals: usize| -> Vec<Answer> {
        let backend = Watched::new(drafting(128, seats, 256 << 20, 0), spoil);
        proof::serve(
            &mut Engine::new(backend, EngineOptions { paranoid: true, ..EngineOptions::default() }),
            requests,
            arrivals,
        )
    };
    let alone: Vec<Answer> = requests.iter().map(|r| serve(1, false, std::slice::from_ref(r), 1).remove(0)).collect();
    assert!(alone.iter().all(|a| a.failure.is_none() && !a.tokens.is_empty()));
    for seats in [1u32, 2, 4, 8, 16] {
        for real in [1, seats.div_ceil(2), seats] {
            let requests = &requests[..real as usize];
            let together = serve(seats, true, requests, 16);
            let compared = proof::compare(&alone[..real as usize], &together);
            assert!(compared.is_equal(), "{real} of {seats}: {compared:?}");
        }
    }
}

/// A row of no tokens is refused by name, a step of no sequences computes nothing.
#[test]
fn m13_steps_without_rows() {
    let mut backend = drafting(64, 2, 32 << 20, 0);
    let ticket = backend.submit(&Step { number: 1, ..Step::default() }).unwrap();
    assert_eq!(backend.collect(ticket).unwrap().seqs, []);
    let units = backend.limits().units;
    assert!(Bucket::ALL.iter().all(|&b| units[b as usize] > 0));
    let mut step = Step { number: 2, ..Step::default() };
    step.seqs.push(crate::rig::blank(0, 0..0));
    let error = backend.submit(&step).unwrap_err();
    assert!(error.to_string().contains("0 tokens"), "{error}");
}
