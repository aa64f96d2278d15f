//! A backend that records what goes through it: steps and results of drafting runs, and acceptance by position.

use std::sync::{Arc, Mutex};

use longwave_cpu::backend::CpuBackend;
use longwave_engine::step::*;
use longwave_model::CacheLayout;

/// One sequence's part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    pub step: u64,
    pub seq: SeqStep,
    pub tokens: Vec<Token>,
    pub result: SeqResult,
}

impl Part {
    /// Position of the last token that came out.
    pub fn position(&self) -> u32 {
        self.seq.start + (self.tokens.len() - self.seq.drafts as usize + self.result.tokens.len() - 1) as u32
    }
}

pub type Log = Arc<Mutex<Vec<Part>>>;

/// Passes everything on and records it.
pub struct Spy {
    inner: CpuBackend,
    step: Option<Step>,
    log: Log,
}

impl Spy {
    pub fn new(inner: CpuBackend) -> (Spy, Log) {
        let log = Log::default();
        (Spy { inner, step: None, log: log.clone() }, log)
    }

    /// Fills every unit with `byte`: what is read before it was written becomes visible.
    pub fn poison(mut self, byte: u8) -> Spy {
        let (units, buckets) = (self.inner.limits().units, self.inner.layout().buckets);
        for (b, bucket) in buckets.iter().enumerate() {
            let bytes = vec![byte; bucket.unit_bytes() as usize];
            (0..units[b]).for_each(|u| self.inner.write_unit(b as u8, BlockId(u), &bytes).unwrap());
        }
        self
    }
}

/// (proposed, accepted) of the drafts at each distance; a draft behind a rejected one counts as proposed.
pub fn acceptance(log: &Log) -> Vec<(u32, u32)> {
    let mut out: Vec<(u32, u32)> = Vec::new();
    for part in log.lock().unwrap().iter() {
        for i in 0..part.seq.drafts {
            out.resize(out.len().max(i as usize + 1), (0, 0));
            out[i as usize].0 += 1;
            out[i as usize].1 += u32::from((i as usize) + 1 < part.result.tokens.len());
        }
    }
    out
}

impl Backend for Spy {
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
        self.step = Some(step.clone());
        self.inner.submit(step)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        let result = self.inner.collect(ticket)?;
        let step = self.step.take().expect("collect follows submit");
        let parts = step.seqs.iter().zip(&result.seqs);
        let part = |(seq, result): (&SeqStep, &SeqResult)| Part {
            step: step.number,
            seq: seq.clone(),
            tokens: step.tokens_of(seq).to_vec(),
            result: result.clone(),
        };
        self.log.lock().unwrap().extend(parts.map(part));
        Ok(result)
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
