//! Norms, rotation and storing between the projections and the core of attention (model.md 6.1, 6.2): query latents as
//! e4m3, window rows in cache format, query heads as bf16.
//!
//! Assumes latents of a multiple of 128 and at most 2,048 channels and window pages of 64 rows. Refuses f32 entries.

use longwave_model::MainFormat;

use super::{Pages, no_kernels};
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// The kernels for one format of entries.
pub struct Keys {
    keys: Kernel,
    gather: Kernel,
    queries: Kernel,
    row_bytes: u32,
}

/// What follows the product with `[wq_a; wkv]`.
#[derive(Debug, Clone, Copy)]
pub struct Projected {
    /// f32 `[T, q_width + 512]`.
    pub products: u64,
    /// [`BatchRow`](super::BatchRow)s `[T]`.
    pub rows: u64,
    /// f32 `[T, 64]`, see [`rope`](super::rope).
    pub angles: u64,
    /// f32 `[q_width]`.
    pub q_norm: u64,
    /// f32 `[512]`.
    pub kv_norm: u64,
    /// Query latents, e4m3 `[T, q_width]`.
    pub codes: u64,
    /// Their scales, f32 `[T, q_width / 128]`.
    pub scales: u64,
    /// Window rows of the cache; a row whose block is not mapped is not stored.
    pub window: Pages,
    /// Window rows of the step; none when its table is 0.
    pub local: Pages,
    /// Rows, padded ones included.
    pub tokens: u32,
    /// Channels of a query latent.
    pub q_width: u32,
    /// Of both norms.
    pub eps: f32,
}

/// Copies of the rows before a step, from the cache to the step's own pages.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    /// u32 `[n, 2]`: seat ([`UNMAPPED`](super::UNMAPPED) is none) and first position of the step.
    pub sequences: u64,
    /// How many.
    pub count: u32,
    /// From here; rows whose block is not mapped are left out.
    pub window: Pages,
    /// To here.
    pub local: Pages,
}

/// What follows the product with `wq_b`.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// f32 `[T, heads, 512]`.
    pub products: u64,
    /// [`BatchRow`](super::BatchRow)s `[T]`.
    pub rows: u64,
    /// f32 `[T, 64]`.
    pub angles: u64,
    /// bf16 `[T, heads, 512]`.
    pub out: u64,
    /// Rows, padded ones included.
    pub tokens: u32,
    /// Heads.
    pub heads: u32,
    /// Of the norm.
    pub eps: f32,
}

impl Projected {
    /// As parameters of a kernel.
    pub(super) fn arguments(&self) -> [Argument; 19] {
        assert!(self.q_width.is_multiple_of(128) && self.q_width <= 2048, "query latents of {} channels", self.q_width);
        let [w0, w1, w2, w3, w4] = self.window.arguments();
        let [l0, l1, l2, l3, l4] = self.local.arguments();
        let [products, rows, angles, q_norm, kv_norm, codes, scales] =
            [self.products, self.rows, self.angles, self.q_norm, self.kv_norm, self.codes, self.scales]
                .map(Argument::Pointer);
        let sizes = [self.q_width.into(), self.eps.into()];
        [
            products, rows, angles, q_norm, kv_norm, codes, scales, w0, w1, w2, w3, w4, l0, l1, l2, l3, l4, sizes[0],
            sizes[1],
        ]
    }
}

impl Keys {
    /// Loads the kernels for window rows in `format`.
    pub fn new(context: &Context, format: MainFormat) -> Result<Keys, DriverError> {
        let name = match format {
            MainFormat::Fp8 => "keys_fp8",
            MainFormat::Bf16 => "keys_bf16",
            MainFormat::F32 => return Err(no_kernels("window rows", format.name())),
        };
        let module = Module::load(context, "keys")?;
        let kernel = |name| module.kernel(name, 0);
        let (keys, gather, queries) = (kernel(name)?, kernel("gather_window")?, kernel("queries")?);
        Ok(Keys { keys, gather, queries, row_bytes: format.row_bytes() })
    }

    /// Norms both parts of a product, quantises the query latents and stores the window rows.
    pub fn project(&self, stream: &Stream, p: &Projected) -> Result<(), DriverError> {
        stream.launch(&self.keys, Grid { blocks: [p.tokens, 2, 1], ..Grid::new(1, 256) }, &p.arguments())
    }

    /// Copies up to 127 rows before each sequence's first position.
    pub fn gather(&self, stream: &Stream, g: &Gather) -> Result<(), DriverError> {
        let [w0, w1, w2, w3, w4] = g.window.arguments();
        let [l0, l1, l2, l3, l4] = g.local.arguments();
        let arguments = [Argument::Pointer(g.sequences), w0, w1, w2, w3, w4, l0, l1, l2, l3, l4, self.row_bytes.into()];
        stream.launch(&self.gather, Grid { blocks: [g.count, 16, 1], ..Grid::new(1, 256) }, &arguments)
    }

    /// Norms and rotates query heads.
    pub fn queries(&self, stream: &Stream, h: &Heads) -> Result<(), DriverError> {
        let arguments = [
            Argument::Pointer(h.products),
            Argument::Pointer(h.rows),
            Argument::Pointer(h.angles),
            Argument::Pointer(h.out),
            h.heads.into(),
            h.eps.into(),
        ];
        let blocks = [h.heads.div_ceil(16), h.tokens, 1];
        stream.launch(&self.queries, Grid { blocks, ..Grid::new(1, 256) }, &arguments)
    }
}
