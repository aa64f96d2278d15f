//! Mixture of experts after routing: routed experts in fp4, the shared one in fp8, and their sum.
//! Assumes widths that are multiples of 256 and routed weights that [`Experts::repack`] arranged. A token has the same
//! bits whatever else is in the batch. A rank of several gives its part of the sum, before the last rounding.

use super::linear_fp8::{Fp8Product, LinearFp8};
use super::router::{GROUPS, Routing};
use crate::cubins;
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

const ALIGN: u64 = 256;
/// Columns of the widest product.
const MOST_COLS: u32 = 8192;
/// Up to so many tokens [`Experts::shared`] may run beside routing and routed experts.
pub const BESIDE: u32 = 64;
/// See [`Hopper::stream`].
const WHOLE: u32 = 1024;
/// Shared memory of a multiprocessor (Hopper and Blackwell).
const MULTIPROCESSOR_BYTES: u32 = 228 * 1024;
/// Shared memory of a block of `wide`: six stages of codes of 64 pairs with scales, sums of 192 rows, the table of powers, barriers.
const WIDE_BYTES: u32 = 6 * 64 * 132 + 192 * 64 * 4 + 256 + 96;
/// The same of the blocks of `ring`: stages of pairs and of rows with scales, sums, inputs of threads, the table, barriers.
const RING_BYTES: [u32; 2] = [
    8 * (64 * 132 + 192 * 68) + 192 * 64 * 4 + 2048 + 256 + 128,
    4 * (128 * 132 + 192 * 68) + 192 * 128 * 4 + 4096 + 256 + 64,
];
/// Groups of so many rows and more take `ring`, others `wide`. `GROUPS[1]` would give it all but the smallest; it has not been measured
/// yet.
const RING_FROM: u32 = GROUPS[2];

/// The kernels.
pub struct Experts {
    /// From 4096 columns on, and fewer.
    few: [Kernel; 2],
    /// The same for groups of many rows.
    many: [Kernel; 2],
    repack: Kernel,
    /// In place of these.
    hopper: Option<Hopper>,
    multiprocessors: u32,
    swiglu: Kernel,
    combine: Kernel,
    combine_part: Kernel,
}

/// Hopper's kernels.
struct Hopper {
    /// For groups of few rows: columns that are a multiple of [`WHOLE`], and others.
    stream: [Kernel; 2],
    wide: Kernel,
    /// For groups of 64 rows and of 128.
    ring: [Kernel; 2],
    repack: Kernel,
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy)]
pub struct ExpertShape {
    /// Model width.
    pub width: u32,
    /// Width inside an expert.
    pub inner: u32,
    /// Bound of gate and up.
    pub limit: f32,
}

/// Addresses of a layer's experts; gate is above up.
#[derive(Debug, Clone, Copy)]
pub struct ExpertWeights {
    /// Routed, packed e2m1 `[experts, 2 * inner, width / 2]`, arranged.
    pub gate_up: u64,
    /// `[experts, 2 * inner, width / 32]`, arranged.
    pub gate_up_scales: u64,
    /// float `[experts, 2 * inner]`, from arranging.
    pub gate_up_factors: u64,
    /// Routed, packed e2m1 `[experts, width, inner / 2]`, arranged.
    pub down: u64,
    /// `[experts, width, inner / 32]`, arranged.
    pub down_scales: u64,
    /// float `[experts, width]`, from arranging.
    pub down_factors: u64,
    /// Shared, e4m3 `[2 * shared_inner, width]`.
    pub shared_gate_up: u64,
    /// float `[2 * shared_inner / 128, width / 128]`.
    pub shared_gate_up_scales: u64,
    /// Shared, e4m3 `[width, shared_inner]`.
    pub shared_down: u64,
    /// float `[width / 128, shared_inner / 128]`.
    pub shared_down_scales: u64,
    /// Inner columns of the shared expert that are here, a multiple of 128; 0 where others have them all.
    pub shared_inner: u32,
}

/// A product of routed experts.
#[derive(Debug, Clone, Copy)]
pub struct RoutedProduct {
    /// Packed weights `[experts, rows, cols / 2]`, arranged.
    pub w: u64,
    /// Their scales, `[experts, rows, cols / 32]`, arranged.
    pub w_scales: u64,
    /// float `[experts, rows]`, from arranging; others than Hopper have none.
    pub w_factors: u64,
    /// Inputs, e4m3 `[inputs, cols]`.
    pub x: u64,
    /// float `[inputs, cols / 128]`.
    pub x_scales: u64,
    /// Input of each place, `u32`; null where a place reads its own.
    pub inputs: u64,
    /// `i32 [groups, 3]`.
    pub groups: u64,
    /// Rows of a group at most, one of [`GROUPS`].
    pub group: u32,
    /// Number of groups, used or not.
    pub group_count: u32,
    /// float `[places, rows]`.
    pub y: u64,
    /// Rows of an expert, a multiple of 16.
    pub rows: u32,
    /// Columns, a multiple of 128.
    pub cols: u32,
}

/// What is made of the experts' outputs; addresses.
#[derive(Debug, Clone, Copy)]
pub enum Sum {
    /// Their sum, bf16 `[tokens, width]`.
    Whole(u64),
    /// The sum of those that are here, float `[tokens, width]`.
    Part(u64),
}

/// Inputs and results of a layer.
#[derive(Debug, Clone, Copy)]
pub struct ExpertBatch {
    /// Inputs, e4m3 `[tokens, width]`.
    pub x: u64,
    /// Their scales, float `[tokens, width / 128]`.
    pub x_scales: u64,
    /// Where results go.
    pub out: Sum,
    /// Memory to work in, [`ExpertShape::scratch_bytes`] of it, aligned to 256.
    pub scratch: u64,
}

/// Scratch of a layer; the results of `down` lie over those of `gate_up`, which are read by then.
struct Scratch {
    wide: u64,
    codes: u64,
    scales: u64,
    shared: u64,
    /// Gate and up of the shared expert, codes and scales.
    shared_inner: [u64; 3],
    end: u64,
}

impl ExpertShape {
    fn scratch(&self, address: u64, tokens: u32, pairs: u32) -> Scratch {
        let mut end = address;
        let mut take = |bytes: u64| {
            let start = end;
            end = (start + bytes).next_multiple_of(ALIGN);
            start
        };
        let rows = u64::from(pairs.max(tokens));
        let wide = take(4 * rows * u64::from((2 * self.inner).max(self.width)));
        let codes = take(rows * u64::from(self.inner));
        let scales = take(4 * rows * u64::from(self.inner / 128));
        let shared = take(4 * u64::from(tokens) * u64::from(self.width));
        // Of few tokens the shared expert may run beside the routed ones.
        let few = u64::from(tokens.min(BESIDE)) * u64::from(self.inner);
        let own = [take(8 * few), take(few), take(few / 32)];
        let shared_inner = if tokens <= BESIDE { own } else { [wide, codes, scales] };
        Scratch { wide, codes, scales, shared, shared_inner, end }
    }

    /// Bytes of scratch for `tokens` tokens with `chosen` experts each.
    pub fn scratch_bytes(&self, tokens: u32, chosen: u32) -> u64 {
        self.scratch(0, tokens, tokens * chosen).end
    }
}

impl Experts {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Experts, DriverError> {
        let (products, module) = (Module::load(context, "experts_fp4")?, Module::load(context, "experts")?);
        let is_hopper = cubins::find("experts_fp4_wide", context.gpu().major, context.gpu().minor).is_some();
        let hopper = || {
            let (module, wide) =
                (Module::load(context, "experts_fp4_stream")?, Module::load(context, "experts_fp4_wide")?);
            let stream = |name| module.kernel(name, stream_bytes(MOST_COLS));
            let ring = Module::load(context, "experts_fp4_ring")?;
            Ok(Hopper {
                stream: [stream("experts_fp4_stream_whole")?, stream("experts_fp4_stream_any")?],
                wide: wide.kernel("experts_fp4_wide", WIDE_BYTES)?,
                ring: [
                    ring.kernel("experts_fp4_ring_64", RING_BYTES[0])?,
                    ring.kernel("experts_fp4_ring_128", RING_BYTES[1])?,
                ],
                repack: module.kernel("repack_fp8", repack_bytes(MOST_COLS))?,
            })
        };
        Ok(Experts {
            hopper: is_hopper.then(hopper).transpose()?,
            multiprocessors: context.gpu().multiprocessors,
            few: [
                products.kernel("experts_fp4_4", shared_bytes(MOST_COLS))?,
                products.kernel("experts_fp4_2", shared_bytes(MOST_COLS))?,
            ],
            many: [products.kernel("experts_fp4_many_4", 0)?, products.kernel("experts_fp4_many_2", 0)?],
            repack: products.kernel("repack", repack_bytes(MOST_COLS))?,
            swiglu: module.kernel("swiglu", 0)?,
            combine: module.kernel("combine", 0)?,
            combine_part: module.kernel("combine_part", 0)?,
        })
    }

    /// Arranges packed weights and their ue8m0 scales in place, once after loading, and writes the rows' factors (float
    /// `[rows]`): `rows` of all experts, a multiple of 16, of `cols` columns, a multiple of 128.
    pub fn repack(
        &self,
        stream: &Stream,
        weights_scales_factors: [u64; 3],
        rows: u32,
        cols: u32,
    ) -> Result<(), DriverError> {
        let fits = rows.is_multiple_of(16) && cols.is_multiple_of(128) && cols <= MOST_COLS;
        assert!(fits, "experts of {rows} x {cols}");
        let grid = Grid { shared_bytes: repack_bytes(cols), ..Grid::new(rows / 16, 256) };
        let [w, scales, factors] = weights_scales_factors.map(Argument::Pointer);
        match &self.hopper {
            Some(hopper) => stream.launch(&hopper.repack, grid, &[w, scales, factors, cols.into()]),
            None => stream.launch(&self.repack, grid, &[w, scales, cols.into()]),
        }
    }

    /// Products of routed experts.
    pub fn product(&self, stream: &Stream, p: &RoutedProduct) -> Result<(), DriverError> {
        let fits = p.rows.is_multiple_of(16) && p.cols.is_multiple_of(128) && p.cols <= MOST_COLS;
        assert!(fits, "experts of {} x {}", p.rows, p.cols);
        let weights = [p.w, p.w_scales].map(Argument::Pointer);
        let pointers = [p.x, p.x_scales, p.groups, p.inputs, p.y].map(Argument::Pointer);
        let sizes = [p.rows, p.cols, p.group_count].map(Argument::U32);
        if let Some(hopper) = &self.hopper {
            let arguments = [&weights[..], &[Argument::Pointer(p.w_factors)], &pointers, &sizes].concat();
            let (kernel, shared_bytes, grid) = if p.group == GROUPS[0] {
                let kernel = &hopper.stream[usize::from(!p.cols.is_multiple_of(WHOLE))];
                (kernel, stream_bytes(p.cols), Grid::new(3 * self.multiprocessors, 128))
            } else if p.group < RING_FROM {
                (&hopper.wide, WIDE_BYTES, Grid::new(self.multiprocessors, 512))
            } else {
                let long = usize::from(p.group > GROUPS[1]);
                (&hopper.ring[long], RING_BYTES[long], Grid::new(self.multiprocessors, 512))
            };
            return stream.launch(kernel, Grid { shared_bytes, ..grid }, &arguments);
        }
        let counted = [&weights[..], &pointers, &sizes].concat();
        let narrow = usize::from(p.cols < 4096);
        if p.group == GROUPS[0] {
            let blocks = resident(p.cols) * self.multiprocessors;
            let grid = Grid { shared_bytes: shared_bytes(p.cols), ..Grid::new(blocks, 256) };
            stream.launch(&self.few[narrow], grid, &counted)
        } else {
            let blocks = [(p.rows / 16).div_ceil(8), p.group_count, p.group.div_ceil(32)];
            let grid = Grid { blocks, ..Grid::new(1, 256) };
            stream.launch(&self.many[narrow], grid, &counted[..counted.len() - 1])
        }
    }

    /// `rows` rows of gate and up (float `[rows, 2, inner]` at `y`) to quantised inputs of the down product; of routed rows
    /// with their weights, of the shared expert's without.
    pub fn swiglu(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        y: u64,
        routing: Option<&Routing>,
        rows: u32,
        codes: u64,
        scales: u64,
    ) -> Result<(), DriverError> {
        let (weights, sources) = routing.map_or((0, 0), |r| (r.weights, r.sources));
        let [y, weights, sources, codes, scales] = [y, weights, sources, codes, scales].map(Argument::Pointer);
        let arguments = [y, weights, sources, codes, scales, rows.into(), shape.inner.into(), shape.limit.into()];
        let warps = u64::from(rows) * u64::from(shape.inner / 128);
        stream.launch(&self.swiglu, Grid::new(warps.div_ceil(8) as u32, 256), &arguments)
    }

    /// The shared expert, where one is here. Others may run at the same time, up to [`BESIDE`] tokens.
    pub fn shared(
        &self,
        stream: &Stream,
        linear: &LinearFp8,
        shape: &ExpertShape,
        weights: &ExpertWeights,
        routing: &Routing,
        batch: &ExpertBatch,
    ) -> Result<(), DriverError> {
        let s = shape.scratch(batch.scratch, routing.tokens, routing.pairs());
        let (tokens, [wide, codes, scales]) = (routing.tokens, s.shared_inner);
        if tokens == 0 || weights.shared_inner == 0 {
            return Ok(());
        }
        let shape = ExpertShape { inner: weights.shared_inner, ..*shape };
        let up = Fp8Product {
            w: weights.shared_gate_up,
            w_scales: weights.shared_gate_up_scales,
            x: batch.x,
            x_scales: batch.x_scales,
            y: wide,
            rows: 2 * shape.inner,
            cols: shape.width,
            groups: 1,
            tokens,
        };
        linear.launch(stream, &up)?;
        self.swiglu(stream, &shape, wide, None, tokens, codes, scales)?;
        let down = Fp8Product {
            w: weights.shared_down,
            w_scales: weights.shared_down_scales,
            x: codes,
            x_scales: scales,
            y: s.shared,
            rows: shape.width,
            cols: shape.inner,
            ..up
        };
        linear.launch(stream, &down)
    }

    /// The routed experts, behind routing.
    pub fn routed(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        weights: &ExpertWeights,
        routing: &Routing,
        batch: &ExpertBatch,
    ) -> Result<(), DriverError> {
        assert!(shape.width.is_multiple_of(256) && shape.inner.is_multiple_of(128), "{shape:?}");
        let pairs = routing.pairs();
        if pairs == 0 {
            return Ok(());
        }
        let s = shape.scratch(batch.scratch, routing.tokens, pairs);
        let up = RoutedProduct {
            w: weights.gate_up,
            w_scales: weights.gate_up_scales,
            w_factors: weights.gate_up_factors,
            x: batch.x,
            x_scales: batch.x_scales,
            inputs: routing.inputs,
            groups: routing.groups,
            group: routing.group(),
            group_count: routing.most_groups(),
            y: s.wide,
            rows: 2 * shape.inner,
            cols: shape.width,
        };
        self.product(stream, &up)?;
        self.swiglu(stream, shape, s.wide, Some(routing), pairs, s.codes, s.scales)?;
        let down = RoutedProduct {
            w: weights.down,
            w_scales: weights.down_scales,
            w_factors: weights.down_factors,
            x: s.codes,
            x_scales: s.scales,
            inputs: 0,
            y: s.wide,
            rows: shape.width,
            cols: shape.inner,
            ..up
        };
        self.product(stream, &down)
    }

    /// The sum of both.
    pub fn combine(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        weights: &ExpertWeights,
        routing: &Routing,
        batch: &ExpertBatch,
    ) -> Result<(), DriverError> {
        if routing.tokens == 0 {
            return Ok(());
        }
        let s = shape.scratch(batch.scratch, routing.tokens, routing.pairs());
        let grid = Grid { blocks: [shape.width.div_ceil(1024), routing.tokens, 1], ..Grid::new(1, 256) };
        let shared = if weights.shared_inner > 0 { s.shared } else { 0 };
        let [shared, routed, places, choices] =
            [shared, s.wide, routing.places, routing.choices].map(Argument::Pointer);
        let sizes = [shape.width.into(), routing.chosen.into()];
        match batch.out {
            Sum::Whole(out) => {
                let arguments = [shared, routed, places, Argument::Pointer(out), sizes[0], sizes[1]];
                stream.launch(&self.combine, grid, &arguments)
            }
            Sum::Part(out) => {
                let arguments = [shared, routed, places, choices, Argument::Pointer(out), sizes[0], sizes[1]];
                stream.launch(&self.combine_part, grid, &arguments)
            }
        }
    }
}

/// Room for eight widened inputs and their scales.
fn shared_bytes(cols: u32) -> u32 {
    16 * cols + cols / 4
}

/// Blocks for few pairs that a multiprocessor holds: as many as its registers allow, or its shared memory, of which a block has
/// the sums of two tiles and a kilobyte besides.
fn resident(cols: u32) -> u32 {
    (MULTIPROCESSOR_BYTES / (shared_bytes(cols) + 8704 + 1024)).clamp(1, 2)
}

/// Room for eight pairs' codes and scales.
fn stream_bytes(cols: u32) -> u32 {
    8 * cols + cols / 4
}

/// Room for sixteen rows of codes and scales.
fn repack_bytes(cols: u32) -> u32 {
    8 * cols + cols / 2
}
