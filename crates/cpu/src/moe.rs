//! Mixture of experts over a batch (model.md 7): rows are grouped by expert, results added in the order of choice.
//! The sum over experts has the order of the choice, so it does not depend on which other rows share an expert.

use longwave_engine::step::Token;
use longwave_model::floors::ALL_EXPERTS;
use rayon::prelude::*;

use crate::forward::Model;
use crate::ops::expert::swiglu;
use crate::ops::linear::linear;
use crate::ops::router::{self, Choice};
use crate::scratch::Buffer;
use crate::weights::{Expert, Moe, Route};

/// Output `[T, D]` for normalised inputs `x` `[T, D]`; `tokens` serve the hash layers.
pub fn forward(model: &Model, moe: &Moe, x: &[f32], tokens: &[Token]) -> Buffer {
    let (d, k, t) = (model.config.hidden_size, model.config.num_experts_per_tok, tokens.len());
    let choices = choose(model, moe, x, tokens);
    model.mark("router choice");
    let mut xq = model.scratch.copy(x);
    model.quantise(&mut xq);

    // Which (row, slot) each expert works on, in row order.
    let mut work: Vec<Vec<(usize, usize)>> = vec![Vec::new(); moe.experts.len()];
    for (i, c) in choices.iter().enumerate() {
        work[c.0 as usize].push((i / k, i % k));
    }
    let one = |(expert, rows): (&Expert, &Vec<(usize, usize)>)| {
        let mut input = model.scratch.take(rows.len() * d);
        for (&(r, _), x) in rows.iter().zip(input.chunks_mut(d)) {
            x.copy_from_slice(&xq[r * d..(r + 1) * d]);
        }
        run(model, expert, &input, |i| choices[rows[i].0 * k + rows[i].1].1)
    };
    let busy: Vec<(&Expert, &Vec<(usize, usize)>)> =
        moe.experts.iter().zip(&work).filter(|w| !w.1.is_empty()).collect();
    let shared_input = &xq;
    let (results, mut out) = rayon::join(
        || busy.par_iter().map(|w| one(*w)).collect::<Vec<_>>(),
        || run(model, &moe.shared, shared_input, |_| 1.0),
    );

    let mut slots = model.scratch.take(t * k * d);
    for ((_, rows), y) in busy.iter().zip(&results) {
        for (&(r, s), y) in rows.iter().zip(y.chunks(d)) {
            slots[(r * k + s) * d..][..d].copy_from_slice(y);
        }
    }
    out.par_chunks_mut(d).zip(slots.par_chunks(k * d)).with_min_len(64).for_each(|(out, slots)| {
        for (c, o) in out.iter_mut().enumerate() {
            let routed: f32 = (0..k).map(|s| slots[s * d + c]).sum();
            *o += routed;
        }
        model.profile.round(out);
    });
    model.mark(ALL_EXPERTS);
    out
}

/// The experts of every row, `k` per row.
fn choose(model: &Model, moe: &Moe, x: &[f32], tokens: &[Token]) -> Vec<Choice> {
    let (e, k, scale) = (moe.experts.len(), model.config.num_experts_per_tok, model.config.routed_scaling_factor);
    let mut logits = model.scratch.take(tokens.len() * e);
    linear(x, &moe.gate, &mut logits);
    model.mark("router");
    let mut out = Vec::with_capacity(tokens.len() * k);
    for (row, &token) in logits.chunks(e).zip(tokens) {
        match &moe.route {
            Route::Hash(table) => router::hashed(row, &table[token as usize * k..][..k], scale, &mut out),
            Route::Scored(bias) => router::scored(row, bias, k, scale, &mut out),
        }
    }
    out
}

/// One expert over quantised rows `x` `[n, D]`; `weight` of row `i` is applied before the down projection.
fn run(model: &Model, expert: &Expert, x: &[f32], weight: impl Fn(usize) -> f32 + Sync) -> Buffer {
    let (d, i) = (model.config.hidden_size, model.config.moe_intermediate_size);
    let n = x.len() / d;
    let (mut g, mut u) = (model.scratch.take(n * i), model.scratch.take(n * i));
    linear(x, &expert.w1, &mut g);
    linear(x, &expert.w3, &mut u);
    model.profile.round(&mut g);
    model.profile.round(&mut u);
    for (r, (g, u)) in g.chunks_mut(i).zip(u.chunks(i)).enumerate() {
        swiglu(g, u, model.config.swiglu_limit, weight(r), model.profile);
    }
    model.quantise(&mut g);
    let mut y = model.scratch.take(n * d);
    linear(&g, &expert.w2, &mut y);
    model.profile.round(&mut y);
    y
}
