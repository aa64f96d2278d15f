//! The weights of a checkpoint on the GPU, by layer. Matrices that read the same input lie one behind the other, so that
//! one product serves them. Names are those of the checkpoint (model.md 2.2). Of several ranks each has its part of query
//! heads, output groups and experts.

use longwave_model::ModelConfig;
use longwave_model::config::LayerKind;

use crate::driver::{DeviceSlice, DriverError};
use crate::loader::{Loader, Packed, Plain, Scaled};
use crate::ops::router::Choosing;
use crate::split::Share;

/// A mixing site of the streams (model.md 5).
pub struct Mixer {
    /// `[24, 4D]`, or `[4, 4D]` for a head.
    pub function: DeviceSlice<f32>,
    /// `[24]` or `[4]`.
    pub base: DeviceSlice<f32>,
    /// `[3]` or `[1]`.
    pub scale: DeviceSlice<f32>,
}

/// A compressor (model.md 6.4).
pub struct Compressor {
    /// Values then scores, `[2 * c * w, D]`.
    pub projection: Plain,
    /// `[ratio, c * w]`.
    pub ape: DeviceSlice<f32>,
    /// `[w]`.
    pub norm: DeviceSlice<f32>,
}

/// The indexer of a c4 layer (model.md 6.5).
pub struct Indexer {
    /// `[Hi * 128, ql]`.
    pub wq_b: Scaled,
    /// `[Hi, D]`.
    pub weights_proj: Plain,
    /// Width 128.
    pub compressor: Compressor,
}

/// Attention of one block (model.md 6).
pub struct Attention {
    /// Kind of the layer.
    pub kind: LayerKind,
    /// `[H]`.
    pub sink: DeviceSlice<f32>,
    /// `wq_a` then `wkv`, `[ql + 512, D]`.
    pub wq_a_wkv: Scaled,
    /// `[ql]`.
    pub q_norm: DeviceSlice<f32>,
    /// `[512]`.
    pub kv_norm: DeviceSlice<f32>,
    /// `[H * 512, ql]`.
    pub wq_b: Scaled,
    /// `[G * ol, H * 512 / G]`.
    pub wo_a: Scaled,
    /// `[D, G * ol]`.
    pub wo_b: Scaled,
    /// In c4 and c128 layers.
    pub compressor: Option<Compressor>,
    /// In c4 layers.
    pub indexer: Option<Indexer>,
}

/// How tokens find their experts (model.md 7.1).
pub enum Route {
    /// By token id: `[V, k]`.
    Hash(DeviceSlice<u32>),
    /// By score plus bias `[E]`.
    Scored(DeviceSlice<f32>),
}

impl Route {
    /// The same for the router's kernels.
    pub fn choosing(&self) -> Choosing {
        match self {
            Route::Hash(table) => Choosing::Hashed(table.address()),
            Route::Scored(bias) => Choosing::Scored(bias.address()),
        }
    }
}

/// Mixture of experts of one block (model.md 7).
pub struct Moe {
    /// `[E, D]`.
    pub gate: Plain,
    /// Table or bias.
    pub route: Route,
    /// `w1` then `w3` of every expert, `[E, 2I, D]`.
    pub gate_up: Packed,
    /// `w2` of every expert, `[E, D, I]`.
    pub down: Packed,
    /// The shared expert's `w1` then `w3`, `[2I, D]`.
    pub shared_gate_up: Scaled,
    /// Its `w2`, `[D, I]`.
    pub shared_down: Scaled,
}

/// A decoder block.
pub struct Block {
    /// Before attention.
    pub hc_attn: Mixer,
    /// `[D]`.
    pub attn_norm: DeviceSlice<f32>,
    /// Attention.
    pub attn: Attention,
    /// Before the experts.
    pub hc_ffn: Mixer,
    /// `[D]`.
    pub ffn_norm: DeviceSlice<f32>,
    /// Experts.
    pub moe: Moe,
}

/// The MTP module (model.md 8); embedding and head are the main model's.
pub struct Mtp {
    /// `[D, D]`.
    pub e_proj: Scaled,
    /// `[D, D]`.
    pub h_proj: Scaled,
    /// `[D]`.
    pub enorm: DeviceSlice<f32>,
    /// `[D]`.
    pub hnorm: DeviceSlice<f32>,
    /// Its one block.
    pub block: Block,
    /// Head mixing.
    pub hc_head: Mixer,
    /// `[D]`.
    pub norm: DeviceSlice<f32>,
}

/// All weights.
pub struct Weights {
    /// Which part of the model they are.
    pub share: Share,
    /// `[V, D]`.
    pub embed: Plain,
    /// Main layers.
    pub layers: Vec<Block>,
    /// Head mixing.
    pub hc_head: Mixer,
    /// `[D]`.
    pub norm: DeviceSlice<f32>,
    /// `[V, D]`.
    pub head: Plain,
    /// Where it drafts.
    pub mtp: Option<Mtp>,
}

impl Weights {
    /// Loads all of them, the MTP module if it `drafts`; the experts' codes still have their stored order.
    pub fn load(l: &mut Loader, config: &ModelConfig, drafts: bool) -> Result<Weights, DriverError> {
        let layer =
            |i: usize, l: &mut Loader| block(l, &format!("layers.{i}."), config.layers[i], config.is_hash_layer(i));
        Ok(Weights {
            share: l.source.share,
            embed: l.plain(&["embed"])?,
            layers: (0..config.num_hidden_layers).map(|i| layer(i, l)).collect::<Result<_, _>>()?,
            hc_head: mixer(l, "hc_head")?,
            norm: l.vector("norm.weight")?,
            head: l.plain(&["head"])?,
            mtp: drafts.then(|| mtp(l)).transpose()?,
        })
    }
}

fn mtp(l: &mut Loader) -> Result<Mtp, DriverError> {
    Ok(Mtp {
        e_proj: l.scaled(&["mtp.0.e_proj"])?,
        h_proj: l.scaled(&["mtp.0.h_proj"])?,
        enorm: l.vector("mtp.0.enorm.weight")?,
        hnorm: l.vector("mtp.0.hnorm.weight")?,
        block: block(l, "mtp.0.", LayerKind::Window, false)?,
        hc_head: mixer(l, "mtp.0.hc_head")?,
        norm: l.vector("mtp.0.norm.weight")?,
    })
}

fn mixer(l: &mut Loader, name: &str) -> Result<Mixer, DriverError> {
    Ok(Mixer {
        function: l.vector(&format!("{name}_fn"))?,
        base: l.vector(&format!("{name}_base"))?,
        scale: l.vector(&format!("{name}_scale"))?,
    })
}

fn compressor(l: &mut Loader, p: &str) -> Result<Compressor, DriverError> {
    Ok(Compressor {
        projection: l.plain(&[&format!("{p}.wkv"), &format!("{p}.wgate")])?,
        ape: l.vector(&format!("{p}.ape"))?,
        norm: l.vector(&format!("{p}.norm.weight"))?,
    })
}

fn block(l: &mut Loader, p: &str, kind: LayerKind, hash: bool) -> Result<Block, DriverError> {
    let (a, f) = (format!("{p}attn."), format!("{p}ffn."));
    let attn = Attention {
        kind,
        sink: l.vector(&format!("{a}attn_sink"))?,
        wq_a_wkv: l.scaled(&[&format!("{a}wq_a"), &format!("{a}wkv")])?,
        q_norm: l.vector(&format!("{a}q_norm.weight"))?,
        kv_norm: l.vector(&format!("{a}kv_norm.weight"))?,
        wq_b: l.scaled(&[&format!("{a}wq_b")])?,
        wo_a: l.scaled(&[&format!("{a}wo_a")])?,
        wo_b: l.scaled(&[&format!("{a}wo_b")])?,
        compressor: match kind {
            LayerKind::Window => None,
            _ => Some(compressor(l, &format!("{a}compressor"))?),
        },
        indexer: match kind {
            LayerKind::C4 => Some(Indexer {
                wq_b: l.scaled(&[&format!("{a}indexer.wq_b")])?,
                weights_proj: l.plain(&[&format!("{a}indexer.weights_proj")])?,
                compressor: compressor(l, &format!("{a}indexer.compressor"))?,
            }),
            _ => None,
        },
    };
    let (experts, shared) = (format!("{f}experts"), |w: &str| format!("{f}shared_experts.{w}"));
    let moe = Moe {
        gate: l.plain(&[&format!("{f}gate")])?,
        route: match hash {
            true => Route::Hash(l.table(&format!("{f}gate.tid2eid"))?),
            false => Route::Scored(l.vector(&format!("{f}gate.bias"))?),
        },
        gate_up: l.experts(&experts, &["w1", "w3"])?,
        down: l.experts(&experts, &["w2"])?,
        shared_gate_up: l.scaled(&[&shared("w1"), &shared("w3")])?,
        shared_down: l.scaled(&[&shared("w2")])?,
    };
    Ok(Block {
        hc_attn: mixer(l, &format!("{p}hc_attn"))?,
        attn_norm: l.vector(&format!("{p}attn_norm.weight"))?,
        attn,
        hc_ffn: mixer(l, &format!("{p}hc_ffn"))?,
        ffn_norm: l.vector(&format!("{p}ffn_norm.weight"))?,
        moe,
    })
}
