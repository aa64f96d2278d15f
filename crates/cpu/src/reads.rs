//! What queries read in one layer: the weights of the attention core itself, noted tile by tile as it goes.
//!
//! Assumes that [`Log::tile`] is called between two tiles, while the state still holds the weights of the last one. Nothing
//! is computed again and no sum changes; where nobody asks there is no log.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use longwave_engine::attention::Reads;

use crate::ops::attend::State;
use crate::simd::exp;

/// The layer that somebody asked about, and what was found out.
pub struct Told {
    layer: usize,
    reads: Mutex<Vec<Reads>>,
}

impl Told {
    /// Nothing yet of `layer`.
    pub fn new(layer: u32) -> Told {
        Told { layer: layer as usize, reads: Mutex::default() }
    }

    /// Whether it is about this layer.
    pub fn wants(&self, layer: usize) -> bool {
        self.layer == layer
    }

    /// Takes over what some queries read; pieces of a batch come in any order.
    pub fn add(&self, reads: impl Iterator<Item = Reads>) {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner).extend(reads);
    }

    /// By position.
    pub fn into_reads(self) -> Vec<Reads> {
        let mut reads = self.reads.into_inner().unwrap_or_else(PoisonError::into_inner);
        reads.sort_unstable_by_key(|reads| reads.position);
        reads
    }
}

/// Notes on a piece of consecutive queries.
pub struct Log<'a> {
    heads: usize,
    sinks: &'a [f32],
    queries: Vec<Query>,
}

/// Notes on one query.
struct Query {
    position: u32,
    tiles: Vec<Tile>,
}

/// Keys of a tile that a query sees.
struct Tile {
    /// Positions of window rows, else numbers of entries.
    window: bool,
    keys: Vec<u32>,
    /// `[heads, keys]`, relative to `max`.
    weights: Vec<f32>,
    /// Maximum of each head after the tile.
    max: Vec<f32>,
}

impl<'a> Log<'a> {
    /// For `queries` from position `from` on.
    pub fn new(from: u32, queries: usize, sinks: &'a [f32]) -> Log<'a> {
        let queries = (from..).take(queries).map(|position| Query { position, tiles: Vec::new() }).collect();
        Log { heads: sinks.len(), sinks, queries }
    }

    /// Notes the part `seen` of the tile that `state` took in last for query `j`, whose rows are `tile_row..` of the tile and
    /// `row..` of the state; `keys` names that part.
    pub fn tile(
        &mut self,
        state: &State,
        j: usize,
        (tile_row, row): (usize, usize),
        window: bool,
        keys: impl Iterator<Item = u32>,
        seen: Range<usize>,
    ) {
        let weights = (0..self.heads).flat_map(|h| &state.weights(tile_row + h)[seen.clone()]).copied().collect();
        let max = state.max[row..row + self.heads].to_vec();
        self.queries[j].tiles.push(Tile { window, keys: keys.collect(), weights, max });
    }

    /// What the queries read, once `state` holds the end.
    pub fn finish(self, state: &State) -> impl Iterator<Item = Reads> {
        let (heads, sinks) = (self.heads, self.sinks);
        self.queries.into_iter().enumerate().map(move |(j, query)| {
            let mut reads = Reads { position: query.position, window_from: query.position, ..Reads::default() };
            let share =
                |h: usize, max: f32| exp(max - state.max[j * heads + h]) / state.sum[j * heads + h] / heads as f32;
            reads.sink = (0..heads).map(|h| share(h, sinks[h])).sum();
            for tile in query.tiles {
                let mut mean = vec![0.0; tile.keys.len()];
                for (h, weights) in tile.weights.chunks(tile.keys.len()).enumerate() {
                    let share = share(h, tile.max[h]);
                    mean.iter_mut().zip(weights).for_each(|(mean, weight)| *mean += weight * share);
                }
                if tile.window {
                    reads.window_from = reads.window_from.min(tile.keys[0]);
                    reads.window.append(&mut mean);
                } else {
                    reads.entries.extend(tile.keys);
                    reads.entry_weights.append(&mut mean);
                }
            }
            reads
        })
    }
}
