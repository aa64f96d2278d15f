//! Whether a GPU can run a model, seen before anything is loaded: kernels, shapes, formats, sizes.
//!
//! The bounds are those that operators assert. Assumes a configuration that `ModelConfig` accepted. What does not fit is an
//! error that says what to do instead.

use longwave_model::config::ExpertDtype;
use longwave_model::geometry::MAX_DRAFTS;
use longwave_model::{CacheLayout, IndexFormat, MainFormat, ModelConfig};

use crate::backend::{CudaOptions, OpenError};
use crate::driver::{Gpu, can_reach, probe};
use crate::ops::linear_fp8::MOST_COLS;
use crate::split::{self, Share};
use crate::{cubins, loader, pools};

/// Largest dimension of a grid that counts tokens.
const MOST_TOKENS: u32 = 65_535;

/// The GPUs that `options` names, which reach each other.
pub(crate) fn gpus(options: &CudaOptions) -> Result<Vec<Gpu>, OpenError> {
    let gpus = probe()?;
    if cubins::CUBINS.is_empty() {
        return Err(OpenError::NoKernels);
    }
    let (count, ranks) = (gpus.len(), options.ranks as usize);
    let own: Vec<Gpu> = gpus.into_iter().skip(options.gpu as usize).take(ranks).collect();
    if own.len() < ranks || ranks == 0 {
        return Err(match ranks {
            1 => OpenError::NoSuchGpu { index: options.gpu, count },
            _ => OpenError::TooFewGpus { ranks: options.ranks, count },
        });
    }
    for (gpu, other) in own.iter().flat_map(|gpu| own.iter().map(move |other| (gpu, other))) {
        if gpu.index != other.index && !can_reach(gpu, other)? {
            return Err(OpenError::Unreachable { gpu: gpu.index, other: other.index });
        }
    }
    Ok(own)
}

/// Refuses what the GPUs that `options` names cannot run, weights that are larger than their memory included.
pub fn fits(config: &ModelConfig, options: &CudaOptions) -> Result<(), OpenError> {
    split::check(config, options.ranks as usize).map_err(OpenError::Model)?;
    let gpus = gpus(options)?;
    for (rank, gpu) in gpus.iter().enumerate() {
        check(config, options, gpu)?;
        let (need, have) =
            (loader::bytes(config, Share { rank, ranks: gpus.len() }, options.drafts > 0), gpu.memory_bytes);
        if need > have {
            return Err(OpenError::Memory {
                what: "the weights",
                need_gib: need as f64 / (1u64 << 30) as f64,
                have_gib: have as f64 / (1u64 << 30) as f64,
                gpu: gpu.index,
                hint: "share the model among more GPUs with --tensor-parallel-size, or use --backend cpu",
            });
        }
    }
    Ok(())
}

/// Refuses GPUs, shapes, formats and sizes that the kernels do not have.
pub(crate) fn check(config: &ModelConfig, options: &CudaOptions, gpu: &Gpu) -> Result<(), OpenError> {
    if cubins::find("attend", gpu.major, gpu.minor).is_none() {
        let (name, major, minor) = (gpu.name.clone(), gpu.major, gpu.minor);
        return Err(OpenError::Architecture { name, major, minor });
    }
    shapes(config, options).map_err(OpenError::Model)
}

fn shapes(config: &ModelConfig, options: &CudaOptions) -> Result<(), String> {
    if config.expert_dtype != ExpertDtype::Fp4 {
        return Err("its experts are fp8, as in the Base checkpoints; use the released one, or --backend cpu".into());
    }
    for (name, value, most) in [
        ("index_n_heads", config.index_n_heads, 64),
        ("index_topk", config.index_topk, 1024),
        ("n_routed_experts", config.n_routed_experts, 512),
        ("num_experts_per_tok", config.num_experts_per_tok, 32),
        ("q_lora_rank", config.q_lora_rank, 2048),
        ("hidden_size", config.hidden_size, 8192),
        ("moe_intermediate_size", config.moe_intermediate_size, 8192),
    ] {
        if value > most {
            return Err(format!("{name} is {value}, the kernels take {most} at most; use --backend cpu"));
        }
    }
    for (name, value, of) in [
        ("hidden_size", config.hidden_size, 256),
        ("q_lora_rank", config.q_lora_rank, 128),
        ("moe_intermediate_size", config.moe_intermediate_size, 128),
        ("o_lora_rank", config.o_lora_rank, 128),
    ] {
        if !value.is_multiple_of(of) {
            return Err(format!("{name} is {value}, not a multiple of {of}; use --backend cpu"));
        }
    }
    let groups = config.o_groups.max(1);
    for (names, cols) in [
        ("num_attention_heads / o_groups * head_dim", config.num_attention_heads / groups * config.head_dim),
        ("o_groups * o_lora_rank / GPUs", groups * config.o_lora_rank / options.ranks.max(1) as usize),
    ] {
        if cols > MOST_COLS as usize {
            return Err(format!("{names} is {cols}, the kernels take {MOST_COLS} at most; use --backend cpu"));
        }
    }
    let drafts = options.drafts;
    if drafts > MAX_DRAFTS {
        return Err(format!("{drafts} draft tokens are more than {MAX_DRAFTS}, which is what the cache can take back"));
    }
    if drafts > 0 && config.num_nextn_predict_layers == 0 {
        return Err(format!("{drafts} draft tokens need an MTP module, and this checkpoint has none; ask for 0"));
    }
    split::check(config, options.ranks as usize)?;
    if options.formats.main == MainFormat::F32 || options.formats.index == IndexFormat::F32 {
        return Err("caches of f32 are for the CPU alone".into());
    }
    if options.step_tokens > MOST_TOKENS {
        return Err(format!("a step takes {MOST_TOKENS} tokens at most; lower --max-num-batched-tokens"));
    }
    let layout = CacheLayout::new(config, options.formats);
    let context = options.context.min(config.max_position_embeddings);
    if pools::table_words(&layout, options.seats, context) > u64::from(u32::MAX) {
        return Err(
            "its block tables would have more than 2^32 entries; lower --max-num-seqs or --max-model-len".into()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_model::{CacheFormats, presets};

    fn options() -> CudaOptions {
        let formats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };
        CudaOptions {
            gpu: 0,
            ranks: 1,
            seats: 256,
            step_tokens: 8192,
            context: 1 << 20,
            cache_bytes: None,
            formats,
            drafts: 0,
            streams: 2,
        }
    }

    #[test]
    fn released_models_fit_the_kernels_and_what_does_not_is_named() {
        for config in [presets::flash(), presets::pro(), presets::flash_0731(), presets::pro_0813()] {
            assert_eq!(shapes(&config, &options()), Ok(()));
        }
        let refused = |change: &dyn Fn(&mut ModelConfig, &mut CudaOptions)| {
            let (mut config, mut options) = (presets::flash(), options());
            change(&mut config, &mut options);
            shapes(&config, &options).unwrap_err()
        };
        assert!(refused(&|config, _| config.index_topk = 2048).contains("index_topk is 2048"));
        assert!(refused(&|config, _| config.hidden_size = 4224).contains("multiple of 256"));
        assert!(refused(&|config, _| config.expert_dtype = ExpertDtype::Fp8).contains("Base"));
        assert!(refused(&|_, options| options.step_tokens = 65_536).contains("--max-num-batched-tokens"));
        assert!(refused(&|_, options| options.drafts = 8).contains("take back"));
        assert!(
            refused(&|config, options| (config.num_nextn_predict_layers, options.drafts) = (0, 1)).contains("none")
        );
        assert!(refused(&|_, options| options.ranks = 3).contains("--tensor-parallel-size"));
        assert!(refused(&|_, options| options.seats = 8192).contains("--max-num-seqs"));
        assert!(refused(&|_, options| options.formats.main = MainFormat::F32).contains("CPU"));
    }
}
