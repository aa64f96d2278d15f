//! Which part of a model each of several GPUs has (model.md 12), as data: ranges of rows and columns of every tensor.
//!
//! Attention is split by output groups with their query heads, routed experts by id, the shared expert by its inner
//! columns in blocks of 128; everything else is on every rank. Assumes ranks for which [`check`] found no fault.

use std::ops::Range;

use longwave_model::ModelConfig;
use longwave_model::tensors::TensorSpec;

/// Inner columns of the shared expert that stay together: they have a scale.
const COLUMNS: usize = 128;

/// One rank of several. The parts of all ranks are the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Which, from 0.
    pub rank: usize,
    /// Of how many.
    pub ranks: usize,
}

/// A part of a matrix; of a vector, rows alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Rows.
    pub rows: Range<usize>,
    /// Elements of each of these rows.
    pub cols: Range<usize>,
}

/// How a tensor is split.
enum Cut {
    /// Every rank has it.
    Whole,
    /// By rows that belong to query heads.
    HeadRows,
    /// By rows that belong to output groups.
    GroupRows,
    /// By columns that belong to output groups.
    GroupCols,
    /// Of a routed expert.
    Expert(usize),
    /// By rows that belong to inner columns of the shared expert.
    SharedRows,
    /// By its inner columns.
    SharedCols,
}

/// Refuses a number of ranks that a model cannot be split over.
pub fn check(config: &ModelConfig, ranks: usize) -> Result<(), String> {
    for (name, value) in [("o_groups", config.o_groups), ("n_routed_experts", config.n_routed_experts)] {
        if ranks == 0 || !value.is_multiple_of(ranks) {
            return Err(format!(
                "{ranks} GPUs cannot share its {value} {}: --tensor-parallel-size must divide {name}",
                if name == "o_groups" { "output groups" } else { "routed experts" }
            ));
        }
    }
    Ok(())
}

impl Share {
    /// The whole model.
    pub const WHOLE: Share = Share { rank: 0, ranks: 1 };

    /// Whether other ranks have parts as well.
    pub fn is_part(&self) -> bool {
        self.ranks > 1
    }

    /// This rank's of `count` things.
    fn of(&self, count: usize) -> Range<usize> {
        count * self.rank / self.ranks..count * (self.rank + 1) / self.ranks
    }

    /// Its query heads.
    pub fn heads(&self, c: &ModelConfig) -> Range<usize> {
        let (groups, each) = (self.groups(c), c.num_attention_heads / c.o_groups);
        groups.start * each..groups.end * each
    }

    /// Its output groups.
    pub fn groups(&self, c: &ModelConfig) -> Range<usize> {
        self.of(c.o_groups)
    }

    /// Its routed experts.
    pub fn experts(&self, c: &ModelConfig) -> Range<usize> {
        self.of(c.n_routed_experts)
    }

    /// Its inner columns of the shared expert; where there are fewer blocks than ranks, some ranks have none.
    pub fn shared_columns(&self, c: &ModelConfig) -> Range<usize> {
        let blocks = self.of(c.moe_intermediate_size / COLUMNS);
        blocks.start * COLUMNS..blocks.end * COLUMNS
    }

    /// What this rank has of a tensor; `None` when that is nothing.
    pub fn part(&self, c: &ModelConfig, spec: &TensorSpec) -> Option<Part> {
        let (rows, cols) = (spec.shape[0], spec.shape[1..].iter().product());
        // `have` of `all` things, each with as many of `count` rows or columns.
        let some = |count: usize, all: usize, have: Range<usize>| {
            let each = count / all;
            have.start * each..have.end * each
        };
        let blocks = c.moe_intermediate_size / COLUMNS;
        let shared = |count: usize| some(count, blocks, self.of(blocks));
        let (rows, cols) = match cut(&spec.name) {
            Cut::Whole => (0..rows, 0..cols),
            Cut::HeadRows => (some(rows, c.num_attention_heads, self.heads(c)), 0..cols),
            Cut::GroupRows => (some(rows, c.o_groups, self.groups(c)), 0..cols),
            Cut::GroupCols => (0..rows, some(cols, c.o_groups, self.groups(c))),
            Cut::Expert(id) if self.experts(c).contains(&id) => (0..rows, 0..cols),
            Cut::Expert(_) => return None,
            Cut::SharedRows => (shared(rows), 0..cols),
            Cut::SharedCols => (0..rows, shared(cols)),
        };
        (!rows.is_empty() && !cols.is_empty()).then_some(Part { rows, cols })
    }
}

/// How the tensor `name` is split. The indexer's `wq_b` is not.
fn cut(name: &str) -> Cut {
    let matrix = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".scale")).unwrap_or(name);
    if let Some((_, expert)) = matrix.split_once(".ffn.experts.") {
        let id = expert.split('.').next().and_then(|id| id.parse().ok());
        return id.map_or(Cut::Whole, Cut::Expert);
    }
    let is = |end: &str| matrix.ends_with(end);
    match () {
        () if is(".attn.attn_sink") || is(".attn.wq_b") => Cut::HeadRows,
        () if is(".attn.wo_a") => Cut::GroupRows,
        () if is(".attn.wo_b") => Cut::GroupCols,
        () if is(".ffn.shared_experts.w1") || is(".ffn.shared_experts.w3") => Cut::SharedRows,
        () if is(".ffn.shared_experts.w2") => Cut::SharedCols,
        () => Cut::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_model::{presets, tensors};

    fn tiny() -> ModelConfig {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny/config.json");
        ModelConfig::read(std::path::Path::new(path)).unwrap()
    }

    #[test]
    fn the_parts_of_all_ranks_are_every_tensor_once() {
        for (config, ranks) in [
            (presets::flash(), vec![1, 2, 4, 8]),
            (presets::pro(), vec![2, 8, 16]),
            (presets::flash_0731(), vec![2]),
            (tiny(), vec![1, 2]),
        ] {
            for ranks in ranks {
                assert_eq!(check(&config, ranks), Ok(()));
                for (_, spec) in tensors::all(&config) {
                    let (rows, cols): (usize, usize) = (spec.shape[0], spec.shape[1..].iter().product());
                    let parts: Vec<Part> =
                        (0..ranks).filter_map(|rank| Share { rank, ranks }.part(&config, &spec)).collect();
                    let whole = Part { rows: 0..rows, cols: 0..cols };
                    if matches!(cut(&spec.name), Cut::Whole) {
                        assert_eq!(parts, vec![whole; ranks], "{}", spec.name);
                        continue;
                    }
                    // Parts in the order of ranks go on where the one before ended, in rows or in columns.
                    let (mut row, mut col) = (0, 0);
                    for part in &parts {
                        assert!(part.rows == (0..rows) || part.cols == (0..cols), "{}: {part:?}", spec.name);
                        let before = if part.cols == (0..cols) { &mut row } else { &mut col };
                        let own = if part.cols == (0..cols) { &part.rows } else { &part.cols };
                        assert_eq!(own.start, *before, "{}", spec.name);
                        *before = own.end;
                    }
                    assert!((row, col) == (rows, 0) || (row, col) == (0, cols), "{}: {row} {col}", spec.name);
                }
            }
        }
    }

    #[test]
    fn half_of_flash_and_of_tiny() {
        let (flash, half) = (presets::flash(), Share { rank: 1, ranks: 2 });
        assert_eq!((half.heads(&flash), half.groups(&flash)), (32..64, 4..8));
        assert_eq!((half.experts(&flash), half.shared_columns(&flash)), (128..256, 1024..2048));
        let of = |name: &str| {
            let all = tensors::all(&flash);
            let (_, spec) = all.iter().find(|(_, spec)| spec.name == name).unwrap();
            half.part(&flash, spec).map(|part| (part.rows, part.cols))
        };
        assert_eq!(of("layers.3.attn.wq_b.weight"), Some((16384..32768, 0..1024)));
        assert_eq!(of("layers.3.attn.wq_b.scale"), Some((128..256, 0..8)));
        assert_eq!(of("layers.2.attn.indexer.wq_b.weight"), Some((0..8192, 0..1024)));
        assert_eq!(of("layers.3.attn.wo_b.scale"), Some((0..32, 32..64)));
        assert_eq!(of("layers.3.attn.attn_sink"), Some((32..64, 0..1)));
        assert_eq!(of("layers.3.ffn.experts.127.w1.weight"), None);
        assert_eq!(of("layers.3.ffn.shared_experts.w2.weight"), Some((0..4096, 1024..2048)));
        // One block of columns: one rank has it, the other none.
        let shared = |rank| Share { rank, ranks: 2 }.shared_columns(&tiny());
        assert_eq!((shared(0), shared(1)), (0..0, 0..128));
    }

    #[test]
    fn what_does_not_divide_is_refused_by_name() {
        let error = check(&presets::flash(), 3).unwrap_err();
        assert!(error.contains("8 output groups") && error.contains("--tensor-parallel-size"), "{error}");
        let mut config = presets::flash();
        config.n_routed_experts = 255;
        assert!(check(&config, 2).unwrap_err().contains("255 routed experts"));
        assert!(check(&config, 0).is_err());
    }
}
