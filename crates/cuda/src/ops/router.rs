//! Router: which experts a token goes to, with which weights, and in which groups the experts work.
//! Assumes at most 512 experts and 32 choices. Everything is decided on the GPU; sizes of launches depend on the number of
//! tokens alone. A padded token goes nowhere. With several ranks each chooses among all experts and groups its own.

use std::ops::Range;

use super::linear_bf16::Bf16Product;
use super::parts;
use crate::cubins;
use crate::driver::{Argument, Context, DriverError, Grid, Kernel, Module, Stream};

/// Rows of a group: what a block of the experts' product multiplies at once; for few tokens, for many and for long steps.
pub const GROUPS: [u32; 3] = [8, 64, 128];
/// Up to so many tokens one block does all of it.
const ONE_BLOCK: u32 = 8;
/// Up to so many pairs per expert on average groups are small: eight rows of one expert are multiplied while its weights stream
/// by, and few experts need them twice.
const FEW_PAIRS: u32 = 6;
/// Above so many pairs per expert on average groups are the largest: weights are widened once for 128 pairs. So far never, since that
/// form has not been measured yet; 40 would be the number to begin with (`experts_fp4.md`).
const MANY_PAIRS: u32 = u32::MAX;
const ALIGN: u64 = 256;
/// Product and choice at once: a cluster of so many blocks, each with its part of the experts; so many choices at most; a multiple
/// of so many columns.
const CLUSTER: u32 = 16;
const CLUSTER_CHOICES: u32 = 8;
const CLUSTER_COLUMNS: u32 = 1024;
const CLUSTER_GRID: Grid =
    Grid { blocks: [CLUSTER, 1, 1], threads: 256, shared_bytes: 0, cluster: CLUSTER, overlaps: true };
/// Experts up to which a block has one tile of rows, not two.
const ONE_TILE: u32 = 256;

/// The kernels.
pub struct Router {
    choose: Kernel,
    group: Kernel,
    few: Kernel,
    /// For up to [`ONE_TILE`] experts and for more; where the GPU has room for such clusters.
    cluster: Option<[Kernel; 2]>,
}

/// How a layer chooses.
#[derive(Debug, Clone, Copy)]
pub enum Choosing {
    /// By score plus the bias at this address, float `[experts]`.
    Scored(u64),
    /// By the table at this address, `u32 [vocab, chosen]`.
    Hashed(u64),
}

impl Choosing {
    /// Of bias and table, the one that is not there as zero.
    fn addresses(self) -> (u64, u64) {
        match self {
            Choosing::Scored(bias) => (bias, 0),
            Choosing::Hashed(table) => (0, table),
        }
    }
}

/// Where routing is written; addresses.
#[derive(Debug, Clone, Copy)]
pub struct Routing {
    /// Tokens.
    pub tokens: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// First expert that is here.
    pub first: u32,
    /// Experts that are here; others get no group.
    pub here: u32,
    /// Experts of a token.
    pub chosen: u32,
    /// `u32 [tokens, chosen]`, in the order of choice; UNMAPPED for a padded token.
    pub choices: u64,
    /// float `[tokens, chosen]`.
    pub weights: u64,
    /// `i32 [most_groups, 3]`: expert (counted from `first`), first place, places; unused groups have none.
    pub groups: u64,
    /// By place: token, `u32 [tokens * chosen]`.
    pub inputs: u64,
    /// By place: index into `choices`, UNMAPPED behind the last place.
    pub sources: u64,
    /// By choice: place, UNMAPPED for a padded token and for an expert that is not here.
    pub places: u64,
}

impl Routing {
    /// Bytes that routing of up to `tokens` tokens needs: fewer tokens in smaller groups can need more than many.
    pub fn scratch_bytes(tokens: u32, experts: u32, chosen: u32) -> u64 {
        let end = |tokens| Routing::at(0, tokens, experts, chosen).1;
        let most = |pairs: u32| end(tokens.min(pairs.saturating_mul(experts) / chosen));
        end(tokens).max(most(FEW_PAIRS)).max(most(MANY_PAIRS))
    }

    /// Routing in memory that begins at `address`, a multiple of 256, and where that memory ends.
    pub fn at(address: u64, tokens: u32, experts: u32, chosen: u32) -> (Routing, u64) {
        let pairs = 4 * u64::from(tokens) * u64::from(chosen);
        let mut end = address;
        let mut take = |bytes: u64| {
            let start = end;
            end = (start + bytes).next_multiple_of(ALIGN);
            start
        };
        let mut routing = Routing {
            tokens,
            experts,
            first: 0,
            here: experts,
            chosen,
            choices: take(pairs),
            weights: take(pairs),
            groups: 0,
            inputs: take(pairs),
            sources: take(pairs),
            places: take(pairs),
        };
        routing.groups = take(12 * u64::from(routing.most_groups()));
        (routing, end)
    }

    /// The same for a rank that has these experts.
    pub fn with(self, experts: Range<usize>) -> Routing {
        Routing { first: experts.start as u32, here: experts.len() as u32, ..self }
    }

    /// Pairs of a token and one of its experts.
    pub fn pairs(&self) -> u32 {
        self.tokens * self.chosen
    }

    /// Rows of a group at most.
    pub fn group(&self) -> u32 {
        let above = |pairs| self.pairs() > self.experts.saturating_mul(pairs);
        GROUPS[usize::from(above(FEW_PAIRS)) + usize::from(above(MANY_PAIRS))]
    }

    /// Groups at most, whatever is chosen.
    pub fn most_groups(&self) -> u32 {
        self.pairs().min(self.here + self.pairs() / self.group())
    }
}

impl Router {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Router, DriverError> {
        let module = Module::load(context, "router")?;
        let kernel = |name| module.kernel(name, 0);
        let cluster = Router::cluster(context)?;
        let [choose, group, few] = ["router_choose", "router_group", "router_few"].map(kernel);
        Ok(Router { choose: choose?, group: group?, few: few?, cluster })
    }

    fn cluster(context: &Context) -> Result<Option<[Kernel; 2]>, DriverError> {
        if cubins::find("router_cluster", context.gpu().major, context.gpu().minor).is_none() {
            return Ok(None);
        }
        let module = Module::load(context, "router_cluster")?;
        let kernels = [module.kernel("router_cluster_1", 0)?, module.kernel("router_cluster_2", 0)?];
        let fits = kernels[0].fits_cluster(CLUSTER_GRID)? && kernels[1].fits_cluster(CLUSTER_GRID)?;
        Ok(fits.then_some(kernels))
    }

    /// Whether [`Router::product_and_route`] takes this product and routing.
    pub fn takes_product(&self, gate: &Bf16Product, to: &Routing) -> bool {
        let experts =
            to.experts <= 512 && to.experts.is_multiple_of(CLUSTER) && to.chosen <= to.experts.min(CLUSTER_CHOICES);
        let columns = gate.cols.is_multiple_of(CLUSTER_COLUMNS) && parts(gate.cols) == 8;
        self.cluster.is_some() && (1..=ONE_BLOCK).contains(&to.tokens) && experts && columns
    }

    /// The product `gate` and [`Router::route`] by its results in one launch; the same bits, but the logits are not written.
    pub fn product_and_route(
        &self,
        stream: &Stream,
        gate: &Bf16Product,
        ids: u64,
        how: Choosing,
        scale: f32,
        to: &Routing,
    ) -> Result<(), DriverError> {
        assert!(self.takes_product(gate, to), "{} of {} experts, {} columns", to.chosen, to.experts, gate.cols);
        assert_eq!((gate.rows, gate.tokens), (to.experts, to.tokens), "the product has a row for each expert");
        assert!(to.group().is_power_of_two());
        let kernels = self.cluster.as_ref().expect("takes_product has looked");
        let (bias, table) = how.addresses();
        let pointers =
            [gate.w, gate.x, bias, table, ids, to.choices, to.weights, to.groups, to.inputs, to.sources, to.places];
        let sizes = [gate.cols, to.tokens, to.experts, to.chosen].map(Argument::U32);
        let group = [to.group(), to.most_groups(), to.first, to.here].map(Argument::U32);
        let arguments = [&pointers.map(Argument::Pointer)[..], &sizes, &[scale.into()], &group].concat();
        stream.launch(&kernels[usize::from(to.experts > ONE_TILE)], CLUSTER_GRID, &arguments)
    }

    /// Routes the tokens with ids at `ids` (`u32 [tokens]`, UNMAPPED for a padded one) by `logits` float
    /// `[tokens, experts]`; weights are multiplied by `scale`.
    pub fn route(
        &self,
        stream: &Stream,
        logits: u64,
        ids: u64,
        how: Choosing,
        scale: f32,
        to: &Routing,
    ) -> Result<(), DriverError> {
        let fits = to.experts <= 512 && to.chosen <= 32 && to.chosen <= to.experts;
        assert!(fits, "{} of {} experts", to.chosen, to.experts);
        if to.tokens == 0 {
            return Ok(());
        }
        let (bias, table) = how.addresses();
        if to.tokens <= ONE_BLOCK {
            let pointers =
                [logits, bias, table, ids, to.choices, to.weights, to.groups, to.inputs, to.sources, to.places];
            let sizes = [to.tokens, to.experts, to.chosen].map(Argument::U32);
            let group = [to.group(), to.most_groups(), to.first, to.here].map(Argument::U32);
            let arguments = [&pointers.map(Argument::Pointer)[..], &sizes, &[scale.into()], &group].concat();
            return stream.launch(&self.few, Grid::new(1, 1024), &arguments);
        }
        let arguments = [
            Argument::Pointer(logits),
            Argument::Pointer(bias),
            Argument::Pointer(table),
            Argument::Pointer(ids),
            Argument::Pointer(to.choices),
            Argument::Pointer(to.weights),
            to.tokens.into(),
            to.experts.into(),
            to.chosen.into(),
            scale.into(),
        ];
        stream.launch(&self.choose, Grid::new(to.tokens.div_ceil(8), 256), &arguments)?;
        let arguments = [
            Argument::Pointer(to.choices),
            Argument::Pointer(to.groups),
            Argument::Pointer(to.inputs),
            Argument::Pointer(to.sources),
            Argument::Pointer(to.places),
            to.pairs().into(),
            to.chosen.into(),
            to.group().into(),
            to.most_groups().into(),
            to.first.into(),
        ];
        stream.launch(&self.group, Grid::new(to.here, 256), &arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_for_many_tokens_is_enough_for_few() {
        for (experts, chosen) in [(8, 2), (64, 8), (256, 6), (256, 32), (384, 8), (512, 17)] {
            for tokens in 1..200 {
                let most = Routing::scratch_bytes(tokens, experts, chosen);
                assert!(
                    (1..=tokens).all(|t| Routing::at(0, t, experts, chosen).1 <= most),
                    "{tokens} {experts} {chosen}"
                );
            }
        }
    }
}
