//! `longwave inspect`: what a checkpoint is and what it holds.
//!
//! From a configuration alone the tensor table gives bytes and counts; a folder with weights is opened as the server
//! would open it, so every tensor is verified, and its shards are listed. Weights are not read beyond their scales.

use std::path::{Path, PathBuf};

use anyhow::Result;
use longwave_model::checkpoint::Shard;
use longwave_model::inventory::{Amount, Inventory, Part};
use longwave_model::tensors::Place;
use longwave_model::{Checkpoint, LayerKind, ModelConfig};
use serde_json::{Value, json};

use crate::load::{self, tiny};
use crate::output;
use crate::source::{self, Source};
use crate::units::{grouped, show_short};

/// Arguments of `longwave inspect`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of a checkpoint, a config.json, or flash, pro, flash-0731, pro-0813; without it the embedded tiny model.
    model: Option<PathBuf>,
    /// Print the numbers as JSON.
    #[arg(long)]
    json: bool,
}

/// Everything that is printed.
struct Report {
    name: String,
    config: ModelConfig,
    inventory: Inventory,
    /// Files of a verified checkpoint; `None` without weights.
    shards: Option<Vec<Shard>>,
}

/// Looks and prints.
pub fn run(args: Args) -> Result<()> {
    let (source, config) = source::find(args.model.as_deref())?;
    let checkpoint = match &source {
        Source::Embedded => Some(Checkpoint::embedded(tiny::NAME, tiny::CONFIG, tiny::SHARD)?),
        Source::Folder(folder) if has_weights(folder) => Some(load::open_folder(folder)?),
        _ => None,
    };
    let inventory = checkpoint.as_ref().map_or_else(|| Inventory::of_config(&config), Inventory::of_checkpoint);
    let report = Report { name: source.name(), config, inventory, shards: checkpoint.map(|c| c.shards) };
    if args.json { output::json(&report.json()) } else { output::text(&report.text()) }
}

/// Whether `folder` holds or names shards. A folder with only a config.json is inspected as a configuration.
fn has_weights(folder: &Path) -> bool {
    let is_shard = |p: PathBuf| p.extension().is_some_and(|e| e == "safetensors");
    folder.join("model.safetensors.index.json").exists()
        || std::fs::read_dir(folder).is_ok_and(|mut d| d.any(|e| e.is_ok_and(|e| is_shard(e.path()))))
}

impl Report {
    fn text(&self) -> String {
        let (c, i) = (&self.config, &self.inventory);
        let mut out = vec![format!("{} ({})", c.describe(), self.name), String::new()];
        out.extend(sizes(c).iter().map(|(k, v)| format!("  {k:<13}{v}")));
        out.push(format!(
            "\n{} B in {} tensors ({}); {} parameters, {} without the drafter, {} active per token",
            grouped(i.total.bytes),
            grouped(i.total.tensors as u64),
            show_short(i.total.bytes),
            billions(i.total.parameters),
            billions(i.total.parameters - draft_parameters(i)),
            billions(i.active_parameters)
        ));
        let row = |name: &str, a: &Amount| {
            let share = 100.0 * a.bytes as f64 / i.total.bytes as f64;
            format!("  {name:<20}{:>19} B {share:>6.2} %  {:>8} tensors", grouped(a.bytes), grouped(a.tensors as u64))
        };
        out.push("\nBy storage type".into());
        out.extend(i.by_dtype.iter().map(|(d, a)| row(d.name(), a)));
        out.push("\nBy part".into());
        out.extend(i.by_part.iter().map(|(p, a)| row(p.name(), a)));
        out.push("\nBy layer".into());
        out.extend(self.places().iter().map(|(name, a)| format!("{}{}", row(name, a), each(name))));
        match &self.shards {
            None => out.push("\nNo weights here: the numbers follow from the configuration.".into()),
            Some(shards) => {
                out.push(format!(
                    "\nVerified: every tensor is there with its shape and type, in {} shard(s)",
                    shards.len()
                ));
                out.extend(shards.iter().map(|s| {
                    format!("  {:<42}{:>19} B  {:>8} tensors", s.name, grouped(s.bytes), grouped(s.tensors as u64))
                }));
            }
        }
        out.join("\n") + "\n"
    }

    /// Layers with equal sums on one line.
    fn places(&self) -> Vec<(String, Amount)> {
        let mut groups: Vec<(LayerKind, Amount, Vec<usize>)> = Vec::new();
        let (mut top, mut drafts) = (Vec::new(), Vec::new());
        for (place, amount) in &self.inventory.by_place {
            match place {
                Place::Top => top.push(("top".to_string(), *amount)),
                Place::Draft(n) => drafts.push((format!("mtp.{n}"), *amount)),
                Place::Layer(l) => {
                    let kind = self.config.layer_kind(*l);
                    match groups.iter_mut().find(|(k, a, _)| *k == kind && a == amount) {
                        Some((_, _, layers)) => layers.push(*l),
                        None => groups.push((kind, *amount, vec![*l])),
                    }
                }
            }
        }
        let layers = groups.into_iter().map(|(kind, a, ids)| (format!("{} {}", span(&ids), kind_name(kind)), a));
        top.into_iter().chain(layers).chain(drafts).collect()
    }

    fn json(&self) -> Value {
        let (c, i) = (&self.config, &self.inventory);
        let amount = |a: &Amount| json!({"bytes": a.bytes, "tensors": a.tensors, "parameters": a.parameters});
        let layers: Vec<Value> = i
            .by_place
            .iter()
            .map(|(place, a)| match place {
                Place::Top => json!({"place": "top", "bytes": a.bytes, "tensors": a.tensors}),
                Place::Layer(l) => {
                    let kind = kind_name(c.layer_kind(*l));
                    json!({"place": format!("layers.{l}"), "kind": kind, "bytes": a.bytes, "tensors": a.tensors})
                }
                Place::Draft(n) => json!({"place": format!("mtp.{n}"), "bytes": a.bytes, "tensors": a.tensors}),
            })
            .collect();
        let shards = self.shards.as_ref().map(|shards| {
            let one = |s: &Shard| json!({"name": s.name, "bytes": s.bytes, "tensors": s.tensors});
            shards.iter().map(one).collect::<Vec<_>>()
        });
        json!({
            "model": self.name,
            "describes": c.describe(),
            "config": {
                "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "num_hidden_layers": c.num_hidden_layers,
                "num_attention_heads": c.num_attention_heads, "head_dim": c.head_dim, "q_lora_rank": c.q_lora_rank,
                "o_groups": c.o_groups, "o_lora_rank": c.o_lora_rank, "sliding_window": c.sliding_window,
                "compress_ratios": c.layers.iter().map(|k| k.ratio()).collect::<Vec<_>>(),
                "index_n_heads": c.index_n_heads, "index_head_dim": c.index_head_dim, "index_topk": c.index_topk,
                "n_routed_experts": c.n_routed_experts, "num_experts_per_tok": c.num_experts_per_tok,
                "moe_intermediate_size": c.moe_intermediate_size, "num_hash_layers": c.num_hash_layers,
                "max_position_embeddings": c.max_position_embeddings,
                "num_nextn_predict_layers": c.num_nextn_predict_layers,
                "dspark": c.dspark.is_some(),
            },
            "layer_kinds": pattern(&c.layers),
            "total": amount(&i.total),
            "active_parameters": i.active_parameters,
            "by_dtype": i.by_dtype.iter().map(|(d, a)| (d.name().to_string(), amount(a))).collect::<serde_json::Map<_, _>>(),
            "by_part": i.by_part.iter().map(|(p, a)| (p.name().to_string(), amount(a))).collect::<serde_json::Map<_, _>>(),
            "layers": layers,
            "shards": shards,
        })
    }
}

/// The main fields of a configuration, as people say them.
fn sizes(c: &ModelConfig) -> Vec<(&'static str, String)> {
    vec![
        ("hidden size", c.hidden_size.to_string()),
        ("layers", c.num_hidden_layers.to_string()),
        ("layer kinds", pattern(&c.layers)),
        (
            "attention",
            format!(
                "{} heads of {} ({} rotary), query rank {}",
                c.num_attention_heads, c.head_dim, c.qk_rope_head_dim, c.q_lora_rank
            ),
        ),
        ("output", format!("{} groups of rank {}", c.o_groups, c.o_lora_rank)),
        ("window", c.sliding_window.to_string()),
        ("indexer", format!("{} heads of {}, top {}", c.index_n_heads, c.index_head_dim, c.index_topk)),
        (
            "experts",
            format!(
                "{} routed, {} picked, {} shared, inner size {}, {:?}",
                c.n_routed_experts, c.num_experts_per_tok, c.n_shared_experts, c.moe_intermediate_size, c.expert_dtype
            )
            .to_lowercase(),
        ),
        ("routing", format!("by token id in {} first layer(s), factor {}", c.num_hash_layers, c.routed_scaling_factor)),
        ("mHC", format!("{} streams, {} Sinkhorn passes", c.hc_mult, c.hc_sinkhorn_iters)),
        ("vocabulary", grouped(c.vocab_size as u64)),
        ("context", grouped(c.max_position_embeddings.into())),
        ("drafter", drafter(c)),
    ]
}

fn draft_parameters(i: &Inventory) -> u64 {
    i.by_part.get(&Part::Draft).map_or(0, |a| a.parameters)
}

fn drafter(c: &ModelConfig) -> String {
    match (&c.dspark, c.num_nextn_predict_layers) {
        (Some(d), _) => format!("DSpark, {} blocks, {} positions at once", d.target_layer_ids.len(), d.block_size),
        (None, 0) => "none".into(),
        (None, n) => format!("MTP, {n} module"),
    }
}

/// A count as people say it: `290.9 B`, `7.6 M`.
fn billions(n: u64) -> String {
    match n as f64 {
        n if n >= 1e9 => format!("{:.1} B", n / 1e9),
        n => format!("{:.1} M", n / 1e6),
    }
}

fn kind_name(kind: LayerKind) -> &'static str {
    match kind {
        LayerKind::Window => "window",
        LayerKind::C4 => "c4",
        LayerKind::C128 => "c128",
    }
}

/// Says that a line of several layers gives their sizes one by one.
fn each(name: &str) -> &'static str {
    if name.contains(['-', ',']) && !name.starts_with("mtp") { " each" } else { "" }
}

/// Layer numbers in short: `0-1`, `3-41 odd`, `4-42 even`, else the list.
fn span(layers: &[usize]) -> String {
    let step = |n: usize| layers.windows(2).all(|w| w[1] == w[0] + n);
    match layers {
        [one] => one.to_string(),
        [first, .., last] if step(1) => format!("{first}-{last}"),
        [first, _, .., last] if step(2) => format!("{first}-{last} {}", if first % 2 == 0 { "even" } else { "odd" }),
        _ => layers.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
    }
}

/// Kinds of all layers in short: `0-1 window, 2-41 (c4, c128) x 20, 42 c4`.
fn pattern(kinds: &[LayerKind]) -> String {
    let mut out = Vec::new();
    let mut at = 0;
    while at < kinds.len() {
        let rest = &kinds[at..];
        let run = rest.iter().take_while(|k| **k == rest[0]).count();
        let pairs =
            if run == 1 && rest.len() > 1 { rest.chunks_exact(2).take_while(|p| *p == &rest[..2]).count() } else { 0 };
        if pairs > 1 {
            let (a, b) = (kind_name(rest[0]), kind_name(rest[1]));
            out.push(format!("{at}-{} ({a}, {b}) x {pairs}", at + 2 * pairs - 1));
            at += 2 * pairs;
        } else {
            let last = at + run - 1;
            let layers = if run > 1 { format!("{at}-{last}") } else { at.to_string() };
            out.push(format!("{layers} {}", kind_name(rest[0])));
            at += run;
        }
    }
    out.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_model::presets;

    #[test]
    fn layer_kinds_are_shown_in_short() {
        assert_eq!(pattern(&presets::flash().layers), "0-1 window, 2-41 (c4, c128) x 20, 42 c4");
        assert_eq!(pattern(&presets::pro().layers), "0-1 c128, 2-59 (c4, c128) x 29, 60 c4");
        let tiny = source::find(None).unwrap().1;
        assert_eq!(pattern(&tiny.layers), "0 window, 1-4 (c128, c4) x 2");
        assert_eq!(pattern(&[]), "");
    }

    #[test]
    fn layer_numbers_are_shown_in_short() {
        assert_eq!((span(&[2]), span(&[0, 1]), span(&[1, 4, 5])), ("2".into(), "0-1".into(), "1,4,5".into()));
        assert_eq!((span(&[3, 5, 7]), span(&[4, 6, 8])), ("3-7 odd".into(), "4-8 even".into()));
    }
}
