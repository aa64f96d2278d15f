//! A backend without a model, for tests of what the engine itself costs and holds.

use longwave_engine::step::{Backend, BackendError, BlockCopy, BlockId, Limits, SeqResult, Step, StepResult, Ticket};
use longwave_model::CacheLayout;

use crate::allocations::uncounted;

/// Answers token 1 to everything and reads nothing.
pub struct NullBackend {
    limits: Limits,
    layout: CacheLayout,
    result: Option<StepResult>,
}

impl NullBackend {
    pub fn new(limits: Limits, layout: CacheLayout) -> NullBackend {
        NullBackend { limits, layout, result: None }
    }
}

impl Backend for NullBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }
    fn layout(&self) -> &CacheLayout {
        &self.layout
    }
    fn fingerprint(&self) -> [u8; 32] {
        [0; 32]
    }
    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        // The engine takes these lists over and hands them on; making them is the backend's part.
        self.result = uncounted(|| {
            let answer = |sampled| SeqResult { tokens: if sampled { vec![1] } else { vec![] }, ..SeqResult::default() };
            let seqs = step.seqs.iter().map(|s| answer(s.sample.is_some())).collect();
            Some(StepResult { number: step.number, seqs })
        });
        Ok(Ticket(step.number))
    }
    fn collect(&mut self, _: Ticket) -> Result<StepResult, BackendError> {
        Ok(self.result.take().unwrap())
    }
    fn copy(&mut self, _: &[BlockCopy]) -> Result<(), BackendError> {
        Ok(())
    }
    fn read_unit(&mut self, _: u8, _: BlockId, _: &mut [u8]) -> Result<(), BackendError> {
        Ok(())
    }
    fn write_unit(&mut self, _: u8, _: BlockId, _: &[u8]) -> Result<(), BackendError> {
        Ok(())
    }
}
