//! Cache geometry: what is stored per position, how long it is kept, and how it is cut into blocks and buckets.
//!
//! One logical block is 256 native positions for every cache (ARCHITECTURE.md, "Cache design"). A *page* is one layer's part
//! of a block; a *unit* is the pages of all layers of a group, one contiguous range with one id. Units come in three
//! sizes (buckets), each a single pool. Engine, backends, transfer and the memory calculator all read this one layout.

use serde::Serialize;

use crate::config::{LayerKind, ModelConfig};

/// Native positions of one logical block.
pub const LOGICAL_BLOCK: u32 = 256;
/// Positions of one window block: with 584-byte rows its page has the size of a c4 page.
pub const WINDOW_BLOCK: u32 = 64;
/// Largest number of draft tokens in one step. The c128 state page holds this many rows that a rejection may take back.
pub const MAX_DRAFTS: u32 = 7;
/// Bytes of a c128 state page before its running sums: how many rows of the open group are folded in (u32, padded).
pub const C128_HEADER_BYTES: u32 = 64;

/// Storage of a 512-wide entry (window, c4 main, c128 main).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MainFormat {
    /// 448 e4m3 + 64 bf16 + 7 ue8m0 scales + 1 byte of padding (model.md 11.2).
    Fp8,
    /// 512 bf16.
    Bf16,
    /// 512 f32: no rounding at all. For the oracle; not offered for serving.
    F32,
}

/// Storage of a 128-wide index key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum IndexFormat {
    /// Hadamard, 128 e2m1 codes, 4 ue8m0 scales.
    Fp4,
    /// 128 e4m3, one f32 power-of-two scale, no Hadamard.
    Fp8,
    /// 128 bf16, neither Hadamard nor rounding to a grid.
    Bf16,
    /// 128 f32, for the oracle.
    F32,
}

impl MainFormat {
    /// Bytes of one entry.
    pub fn row_bytes(self) -> u32 {
        match self {
            MainFormat::Fp8 => 584,
            MainFormat::Bf16 => 1024,
            MainFormat::F32 => 2048,
        }
    }
    /// Name as typed on the command line.
    pub fn name(self) -> &'static str {
        match self {
            MainFormat::Fp8 => "fp8",
            MainFormat::Bf16 => "bf16",
            MainFormat::F32 => "f32",
        }
    }
}

impl IndexFormat {
    /// Bytes of one key.
    pub fn row_bytes(self) -> u32 {
        match self {
            IndexFormat::Fp4 => 68,
            IndexFormat::Fp8 => 132,
            IndexFormat::Bf16 => 256,
            IndexFormat::F32 => 512,
        }
    }
    /// Name as typed on the command line.
    pub fn name(self) -> &'static str {
        match self {
            IndexFormat::Fp4 => "fp4",
            IndexFormat::Fp8 => "fp8",
            IndexFormat::Bf16 => "bf16",
            IndexFormat::F32 => "f32",
        }
    }
}

/// Formats of the two kinds of cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct CacheFormats {
    /// Window, c4 main and c128 main entries.
    pub main: MainFormat,
    /// c4 index keys.
    pub index: IndexFormat,
}

/// What a group of caches holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheKind {
    /// Compressed entries of ratio 4.
    C4Main,
    /// Index keys of ratio 4.
    C4Index,
    /// Compressed entries of ratio 128.
    C128Main,
    /// Raw entries of the last 128 positions, in every layer, MTP included.
    Window,
    /// Compressor rows of ratio 4, main: 1,024 values then 1,024 scores, f32 (model.md 6.4).
    C4State,
    /// Compressor rows of ratio 4, indexer: 256 values then 256 scores, f32.
    IndexState,
    /// Open group of ratio 128: running (max, sum, weighted sum) per channel and up to [`MAX_DRAFTS`] pending rows.
    C128State,
}

/// How long rows are kept. One spec type serves attention windows and compressor states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Retention {
    /// For the life of the sequence and, shared, of its prefix: one entry per `ratio` positions.
    LongLived {
        /// Positions per entry.
        ratio: u32,
    },
    /// Only what later positions still read: see [`Retention::first_needed`].
    SlidingWindow {
        /// Rows that a query may read, its own included.
        window: u32,
        /// The window moves in steps of this many positions (1 for attention, the ratio for compressor state).
        stride: u32,
    },
}

impl Retention {
    /// First position whose row is still read when position `next` is computed; rows before it may be freed.
    ///
    /// Attention window 128: `next - 127`. c4 state (window 8, stride 4): the previous complete group, `4*(next/4) - 4`.
    /// c128 state (window 128, stride 128): the open group, `128*(next/128)`.
    pub fn first_needed(self, next: u32) -> u32 {
        match self {
            Retention::LongLived { .. } => 0,
            Retention::SlidingWindow { window, stride } => (next - next % stride).saturating_sub(window - stride),
        }
    }
}

/// One of the three page sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bucket {
    /// c4 main, window, c4 state, c128 state.
    Large,
    /// c4 index keys and their compressor state.
    Middle,
    /// c128 main.
    Small,
}

impl Bucket {
    /// All buckets, largest first.
    pub const ALL: [Bucket; 3] = [Bucket::Large, Bucket::Middle, Bucket::Small];

    /// Lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Bucket::Large => "large",
            Bucket::Middle => "middle",
            Bucket::Small => "small",
        }
    }
}

/// Caches of one kind that share block ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// What it holds.
    pub kind: CacheKind,
    /// How long.
    pub retention: Retention,
    /// Which pool its blocks come from.
    pub bucket: Bucket,
    /// Layers, in page order inside a unit; `num_hidden_layers` stands for the MTP layer.
    pub layers: Vec<u32>,
    /// Native positions per block.
    pub block_tokens: u32,
    /// Entries (rows) per page.
    pub rows_per_block: u32,
    /// Bytes of one entry (for `C128State`: of one pending row).
    pub row_bytes: u32,
}

impl GroupSpec {
    /// Bytes of a page that carry rows or sums; at most the bucket's page size.
    pub fn used_page_bytes(&self) -> u32 {
        match self.kind {
            CacheKind::C128State => C128_HEADER_BYTES + 3 * 512 * 4 + MAX_DRAFTS * self.row_bytes,
            _ => self.rows_per_block * self.row_bytes,
        }
    }

    /// Blocks that positions `first..=last` touch.
    pub fn blocks_between(&self, first: u32, last: u32) -> u32 {
        last / self.block_tokens - first / self.block_tokens + 1
    }

    /// Whether this group slides.
    pub fn is_sliding(&self) -> bool {
        matches!(self.retention, Retention::SlidingWindow { .. })
    }
}

/// Size of the units of one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketSpec {
    /// Which.
    pub bucket: Bucket,
    /// Bytes of one layer's page, a multiple of 16.
    pub page_bytes: u32,
    /// Pages per unit: the most layers any of its groups has.
    pub layers_per_unit: u32,
}

impl BucketSpec {
    /// Bytes of one unit: one copy, one network write, one disk record.
    pub fn unit_bytes(&self) -> u64 {
        u64::from(self.page_bytes) * u64::from(self.layers_per_unit)
    }
}

/// The whole cache of a model: groups and buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheLayout {
    /// Entry formats.
    pub formats: CacheFormats,
    /// Main layers. A window layer with this number or a higher one belongs to the MTP module.
    pub layers: u32,
    /// All groups; the position in this list is the group id used in block tables. Long-lived groups come first.
    pub groups: Vec<GroupSpec>,
    /// Large, middle, small.
    pub buckets: [BucketSpec; 3],
}

impl CacheLayout {
    /// Lays out the cache of `config`. Groups without layers are left out, so a window-only model has one group.
    pub fn new(config: &ModelConfig, formats: CacheFormats) -> CacheLayout {
        let ids = |kind| config.layers_of(kind).into_iter().map(|l| l as u32).collect::<Vec<u32>>();
        let (c4, c128) = (ids(LayerKind::C4), ids(LayerKind::C128));
        let window: Vec<u32> = (0..(config.num_hidden_layers + config.num_nextn_predict_layers) as u32).collect();

        // Window layers are cut into as many groups as keep each at least as large as the compressed ones
        // (Flash: 44 in two groups of 22; Pro: 62 in two of 31), so that every unit of the large pool is nearly full.
        let least = c4.len().max(c128.len());
        let parts = (window.len() / least.max(1)).clamp(1, window.len());
        let parts = if least == 0 { 1 } else { parts };
        let per_unit = window.len().div_ceil(parts).max(least);

        let (main, index) = (formats.main.row_bytes(), formats.index.row_bytes());
        let page = [64 * main, 64 * index, (2 * main).next_multiple_of(16)];
        let group = |kind, retention, bucket, layers: &[u32], block_tokens, rows_per_block, row_bytes| GroupSpec {
            kind,
            retention,
            bucket,
            layers: layers.to_vec(),
            block_tokens,
            rows_per_block,
            row_bytes,
        };
        let long = |ratio| Retention::LongLived { ratio };
        let slide = |window, stride| Retention::SlidingWindow { window, stride };
        let index_state_tokens = if page[1] >= 4 * 2048 { 4 } else { 2 };
        let mut groups = vec![
            group(CacheKind::C4Main, long(4), Bucket::Large, &c4, LOGICAL_BLOCK, 64, main),
            group(CacheKind::C4Index, long(4), Bucket::Middle, &c4, LOGICAL_BLOCK, 64, index),
            group(CacheKind::C128Main, long(128), Bucket::Small, &c128, LOGICAL_BLOCK, 2, main),
        ];
        for part in window.chunks(per_unit.min(window.len().div_ceil(parts))) {
            groups.push(group(CacheKind::Window, slide(128, 1), Bucket::Large, part, WINDOW_BLOCK, WINDOW_BLOCK, main));
        }
        groups.push(group(CacheKind::C4State, slide(8, 4), Bucket::Large, &c4, 4, 4, 8192));
        groups.push(group(
            CacheKind::IndexState,
            slide(8, 4),
            Bucket::Middle,
            &c4,
            index_state_tokens,
            index_state_tokens,
            2048,
        ));
        groups.push(group(CacheKind::C128State, slide(128, 128), Bucket::Large, &c128, 128, 1, 4096));
        groups.retain(|g| !g.layers.is_empty());

        let bucket = |i: usize, bucket: Bucket| BucketSpec {
            bucket,
            page_bytes: page[i],
            layers_per_unit: groups
                .iter()
                .filter(|g| g.bucket == bucket)
                .map(|g| g.layers.len() as u32)
                .max()
                .unwrap_or(0),
        };
        let buckets = [bucket(0, Bucket::Large), bucket(1, Bucket::Middle), bucket(2, Bucket::Small)];
        for g in &groups {
            assert!(g.used_page_bytes() <= page[g.bucket as usize], "{:?} does not fit its page", g.kind);
        }
        CacheLayout { formats, layers: config.num_hidden_layers as u32, groups, buckets }
    }

    /// Size of `bucket`'s units.
    pub fn bucket(&self, bucket: Bucket) -> &BucketSpec {
        &self.buckets[bucket as usize]
    }

    /// Ids of the groups that are kept for the life of a sequence.
    pub fn long_lived(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.groups.len()).filter(|&g| !self.groups[g].is_sliding())
    }

    /// Ids of the sliding groups.
    pub fn sliding(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.groups.len()).filter(|&g| self.groups[g].is_sliding())
    }

    /// Group that holds `kind` for `layer`, and the page of that layer inside a unit.
    pub fn find(&self, kind: CacheKind, layer: usize) -> Option<(usize, usize)> {
        self.groups
            .iter()
            .enumerate()
            .filter(|(_, g)| g.kind == kind)
            .find_map(|(id, g)| g.layers.iter().position(|&l| l as usize == layer).map(|page| (id, page)))
    }

    /// Units per bucket that the long-lived caches of one logical block take (1 or 0 each).
    pub fn long_lived_units(&self) -> [u32; 3] {
        let mut units = [0; 3];
        for g in self.groups.iter().filter(|g| !g.is_sliding()) {
            units[g.bucket as usize] += 1;
        }
        units
    }

    /// Most units per bucket that the sliding caches of one running sequence take while a step of at most `drafts`
    /// draft tokens is in flight: rows from `first_needed(p)` up to position `p + drafts`, for the worst `p`.
    pub fn sliding_units(&self, drafts: u32) -> [u32; 3] {
        let mut units = [0; 3];
        for g in self.groups.iter().filter(|g| g.is_sliding()) {
            // Block boundaries repeat every 256 positions, so one period away from the start shows the worst case.
            let most =
                (1024..1024 + LOGICAL_BLOCK).map(|p| g.blocks_between(g.retention.first_needed(p), p + drafts)).max();
            units[g.bucket as usize] += most.unwrap_or(0);
        }
        units
    }

    /// Units per bucket of one checkpoint at a 256 boundary: the window and the overlap rows; no c128 state, it is empty.
    pub fn checkpoint_units(&self) -> [u32; 3] {
        let mut units = [0; 3];
        for g in self.groups.iter().filter(|g| g.is_sliding()) {
            let (next, first) = (1024, g.retention.first_needed(1024));
            if first < next {
                units[g.bucket as usize] += g.blocks_between(first, next - 1);
            }
        }
        units
    }

    /// Positions before its own that a query reads in a window.
    pub fn reach(&self) -> u32 {
        let window = self.groups.iter().find(|g| g.kind == CacheKind::Window).map(|g| g.retention);
        match window {
            Some(Retention::SlidingWindow { window, .. }) => window - 1,
            _ => 0,
        }
    }

    /// Splits `bytes` over the pools so that they run out together: as many logical blocks as fit beside the sliding
    /// caches of `seats` sequences with `drafts` drafts each.
    pub fn plan_units(&self, seats: u32, drafts: u32, bytes: u64) -> [u32; 3] {
        // A prefill step holds the old and the new window at once, hence twice the sliding units.
        let sliding = self.sliding_units(drafts).map(|u| 2 * u * seats);
        let long = self.long_lived_units();
        let rest = bytes.saturating_sub(self.bytes(sliding));
        let blocks = (rest / self.bytes(long).max(1)).min(u64::from(u32::MAX / 4)) as u32;
        std::array::from_fn(|b| sliding[b] + long[b] * blocks)
    }

    /// Bytes of `units` (large, middle, small).
    pub fn bytes(&self, units: [u32; 3]) -> u64 {
        (0..3).map(|i| u64::from(units[i]) * self.buckets[i].unit_bytes()).sum()
    }
}
