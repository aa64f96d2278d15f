//! Drafting with the MTP module: fills its window as sequences advance and proposes the tokens after the sampled one.
//!
//! The module's row for (streams of position `p - 1`, token at `p`) is kept at position `p`. So its rows in the cache
//! depend on the tokens up to their own position, like all others, a step writes only positions of its own, and a cached
//! prefix is complete. Position 0 has no row and is never read. Between steps a seat keeps the streams of its last
//! committed position, which the row of the next one needs. A seat that starts behind a cached prefix, or again after it
//! lost its blocks, does not know them: zeros stand in, in this one row. That can cost a draft and never changes a
//! result, because every draft is compared with the model's own choice.
//!
//! Rows of drafted positions stay in this file's buffers: they may lie past the mapped blocks, and the next step computes
//! them again from the accepted tokens. Assumes checked steps; draws with the noise of the position that a draft would
//! take, as the model will.

use longwave_engine::step::{Sampling, Seat, Token};
use longwave_model::geometry::CacheKind;

use crate::cache::Cache;
use crate::forward::{Model, Rows, Seen};
use crate::ops::sample;
use crate::scratch::Buffer;

/// What drafting keeps between steps.
pub struct Drafter {
    /// Most drafts per sequence and step.
    depth: u32,
    /// Streams of the last committed position of each seat `[seats, 4, D]`.
    hidden: Vec<f32>,
    /// The position after it; 0 when they are not known.
    next: Vec<u32>,
    width: usize,
}

/// One sequence after a step was verified.
pub struct Turn<'a> {
    /// Its seat.
    pub seat: Seat,
    /// The seat is new or belongs to another sequence now.
    pub fresh: bool,
    /// Its rows of the batch.
    pub rows: Rows<'a>,
    /// Its tokens in the step.
    pub tokens: &'a [Token],
    /// Position after the last one that counts: rejected drafts are behind it.
    pub committed: u32,
    /// The token sampled for that position, and how.
    pub sampled: Option<(Token, &'a Sampling)>,
    /// Drafts wanted.
    pub want: u32,
}

impl Turn<'_> {
    /// First position whose final streams are exact.
    fn exact(&self, model: &Model) -> u32 {
        self.rows.replay.map_or(0, |_| self.rows.oldest_in(model.config.num_hidden_layers, &model.config))
    }

    /// Row of the batch that holds `position`.
    fn row(&self, position: u32) -> usize {
        self.rows.rows.start + (position - self.rows.start) as usize
    }
}

impl Drafter {
    /// A drafter for `seats` seats that proposes at most `depth` tokens.
    pub fn new(model: &Model, seats: u32, depth: u32) -> Drafter {
        assert!(model.has_mtp(), "drafts need an MTP module");
        let width = 4 * model.config.hidden_size;
        Drafter { depth, hidden: vec![0.0; seats as usize * width], next: vec![0; seats as usize], width }
    }

    /// Brings the module's window up to date with the step and returns the drafts of each sequence. `streams` are the
    /// main model's, of the whole batch.
    pub fn advance(&mut self, model: &Model, cache: &mut Cache, turns: &[Turn], streams: &[f32]) -> Vec<Vec<Token>> {
        self.fill(model, cache, turns, streams);
        for t in turns {
            let (seat, row) = (t.seat.0 as usize, t.row(t.committed - 1));
            if t.committed <= t.exact(model) {
                self.next[seat] = 0;
                continue;
            }
            self.hidden[seat * self.width..][..self.width].copy_from_slice(&streams[row * self.width..][..self.width]);
            self.next[seat] = t.committed;
        }
        self.propose(model, cache, turns)
    }

    /// Stores the rows of committed positions whose blocks are mapped.
    fn fill(&self, model: &Model, cache: &mut Cache, turns: &[Turn], streams: &[f32]) {
        let place = cache.place(CacheKind::Window, model.config.num_hidden_layers).expect("the module has a window");
        let unknown = model.scratch.zeros(self.width);
        let mut seqs: Vec<Rows> = Vec::with_capacity(turns.len());
        let (mut next, mut sources): (Vec<Token>, Vec<&[f32]>) = (Vec::new(), Vec::new());
        for t in turns {
            // One entry of `seqs` per run of mapped positions.
            let mut in_run = false;
            // A replay has no streams before the last layer's outputs are exact.
            let first = t.exact(model).saturating_add(1).max(t.rows.start.max(1));
            for p in first..t.committed {
                let mapped = t.rows.tables.block(place, p).is_some();
                if mapped {
                    match seqs.last_mut().filter(|_| in_run) {
                        Some(run) => run.rows.end += 1,
                        None => seqs.push(Rows::new(next.len()..next.len() + 1, p, 0, t.rows.tables)),
                    }
                    next.push(t.tokens[(p - t.rows.start) as usize]);
                    sources.push(match p > t.rows.start {
                        true => self.part(streams, t.row(p - 1)),
                        false => self.kept(t).unwrap_or(&unknown),
                    });
                }
                in_run = mapped;
            }
        }
        if !seqs.is_empty() {
            model.mtp_keys(&gather(model, &sources), &next, &seqs, cache);
        }
    }

    /// Streams of the position before a step, if its seat kept them.
    fn kept(&self, t: &Turn) -> Option<&[f32]> {
        let seat = t.seat.0 as usize;
        (!t.fresh && self.next[seat] == t.rows.start).then(|| self.part(&self.hidden, seat))
    }

    fn part<'a>(&self, streams: &'a [f32], row: usize) -> &'a [f32] {
        &streams[row * self.width..(row + 1) * self.width]
    }

    /// Drafts of every sequence: the module applied to the last committed position and the sampled token, then to its own
    /// streams and its own choice.
    fn propose(&self, model: &Model, cache: &mut Cache, turns: &[Turn]) -> Vec<Vec<Token>> {
        let mut drafts: Vec<Vec<Token>> = vec![Vec::new(); turns.len()];
        let wanted = |i: usize| turns[i].sampled.map_or(0, |_| turns[i].want.min(self.depth)) as usize;
        // Those that want most first, so that the sequences of every round are the first ones of the round before.
        let mut order: Vec<usize> = (0..turns.len()).filter(|&i| wanted(i) > 0).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(wanted(i)));
        let kept: Vec<&[f32]> = order.iter().map(|&i| self.part(&self.hidden, turns[i].seat.0 as usize)).collect();
        let mut x = gather(model, &kept);
        let mut ahead: Vec<Vec<f32>> = vec![Vec::new(); order.len()];
        for round in 0..self.depth as usize {
            order.truncate(order.iter().take_while(|&&i| wanted(i) > round).count());
            if order.is_empty() {
                break;
            }
            let last = |i: usize| drafts[i].last().copied().or(turns[i].sampled.map(|s| s.0));
            let next: Vec<Token> =
                order.iter().map(|&i| last(i).expect("only sampled sequences are drafted")).collect();
            let rows = |(at, &i): (usize, &usize)| Rows {
                oldest: 1,
                ahead: Some(&ahead[at]),
                ..Rows::new(at..at + 1, turns[i].committed + round as u32, 0, turns[i].rows.tables)
            };
            let seqs: Vec<Rows> = order.iter().enumerate().map(rows).collect();
            let mut keys = Vec::new();
            let mut tap = |_: usize, seen: Seen| {
                if let Seen::Kv(kv) = seen {
                    keys.extend_from_slice(kv);
                }
            };
            x = model.mtp(&x[..order.len() * self.width], &next, &seqs, cache, Some(&mut tap));
            let all: Vec<usize> = (0..order.len()).collect();
            let logits = model.logits(&model.mtp_top(&x, &all));
            for (at, (&i, logits)) in order.iter().zip(logits.chunks(model.config.vocab_size)).enumerate() {
                ahead[at].extend_from_slice(&keys[at * 512..(at + 1) * 512]);
                let how = turns[i].sampled.expect("only sampled sequences are drafted").1;
                drafts[i].push(sample::sample(logits, how, turns[i].committed + 1 + round as u32, None, None));
            }
        }
        drafts
    }
}

/// Rows one after another.
fn gather(model: &Model, rows: &[&[f32]]) -> Buffer {
    let mut out = model.scratch.take(rows.iter().map(|r| r.len()).sum());
    let mut at = 0;
    for r in rows {
        out[at..at + r.len()].copy_from_slice(r);
        at += r.len();
    }
    out
}
