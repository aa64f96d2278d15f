//! How much work a token is: bytes of weights read and floating-point operations, for benches and pictures.
//! Counts products only; norms, roundings and softmax are left out, so shares of a peak are understated.

use longwave_model::config::LayerKind;

use crate::forward::Model;
use crate::ops::matrix::Matrix;
use crate::weights::{Block, Expert};

fn expert(e: &Expert) -> [&Matrix; 3] {
    [&e.w1, &e.w2, &e.w3]
}

/// Matrices that one token passes through in a block, with how many of them are used.
fn matrices<'a>(model: &Model, b: &'a Block) -> Vec<(&'a Matrix, usize)> {
    let a = &b.attn;
    let mut out = vec![
        (&b.hc_attn.dots, 1),
        (&b.hc_ffn.dots, 1),
        (&a.wq_a, 1),
        (&a.wq_b, 1),
        (&a.wkv, 1),
        (&a.wo_a, 1),
        (&a.wo_b, 1),
        (&b.moe.gate, 1),
    ];
    for c in a.compressor.iter().chain(a.indexer.iter().map(|i| &i.compressor)) {
        out.extend([(&c.wkv, 1), (&c.wgate, 1)]);
    }
    if let Some(i) = &a.indexer {
        out.extend([(&i.wq_b, 1), (&i.weights_proj, 1)]);
    }
    out.extend(expert(&b.moe.shared).map(|m| (m, 1)));
    out.extend(expert(&b.moe.experts[0]).map(|m| (m, model.config.num_experts_per_tok)));
    out
}

impl Model {
    /// Bytes of weights that decoding one token reads, the head included, the MTP module not.
    pub fn bytes_per_token(&self) -> usize {
        let blocks = self.weights.layers.iter().flat_map(|b| matrices(self, b)).map(|(m, n)| m.bytes() * n);
        blocks.sum::<usize>() + self.weights.head.bytes() + self.weights.hc_head.dots.bytes()
    }

    /// Floating-point operations of prefilling `n` tokens from an empty cache (products only, without the head).
    pub fn prefill_flop(&self, n: usize) -> f64 {
        let c = &self.config;
        let dense: f64 = self
            .weights
            .layers
            .iter()
            .flat_map(|b| matrices(self, b))
            .map(|(m, k)| 2.0 * (m.shape().0 * m.shape().1 * k) as f64)
            .sum();
        let mut pairs = 0.0;
        for kind in &c.layers {
            for i in 0..n {
                // Query-entry pairs: score and weighted sum, 512 wide, all heads.
                let window = (i + 1).min(c.sliding_window as usize);
                let extra = match kind {
                    LayerKind::Window => 0,
                    LayerKind::C4 => ((i + 1) / 4).min(c.index_topk),
                    LayerKind::C128 => (i + 1) / 128,
                };
                pairs += 4.0 * ((window + extra) * c.num_attention_heads * 512) as f64;
                if *kind == LayerKind::C4 && (i + 1) / 4 > c.index_topk {
                    pairs += 2.0 * ((i + 1) / 4 * c.index_n_heads * 128) as f64;
                }
            }
        }
        dense * n as f64 + pairs
    }
}
