//! The table of `docs/deployment.md`: weights of every GPU as the loader counts them, and the requests that fit beside them.

use longwave_cuda::loader;
use longwave_cuda::split::Share;
use longwave_model::memory::Memory;
use longwave_model::{CacheFormats, IndexFormat, MainFormat, ModelConfig, presets};

use super::page;

const GIB: f64 = (1u64 << 30) as f64;
/// Memory of an H200 that a program can take, and what the page keeps of it: a reserve of 1 GiB for the driver, 2 for scratch
/// and block tables.
const GPU_GIB: f64 = 139.0;
const KEPT_GIB: f64 = 3.0;

/// GiB of weights on the GPU of `ranks` that has most.
fn weights_gib(config: &ModelConfig, ranks: usize, drafts: bool) -> f64 {
    let most = (0..ranks).map(|rank| loader::bytes(config, Share { rank, ranks }, drafts)).max();
    most.unwrap() as f64 / GIB
}

/// Requests of `context` tokens that a cache of so many GiB admits: blocks for life, and two sets of windows and state.
fn requests(config: &ModelConfig, cache_gib: f64, context: u32) -> u64 {
    let formats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };
    let allocated = Memory::of(config, formats, context).allocated;
    (cache_gib * GIB) as u64 / (allocated.long_lived_bytes + 2 * allocated.sliding_bytes)
}

fn row(name: &str, config: &ModelConfig, ranks: usize) -> String {
    let [plain, drafts] = [false, true].map(|drafts| weights_gib(config, ranks, drafts));
    let cache = GPU_GIB - KEPT_GIB - plain;
    let fits = match cache > 0.0 {
        true => {
            let [short, long] = [131_072, 1_048_576].map(|context| requests(config, cache, context));
            format!("{cache:.1} | {short} | {long}")
        }
        false => "does not fit | | ".to_owned(),
    };
    format!("| {name} | {ranks} | {plain:.1} | {drafts:.1} | {fits} |")
}

#[test]
fn the_sizes_of_deployments_are_what_the_loader_and_the_calculator_count() {
    let text = page("docs/deployment.md").prose;
    let (flash, pro) = (presets::flash(), presets::pro());
    let all = [("Flash", &flash, 1), ("Flash", &flash, 2), ("Flash", &flash, 4), ("Flash", &flash, 8)];
    let all = all.into_iter().chain([("Pro", &pro, 4), ("Pro", &pro, 8)]);
    let rows: Vec<String> = all.map(|(name, config, ranks)| row(name, config, ranks)).collect();
    let missing: Vec<&String> = rows.iter().filter(|row| !text.contains(row.as_str())).collect();
    assert!(missing.is_empty(), "docs/deployment.md lacks rows; all of them are\n{}", rows.join("\n"));
}

/// bench/results/h200_ranks_2026-11-30.json has what two GPUs said when they were opened.
#[test]
fn counted_weights_are_those_that_were_measured() {
    let path = super::root().join("bench/results/h200_ranks_2026-11-30.json");
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let flash = &json["flash"];
    for (measured, drafts) in
        [(&flash["weights_gib_per_gpu"], false), (&flash["with_3_drafts"]["weights_gib_per_gpu"], true)]
    {
        let (measured, counted) = (measured.as_f64().unwrap(), weights_gib(&presets::flash(), 2, drafts));
        assert!((measured - counted).abs() < 0.006, "measured {measured}, counted {counted}");
    }
}
