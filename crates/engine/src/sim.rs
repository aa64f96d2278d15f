//! A backend that computes hashes in place of a model, to test everything around it without one.
//!
//! Every row of every layer is a hash of all rows that its position may read, so of the history (`sim/layers.rs`); the next
//! token is a hash of what a query reads at that position: all long-lived entries and all rows of the windows. A wrong,
//! doubled, missing, stale or too early freed block changes tokens or is an error. Chunks, batches, drafts and replays
//! change nothing. Rows live in blocks only when a block is mapped; the rest of a chunk is scratch, as on a real backend.
//! Refuses, as `BadStep`, whatever breaks the contract of [`crate::step`].

mod layers;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use longwave_model::CacheLayout;
use longwave_model::geometry::LOGICAL_BLOCK;

use crate::constraint::{allows, mask_words};
use crate::operators::{OperatorSums, OperatorTime};
use crate::step::{
    Backend, BackendError, BlockCopy, BlockId, LAST_SAMPLED, Limits, Replay, ReturnLogits, Sampling, Seat, SeqResult,
    SeqStep, Step, StepResult, Ticket, Token, TokenLogprobs,
};
use crate::tables::SeatTables;
use layers::{Layers, Scratch, ratio};

/// How good the drafts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftQuality {
    /// No drafts.
    Off,
    /// All are accepted.
    Right,
    /// All are rejected.
    Wrong,
    /// Each is right or wrong by the hash of its position.
    Random,
}

/// How an injected failure shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The step fails, the backend lives.
    BadStep,
    /// The backend is gone.
    Fatal,
    /// The backend panics.
    Panic,
}

/// What a simulated backend does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimOptions {
    /// The "weights": other seeds give other tokens.
    pub seed: u64,
    /// How good the drafts are.
    pub draft_quality: DraftQuality,
    /// The step number that fails.
    pub fail_at_step: Option<u64>,
    /// How it fails.
    pub failure: Failure,
    /// It fails when its result is collected, after it was computed.
    pub fail_late: bool,
    /// Of all reads and writes of units, the one that fails, and with it the backend.
    pub fail_at_unit: Option<u64>,
    /// Make rows of newly mapped blocks unreadable until they are written.
    pub poison: bool,
    /// Choose tokens as if there were no masks.
    pub ignore_masks: bool,
    /// Time that each step takes, for tests that need requests to be under way.
    pub step_time: Duration,
}

impl Default for SimOptions {
    /// No drafts, no failure, poison on, no waiting.
    fn default() -> Self {
        SimOptions {
            seed: 0,
            draft_quality: DraftQuality::Off,
            fail_at_step: None,
            failure: Failure::BadStep,
            fail_late: false,
            fail_at_unit: None,
            poison: true,
            ignore_masks: false,
            step_time: Duration::ZERO,
        }
    }
}

/// One stored row. The tag names group, page and position, so that a row of elsewhere is never mistaken; 0 is poison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Row {
    tag: u64,
    value: u64,
}

/// Rows of one unit and who stored to it last: (step, seat, group, block index).
#[derive(Debug, Clone, Default)]
struct Unit {
    rows: Vec<Row>,
    writer: (u64, u32, u8, u32),
}

/// What the backend remembers of a seat: where its next step starts and which token comes first.
#[derive(Debug, Clone, Copy)]
struct SeatState {
    next: u32,
    last_sampled: Option<Token>,
    /// Hash of all tokens before `next`, in any order, once the seat was told its history.
    history: Option<u64>,
    /// The replay that its last step was part of.
    replay: Option<Replay>,
}

/// See the [module](self).
pub struct SimBackend {
    layout: CacheLayout,
    layers: Layers,
    limits: Limits,
    options: SimOptions,
    tables: SeatTables,
    pools: [Vec<Unit>; 3],
    seats: Vec<Option<SeatState>>,
    last_step: u64,
    done: VecDeque<StepResult>,
    /// Reads and writes of units so far.
    touched: u64,
    /// Its one operator: a call for every sequence, which is said to take a microsecond a token.
    timers: Option<OperatorSums>,
}

impl SimBackend {
    /// A backend with empty seats and unwritten units.
    pub fn new(layout: CacheLayout, limits: Limits, options: SimOptions) -> SimBackend {
        SimBackend {
            tables: SeatTables::new(&layout, limits.seats),
            pools: limits.units.map(|units| vec![Unit::default(); units as usize]),
            seats: vec![None; limits.seats as usize],
            last_step: 0,
            done: VecDeque::new(),
            touched: 0,
            timers: None,
            layers: Layers::new(&layout),
            layout,
            limits,
            options,
        }
    }

    /// Whether operators are timed now.
    pub fn times_operators(&self) -> bool {
        self.timers.is_some()
    }

    fn touch_unit(&mut self) -> Result<(), BackendError> {
        self.touched += 1;
        match self.options.fail_at_unit {
            Some(n) if n == self.touched => Err(BackendError::Fatal("injected failure".into())),
            _ => Ok(()),
        }
    }

    fn run(&mut self, step: &Step) -> Result<StepResult, String> {
        self.check(step)?;
        // All changes first: a block that one sequence gave up may be another's in the same step.
        for seq in &step.seqs {
            self.check_writes(step, seq)?;
            self.tables.apply(step, seq)?;
            self.check_past(seq)?;
        }
        let shared = self.check_shared(step)?;
        if self.options.poison {
            step.seqs.iter().for_each(|seq| self.poison(step, seq));
        }
        let seqs = step.seqs.iter().map(|seq| self.run_sequence(step, seq, &shared)).collect::<Result<_, _>>()?;
        Ok(StepResult { number: step.number, seqs })
    }

    /// Everything about a step that needs no tables.
    fn check(&self, step: &Step) -> Result<(), String> {
        if step.tokens.len() > self.limits.step_tokens as usize {
            return Err(format!("{} tokens, the limit is {}", step.tokens.len(), self.limits.step_tokens));
        }
        let (mut tokens, mut writes, mut masks) = (0, 0, 0);
        for (i, seq) in step.seqs.iter().enumerate() {
            let at = format!("seat {}", seq.seat.0);
            let len = seq.tokens.end.saturating_sub(seq.tokens.start);
            if seq.seat.0 >= self.limits.seats || step.seqs[..i].iter().any(|s| s.seat == seq.seat) {
                return Err(format!("{at} does not exist or is there twice"));
            }
            if seq.tokens.start != tokens || seq.tokens.end as usize > step.tokens.len() {
                return Err(format!("{at}: tokens {:?} do not follow {tokens}", seq.tokens));
            }
            if seq.writes.start != writes || seq.writes.end < writes || seq.writes.end as usize > step.writes.len() {
                return Err(format!("{at}: writes {:?} do not follow {writes}", seq.writes));
            }
            let words = (1 + seq.drafts as usize) * mask_words(self.limits.vocab);
            let masked = if seq.masks.is_empty() { 0 } else { words };
            if seq.masks.start != masks || seq.masks.len() != masked || masked > 0 && seq.sample.is_none() {
                return Err(format!("{at}: masks {:?} do not follow {masks} with {words} words", seq.masks));
            }
            (tokens, writes, masks) = (seq.tokens.end, seq.writes.end, seq.masks.end);
            if step.history_of(seq).is_some_and(|h| h.len() != seq.start as usize) {
                return Err(format!("{at}: a history of {:?} for position {}", seq.history, seq.start));
            }
            if seq.drafts >= len || seq.drafts > self.limits.drafts || (seq.drafts > 0 && seq.sample.is_none()) {
                return Err(format!(
                    "{at}: {} drafts among {len} tokens, sampled: {}",
                    seq.drafts,
                    seq.sample.is_some()
                ));
            }
            if seq.want_drafts > self.limits.drafts {
                return Err(format!("{at} wants {} drafts, the limit is {}", seq.want_drafts, self.limits.drafts));
            }
            if seq.start + len > self.limits.context {
                return Err(format!("{at}: position {} is beyond the context", seq.start + len - 1));
            }
            if seq.replay.is_some() && (seq.sample.is_some() || seq.want_drafts > 0 || seq.logits != ReturnLogits::No) {
                return Err(format!("{at}: a replay gives no tokens, drafts or logits"));
            }
            match &self.seats[seq.seat.0 as usize] {
                _ if seq.fresh => {}
                Some(state) if !seq.fresh && state.next == seq.start && [None, state.replay].contains(&seq.replay) => {}
                state => {
                    return Err(format!("{at} starts at {}, fresh: {}, but is at {state:?}", seq.start, seq.fresh));
                }
            }
            self.check_tokens(step, seq).map_err(|e| format!("{at}: {e}"))?;
        }
        if [tokens, writes, masks].map(|n| n as usize) != [step.tokens.len(), step.writes.len(), step.masks.len()] {
            return Err("tokens, writes or masks that belong to no sequence".into());
        }
        Ok(())
    }

    fn check_tokens(&self, step: &Step, seq: &SeqStep) -> Result<(), String> {
        for (i, &token) in step.tokens_of(seq).iter().enumerate() {
            let known = self.seats[seq.seat.0 as usize].and_then(|s| s.last_sampled);
            if token == LAST_SAMPLED && (i > 0 || seq.fresh || known.is_none()) {
                return Err("nothing was sampled here before".into());
            }
            if token != LAST_SAMPLED && token >= self.limits.vocab {
                return Err(format!("token {token}, the vocabulary has {}", self.limits.vocab));
            }
        }
        Ok(())
    }

    fn check_writes(&self, step: &Step, seq: &SeqStep) -> Result<(), String> {
        for w in step.writes_of(seq) {
            let spec =
                self.layout.groups.get(w.group as usize).ok_or_else(|| format!("group {} does not exist", w.group))?;
            if w.block != BlockId::NONE && w.block.0 >= self.limits.units[spec.bucket as usize] {
                return Err(format!("block {} does not exist in the {} pool", w.block.0, spec.bucket.name()));
            }
        }
        Ok(())
    }

    /// Blocks that nothing reads any more must have been taken out: they may belong to somebody else already.
    fn check_past(&self, seq: &SeqStep) -> Result<(), String> {
        let end = seq.start + seq.tokens.len() as u32;
        for group in self.layout.long_lived().filter(|_| seq.replay.is_some()) {
            let mapped = self.tables.table(seq.seat, group).dense().len() as u32 * LOGICAL_BLOCK;
            if mapped < end {
                return Err(format!("seat {} group {group}: a replay to {end}, blocks to {mapped}", seq.seat.0));
            }
        }
        for group in self.layout.sliding() {
            let spec = &self.layout.groups[group];
            let first = spec.retention.first_needed(seq.start);
            match self.tables.table(seq.seat, group).sparse().first() {
                Some(&(index, _)) if (index + 1) * spec.block_tokens <= first => {
                    return Err(format!("seat {} group {group}: block {index} is past and still mapped", seq.seat.0));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Blocks (pool, id) that several sequences of the step map: they may be read and not stored to. A block has one
    /// meaning: the same place in every table that maps it.
    fn check_shared(&self, step: &Step) -> Result<BTreeSet<(u8, BlockId)>, String> {
        let mut places = BTreeMap::new();
        let mut shared = BTreeSet::new();
        if step.seqs.len() < 2 {
            return Ok(shared);
        }
        for seq in &step.seqs {
            for (group, spec) in self.layout.groups.iter().enumerate() {
                let table = self.tables.table(seq.seat, group);
                let dense = table.dense().iter().enumerate().map(|(index, &block)| (index as u32, block));
                for (index, block) in dense.chain(table.sparse().iter().copied()) {
                    let (key, place) = ((spec.bucket as u8, block), (group, index));
                    match places.insert(key, (place, seq.seat)) {
                        None => {}
                        Some((other, seat)) if other == place && seat != seq.seat => drop(shared.insert(key)),
                        Some(other) => {
                            let (at, seat) = (format!("group {group} index {index}"), seq.seat.0);
                            return Err(format!("block {} is {at} of seat {seat} and also {other:?}", block.0));
                        }
                    }
                }
            }
        }
        Ok(shared)
    }

    /// A newly mapped block whose positions are all still to come cannot hold anything that may be read. A replay finds
    /// its long-lived blocks written, and no row in the block where it begins.
    fn poison(&mut self, step: &Step, seq: &SeqStep) {
        for w in step.writes_of(seq).iter().filter(|w| w.block != BlockId::NONE) {
            let spec = &self.layout.groups[w.group as usize];
            let unwritten = match seq.replay {
                Some(_) => spec.is_sliding() && (w.index + 1) * spec.block_tokens > seq.start,
                None => w.index * spec.block_tokens >= seq.start,
            };
            if unwritten {
                self.pools[spec.bucket as usize][w.block.0 as usize].rows.fill(Row::default());
            }
        }
    }

    fn run_sequence(
        &mut self,
        step: &Step,
        seq: &SeqStep,
        shared: &BTreeSet<(u8, BlockId)>,
    ) -> Result<SeqResult, String> {
        let tokens = step.tokens_of(seq);
        let state = self.seats[seq.seat.0 as usize].filter(|_| !seq.fresh);
        let mut read = |(group, page, p)| self.row(seq.seat, group, page, p);
        let at = (seq.seat, seq.start);
        let mut scratch = self.layers.scratch(&self.layout, at, seq.replay, seq.want_drafts > 0, &mut read)?;
        let mut result = SeqResult::default();
        let sampled_from = tokens.len() - 1 - seq.drafts as usize;
        let counts = |tokens: &[Token], from: u32| (from..).zip(tokens).fold(0, |h, (p, &t)| h ^ count(seq, p, t));
        let mut history = step.history_of(seq).map(|h| counts(h, 0)).or(state.and_then(|s| s.history));
        if seq.sample.as_ref().is_some_and(Sampling::has_penalties) && history.is_none() {
            return Err(format!("seat {}: penalties without a history", seq.seat.0));
        }
        history = history.map(|h| h ^ counts(&tokens[..=sampled_from], seq.start));
        for (i, &token) in tokens.iter().enumerate() {
            let last = state.and_then(|s| s.last_sampled);
            let token = if token == LAST_SAMPLED { last.expect("checked with the tokens") } else { token };
            self.extend(&mut scratch, token)?;
            self.add_logits(seq, &scratch, i >= sampled_from, &mut result)?;
            let accepted = result.tokens.len();
            if let Some(sampling) = &seq.sample
                && i >= sampled_from
                && accepted == i - sampled_from
                && result.tokens.iter().eq(&tokens[sampled_from + 1..=i])
            {
                if i > sampled_from {
                    history = history.map(|h| h ^ count(seq, seq.start + i as u32, tokens[i]));
                }
                let mask = step.mask_of(seq, (i - sampled_from) as u32).filter(|_| !self.options.ignore_masks);
                let token = self.masked(self.pick(&scratch, sampling, history)?, mask)?;
                result.logprobs.extend(logprobs(sampling, token, self.limits.vocab));
                result.tokens.push(token);
            }
        }
        self.store(step, &scratch, shared)?;
        let next = seq.start + (sampled_from + result.tokens.len().max(1)) as u32;
        let last_sampled = result.tokens.last().copied();
        self.seats[seq.seat.0 as usize] = Some(SeatState { next, last_sampled, history, replay: seq.replay });
        scratch.truncate(&self.layout, next);
        if let (Some(sampling), Some(&last)) = (&seq.sample, result.tokens.last()) {
            result.drafts = self.draft(scratch, sampling, last, seq.want_drafts)?;
        }
        Ok(result)
    }

    /// Computes the next position of the scratch.
    fn extend(&self, scratch: &mut Scratch, token: Token) -> Result<(), String> {
        let (seat, start) = (scratch.seat, scratch.start);
        let mut stored = |group, n| self.entry(seat, group, n).map_err(|e| format!("{e}, read from {start} on"));
        self.layers.extend(&self.layout, scratch, (self.options.seed, token), &mut stored)
    }

    /// A row of a sliding group that an earlier step stored.
    fn row(&self, seat: Seat, group: usize, page: u32, p: u32) -> Result<u64, String> {
        let spec = &self.layout.groups[group];
        let index = p / spec.block_tokens;
        let block = self.tables.table(seat, group).get(index);
        let block = block.ok_or_else(|| format!("seat {} group {group}: block {index} is not mapped", seat.0))?;
        let unit = &self.pools[spec.bucket as usize][block.0 as usize];
        unit.read(tag(group, page, p), page * spec.block_tokens + p % spec.block_tokens)
    }

    /// Entry `n` of a long-lived group that an earlier step stored.
    fn entry(&self, seat: Seat, group: usize, n: u32) -> Result<u64, String> {
        let spec = &self.layout.groups[group];
        let closed_at = (n + 1) * ratio(&self.layout, group) - 1;
        let index = closed_at / spec.block_tokens;
        let block = self.tables.table(seat, group).dense().get(index as usize);
        let block = block.ok_or_else(|| format!("seat {} group {group}: no block {index}", seat.0))?;
        let unit = &self.pools[spec.bucket as usize][block.0 as usize];
        unit.read(tag(group, 0, closed_at), n % spec.rows_per_block)
    }

    /// Hash of what a query at the last position of the scratch reads: its streams and all closed entries.
    fn query(&self, scratch: &Scratch) -> Result<u64, String> {
        let mut hash = scratch.last()?;
        for group in self.layout.long_lived() {
            for n in 0..scratch.end() / ratio(&self.layout, group) {
                let own = scratch.entry(&self.layout, group, n);
                hash = mix(hash, own.map_or_else(|| self.entry(scratch.seat, group, n), Ok)?);
            }
        }
        Ok(hash)
    }

    /// The token after the last position of the scratch.
    fn pick(&self, scratch: &Scratch, sampling: &Sampling, history: Option<u64>) -> Result<Token, String> {
        let hash = self.query(scratch)?;
        let hash = if sampling.has_penalties() { mix(hash, history.unwrap_or_default()) } else { hash };
        // The position is in the hash already; greedy choice ignores the seed of the request.
        let hash = if sampling.temperature > 0.0 { mix(hash, sampling.seed) } else { hash };
        Ok((hash % u64::from(self.limits.vocab)) as Token)
    }

    /// The first allowed token from `token` on, around the vocabulary.
    fn masked(&self, token: Token, mask: Option<&[u32]>) -> Result<Token, String> {
        let vocab = self.limits.vocab;
        let allowed = (0..vocab).map(|i| (token + i) % vocab).find(|&t| allows(mask, t));
        allowed.ok_or_else(|| "a mask allows nothing".into())
    }

    fn add_logits(
        &self,
        seq: &SeqStep,
        scratch: &Scratch,
        sampled: bool,
        result: &mut SeqResult,
    ) -> Result<(), String> {
        let wanted = match seq.logits {
            ReturnLogits::No => false,
            ReturnLogits::Sampled => sampled && seq.sample.is_some(),
            ReturnLogits::All => true,
        };
        if wanted {
            let hash = self.query(scratch)?;
            let best = hash % u64::from(self.limits.vocab);
            let logit = |v: u64| if v == best { 2.0 } else { (mix(hash, v) >> 40) as f32 / (1u64 << 24) as f32 };
            result.logits.extend((0..u64::from(self.limits.vocab)).map(logit));
        }
        Ok(())
    }

    /// Writes the rows of a step to the blocks that are mapped, and its entries unless they are there already.
    fn store(&mut self, step: &Step, scratch: &Scratch, shared: &BTreeSet<(u8, BlockId)>) -> Result<(), String> {
        for group in 0..self.layout.groups.len() {
            let spec = &self.layout.groups[group];
            for position in scratch.start..scratch.end() {
                let index = position / spec.block_tokens;
                let mut rows: Vec<(u32, u32, u64)> = Vec::new();
                if spec.is_sliding() {
                    if self.tables.table(scratch.seat, group).get(index).is_none() {
                        continue;
                    }
                    let at = |page: u32| page * spec.block_tokens + position % spec.block_tokens;
                    rows.extend(
                        self.layers.rows(scratch, group, position).map(|(page, value)| (page, at(page), value)),
                    );
                } else if (position + 1).is_multiple_of(ratio(&self.layout, group)) {
                    let n = position / ratio(&self.layout, group);
                    let entry = scratch.entry(&self.layout, group, n);
                    rows.extend(entry.map(|value| (0, n % spec.rows_per_block, value)));
                }
                if rows.is_empty() {
                    continue;
                }
                let block = self.tables.table(scratch.seat, group).get(index);
                let missing = || format!("seat {} group {group}: no block {index} for an entry", scratch.seat.0);
                let block = block.ok_or_else(missing)?;
                if shared.contains(&(spec.bucket as u8, block)) {
                    let seat = scratch.seat.0;
                    return Err(format!("block {} is stored to by seat {seat}; another one maps it", block.0));
                }
                let unit = &mut self.pools[spec.bucket as usize][block.0 as usize];
                let writer = (step.number, scratch.seat.0, group as u8, index);
                if unit.writer.0 == step.number && unit.writer != writer {
                    return Err(format!("block {} is stored to by {:?} and {writer:?}", block.0, unit.writer));
                }
                unit.writer = writer;
                let size = if spec.is_sliding() { spec.block_tokens } else { spec.rows_per_block };
                let size = (size * self.layers.pages[group]) as usize;
                if unit.rows.len() < size {
                    unit.rows.resize(size, Row::default());
                }
                for (page, row, value) in rows {
                    unit.rows[row as usize] = Row { tag: tag(group, page, position), value };
                }
            }
        }
        Ok(())
    }

    /// Drafts for the positions after `last`, which was just sampled: continues the scratch without storing.
    fn draft(&self, mut scratch: Scratch, sampling: &Sampling, last: Token, want: u32) -> Result<Vec<Token>, String> {
        let mut drafts = Vec::new();
        if self.options.draft_quality == DraftQuality::Off {
            return Ok(drafts);
        }
        let mut token = last;
        for _ in 0..want {
            self.extend(&mut scratch, token)?;
            // Drafts need not know the penalties.
            token = self.pick(&scratch, &Sampling { repetition_penalty: 1.0, ..sampling.clone() }, None)?;
            let wrong = match self.options.draft_quality {
                DraftQuality::Wrong => true,
                DraftQuality::Random => scratch.last()?.is_multiple_of(3),
                _ => false,
            };
            drafts.push(if wrong { (token + 1) % self.limits.vocab } else { token });
        }
        Ok(drafts)
    }
}

impl Unit {
    fn read(&self, tag: u64, row: u32) -> Result<u64, String> {
        match self.rows.get(row as usize) {
            Some(r) if r.tag == tag => Ok(r.value),
            Some(r) => Err(format!("{}: the row holds {}", name(tag), name(r.tag))),
            None => Err(format!("{}: the block was never written", name(tag))),
        }
    }
}

impl Backend for SimBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    fn fingerprint(&self) -> [u8; 32] {
        // Drafts, failures and time change no row.
        let mut fingerprint = [0; 32];
        fingerprint[..8].copy_from_slice(&self.options.seed.to_le_bytes());
        fingerprint[8..12].copy_from_slice(&self.limits.vocab.to_le_bytes());
        fingerprint
    }

    fn time_operators(&mut self, on: bool) -> Result<Vec<OperatorTime>, BackendError> {
        let before = std::mem::replace(&mut self.timers, on.then(OperatorSums::default));
        Ok(before.map(|timers| timers.table()).unwrap_or_default())
    }

    fn submit(&mut self, step: &Step) -> Result<Ticket, BackendError> {
        let bad = |what: String| BackendError::BadStep { step: step.number, what };
        if step.number != self.last_step + 1 || self.done.len() >= self.limits.in_flight as usize {
            return Err(bad(format!("it follows step {} with {} open", self.last_step, self.done.len())));
        }
        self.last_step = step.number;
        std::thread::sleep(self.options.step_time);
        if self.options.fail_at_step == Some(step.number) && !self.options.fail_late {
            match self.options.failure {
                Failure::BadStep => return Err(bad("injected failure".into())),
                Failure::Fatal => return Err(BackendError::Fatal("injected failure".into())),
                Failure::Panic => panic!("injected failure"),
            }
        }
        let result = self.run(step).map_err(bad)?;
        if let Some(timers) = &mut self.timers {
            step.seqs.iter().for_each(|seq| timers.add("hashes", f64::from(seq.tokens.end - seq.tokens.start)));
        }
        self.done.push_back(result);
        Ok(Ticket(step.number))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepResult, BackendError> {
        let done = self.done.pop_front();
        if self.options.fail_at_step == Some(ticket.0) && self.options.fail_late {
            return Err(match self.options.failure {
                Failure::BadStep => BackendError::BadStep { step: ticket.0, what: "injected failure".into() },
                Failure::Fatal => BackendError::Fatal("injected failure".into()),
                Failure::Panic => panic!("injected failure"),
            });
        }
        match done {
            Some(result) if result.number == ticket.0 => Ok(result),
            _ => Err(BackendError::BadStep { step: ticket.0, what: "it is not the oldest open step".into() }),
        }
    }

    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), BackendError> {
        for c in copies {
            let pool = &mut self.pools[c.bucket as usize];
            pool[c.to.0 as usize] = pool[c.from.0 as usize].clone();
        }
        Ok(())
    }

    fn read_unit(&mut self, bucket: u8, block: BlockId, out: &mut [u8]) -> Result<(), BackendError> {
        self.touch_unit()?;
        out.fill(0);
        for (row, bytes) in self.pools[bucket as usize][block.0 as usize].rows.iter().zip(out.chunks_exact_mut(16)) {
            bytes[..8].copy_from_slice(&row.tag.to_le_bytes());
            bytes[8..].copy_from_slice(&row.value.to_le_bytes());
        }
        Ok(())
    }

    fn write_unit(&mut self, bucket: u8, block: BlockId, bytes: &[u8]) -> Result<(), BackendError> {
        self.touch_unit()?;
        let word = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes"));
        let rows = bytes.chunks_exact(16).take(self.layers.most_rows(&self.layout, bucket));
        let rows = rows.map(|b| Row { tag: word(&b[..8]), value: word(&b[8..]) }).collect();
        self.pools[bucket as usize][block.0 as usize].rows = rows;
        Ok(())
    }
}

/// Made-up log-probabilities: the chosen token first, then those after it.
fn logprobs(sampling: &Sampling, token: Token, vocab: u32) -> Option<TokenLogprobs> {
    let top = |n: u32| (0..n.min(vocab)).map(|i| ((token + i) % vocab, -0.25 - i as f32)).collect();
    sampling.top_logprobs.map(|n| TokenLogprobs { chosen: -0.25, top: top(n) })
}

/// What a token adds to the hash of a history: its place counts only as prompt or answer.
fn count(seq: &SeqStep, position: u32, token: Token) -> u64 {
    let answer = seq.sample.as_ref().is_some_and(|s| position >= s.answer_from);
    // The place makes equal tokens differ, so that none cancels another out; a wrong place is noticed as well.
    mix(mix(u64::from(token), u64::from(answer)), u64::from(position))
}

fn tag(group: usize, page: u32, position: u32) -> u64 {
    (group as u64 + 1) << 48 | u64::from(page) << 32 | u64::from(position)
}

fn name(tag: u64) -> String {
    let (group, page) = (tag >> 48, (tag >> 32) & 0xffff);
    if tag == 0 { "poison".into() } else { format!("group {} page {page} position {}", group - 1, tag as u32) }
}

/// A hash of two words that depends on their order.
fn mix(a: u64, b: u64) -> u64 {
    let x = (a.rotate_left(23) ^ b).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 29)
}
