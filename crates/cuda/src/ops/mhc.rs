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

/// The kernels.
pub struct Mhc {
    dots: Kernel,
    post_dots: Kernel,
    pre: Kernel,
    post: Kernel,
    /// For blocks of one unit of columns, and of two, where the GPU has room for their clusters.
    few: Option<[Kernel; 2]>,
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
        let module = Module::load(context, "mhc")?;
        let kernel = |name| module.kernel(name, 0);
        let (dots, post_dots) = (kernel("mhc_dots")?, kernel("mhc_post_dots")?);
        let few = Module::load(context, "mhc_few")?;
        let few = [few.kernel("mhc_few_1", 0)?, few.kernel("mhc_few_2", 0)?];
        let fits =
            few[0].fits_cluster(few_grid(FEW_BLOCKS, 1, 1))? && few[1].fits_cluster(few_grid(FEW_BLOCKS, 1, 2))?;
        let few = fits.then_some(few);
        Ok(Mhc { dots, post_dots, pre: kernel("mhc_pre")?, post: kernel("mhc_post")?, few })
    }

    /// Products of the streams with the `function` (`fn`, float `[24, 4 * width]`) of a site before which no sublayer was.
    pub fn start(&self, stream: &Stream, shape: &MhcShape, function: u64, b: &MhcBatch) -> Result<(), DriverError> {
        let [streams, function, partial] = [b.streams, function, b.partial].map(Argument::Pointer);
        let arguments = [streams, function, partial, shape.width.into(), b.tokens.into()];
        if b.tokens == 0 { Ok(()) } else { stream.launch(&self.dots, products(shape, b), &arguments) }
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
        let (rounded, wide) = y.addresses();
        let [streams, rounded, wide, mix, function, partial] =
            [b.streams, rounded, wide, b.mix, function, b.partial].map(Argument::Pointer);
        let arguments = [streams, rounded, wide, mix, function, partial, shape.width.into(), b.tokens.into()];
        if b.tokens == 0 { Ok(()) } else { stream.launch(&self.post_dots, products(shape, b), &arguments) }
    }

    /// Whether `boundary` takes so many tokens.
    pub fn takes(&self, shape: &MhcShape, tokens: u32) -> bool {
        let fits = shape.width.is_power_of_two() && (2 * COLUMNS..=2 * COLUMNS * FEW_BLOCKS).contains(&shape.width);
        self.few.is_some() && tokens <= FEW && fits
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
        let grid = few_grid(shape.width / COLUMNS / units, b.tokens, units);
        let kernels = self.few.as_ref().expect("takes has looked");
        stream.launch(&kernels[units as usize - 1], grid, &[&pointers.map(Argument::Pointer)[..], &numbers].concat())
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
