//! A model with a cache of its own and every position mapped: forward passes without an engine.

use std::path::PathBuf;

use longwave_cpu::cache::{Cache, SeqTables};
use longwave_cpu::forward::{Model, Rows, Tap};
use longwave_cpu::numerics::Profile;
use longwave_cpu::reads::Told;
use longwave_engine::attention::Reads;
use longwave_engine::step::{BlockId, Seat, SeqStep, Step, TableWrite, Token};
use longwave_engine::tables::SeatTables;
use longwave_model::{CacheFormats, CacheLayout, Checkpoint, IndexFormat, MainFormat};

pub const EXACT: CacheFormats = CacheFormats { main: MainFormat::F32, index: IndexFormat::F32 };
pub const CACHE: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };

pub fn testdata() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata")
}

pub fn tiny() -> Checkpoint {
    Checkpoint::open(&testdata().join("tiny"), &mut |_| {}).unwrap()
}

pub struct Rig {
    pub model: Model,
    pub cache: Cache,
    tables: SeatTables,
    seats: u32,
    units: [u32; 3],
}

impl Rig {
    /// Room for `seats` sequences of `context` positions.
    pub fn new(profile: Profile, formats: CacheFormats, seats: u32, context: u32) -> Rig {
        let ckpt = tiny();
        let layout = CacheLayout::new(&ckpt.config, formats);
        let mut next = [0u32; 3];
        let mut tables = SeatTables::new(&layout, seats);
        for seat in 0..seats {
            let mut step = Step::default();
            for (g, spec) in layout.groups.iter().enumerate() {
                for index in 0..context.div_ceil(spec.block_tokens) {
                    let id = &mut next[spec.bucket as usize];
                    step.writes.push(TableWrite { group: g as u8, index, block: BlockId(*id) });
                    *id += 1;
                }
            }
            let seq = blank(seat, 0..step.writes.len() as u32);
            tables.apply(&step, &seq).unwrap();
        }
        Rig { model: Model::new(&ckpt, profile, formats), cache: Cache::new(layout, next), tables, seats, units: next }
    }

    /// Units of each pool; all are mapped.
    pub fn units(&self) -> [u32; 3] {
        self.units
    }

    /// Runs chunks of several sequences as one batch: (seat, start, tokens, drafts).
    pub fn batch(&mut self, parts: &[(u32, u32, &[Token], u32)], tap: Option<Tap>) -> Vec<f32> {
        let mut tokens = Vec::new();
        let mut rows = Vec::new();
        for &(seat, start, t, drafts) in parts {
            assert!(seat < self.seats);
            let from = tokens.len();
            tokens.extend_from_slice(t);
            rows.push(Rows::new(from..tokens.len(), start, drafts, SeqTables::new(&self.tables, Seat(seat))));
        }
        self.model.trunk(&tokens, &rows, &mut self.cache, tap).to_vec()
    }

    /// What the positions of `tokens` read in a layer.
    pub fn told(&mut self, layer: u32, tokens: &[Token], tap: Tap) -> Vec<Reads> {
        let told = Told::new(layer);
        let tables = SeqTables::new(&self.tables, Seat(0));
        let rows = [Rows { tell: Some(&told), ..Rows::new(0..tokens.len(), 0, 0, tables) }];
        self.model.trunk(tokens, &rows, &mut self.cache, Some(tap));
        told.into_reads()
    }

    pub fn mtp(&mut self, seat: u32, start: u32, streams: &[f32], next: &[Token], tap: Option<Tap>) -> Vec<f32> {
        self.mtp_from(0, seat, start, streams, next, tap)
    }

    /// [`Rig::mtp`] where positions before `oldest` have no window rows.
    pub fn mtp_from(
        &mut self,
        oldest: u32,
        seat: u32,
        start: u32,
        streams: &[f32],
        next: &[Token],
        tap: Option<Tap>,
    ) -> Vec<f32> {
        let rows = [Rows { oldest, ..Rows::new(0..next.len(), start, 0, SeqTables::new(&self.tables, Seat(seat))) }];
        self.model.mtp(streams, next, &rows, &mut self.cache, tap).to_vec()
    }

    /// Stores the MTP module's window rows of positions from `start` on, as drafting does.
    pub fn mtp_keys(&mut self, seat: u32, start: u32, streams: &[f32], next: &[Token]) {
        let rows = [Rows::new(0..next.len(), start, 0, SeqTables::new(&self.tables, Seat(seat)))];
        self.model.mtp_keys(streams, next, &rows, &mut self.cache);
    }

    /// One row of the MTP module at `position`, with window rows `ahead` that are in no block.
    pub fn mtp_ahead(&mut self, seat: u32, position: u32, streams: &[f32], next: Token, ahead: &[f32]) -> Vec<f32> {
        let rows = Rows::new(0..1, position, 0, SeqTables::new(&self.tables, Seat(seat)));
        let rows = [Rows { oldest: 1, ahead: Some(ahead), ..rows }];
        self.model.mtp(streams, &[next], &rows, &mut self.cache, None).to_vec()
    }

    pub fn tables(&self, seat: u32) -> SeqTables<'_> {
        SeqTables::new(&self.tables, Seat(seat))
    }

    /// Logits of the rows `rows` of streams.
    pub fn logits(&self, streams: &[f32], rows: &[usize]) -> Vec<f32> {
        self.model.logits(&self.model.top(streams, rows))
    }
}

pub fn blank(seat: u32, writes: std::ops::Range<u32>) -> SeqStep {
    SeqStep { fresh: true, writes, ..SeqStep::new(Seat(seat), 0, 0..0) }
}
