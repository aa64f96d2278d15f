//! The weights of a checkpoint, arranged by layer and kept in their stored form.
//!
//! Big matrices stay where they lie (mapped or embedded); only small vectors are widened. Assumes a checked
//! [`Checkpoint`]; nothing here can fail on one.

use longwave_model::config::LayerKind;
use longwave_model::{Checkpoint, ModelConfig};

use crate::ops::matrix::Matrix;
use crate::ops::mhc::Site;

/// A mixing site: `fn` and its constants.
pub struct Mixer {
    /// `[24, 4D]`, or `[4, 4D]` for a head.
    pub dots: Matrix,
    /// Base, scale, epsilons.
    pub site: Site,
}

/// Compressor of ratio 4 or 128 (model.md 6.4).
pub struct Compressor {
    /// Positional bias `[ratio, c * w]`.
    pub ape: Vec<f32>,
    /// `[c * w, D]`.
    pub wkv: Matrix,
    /// `[c * w, D]`.
    pub wgate: Matrix,
    /// `[w]`.
    pub norm: Vec<f32>,
}

/// Indexer of a c4 layer (model.md 6.5).
pub struct Indexer {
    /// `[Hi * 128, ql]`.
    pub wq_b: Matrix,
    /// `[Hi, D]`.
    pub weights_proj: Matrix,
    /// Width 128.
    pub compressor: Compressor,
}

/// Attention of one block (model.md 6).
pub struct Attention {
    /// Kind of the layer.
    pub kind: LayerKind,
    /// One sink logit per head.
    pub sink: Vec<f32>,
    /// `[ql, D]`.
    pub wq_a: Matrix,
    /// `[ql]`.
    pub q_norm: Vec<f32>,
    /// `[H * 512, ql]`.
    pub wq_b: Matrix,
    /// `[512, D]`.
    pub wkv: Matrix,
    /// `[512]`.
    pub kv_norm: Vec<f32>,
    /// `[G * ol, H * 512 / G]`, one block of rows per group.
    pub wo_a: Matrix,
    /// `[D, G * ol]`.
    pub wo_b: Matrix,
    /// In c4 and c128 layers.
    pub compressor: Option<Compressor>,
    /// In c4 layers.
    pub indexer: Option<Indexer>,
}

/// An expert: gate `w1`, down `w2`, up `w3`.
pub struct Expert {
    /// `[I, D]`.
    pub w1: Matrix,
    /// `[D, I]`.
    pub w2: Matrix,
    /// `[I, D]`.
    pub w3: Matrix,
}

/// How tokens find their experts (model.md 7.1).
pub enum Route {
    /// By token id: `[V, k]`.
    Hash(Vec<u32>),
    /// By score plus bias.
    Scored(Vec<f32>),
}

/// Mixture of experts of one block (model.md 7).
pub struct Moe {
    /// `[E, D]`.
    pub gate: Matrix,
    /// Table or bias.
    pub route: Route,
    /// Routed experts.
    pub experts: Vec<Expert>,
    /// The shared expert.
    pub shared: Expert,
}

/// A decoder block.
pub struct Block {
    /// Before attention.
    pub hc_attn: Mixer,
    /// `[D]`.
    pub attn_norm: Vec<f32>,
    /// Attention.
    pub attn: Attention,
    /// Before the experts.
    pub hc_ffn: Mixer,
    /// `[D]`.
    pub ffn_norm: Vec<f32>,
    /// Experts.
    pub moe: Moe,
}

/// The MTP module (model.md 8.1).
pub struct Mtp {
    /// `[D, D]`.
    pub e_proj: Matrix,
    /// `[D, D]`.
    pub h_proj: Matrix,
    /// `[D]`.
    pub enorm: Vec<f32>,
    /// `[D]`.
    pub hnorm: Vec<f32>,
    /// Its block, window-only.
    pub block: Block,
    /// Its own head mixing.
    pub head: Mixer,
    /// `[D]`.
    pub norm: Vec<f32>,
}

/// All weights.
pub struct Weights {
    /// `[V, D]`.
    pub embed: Matrix,
    /// Main layers.
    pub layers: Vec<Block>,
    /// Head mixing.
    pub hc_head: Mixer,
    /// `[D]`.
    pub norm: Vec<f32>,
    /// `[V, D]`.
    pub head: Matrix,
    /// In checkpoints with an MTP module.
    pub mtp: Option<Mtp>,
}

struct Reader<'a> {
    ckpt: &'a Checkpoint,
    config: &'a ModelConfig,
}

impl Weights {
    /// Arranges the tensors of `ckpt`.
    pub fn new(ckpt: &Checkpoint) -> Weights {
        let config = &ckpt.config;
        let r = Reader { ckpt, config };
        Weights {
            embed: r.plain("embed.weight"),
            layers: (0..config.num_hidden_layers)
                .map(|l| r.block(&format!("layers.{l}."), config.layers[l], config.is_hash_layer(l)))
                .collect(),
            hc_head: r.mixer("hc_head"),
            norm: r.vector("norm.weight"),
            head: r.plain("head.weight"),
            mtp: (config.num_nextn_predict_layers == 1).then(|| Mtp {
                e_proj: r.scaled("mtp.0.e_proj"),
                h_proj: r.scaled("mtp.0.h_proj"),
                enorm: r.vector("mtp.0.enorm.weight"),
                hnorm: r.vector("mtp.0.hnorm.weight"),
                block: r.block("mtp.0.", LayerKind::Window, false),
                head: r.mixer("mtp.0.hc_head"),
                norm: r.vector("mtp.0.norm.weight"),
            }),
        }
    }
}

impl Reader<'_> {
    fn plain(&self, name: &str) -> Matrix {
        Matrix::plain(self.ckpt.tensor(name))
    }

    fn scaled(&self, name: &str) -> Matrix {
        Matrix::scaled(self.ckpt.tensor(&format!("{name}.weight")), self.ckpt.tensor(&format!("{name}.scale")))
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        self.ckpt.tensor(name).to_f32()
    }

    fn mixer(&self, name: &str) -> Mixer {
        let site = Site {
            base: self.vector(&format!("{name}_base")),
            scale: self.vector(&format!("{name}_scale")),
            hc_eps: self.config.hc_eps,
            norm_eps: self.config.rms_norm_eps,
            iters: self.config.hc_sinkhorn_iters,
        };
        Mixer { dots: self.plain(&format!("{name}_fn")), site }
    }

    fn compressor(&self, p: &str) -> Compressor {
        Compressor {
            ape: self.vector(&format!("{p}.ape")),
            wkv: self.plain(&format!("{p}.wkv.weight")),
            wgate: self.plain(&format!("{p}.wgate.weight")),
            norm: self.vector(&format!("{p}.norm.weight")),
        }
    }

    fn expert(&self, p: &str) -> Expert {
        Expert {
            w1: self.scaled(&format!("{p}.w1")),
            w2: self.scaled(&format!("{p}.w2")),
            w3: self.scaled(&format!("{p}.w3")),
        }
    }

    fn block(&self, p: &str, kind: LayerKind, hash: bool) -> Block {
        let a = format!("{p}attn.");
        let f = format!("{p}ffn.");
        let attn = Attention {
            kind,
            sink: self.vector(&format!("{a}attn_sink")),
            wq_a: self.scaled(&format!("{a}wq_a")),
            q_norm: self.vector(&format!("{a}q_norm.weight")),
            wq_b: self.scaled(&format!("{a}wq_b")),
            wkv: self.scaled(&format!("{a}wkv")),
            kv_norm: self.vector(&format!("{a}kv_norm.weight")),
            wo_a: self.scaled(&format!("{a}wo_a")),
            wo_b: self.scaled(&format!("{a}wo_b")),
            compressor: (kind != LayerKind::Window).then(|| self.compressor(&format!("{a}compressor"))),
            indexer: (kind == LayerKind::C4).then(|| Indexer {
                wq_b: self.scaled(&format!("{a}indexer.wq_b")),
                weights_proj: self.plain(&format!("{a}indexer.weights_proj.weight")),
                compressor: self.compressor(&format!("{a}indexer.compressor")),
            }),
        };
        let route = if hash {
            Route::Hash(self.ckpt.tensor(&format!("{f}gate.tid2eid")).to_i64().into_iter().map(|e| e as u32).collect())
        } else {
            Route::Scored(self.vector(&format!("{f}gate.bias")))
        };
        Block {
            hc_attn: self.mixer(&format!("{p}hc_attn")),
            attn_norm: self.vector(&format!("{p}attn_norm.weight")),
            attn,
            hc_ffn: self.mixer(&format!("{p}hc_ffn")),
            ffn_norm: self.vector(&format!("{p}ffn_norm.weight")),
            moe: Moe {
                gate: self.plain(&format!("{f}gate.weight")),
                route,
                experts: (0..self.config.n_routed_experts).map(|e| self.expert(&format!("{f}experts.{e}"))).collect(),
                shared: self.expert(&format!("{f}shared_experts")),
            },
        }
    }
}
