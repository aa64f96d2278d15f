//! Bytes of scratch that a step can take, from the configuration and the largest step alone.
//!
//! Every buffer of the forward pass is counted as if all of them lived at once, so reuse can only make it less. The
//! context is no input: nothing in a step grows with it. The peak of [`crate::scratch::Scratch`] is tested against it.

use longwave_model::ModelConfig;

/// Most bytes of scratch of a step of `step_tokens` tokens in at most `seats` sequences.
pub fn scratch_bytes(c: &ModelConfig, step_tokens: u32, seats: u32) -> u64 {
    let (d, heads) = (c.hidden_size, c.num_attention_heads * c.head_dim);
    let (k, i) = (c.num_experts_per_tok, c.moe_intermediate_size);
    let hyper = 4 * d + 24 + d;
    let queries = d + 2 * c.q_lora_rank + heads + 2 * c.head_dim;
    let indexer = c.index_n_heads * (c.index_head_dim + 1);
    // Values, scores and both together, of two overlapping branches each.
    let compressors = 4 * 2 * (c.head_dim + c.index_head_dim);
    let output = heads + c.o_groups * c.o_lora_rank + heads / c.o_groups + c.o_lora_rank + d;
    let experts = d + c.n_routed_experts + 2 * k * d + (k + 1) * (2 * i + d);
    let window = c.head_dim;
    let mtp = if c.num_nextn_predict_layers > 0 { 10 * d } else { 0 };
    let per_token = hyper + queries + indexer + compressors + output + experts + window + mtp;
    // Rows before a step that its first tokens read: a window and its tile, eight rows of compressor state.
    let per_seat = (c.sliding_window as usize + 64) * c.head_dim + 8 * 4 * (c.head_dim + c.index_head_dim);
    4 * (step_tokens as u64 * per_token as u64 + u64::from(seats) * per_seat as u64)
}
