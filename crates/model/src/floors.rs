//! What each operator of a step moves and computes at least, and how long that takes on a machine: its floor.
//!
//! Weights count once per call, and so do inputs, outputs and the entries that rows read, in the smallest format that
//! operators hand on. How kernels cut the work, and what they keep in between, is not in here. Names are those of the
//! timers. Assumes a step whose sequences all have as many rows behind as many tokens, and experts that are chosen
//! evenly. Operators that move next to nothing have no floor: a launch takes longer.

use crate::config::{ExpertDtype, LayerKind, ModelConfig};
use crate::geometry::CacheFormats;

/// What a machine can do at most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roofs {
    /// Bytes per second that can be read from memory.
    pub read_bytes_per_s: f64,
    /// Operations per second with bf16 inputs; a multiplication and an addition are two.
    pub bf16_flop_per_s: f64,
    /// The same with fp8 inputs.
    pub fp8_flop_per_s: f64,
    /// The same with tf32 inputs.
    pub tf32_flop_per_s: f64,
}

/// Which of a machine's rates an operator's products have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// bf16 inputs.
    Bf16,
    /// fp8 inputs.
    Fp8,
    /// tf32 inputs.
    Tf32,
}

/// A step as the floors see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepShape {
    /// Sequences.
    pub sequences: u32,
    /// Rows of each.
    pub rows: u32,
    /// Tokens before the first row of each.
    pub context: u32,
    /// Rows whose logits are wanted, of all sequences.
    pub logits: u32,
    /// GPUs that share the model; the work is that of one of them.
    pub ranks: u32,
}

/// The least work of an operator in one call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// The timers' name.
    pub name: &'static str,
    /// Calls of this kind in a step; an operator may have several kinds.
    pub calls: u32,
    /// Bytes.
    pub bytes: f64,
    /// Operations.
    pub flop: f64,
    /// Of which kind they are.
    pub rate: Rate,
}

impl Work {
    /// Microseconds of one call: the longer of moving and computing.
    pub fn floor_us(&self, roofs: &Roofs) -> f64 {
        let rate = match self.rate {
            Rate::Bf16 => roofs.bf16_flop_per_s,
            Rate::Fp8 => roofs.fp8_flop_per_s,
            Rate::Tf32 => roofs.tf32_flop_per_s,
        };
        (self.bytes / roofs.read_bytes_per_s).max(self.flop / rate) * 1e6
    }
}

/// Both kinds of experts where a backend computes them side by side.
pub const ALL_EXPERTS: &str = "routed and shared experts";

/// Microseconds of all calls of an operator in a step; `None` where it has no floor.
pub fn step_us(step: &[Work], roofs: &Roofs, name: &str) -> Option<f64> {
    let own = |work: &&Work| match name {
        ALL_EXPERTS => ["routed experts", "shared expert"].contains(&work.name),
        _ => work.name == name,
    };
    let floors: Vec<f64> = step.iter().filter(own).map(|work| f64::from(work.calls) * work.floor_us(roofs)).collect();
    (!floors.is_empty()).then(|| floors.iter().sum())
}

/// Bytes and operations of a product of `rows` inputs with a matrix `[outputs, inputs]`; bytes of a weight, an input and an
/// output.
fn product(rows: f64, [outputs, inputs]: [usize; 2], [weight, input, output]: [f64; 3]) -> (f64, f64) {
    let (n, k) = (outputs as f64, inputs as f64);
    (n * k * weight + rows * k * input + rows * n * output, 2.0 * rows * n * k)
}

/// Bytes of one routed expert: codes and scales of its three matrices.
fn expert_bytes(c: &ModelConfig) -> f64 {
    let weights = (3 * c.hidden_size * c.moe_intermediate_size) as f64;
    match c.expert_dtype {
        ExpertDtype::Fp4 => weights * (0.5 + 1.0 / 32.0),
        ExpertDtype::Fp8 => weights,
    }
}

/// Experts that `tokens` tokens choose between them, on average.
fn experts_used(c: &ModelConfig, tokens: f64) -> f64 {
    let (all, chosen) = (c.n_routed_experts as f64, c.num_experts_per_tok as f64);
    all * (1.0 - (1.0 - chosen / all).powf(tokens))
}

/// The work of a step: all its operators, main layers and head; the MTP module is not in it.
pub fn step(c: &ModelConfig, formats: CacheFormats, shape: &StepShape) -> Vec<Work> {
    let mut out = Vec::new();
    projections(&mut out, c, formats, shape);
    compressors(&mut out, c, formats, shape);
    indexer(&mut out, c, formats, shape);
    attention(&mut out, c, formats, shape);
    experts(&mut out, c, shape);
    let (t, logits) = (tokens(shape), f64::from(shape.logits));
    let (d, streams) = (c.hidden_size as f64, (c.hc_mult * c.hidden_size) as f64);
    let mix = (c.hc_mult * (c.hc_mult + 2)) as f64;
    let mut add = |name, calls: usize, (bytes, flop), rate| {
        out.push(Work { name, calls: calls as u32, bytes, flop, rate });
    };
    // Behind a sublayer: the streams are renewed and multiplied with the next site's function, which is float.
    let after = mix * streams * 4.0 + t * (2.0 * streams * 2.0 + d * 2.0 + mix * 4.0);
    let flop = t * (mix * streams * 2.0 + (c.hc_mult * c.hc_mult) as f64 * d * 2.0);
    add("mHC after", 2 * c.num_hidden_layers, (after, flop), Rate::Tf32);
    // Before one: they are mixed, normed, and quantised beside the plain form.
    let before = t * (streams * 2.0 + mix * 4.0 + d * 3.0);
    add("mHC before", 2 * c.num_hidden_layers, (before, 0.0), Rate::Tf32);
    if shape.logits > 0 {
        add("lm_head", 1, product(logits, [c.vocab_size, c.hidden_size], [2.0; 3]), Rate::Bf16);
    }
    out
}

fn tokens(shape: &StepShape) -> f64 {
    f64::from(shape.sequences) * f64::from(shape.rows)
}

/// Query heads and output groups of a rank.
fn heads(c: &ModelConfig, shape: &StepShape) -> [usize; 2] {
    let ranks = shape.ranks.max(1) as usize;
    [c.num_attention_heads / ranks, c.o_groups / ranks]
}

/// Layers of a kind.
fn count(c: &ModelConfig, kind: LayerKind) -> u32 {
    c.layers_of(kind).len() as u32
}

/// Products before and behind the core of attention, in every layer.
fn projections(out: &mut Vec<Work>, c: &ModelConfig, formats: CacheFormats, shape: &StepShape) {
    let (t, layers, [heads, groups]) = (tokens(shape), c.num_hidden_layers as u32, heads(c, shape));
    let (wide, low) = (heads * c.head_dim, groups * c.o_lora_rank);
    let mut add = |name, (bytes, flop)| out.push(Work { name, calls: layers, bytes, flop, rate: Rate::Fp8 });
    let fp8 = [1.0, 1.0, 2.0];
    let latents = c.q_lora_rank + c.head_dim;
    add("wq_a + wkv", product(t, [latents, c.hidden_size], fp8));
    let row = f64::from(formats.main.row_bytes());
    add("q/kv norm and insert", (t * ((latents * 2 + c.q_lora_rank) as f64 + row), 0.0));
    add("wq_b", product(t, [wide, c.q_lora_rank], fp8));
    add("q norm and rotation", (t * (wide * 4) as f64, 0.0));
    // Every group has its own inputs.
    let (bytes, flop) = product(t, [low, wide / groups.max(1)], [1.0, groups as f64, 2.0]);
    add("wo_a", (bytes, flop));
    add("quantise", (t * (low * 3) as f64, 0.0));
    add("wo_b", product(t, [c.hidden_size, low], fp8));
}

/// Compressors of entries and of index keys: products, then entries of groups that end and state of the others.
fn compressors(out: &mut Vec<Work>, c: &ModelConfig, formats: CacheFormats, shape: &StepShape) {
    let (t, d) = (tokens(shape), c.hidden_size);
    let (c4, c128) = (count(c, LayerKind::C4), count(c, LayerKind::C128));
    let (main, index) = (f64::from(formats.main.row_bytes()), f64::from(formats.index.row_bytes()));
    let mut add = |name, calls, (bytes, flop)| {
        if calls > 0 {
            out.push(Work { name, calls, bytes, flop, rate: Rate::Bf16 });
        }
    };
    // Values and scores, of two groups that overlap where the ratio is 4.
    let [wide, narrow, keys] = [4 * c.head_dim, 2 * c.head_dim, 4 * c.index_head_dim];
    let floats = |width: usize| (4 * width) as f64;
    let bf16 = [2.0, 2.0, 4.0];
    add("compressor projection", c4, product(t, [wide, d], bf16));
    add("compressor projection", c128, product(t, [narrow, d], bf16));
    add("c4 compress", c4, (t * 2.0 * floats(wide) + t / 4.0 * (8.0 * floats(wide) + main), 0.0));
    add("c128 compress", c128, (t * 2.0 * floats(narrow) + t / 128.0 * (128.0 * floats(narrow) + main), 0.0));
    add("index compressor projection", c4, product(t, [keys, d], bf16));
    add("index compress", c4, (t * 2.0 * floats(keys) + t / 4.0 * (8.0 * floats(keys) + index), 0.0));
}

/// The indexer of c4 layers.
fn indexer(out: &mut Vec<Work>, c: &ModelConfig, formats: CacheFormats, shape: &StepShape) {
    let (t, calls) = (tokens(shape), count(c, LayerKind::C4));
    if calls == 0 {
        return;
    }
    let (heads, wide) = (c.index_n_heads, c.index_n_heads * c.index_head_dim);
    let mut add = |name, (bytes, flop), rate| out.push(Work { name, calls, bytes, flop, rate });
    add("index wq_b", product(t, [wide, c.q_lora_rank], [1.0, 1.0, 2.0]), Rate::Fp8);
    add("index weights", product(t, [heads, c.hidden_size], [2.0, 2.0, 4.0]), Rate::Bf16);
    add("index queries", (t * (wide * 3 + heads * 8) as f64, 0.0), Rate::Bf16);
    // Rows that see no more entries than they pick compare nothing.
    let (mut bytes, mut flop, mut keys) = (0.0, 0.0, 0.0);
    for p in positions(shape) {
        let seen = u64::from((p + 1) / 4);
        let picked = seen.min(c.index_topk as u64);
        bytes += picked as f64 * 4.0;
        if seen > picked {
            bytes += wide as f64;
            flop += seen as f64 * (wide * 2) as f64;
            keys = seen as f64 * f64::from(formats.index.row_bytes());
        }
    }
    let sequences = f64::from(shape.sequences);
    add("index select", (sequences * (bytes + keys), sequences * flop), Rate::Fp8);
}

/// Positions of the rows of one sequence.
fn positions(shape: &StepShape) -> std::ops::Range<u32> {
    shape.context..shape.context + shape.rows
}

/// The core of attention, with the inverse rotation and the codes that come out.
fn attention(out: &mut Vec<Work>, c: &ModelConfig, formats: CacheFormats, shape: &StepShape) {
    let ([heads, _], row) = (heads(c, shape), f64::from(formats.main.row_bytes()));
    let (sequences, rows, reach) = (f64::from(shape.sequences), f64::from(shape.rows), c.sliding_window - 1);
    let last = (shape.context + shape.rows).saturating_sub(1);
    for (name, kind) in [
        ("attention window", LayerKind::Window),
        ("attention c4a", LayerKind::C4),
        ("attention c128a", LayerKind::C128),
    ] {
        let calls = count(c, kind);
        if calls == 0 {
            continue;
        }
        let entries = |p: u32| match kind {
            LayerKind::Window => 0,
            LayerKind::C4 => u64::from((p + 1) / 4).min(c.index_topk as u64),
            LayerKind::C128 => u64::from((p + 1) / 128),
        };
        let read: u64 = positions(shape).map(entries).sum();
        // What several rows of a sequence read is moved once; c4 rows may all have picked the same.
        let moved = entries(last);
        let window: u64 = positions(shape).map(|p| u64::from(p.min(reach)) + 1).sum();
        let window_moved = f64::from(shape.context.min(reach)) + rows;
        let wide = (heads * c.head_dim) as f64;
        out.push(Work {
            name,
            calls,
            bytes: sequences * ((moved as f64 + window_moved) * row + rows * wide * 3.0),
            flop: sequences * (read + window) as f64 * wide * 4.0,
            rate: Rate::Bf16,
        });
    }
}

/// Router and experts. A rank has its part of the routed experts and of the shared expert's columns.
fn experts(out: &mut Vec<Work>, c: &ModelConfig, shape: &StepShape) {
    let (t, ranks, calls) = (tokens(shape), f64::from(shape.ranks.max(1)), c.num_hidden_layers as u32);
    let (d, inner, chosen) = (c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok as f64);
    let mut add = |name, (bytes, flop), rate| out.push(Work { name, calls, bytes, flop, rate });
    add("router", product(t, [c.n_routed_experts, d], [2.0, 2.0, 4.0]), Rate::Bf16);
    let (width, inner_width) = (d as f64, inner as f64);
    let slots = chosen / ranks;
    let moved = t * (width + slots * inner_width * 7.0 + slots * width * 2.0 + width * 2.0);
    let routed = experts_used(c, t) / ranks * expert_bytes(c) + moved;
    add("routed experts", (routed, t * slots * 3.0 * width * inner_width * 2.0), Rate::Fp8);
    let shared = inner / shape.ranks.max(1) as usize;
    let fp8 = [1.0, 1.0, 2.0];
    let (up, down) = (product(t, [2 * shared, d], fp8), product(t, [d, shared], fp8));
    let between = t * (shared * 5) as f64;
    add("shared expert", (up.0 + down.0 + between, up.1 + down.1), Rate::Fp8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{IndexFormat, MainFormat};
    use crate::presets;

    /// The roofs of the design's table of floors.
    const ROOFS: Roofs =
        Roofs { read_bytes_per_s: 4.3e12, bf16_flop_per_s: 790e12, fp8_flop_per_s: 1580e12, tf32_flop_per_s: 395e12 };
    const FORMATS: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp8 };

    fn decode(sequences: u32, context: u32) -> Vec<Work> {
        step(&presets::flash(), FORMATS, &StepShape { sequences, rows: 1, context, logits: sequences, ranks: 1 })
    }

    fn of<'a>(step: &'a [Work], name: &str) -> &'a Work {
        step.iter().find(|work| work.name == name).unwrap()
    }

    /// Within the digits that the table has.
    fn close(have: f64, want: f64) -> bool {
        (have - want).abs() <= 0.006 * want + 0.006
    }

    #[test]
    fn floors_of_decode_steps_are_those_of_the_design() {
        // Microseconds of a call for 1, 32 and 128 tokens.
        for (name, calls, floors) in [
            ("wq_a + wkv", 43, [1.46, 1.52, 1.68]),
            ("wq_b", 43, [7.82, 8.30, 9.78]),
            ("compressor projection", 21, [3.91, 4.02, 4.39]),
            ("c4 compress", 21, [0.01, 0.24, 0.98]),
            ("c128 compress", 20, [0.00, 0.09, 0.37]),
            ("index wq_b", 21, [1.95, 2.08, 2.47]),
            ("index queries", 21, [0.01, 0.19, 0.75]),
            ("index compressor projection", 21, [0.98, 1.05, 1.28]),
            ("index weights", 21, [0.12, 0.18, 0.37]),
            ("wo_a", 43, [7.81, 8.17, 9.27]),
            ("wo_b", 43, [7.81, 7.93, 8.29]),
            ("router", 43, [0.49, 0.56, 0.76]),
            ("routed experts", 43, [18.69, 424.41, 762.09]),
            ("shared expert", 43, [5.86, 6.10, 6.83]),
            ("lm_head", 1, [246.36, 248.28, 254.23]),
        ] {
            for (tokens, floor) in [1, 32, 128].into_iter().zip(floors) {
                let step = decode(tokens, 8192);
                let work = of(&step, name);
                assert_eq!(work.calls, calls, "{name}");
                let us = work.floor_us(&ROOFS);
                assert!(close(us, floor), "{name} of {tokens}: {us} and {floor}");
            }
        }
        // c128 layers have a narrower one, under the same name.
        let step = decode(1, 8192);
        let narrow = step.iter().rfind(|work| work.name == "compressor projection").unwrap();
        assert!(narrow.calls == 20 && close(narrow.floor_us(&ROOFS), 1.95), "{narrow:?}");
        assert!(close(step_us(&step, &ROOFS, "compressor projection").unwrap(), 21.0 * 3.91 + 20.0 * 1.95));
        assert_eq!(step_us(&step, &ROOFS, "sampling"), None);
        let both = ["routed experts", "shared expert"].map(|name| step_us(&step, &ROOFS, name).unwrap());
        assert_eq!(step_us(&step, &ROOFS, ALL_EXPERTS), Some(both[0] + both[1]));
    }

    #[test]
    fn what_grows_with_the_context_is_that_of_the_design() {
        // Bytes and operations of a row; the design writes queries' outputs as bf16, which are codes here, and adds
        // logits, which need not be moved when the choice is made where they are computed.
        let wide = 64.0 * 512.0;
        for (name, context, bytes, flop) in [
            ("attention window", 8192, 206e3, 16.8e6),
            ("attention c4a", 8192, 505e3, 83.9e6),
            ("attention c4a", 1 << 20, 505e3, 83.9e6),
            ("attention c128a", 131_072, 804e3, 151e6),
            ("attention c128a", 1 << 20, 4.99e6, 1.09e9),
        ] {
            let step = decode(1, context);
            let work = of(&step, name);
            assert!(close(work.bytes + wide, bytes) && close(work.flop, flop), "{name} at {context}: {work:?}");
        }
        for (context, bytes, flop) in [(8192, 287e3, 33.6e6), (131_072, 4.46e6, 537e6), (1 << 20, 35.7e6, 4.29e9)] {
            let step = decode(1, context);
            let work = of(&step, "index select");
            let logits = f64::from(context / 4) * 4.0 - 512.0 * 4.0;
            assert!(close(work.bytes + logits, bytes) && close(work.flop, flop), "at {context}: {work:?}");
        }
        // Nobody chooses where all entries are picked.
        assert_eq!(of(&decode(1, 2000), "index select").flop, 0.0);
        // Both halves of a boundary, whose streams pass through memory once more than in one kernel.
        let step = decode(1, 8192);
        let boundary = of(&step, "mHC after").bytes + of(&step, "mHC before").bytes;
        assert!((1.65e6..1.75e6).contains(&boundary), "{boundary}");
    }

    #[test]
    fn chunks_move_what_their_rows_share_once_and_ranks_share_the_rest() {
        let config = presets::flash();
        let chunk = StepShape { sequences: 1, rows: 2048, context: 131_072, logits: 0, ranks: 1 };
        let whole = step(&config, FORMATS, &chunk);
        let window = of(&whole, "attention window");
        assert_eq!(window.bytes, (127.0 + 2048.0) * 584.0 + 2048.0 * 64.0 * 512.0 * 3.0);
        assert_eq!(window.flop, 2048.0 * 128.0 * 64.0 * 512.0 * 4.0);
        assert!(!whole.iter().any(|work| work.name == "lm_head"));
        let half = step(&config, FORMATS, &StepShape { ranks: 2, ..chunk });
        for name in ["wq_b", "wo_a", "routed experts", "shared expert", "attention c4a"] {
            assert_eq!(of(&half, name).flop * 2.0, of(&whole, name).flop, "{name}");
        }
        for name in ["router", "index select", "wq_a + wkv", "mHC after"] {
            assert_eq!(of(&half, name), of(&whole, name), "{name}");
        }
        // A model of windows alone has neither compressors nor an indexer.
        let mut plain = config;
        plain.layers.fill(LayerKind::Window);
        let names: Vec<&str> = step(&plain, FORMATS, &chunk).iter().map(|work| work.name).collect();
        assert!(!names.iter().any(|name| name.contains("index") || name.contains("compress")), "{names:?}");
    }
}
