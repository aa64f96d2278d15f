//! Experts of a batch (model.md 7): the router's choice, pairs grouped by expert on the GPU, both products, the sum.
//! Kernels: router.cu, experts_fp4.cu, quantise.cu.
//!
//! Launches depend on the number of tokens alone; how many groups there are is read on the GPU. A pair has the same bits
//! in any group. Assumes fp4 experts that [`Moe::arrange`] went over once.

use crate::driver::{Arena, Argument, Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};
use crate::loader::Packed;
use crate::scratch::Codes;
use crate::weights::Route;

/// Pairs of a group.
const GROUP: usize = 8;

/// Kernels.
pub struct Moe {
    route: Kernel,
    group: Kernel,
    /// From 4,096 columns on, and fewer.
    experts: [Kernel; 2],
    repack: Kernel,
    activate: Kernel,
    combine: Kernel,
    /// Choices of a token.
    k: u32,
    /// Routed experts.
    count: u32,
    scale: f32,
    limit: f32,
}

/// Pairs of a batch, in the order of experts.
pub struct Pairs {
    /// `[most, 3]`: expert, first pair, pairs.
    groups: DeviceSlice<i32>,
    /// Token of each pair.
    inputs: DeviceSlice<u32>,
    /// Weight of each pair.
    weights: DeviceSlice<f32>,
    /// Pair of each choice.
    places: DeviceSlice<u32>,
    /// 0, 1, 2, ...: the input of a pair's second product is its own.
    own: DeviceSlice<u32>,
}

/// Groups that `tokens` tokens need at most.
fn most_groups(tokens: usize, k: usize, experts: usize) -> usize {
    (tokens * k).min(experts + tokens * k / GROUP)
}

impl Pairs {
    /// Room for `tokens` tokens.
    pub fn new(arena: &mut Arena, tokens: usize, k: usize, experts: usize) -> Result<Pairs, DriverError> {
        let pairs = tokens * k;
        Ok(Pairs {
            groups: arena.slice(3 * most_groups(tokens, k, experts))?,
            inputs: arena.slice(pairs)?,
            weights: arena.slice(pairs)?,
            places: arena.slice(pairs)?,
            own: arena.slice(pairs)?,
        })
    }

    /// Fills what is the same in every step.
    pub fn prepare(&self, stream: &Stream) -> Result<(), DriverError> {
        self.own.write(stream, &(0..self.own.len() as u32).collect::<Vec<_>>())
    }
}

impl Moe {
    /// Loads the kernels for `count` experts of which each token takes `k`; `widest` columns of an expert's matrix at most.
    pub fn new(
        context: &Context,
        count: usize,
        k: usize,
        scale: f32,
        limit: f32,
        widest: usize,
    ) -> Result<Moe, DriverError> {
        let (router, experts) = (Module::load(context, "router")?, Module::load(context, "experts_fp4")?);
        let small = Module::load(context, "quantise")?;
        let shared_bytes = (GROUP * 2 * widest) as u32;
        Ok(Moe {
            route: router.kernel("route", 0)?,
            group: router.kernel("group", 0)?,
            experts: [experts.kernel("experts_fp4_4", shared_bytes)?, experts.kernel("experts_fp4_2", shared_bytes)?],
            repack: experts.kernel("repack", 0)?,
            activate: small.kernel("activate", 0)?,
            combine: small.kernel("combine", 0)?,
            k: k as u32,
            count: count as u32,
            scale,
            limit,
        })
    }

    /// Brings stored codes into the order in which the kernels read them; once, when they are loaded.
    pub fn arrange(&self, stream: &Stream, w: &Packed) -> Result<(), DriverError> {
        let pieces = w.codes.len() as u64 / 64;
        let grid = Grid::new(pieces.div_ceil(256) as u32, 256);
        stream.launch(&self.repack, grid, &[Argument::from(&w.codes), Argument::U64(pieces)])
    }

    /// Chooses experts of `count` tokens (address of `u32 [T]`) from router logits `[T, E]` and lists the pairs. `chosen`
    /// and `weights` are `[T, k]`.
    pub fn choose(
        &self,
        stream: &Stream,
        logits: &DeviceSlice<f32>,
        route: &Route,
        tokens: u64,
        (chosen, weights): (&DeviceSlice<u32>, &DeviceSlice<f32>),
        pairs: &Pairs,
        count: u32,
    ) -> Result<(), DriverError> {
        let none = Argument::Pointer(0);
        let (bias, table) = match route {
            Route::Hash(table) => (none, table.into()),
            Route::Scored(bias) => (bias.into(), none),
        };
        let arguments: [Argument; 10] = [
            logits.into(),
            bias,
            table,
            Argument::Pointer(tokens),
            chosen.into(),
            weights.into(),
            count.into(),
            self.count.into(),
            self.k.into(),
            self.scale.into(),
        ];
        stream.launch(&self.route, Grid::new(count.div_ceil(8), 256), &arguments)?;
        let arguments: [Argument; 10] = [
            chosen.into(),
            weights.into(),
            (&pairs.groups).into(),
            (&pairs.inputs).into(),
            (&pairs.weights).into(),
            (&pairs.places).into(),
            (count * self.k).into(),
            self.k.into(),
            self.count.into(),
            self.groups(count).into(),
        ];
        stream.launch(&self.group, Grid::new(1, 1024), &arguments)
    }

    fn groups(&self, tokens: u32) -> u32 {
        most_groups(tokens as usize, self.k as usize, self.count as usize) as u32
    }

    /// `y` float `[P, rows]`: of every pair, its expert's matrix times its token's input `x`.
    pub fn of_tokens(
        &self,
        stream: &Stream,
        w: &Packed,
        x: &Codes,
        pairs: &Pairs,
        y: &DeviceSlice<f32>,
        tokens: u32,
    ) -> Result<(), DriverError> {
        self.product(stream, w, x, pairs, &pairs.inputs, y, tokens)
    }

    /// The same with a pair's own input, `x` `[P, cols]`.
    pub fn of_pairs(
        &self,
        stream: &Stream,
        w: &Packed,
        x: &Codes,
        pairs: &Pairs,
        y: &DeviceSlice<f32>,
        tokens: u32,
    ) -> Result<(), DriverError> {
        self.product(stream, w, x, pairs, &pairs.own, y, tokens)
    }

    fn product(
        &self,
        stream: &Stream,
        w: &Packed,
        x: &Codes,
        pairs: &Pairs,
        inputs: &DeviceSlice<u32>,
        y: &DeviceSlice<f32>,
        tokens: u32,
    ) -> Result<(), DriverError> {
        let wide = w.cols >= 4096;
        let (kernel, split) = if wide { (&self.experts[0], 4) } else { (&self.experts[1], 2) };
        let arguments: [Argument; 9] = [
            (&w.codes).into(),
            (&w.scales).into(),
            (&x.codes).into(),
            (&x.scales).into(),
            (&pairs.groups).into(),
            inputs.into(),
            y.into(),
            w.rows.into(),
            w.cols.into(),
        ];
        let blocks = [(w.rows / 16).div_ceil(8 / split), self.groups(tokens), 1];
        let grid = Grid { blocks, shared_bytes: GROUP as u32 * 2 * w.cols, ..Grid::new(1, 256) };
        stream.launch(kernel, grid, &arguments)
    }

    /// Activations of `rows` rows of `2 inner` products, with the pairs' weights.
    pub fn activate(
        &self,
        stream: &Stream,
        x: &DeviceSlice<f32>,
        pairs: &Pairs,
        out: &Codes,
        inner: u32,
        tokens: u32,
    ) -> Result<(), DriverError> {
        self.swiglu(stream, x, (&pairs.weights).into(), out, inner, tokens * self.k)
    }

    /// Those of the shared expert.
    pub fn activate_shared(
        &self,
        stream: &Stream,
        x: &DeviceSlice<f32>,
        out: &Codes,
        inner: u32,
        tokens: u32,
    ) -> Result<(), DriverError> {
        self.swiglu(stream, x, Argument::Pointer(0), out, inner, tokens)
    }

    fn swiglu(
        &self,
        stream: &Stream,
        x: &DeviceSlice<f32>,
        weights: Argument,
        out: &Codes,
        inner: u32,
        rows: u32,
    ) -> Result<(), DriverError> {
        let arguments: [Argument; 6] =
            [x.into(), weights, (&out.codes).into(), (&out.scales).into(), inner.into(), self.limit.into()];
        let grid = Grid { blocks: [inner.div_ceil(1024), rows, 1], ..Grid::new(1, 256) };
        stream.launch(&self.activate, grid, &arguments)
    }

    /// The sum over a token's experts, bf16 `[T, D]`.
    pub fn combine(
        &self,
        stream: &Stream,
        shared: &DeviceSlice<f32>,
        routed: &DeviceSlice<f32>,
        pairs: &Pairs,
        out: &DeviceSlice<u16>,
        width: u32,
        tokens: u32,
    ) -> Result<(), DriverError> {
        let arguments: [Argument; 6] =
            [shared.into(), routed.into(), (&pairs.places).into(), out.into(), width.into(), self.k.into()];
        let grid = Grid { blocks: [width.div_ceil(1024), tokens, 1], ..Grid::new(1, 256) };
        stream.launch(&self.combine, grid, &arguments)
    }
}
