//! Buffers of a step, taken once: their sizes follow from the model and the largest step and never from the context.
//!
//! A buffer has one use in a layer; `H` and `G` count the rank's own heads and groups. What a step does not fill keeps old bits, which nothing reads.

use longwave_model::ModelConfig;

use crate::driver::{Arena, DeviceSlice, DriverError};
use crate::ops::experts::ExpertShape;
use crate::ops::index;
use crate::ops::mhc::MhcShape;
use crate::ops::router::Routing;
use crate::split::Share;

/// Sizes of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSizes {
    /// Tokens.
    pub tokens: usize,
    /// Sequences.
    pub seats: usize,
    /// Rows whose logits are computed at once.
    pub heads: usize,
    /// Most drafts of a sequence; 0 leaves the MTP module out.
    pub drafts: u32,
}

/// Codes e4m3 `[T, n]` with a float scale per 128 of them.
pub struct Codes {
    /// Codes.
    pub codes: DeviceSlice<u8>,
    /// Scales `[T, n / 128]`.
    pub scales: DeviceSlice<f32>,
}

/// All buffers; `T` tokens.
pub struct Scratch {
    /// Cosines and sines `[T, 64]`: of window layers, of compressed ones, and of the first position of each row's group of 4
    /// and of 128.
    pub angles: [DeviceSlice<f32>; 4],
    /// Residual streams, bf16 `[T, 4, D]`.
    pub streams: DeviceSlice<u16>,
    /// Partial products of a mixing site, float `[T, 4D / 512, 32]`.
    pub partial: DeviceSlice<f32>,
    /// Mix of a site, `[T, 20]`.
    pub mix: DeviceSlice<f32>,
    /// A sublayer's input, bf16 `[T, D]`.
    pub normed: DeviceSlice<u16>,
    /// The same quantised.
    pub input: Codes,
    /// `wq_a` and `wkv` products, float `[T, ql + 512]`.
    pub q_kv: DeviceSlice<f32>,
    /// Low-rank queries, `[T, ql]`.
    pub q_low: Codes,
    /// `wq_b` products, float `[T, H * 512]`.
    pub q_wide: DeviceSlice<f32>,
    /// Queries, bf16 `[T, H, 512]`.
    pub q: DeviceSlice<u16>,
    /// Attention output after the inverse rotation, `[T, H * 512]`.
    pub o: Codes,
    /// `wo_a` products, float `[T, G * ol]`.
    pub o_low_wide: DeviceSlice<f32>,
    /// The same quantised.
    pub o_low: Codes,
    /// A sublayer's product before rounding, float `[T, D]`.
    pub product: DeviceSlice<f32>,
    /// A sublayer's output, bf16 `[T, D]`.
    pub output: DeviceSlice<u16>,
    /// Compressor products, float `[T, 2048]`.
    pub compressed: DeviceSlice<f32>,
    /// Index compressor products, float `[T, 512]`.
    pub index_compressed: DeviceSlice<f32>,
    /// Index query products, float `[T, Hi * 128]`.
    pub index_wide: DeviceSlice<f32>,
    /// Index queries on the grid of the keys, bf16 `[T, Hi, 128]`.
    pub index_queries: DeviceSlice<u16>,
    /// Products of the index head weights, float `[T, Hi]`.
    pub index_gates: DeviceSlice<f32>,
    /// The weights, float `[T, Hi]`.
    pub index_weights: DeviceSlice<f32>,
    /// Candidates of the selection.
    pub candidates: DeviceSlice<u8>,
    /// Picked entries, `[T, topk]`.
    pub picks: DeviceSlice<u32>,
    /// How many, `[T]`.
    pub pick_counts: DeviceSlice<u32>,
    /// Router logits, float `[T, E]`.
    pub router: DeviceSlice<f32>,
    /// Choices of the router and the groups of pairs.
    pub routing: DeviceSlice<u8>,
    /// What experts work in.
    pub experts: DeviceSlice<u8>,
    /// Inputs of the head, bf16 `[heads, D]`.
    pub head_input: DeviceSlice<u16>,
    /// Logits, float `[heads, V]`.
    pub logits: DeviceSlice<f32>,
}

/// Sizes of a layer's experts.
pub fn expert_shape(c: &ModelConfig) -> ExpertShape {
    ExpertShape { width: c.hidden_size as u32, inner: c.moe_intermediate_size as u32, limit: c.swiglu_limit }
}

/// Sizes of a mixing site.
pub fn mhc_shape(c: &ModelConfig) -> MhcShape {
    let (norm_eps, hc_eps) = (c.rms_norm_eps, c.hc_eps);
    MhcShape { width: c.hidden_size as u32, norm_eps, hc_eps, iters: c.hc_sinkhorn_iters }
}

/// Takes all buffers from `arena`, those of query heads and output groups for the ones that a rank has.
pub fn take(arena: &mut Arena, c: &ModelConfig, share: Share, sizes: StepSizes) -> Result<Scratch, DriverError> {
    let (t, d) = (sizes.tokens, c.hidden_size);
    // The MTP module projects four streams where query heads are otherwise.
    let heads = (share.heads(c).len() * c.head_dim).max(if sizes.drafts > 0 { 4 * d } else { 0 });
    let (low, chosen, shape) = (share.groups(c).len() * c.o_lora_rank, c.num_experts_per_tok as u32, expert_shape(c));
    let codes = |arena: &mut Arena, rows: usize, n: usize| -> Result<Codes, DriverError> {
        Ok(Codes { codes: arena.slice(rows * n)?, scales: arena.slice(rows * n.div_ceil(128))? })
    };
    Ok(Scratch {
        angles: [arena.slice(t * 64)?, arena.slice(t * 64)?, arena.slice(t * 64)?, arena.slice(t * 64)?],
        streams: arena.slice(t * 4 * d)?,
        partial: arena.slice(mhc_shape(c).scratch_bytes(t as u32) as usize / 4)?,
        mix: arena.slice(t * 20)?,
        normed: arena.slice(t * d)?,
        input: codes(arena, t, d)?,
        q_kv: arena.slice(t * (c.q_lora_rank + 512))?,
        q_low: codes(arena, t, c.q_lora_rank)?,
        q_wide: arena.slice(t * heads)?,
        q: arena.slice(t * heads)?,
        o: codes(arena, t, heads)?,
        o_low_wide: arena.slice(t * low)?,
        o_low: codes(arena, t, low)?,
        product: arena.slice(t * d)?,
        output: arena.slice(t * d)?,
        compressed: arena.slice(t * 2048)?,
        index_compressed: arena.slice(t * 512)?,
        index_wide: arena.slice(t * c.index_n_heads * 128)?,
        index_queries: arena.slice(t * c.index_n_heads * 128)?,
        index_gates: arena.slice(t * c.index_n_heads)?,
        index_weights: arena.slice(t * c.index_n_heads)?,
        candidates: arena.slice(index::scratch_bytes(t as u32, c.index_topk as u32, most_entries(c)) as usize)?,
        picks: arena.slice(t * c.index_topk)?,
        pick_counts: arena.slice(t)?,
        router: arena.slice(t * c.n_routed_experts)?,
        routing: arena.slice(Routing::scratch_bytes(t as u32, c.n_routed_experts as u32, chosen) as usize)?,
        experts: arena.slice(shape.scratch_bytes(t as u32, chosen) as usize)?,
        head_input: arena.slice(sizes.heads * d)?,
        logits: arena.slice(sizes.heads * c.vocab_size)?,
    })
}

/// Entries of a c4 layer in the longest context of the model.
pub(crate) fn most_entries(c: &ModelConfig) -> u32 {
    c.max_position_embeddings / 4
}
