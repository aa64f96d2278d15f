//! Hyper-connections before and after a sublayer.
//! Assumes a width that is a multiple of 256, up to 8192. A token has the same bits for any number of tokens.

use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Products of a token and its squares in one block of columns, padded.
const PARTIAL: u64 = 32;
/// Columns of each stream of a block of products.
const COLUMNS: u32 = 128;
/// Tokens whose products are computed at once; a block keeps its weights for the next ones.
const DOTS_AT_ONCE: u32 = 64;
/// Tokens at most whose boundary takes one launch, and blocks of its clusters at most.
const FEW: u32 = 2;
const FEW_BLOCKS: u32 = 16;
/// Whether products are made on the tensor cores (mhc.md). They have not been measured yet.
const TENSOR: bool = false;
/// Tokens at most whose boundary takes one launch there, and tokens of a cluster or of a tile at most.
const TENSOR_FEW: u32 = 8;
const TENSOR_TOKENS: u32 = 8;
/// Tiles of eight tokens that are multiplied at once; a block keeps its weights for the next ones.
const TENSOR_TILES: u32 = 8;

/// The kernels.
pub struct Mhc {
    dots: Kernel,
    post_dots: Kernel,
    pre: Kernel,
    post: Kernel,
    /// For blocks of one unit of columns, and of two, where the GPU has room for their clusters.
    few: Option<[Kernel; 2]>,
    /// In place of these, but for `pre` and `post`.
    tensor: Option<Tensor>,
}

/// Kernels whose products are made on the tensor cores.
struct Tensor {
    start: Kernel,
    /// Behind an output in bf16, and in float.
    after: [Kernel; 2],
    /// For clusters of one token, and of up to eight; each for blocks of one unit of columns, and of two.
    few: Option<[[Kernel; 2]; 2]>,
}

/// Constants of the model.
#[derive(Debug, Clone, Copy)]
pub struct MhcShape {
    /// Model width.
    pub width: u32,
    /// `rms_norm_eps`.
    pub norm_eps: f32,
    /// `hc_eps`.
    pub hc_eps: f32,
    /// Column passes of Sinkhorn.
    pub iters: u32,
}

/// Weights of a mixing site and of the norm behind it; addresses of floats.
#[derive(Debug, Clone, Copy)]
pub struct MhcSite {
    /// `fn`, `[24, 4 * width]`.
    pub function: u64,
    /// `[24]`.
    pub base: u64,
    /// `[3]`: pre, post, comb.
    pub scale: u64,
    /// Norm, `[width]`.
    pub weight: u64,
}

/// A sublayer's output, `[tokens, width]`; an address.
#[derive(Debug, Clone, Copy)]
pub enum Output {
    /// bf16.
    Rounded(u64),
    /// float, still to be rounded.
    Wide(u64),
}

impl Output {
    /// The address in either form; 0 in the other.
    fn addresses(self) -> (u64, u64) {
        match self {
            Output::Rounded(y) => (y, 0),
            Output::Wide(y) => (0, y),
        }
    }
}

/// What a sublayer needs and leaves; addresses.
#[derive(Debug, Clone, Copy)]
pub struct MhcBatch {
    /// Residual streams, bf16 `[tokens, 4, width]`.
    pub streams: u64,
    /// Scratch, [`MhcShape::scratch_bytes`] of it.
    pub partial: u64,
    /// float `[tokens, 20]`, from `before` to `next` or `after`.
    pub mix: u64,
    /// The sublayer's input, bf16 `[tokens, width]`.
    pub normed: u64,
    /// The same in e4m3, `[tokens, width]`.
    pub codes: u64,
    /// Scales of the codes, float `[tokens, width / 128]`.
    pub scales: u64,
    /// Tokens.
    pub tokens: u32,
}

impl MhcShape {
    /// Bytes of scratch for `tokens` tokens.
    pub fn scratch_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * u64::from(self.width / COLUMNS) * PARTIAL * 4
    }
}

impl Mhc {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Mhc, DriverError> {
        Mhc::with(context, TENSOR)
    }

    /// Loads the kernels with products on the tensor cores, or without; bits differ.
    pub fn with(context: &Context, tensor: bool) -> Result<Mhc, DriverError> {
        let module = Module::load(context, "mhc")?;
        let kernel = |name| module.kernel(name, 0);
        let (dots, post_dots) = (kernel("mhc_dots")?, kernel("mhc_post_dots")?);
        let few = Module::load(context, "mhc_few")?;
        let few = [few.kernel("mhc_few_1", 0)?, few.kernel("mhc_few_2", 0)?];
        let fits =
            few[0].fits_cluster(few_grid(FEW_BLOCKS, 1, 1))? && few[1].fits_cluster(few_grid(FEW_BLOCKS, 1, 2))?;
        let few = fits.then_some(few);
        let tensor = if tensor { Some(Tensor::new(context)?) } else { None };
        Ok(Mhc { dots, post_dots, pre: kernel("mhc_pre")?, post: kernel("mhc_post")?, few, tensor })
    }

    /// Products of the streams with the `function` (`fn`, float `[24, 4 * width]`) of a site before which no sublayer was.
    pub fn start(&self, stream: &Stream, shape: &MhcShape, function: u64, b: &MhcBatch) -> Result<(), DriverError> {
        let [streams, function, partial] = [b.streams, function, b.partial].map(Argument::Pointer);
        let arguments = [streams, function, partial, shape.width.into(), b.tokens.into()];
        match &self.tensor {
            _ if b.tokens == 0 => Ok(()),
            Some(tensor) => tensor.launch(stream, shape, b, &tensor.start, 0, function),
            None => stream.launch(&self.dots, products(shape, b), &arguments),
        }
    }

    /// The mix of a site and the sublayer's input, behind `start` or `next` with its function.
    pub fn before(&self, stream: &Stream, shape: &MhcShape, site: &MhcSite, b: &MhcBatch) -> Result<(), DriverError> {
        if b.tokens == 0 {
            return Ok(());
        }
        let arguments = [
            Argument::Pointer(b.streams),
            Argument::Pointer(b.partial),
            Argument::Pointer(site.base),
            Argument::Pointer(site.scale),
            Argument::Pointer(site.weight),
            Argument::Pointer(b.mix),
            Argument::Pointer(b.normed),
            Argument::Pointer(b.codes),
            Argument::Pointer(b.scales),
            shape.width.into(),
            shape.norm_eps.into(),
            shape.hc_eps.into(),
            shape.iters.into(),
        ];
        stream.launch(&self.pre, Grid::new(b.tokens, 288), &arguments)
    }

    /// The streams after a sublayer with output `y`, and their products with the `function` of the site that follows.
    pub fn next(
        &self,
        stream: &Stream,
        shape: &MhcShape,
        function: u64,
        b: &MhcBatch,
        y: Output,
    ) -> Result<(), DriverError> {
        if b.tokens == 0 {
            return Ok(());
        }
        let (rounded, wide) = y.addresses();
        if let Some(tensor) = &self.tensor {
            let kernel = &tensor.after[usize::from(wide != 0)];
            return tensor.launch(stream, shape, b, kernel, rounded | wide, Argument::Pointer(function));
        }
        let [streams, rounded, wide, mix, function, partial] =
            [b.streams, rounded, wide, b.mix, function, b.partial].map(Argument::Pointer);
        let arguments = [streams, rounded, wide, mix, function, partial, shape.width.into(), b.tokens.into()];
        stream.launch(&self.post_dots, products(shape, b), &arguments)
    }

    /// Whether `boundary` takes so many tokens.
    pub fn takes(&self, shape: &MhcShape, tokens: u32) -> bool {
        let fits = shape.width.is_power_of_two() && (2 * COLUMNS..=2 * COLUMNS * FEW_BLOCKS).contains(&shape.width);
        fits && match &self.tensor {
            Some(tensor) => tensor.few.is_some() && tokens <= TENSOR_FEW,
            None => self.few.is_some() && tokens <= FEW,
        }
    }

    /// `next` with the function of `site` and then `before`, in one launch with the same bits.
    pub fn boundary(
        &self,
        stream: &Stream,
        shape: &MhcShape,
        site: &MhcSite,
        b: &MhcBatch,
        y: Output,
    ) -> Result<(), DriverError> {
        assert!(self.takes(shape, b.tokens), "{} tokens of width {} in one launch", b.tokens, shape.width);
        if b.tokens == 0 {
            return Ok(());
        }
        let (rounded, wide) = y.addresses();
        let pointers = [
            b.streams,
            rounded,
            wide,
            b.mix,
            site.function,
            site.base,
            site.scale,
            site.weight,
            b.normed,
            b.codes,
            b.scales,
        ];
        let numbers = [shape.norm_eps.into(), shape.hc_eps.into(), shape.iters.into()];
        let units = if shape.width > COLUMNS * FEW_BLOCKS { 2 } else { 1 };
        let blocks = shape.width / COLUMNS / units;
        let mut arguments = [&pointers.map(Argument::Pointer)[..], &numbers].concat();
        if let Some(few) = self.tensor.as_ref().and_then(|tensor| tensor.few.as_ref()) {
            arguments.push(b.tokens.into());
            let most = if b.tokens == 1 { 1 } else { TENSOR_TOKENS };
            let kernel = &few[usize::from(most > 1)][units as usize - 1];
            return stream.launch(kernel, tensor_grid(blocks, b.tokens.div_ceil(most), units, most), &arguments);
        }
        let kernels = self.few.as_ref().expect("takes has looked");
        stream.launch(&kernels[units as usize - 1], few_grid(blocks, b.tokens, units), &arguments)
    }

    /// The streams after the last sublayer, whose output is at `y`, bf16 `[tokens, width]`.
    pub fn after(&self, stream: &Stream, shape: &MhcShape, b: &MhcBatch, y: u64) -> Result<(), DriverError> {
        if b.tokens == 0 {
            return Ok(());
        }
        let [streams, y, mix] = [b.streams, y, b.mix].map(Argument::Pointer);
        let grid = Grid { blocks: [shape.width.div_ceil(512), b.tokens, 1], ..Grid::new(1, 256) };
        stream.launch(&self.post, grid, &[streams, y, mix, shape.width.into()])
    }
}

impl Tensor {
    fn new(context: &Context) -> Result<Tensor, DriverError> {
        let module = Module::load(context, "mhc_tensor")?;
        let kernel = |name| module.kernel(name, 0);
        let few = Module::load(context, "mhc_tensor_few")?;
        let of = |name, units, most| {
            let kernel = few.kernel(name, tensor_bytes(units, most))?;
            Ok((kernel.fits_cluster(tensor_grid(FEW_BLOCKS, 1, units, most))?, kernel))
        };
        let one = [of("mhc_tensor_one_1", 1, 1)?, of("mhc_tensor_one_2", 2, 1)?];
        let eight = [of("mhc_tensor_eight_1", 1, TENSOR_TOKENS)?, of("mhc_tensor_eight_2", 2, TENSOR_TOKENS)?];
        let fits = one.iter().chain(&eight).all(|(fits, _)| *fits);
        Ok(Tensor {
            start: kernel("mhc_tensor")?,
            after: [kernel("mhc_tensor_after")?, kernel("mhc_tensor_after_wide")?],
            few: fits.then(|| [one, eight].map(|kernels| kernels.map(|(_, kernel)| kernel))),
        })
    }

    /// Products with `function` of the streams, before which a sublayer's output `y` goes into them unless it is null.
    fn launch(
        &self,
        stream: &Stream,
        shape: &MhcShape,
        b: &MhcBatch,
        kernel: &Kernel,
        y: u64,
        function: Argument,
    ) -> Result<(), DriverError> {
        let [streams, y, mix, partial] = [b.streams, y, b.mix, b.partial].map(Argument::Pointer);
        let tiles = b.tokens.div_ceil(TENSOR_TOKENS).min(TENSOR_TILES);
        let grid = Grid { blocks: [products(shape, b).blocks[0], tiles, 1], ..Grid::new(1, 256) };
        stream.launch(kernel, grid, &[streams, y, mix, function, partial, shape.width.into(), b.tokens.into()])
    }
}

/// The grid of boundaries on the tensor cores in one launch: `count` clusters of blocks of so many units, of `most` tokens at most.
fn tensor_grid(cluster: u32, count: u32, units: u32, most: u32) -> Grid {
    let threads = 256 * units + 32 * most.div_ceil(cluster);
    Grid {
        blocks: [cluster, count, 1],
        cluster,
        shared_bytes: tensor_bytes(units, most),
        ..Grid::new(cluster, threads)
    }
}

/// Shared memory of such a block; its kernel checks these numbers.
fn tensor_bytes(units: u32, most: u32) -> u32 {
    match (units, most) {
        (1, 1) => 13808,
        (_, 1) => 26352,
        (1, _) => 37888,
        (..) => 73728,
    }
}

/// The grid of boundaries in one launch: clusters of blocks of so many units.
fn few_grid(cluster: u32, tokens: u32, units: u32) -> Grid {
    Grid { blocks: [cluster, tokens, 1], cluster, ..Grid::new(cluster, 256 * units) }
}

/// The grid of products.
fn products(shape: &MhcShape, b: &MhcBatch) -> Grid {
    let fits = shape.width.is_multiple_of(256) && shape.width <= 8192;
    assert!(fits, "hyper-connections of width {}", shape.width);
    Grid { blocks: [shape.width / COLUMNS, b.tokens.min(DOTS_AT_ONCE), 1], ..Grid::new(1, 256) }
}
